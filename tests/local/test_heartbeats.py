"""When a front is said to hang, under a clock that the test turns."""

from collections.abc import Callable

import pytest

from server.local.heartbeats import LOOK_S, SILENCE_S, Heartbeats


class Looker:
    """Looks each LOOK_S, at beats that the test tells."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.heartbeats = Heartbeats()

    def look_for(self, seconds: float, beats: Callable[[float], dict[int, int]]) -> list[tuple[float, int, float]]:
        """Who was said to hang, and when, in seconds from now. beats: at so many seconds from now."""
        began, told = self.now, []
        while self.now < began + seconds:
            self.now += LOOK_S
            passed_s = self.now - began
            told += [(passed_s, *hang) for hang in self.heartbeats.look(beats(passed_s), self.now).items()]
        return told


@pytest.fixture
def looker() -> Looker:
    return Looker()


def test_front_whose_beat_stands_still_hangs_after_ten_seconds_and_its_neighbour_does_not(looker: Looker) -> None:
    """Told with how long it was silent, once, and again only after as long again."""
    told = looker.look_for(15, lambda passed_s: {1: 7, 2: int(passed_s * 4)})
    assert told == [(SILENCE_S + LOOK_S, 1, SILENCE_S)]
    assert [index for _, index, _ in looker.look_for(10, lambda passed_s: {1: 7, 2: 100 + int(passed_s * 4)})] == [1]


def test_front_that_beats_seldom_does_not_hang(looker: Looker) -> None:
    """One beat in nine seconds is a busy machine."""
    assert looker.look_for(100, lambda passed_s: {1: 1 + int(passed_s / 9)}) == []


def test_front_that_has_not_begun_to_beat_does_not_hang(looker: Looker) -> None:
    """It starts; whether it can is another's question."""
    assert looker.look_for(60, lambda _: {1: 0}) == []


def test_front_that_was_replaced_is_given_its_own_time(looker: Looker) -> None:
    """A death takes its beats off the page; the next one's first beat may be the number of the last one seen."""
    assert looker.look_for(9, lambda _: {1: 1}) == []
    assert looker.look_for(1, lambda _: {1: 0}) == []
    assert looker.look_for(9, lambda _: {1: 1}) == []


def test_machine_that_was_suspended_finds_nobody_silent(looker: Looker) -> None:
    """Hours between two looks are one look: the fronts slept as long, and have all of their time to beat again."""
    assert looker.look_for(5, lambda _: {1: 7}) == []
    for _ in range(4):
        looker.now += 3600
        assert looker.heartbeats.look({1: 7}, looker.now) == {}
    assert looker.look_for(30, lambda passed_s: {1: 8 + int(passed_s)}) == []
