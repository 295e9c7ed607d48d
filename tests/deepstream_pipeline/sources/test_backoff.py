"""Pauses between attempts, and who may be opened at one moment."""

import random

import pytest

from penstock_video.backoff import Backoff
from penstock_video.sources.sources import OpeningGate


@pytest.mark.parametrize(
    ("failures", "shortest_s", "longest_s"),
    [(1, 0.5, 1.0), (2, 1.0, 2.0), (3, 2.0, 4.0), (5, 8.0, 16.0), (6, 15.0, 30.0), (50, 15.0, 30.0), (10**6, 15, 30)],
)
def test_pause_doubles_to_its_cap_and_half_of_it_is_chance(failures: int, shortest_s: float, longest_s: float) -> None:
    """The first pause is half a second to a second, each next one twice that, none above 30 s."""
    assert Backoff().delay_s(failures, 0.0) == pytest.approx(shortest_s)
    assert Backoff().delay_s(failures, 1.0) == pytest.approx(longest_s)


def test_pauses_of_many_sources_are_spread() -> None:
    """Two hundred sources that fail together do not come back together: no tenth of the span holds a fifth of them."""
    chance = random.Random(7)
    delays = [Backoff().delay_s(6, chance.random()) for _ in range(200)]
    tenths = [sum(15 + 1.5 * n <= delay < 16.5 + 1.5 * n for delay in delays) for n in range(10)]
    assert sum(tenths) == 200
    assert max(tenths) < 40


def enter_all(gate: OpeningGate[str], now: float) -> list[str]:
    """A source that may open."""
    entered = []
    while (key := gate.next(now)) is not None:
        gate.enter(key, now)
        entered.append(key)
    return entered


def test_gate_full_lets_the_next_in_order_when_one_is_open() -> None:
    """At most so many are inside; who waits comes in turn, when someone leaves."""
    gate: OpeningGate[str] = OpeningGate(2)
    for key in "abcda":
        gate.ask(key)
    assert enter_all(gate, 0.0) == ["a", "b"]
    assert gate.next_wakeup() == 3.0
    gate.leave("b")
    assert enter_all(gate, 0.1) == ["c"]
    assert gate.is_asking("d")
    assert not gate.is_asking("a")


def test_gate_with_dead_cameras_inside_does_not_keep_the_others_out() -> None:
    """A source that waits for its camera for longer than a process needs to start holds no place any more."""
    gate: OpeningGate[str] = OpeningGate(2)
    for key in "abc":
        gate.ask(key)
    enter_all(gate, 0.0)
    assert enter_all(gate, 2.9) == []
    assert enter_all(gate, 3.0) == ["c"]
    assert gate.next_wakeup() is None
