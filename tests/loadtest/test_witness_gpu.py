"""The process that asks NVML of the load, over a fake NVML: util beside SM activity, and cards that tell none."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock_load.witness.gpu import GpuLine

FAKE_NVML = Path(__file__).parents[1] / "gpu" / "fake_nvml"


def first_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *cards: dict[str, Any], **said: Any) -> GpuLine:
    """What the real program says first of these cards; its input is closed, so that it ends."""
    state = tmp_path / "nvml.json"
    state.write_text(json.dumps({"cards": cards, **said}))
    monkeypatch.setenv("FAKE_NVML", str(state))
    monkeypatch.setenv("PYTHONPATH", str(FAKE_NVML))
    program = [sys.executable, "-m", "penstock_load.witness.gpu"]
    ended = subprocess.run(program, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=True)
    (line,) = ended.stdout.splitlines()
    return msgspec.json.decode(line, type=GpuLine)


def test_busiest_card_is_found_by_util_and_by_its_sms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the card that has most of it; a card without the counters counts for util."""
    line = first_line(
        tmp_path,
        monkeypatch,
        {"uuid": "a", "util": 30, "gpm": {"2": 12.5}},
        {"uuid": "b", "util": 100, "gpm": {"2": 0.75}},
        {"uuid": "v100", "util": 99},
    )
    assert line == GpuLine(busiest=1.0, sm_activity=0.125)


def test_card_without_counters_has_no_sm_activity_and_not_nought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card before Hopper, one whose counters are root's, one that has the counter and no figure."""
    for card in ({"gpm_error": 4, "gpm": {"2": 1.0}}, {}, {"gpm": {}}):
        line = first_line(tmp_path, monkeypatch, {"uuid": "a", "util": 50, **card})
        assert line == GpuLine(busiest=0.5)


def test_machine_without_a_card_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In NVML's words."""
    assert first_line(tmp_path, monkeypatch, init_error=9) == GpuLine(why="Driver Not Loaded")
    assert first_line(tmp_path, monkeypatch) == GpuLine(why="the driver sees no GPU")
