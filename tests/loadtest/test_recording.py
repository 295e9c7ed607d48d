"""What of a recording is replayed."""

import json
from pathlib import Path

import pytest

from penstock_load.driver.protocol import read_recording


def write_run(path: Path, *requests: tuple[int, str, float]) -> Path:
    """records.jsonl of a run: round, phase and intended moment of each request."""
    lines = [{"round": round, "phase": phase, "side": "target", "intended_s": at_s} for round, phase, at_s in requests]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_phase_replays_its_own_records_of_the_same_round(tmp_path: Path) -> None:
    """What callers asked while the capacity was measured is left out; a round that was not recorded gets the first."""
    run = write_run(
        tmp_path / "records.jsonl",
        *((1, "capacity", 0.0), (1, "capacity", 0.001), (1, "steady", 5.0), (1, "steady", 5.5)),
        *((2, "capacity", 9.0), (2, "steady", 14.0), (2, "steady", 16.0)),
    )
    assert read_recording(run, phase="steady", round=1) == [0, 0.5]
    assert read_recording(run, phase="steady", round=2) == [0, 2]
    assert read_recording(run, phase="steady", round=3) == [0, 0.5]


def test_phase_that_was_not_recorded_replays_everything(tmp_path: Path) -> None:
    """Another scenario's phase may have another name, and bare times have none."""
    run = write_run(tmp_path / "records.jsonl", (1, "a", 2.0), (1, "b", 3.0))
    assert read_recording(run, phase="steady") == [0, 1]


@pytest.mark.parametrize("moment", ["1e400", "-1e400"])
def test_record_without_a_finite_moment_is_refused(tmp_path: Path, moment: str) -> None:
    """The sentence says where."""
    path = tmp_path / "records.jsonl"
    path.write_text(f'{{"round":1,"phase":"p","side":"target","intended_s":{moment}}}\n')
    with pytest.raises(ValueError, match=r"records\.jsonl:1: "):
        read_recording(path)
