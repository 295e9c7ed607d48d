"""The bench of two cards by one: what it refuses, and how it counts. It was never run on two cards."""

import json
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from loadtest.bench.gpu import cards
from loadtest.bench.gpu.cards import main, ratio_row, run_bench, two_cards

FAKE_NVML = Path(__file__).parent / "fake_nvml"


def nvml(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """So many cards, of a stand-in."""
    state = folder / "nvml.json"
    state.write_text(json.dumps({"cards": [{"uuid": f"GPU-{number}"} for number in range(count)]}))
    monkeypatch.setenv("FAKE_NVML", str(state))
    monkeypatch.setenv("PYTHONPATH", str(FAKE_NVML))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_bench_of_two_cards_refuses_one_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before it makes a model or starts anything."""
    nvml(tmp_path, monkeypatch, 1)
    assert main(["--work", str(tmp_path / "work")]) == 2
    assert capsys.readouterr().err == (
        "this bench compares two NVIDIA GPUs with one, and CUDA sees 1 NVIDIA GPU here; run it where two are\n"
    )
    assert not (tmp_path / "work").exists()
    nvml(tmp_path, monkeypatch, 3)
    assert [card.uuid for card in two_cards()] == ["GPU-0", "GPU-1"]


class Up(AbstractContextManager["Up"]):
    """A stack that is ready at once."""

    def __exit__(self, *_: object) -> None: ...

    def wait(self, until_s: float) -> None: ...


def test_ratio_is_of_each_round_and_its_median_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """One card and two in every round, in an order that changes."""
    asked: list[int] = []

    def measure(plan: object, count: int, up: object) -> dict[str, float]:
        asked.append(count)
        return {"per_s": 100.0 if count == 1 else 188.0}

    monkeypatch.setitem(cards.PARTS, "served", measure)
    monkeypatch.setattr(cards.CardsPlan, "stack", lambda *_: Up())
    plan = cards.CardsPlan(Path(), Path(), (), 1.0, 1, 1, 1, 1)
    (row,) = run_bench(plan, ["served"], 3, lambda _: None)
    assert (sorted(asked), row["two_by_one"], row["is_met"]) == ([1, 1, 1, 2, 2, 2], 1.88, False)
    rounds = [{1: {"per_s": 100.0}, 2: {"per_s": two}} for two in (190.0, 180.0, 197.0)]
    found = ratio_row("streams", rounds)
    assert (found["two_by_one"], found["spread"], found["is_met"]) == (1.9, [1.8, 1.97], True)
