"""Rounds in turns, by a clock that the test moves."""

import pytest

from penstock.models.optimize import profile as timing
from penstock.models.optimize.profile import FEWEST_RUNS, WARM_UP_RUNS, compare_speed


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round is its fewest runs."""
    monkeypatch.setattr(timing, "ROUND_S", 0.0)


class Clock:
    """Moves by what each run costs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.runs: list[str] = []

    def run(self, name: str, cost_s: float) -> None:
        self.now += cost_s
        self.runs.append(name)


def test_compare_takes_turns_after_a_warm_up_and_gives_each_rounds_ratio() -> None:
    """The order alternates, the warm-up is not measured, and the ratio is float's time divided by INT8's."""
    clock = Clock()
    found = compare_speed(
        4, lambda: clock.run("float", 0.3), lambda: clock.run("int8", 0.1), rounds=2, clock=lambda: clock.now
    )
    assert found.batch_size == 4
    assert found.float_ms == pytest.approx((300.0, 300.0))
    assert found.int8_ms == pytest.approx((100.0, 100.0))
    assert found.ratio == pytest.approx(3.0)
    measured = clock.runs[2 * WARM_UP_RUNS :]
    assert measured[:4] == ["float", "int8", "int8", "float"]


def test_compare_of_a_disturbed_round_keeps_the_median() -> None:
    """One slow round does not decide the result, and one slow run does not decide its round."""
    clock = Clock()
    slow = [0.2] * FEWEST_RUNS, [2.0] * FEWEST_RUNS, [0.2] * (FEWEST_RUNS - 1) + [9.0]
    costs = iter([0.2] * WARM_UP_RUNS + [cost for part in slow for cost in part])
    found = compare_speed(
        1, lambda: clock.run("float", next(costs)), lambda: clock.run("int8", 0.1), rounds=3, clock=lambda: clock.now
    )
    assert sorted(found.ratios) == pytest.approx([2.0, 2.0, 20.0])
    assert found.ratio == pytest.approx(2.0)
