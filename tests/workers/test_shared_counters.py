"""Counters shared by the processes of one gateway: limits, quotas, heartbeats."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.auth.rate_limiter import ClientUsage, RateLimiter
from penstock.gateway.in_flight import InFlightLimiter, InFlightLimits
from penstock.gateway.workers.shared_counters import (
    CORE,
    HEARTBEAT_LOOK_S,
    MAX_PROCESSES,
    SILENCE_S,
    SLOTS,
    CounterPage,
    CounterRow,
    Heartbeats,
    QuotaTable,
    SharedCounts,
    core_counts,
)
from penstock.protocol.errors import Overloaded, QuotaExceeded
from penstock.protocol.identity import Identity, Quota

LIMITS = InFlightLimits(max_requests=3, max_bytes=1000)


@pytest.fixture
def page(tmp_path: Path) -> CounterPage:
    return CounterPage(tmp_path / "limits")


def admission(tmp_path: Path, column: int) -> InFlightLimiter:
    """Of another process: it maps the file itself."""
    return InFlightLimiter(LIMITS, SharedCounts(CounterPage(tmp_path / "limits"), column))


def test_limits_hold_for_all_processes_together(tmp_path: Path) -> None:
    """Three places are three, whichever fronts have them; one given back is anybody's."""
    one, other = admission(tmp_path, 1), admission(tmp_path, 2)
    one.enter(10)
    other.enter(10)
    one.enter(10)
    with pytest.raises(Overloaded, match=r"3 requests in flight \(limit 3\)"):
        other.enter(10)
    one.leave(10)
    other.enter(10)
    assert one.statistics() == other.statistics()
    assert (one.statistics().requests, one.statistics().size_bytes) == (3, 30)


def test_bytes_of_requests_and_of_bodies_count_together(tmp_path: Path) -> None:
    """A body on its way in one front keeps one out of another; a request likewise."""
    one, other = admission(tmp_path, 1), admission(tmp_path, 2)
    one.receive(900, before=0)
    with pytest.raises(Overloaded, match="900 bytes of bodies are on their way"):
        other.receive(200, before=0)
    one.received(900)
    other.receive(200, before=0)
    one.enter(900)
    with pytest.raises(Overloaded, match="900 bytes in flight and 200 more asked"):
        other.enter(200)


def test_page_of_a_front_that_died_holds_nothing_of_it(tmp_path: Path, page: CounterPage) -> None:
    """Its places are free at once; what only ever grows stays."""
    dead, other = admission(tmp_path, 1), admission(tmp_path, 2)
    for _ in range(3):
        dead.enter(10)
    page.write(CounterRow.DECODER_RESTARTS, 1, 4)
    page.clear(1)
    other.enter(10)
    assert other.statistics().requests == 1
    assert page.total(CounterRow.DECODER_RESTARTS) == 4


def test_core_that_begins_again_holds_nothing_of_the_former_one(page: CounterPage) -> None:
    """Its column is its own to clear, and no other's."""
    page.write(CounterRow.REQUESTS, CORE, 5)
    page.write(CounterRow.REQUESTS, MAX_PROCESSES - 1, 2)
    assert core_counts(page).totals() == (2, 0)


def process(folder: Path, column: int, now: float = 0.0) -> tuple[RateLimiter, QuotaTable]:
    table = QuotaTable(folder / "quotas", column, clock=lambda: now)
    return RateLimiter(max_requests=10, max_bytes=1000, board=table), table


def caller(name: str = "camera", *, rate: int = 0, share: float = 1.0) -> Identity:
    return Identity(name, quota=Quota(rate, 1.0, share))


def test_rate_is_one_for_all_processes(tmp_path: Path) -> None:
    """Four a second are four, wherever they are asked; a refusal says when, and a second later there are four again."""
    (one, _), (other, _) = process(tmp_path, 1), process(tmp_path, 2)
    asked = caller(rate=4)
    for quotas in (one, other, one, other):
        quotas.take(asked, 100.0)
    for quotas in (one, other):
        with pytest.raises(QuotaExceeded, match=r"retry after 0\.25 s"):
            quotas.check_rate(asked, 100.0)
    for quotas in (other, one, other, one):
        quotas.take(asked, 101.0)


def test_share_is_one_for_all_processes(tmp_path: Path) -> None:
    """Half of ten places are five, wherever they are taken; of another caller's nothing is taken."""
    (one, table), (other, _) = process(tmp_path, 1), process(tmp_path, 2)
    asked = caller(share=0.5)
    for quotas in (one, other, one, other, one):
        quotas.enter(asked, 10)
    for quotas in (one, other):
        with pytest.raises(QuotaExceeded, match=r"5 requests in flight \(its share is 5\)"):
            quotas.enter(asked, 10)
    other.enter(caller("other", share=0.5), 10)
    assert one.in_flight() == {"camera": 5, "other": 1}
    one.leave(asked, 10)
    other.enter(asked, 10)
    assert dict(table.in_flight()) == {"camera": 5, "other": 1}


def test_share_of_a_process_that_died_is_free_again(tmp_path: Path) -> None:
    """Its parent clears what it had."""
    (dead, _), (other, table) = process(tmp_path, 1), process(tmp_path, 2)
    asked = caller(share=0.1)
    dead.enter(asked, 10)
    with pytest.raises(QuotaExceeded):
        other.enter(asked, 10)
    table.clear(1)
    other.enter(asked, 10)


def test_slot_of_an_idle_caller_is_another_callers(tmp_path: Path) -> None:
    """Callers come and go without end; the table takes them all, one after the other."""
    quotas, table = process(tmp_path, 1, now=100.0)
    for number in range(2 * SLOTS):
        asked = caller(f"token:{number}", rate=1_000_000)
        quotas.take(asked, 1.0)
        quotas.enter(asked, 1)
        quotas.leave(asked, 1)
    assert not dict(table.in_flight())
    quotas.enter(caller("last"), 1)
    assert dict(table.in_flight()) == {"last": 1}


@pytest.mark.parametrize("common", ["a" * 200, "ü" * 100, "日" * 70], ids=["1 byte", "2 bytes", "3 bytes"])
def test_long_names_that_begin_alike_are_counted_apart(tmp_path: Path, common: str) -> None:
    """Names that are longer than a slot's text remain different, wherever they are truncated."""
    (one, table), (other, _) = process(tmp_path, 1), process(tmp_path, 2)
    counts = {f"token:{common}": 1, f"token:{common}x": 2, f"token:{common[:20]}": 3}
    for name, count in counts.items():
        for _ in range(count):
            one.enter(caller(name), 1)
    other.enter(caller(f"token:{common}"), 1)
    found = one.in_flight()
    assert sorted(found.values()) == [2, 2, 3]
    assert all(name.startswith(f"token:{common[:20]}") for name in found)
    assert dict(table.in_flight()) == found


def test_caller_with_two_slots_is_counted_once_with_both() -> None:
    """Two processes that claim a slot at the same moment may each get one; their requests are added."""

    class TwoSlots(QuotaTable):
        def __init__(self) -> None: ...

        def in_flight(self) -> Iterator[tuple[str, int]]:
            yield from [("camera", 2), ("other", 1), ("camera", 3)]

    assert RateLimiter(max_requests=10, max_bytes=1000, board=TwoSlots()).in_flight() == {"camera": 5, "other": 1}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(0, 5)), max_size=60))
def test_table_knows_what_each_caller_has_elsewhere(
    tmp_path_factory: pytest.TempPathFactory, noted: list[tuple[int, int, int]]
) -> None:
    """In any order of updates, others sees the sum of the last values of all other processes."""
    folder = tmp_path_factory.mktemp("table")
    tables = {column: process(folder, column)[1] for column in (1, 2, 3)}
    last: dict[tuple[int, int], int] = {}
    for column, who, requests in noted:
        tables[column].note(f"key {who}", ClientUsage(requests, 10 * requests))
        last[column, who] = requests
    for column, table in tables.items():
        for who in range(5):
            elsewhere = sum(count for (other, name), count in last.items() if name == who and other != column)
            assert table.others(f"key {who}") == ClientUsage(elsewhere, 10 * elsewhere)


class Looker:
    """Looks each LOOK_S, at beats that the test tells."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.heartbeats = Heartbeats()

    def look_for(self, seconds: float, beats: Callable[[float], dict[int, int]]) -> list[tuple[float, int, float]]:
        """Who was said to hang, and when, in seconds from now. beats: at so many seconds from now."""
        began, hangs = self.now, []
        while self.now < began + seconds:
            self.now += HEARTBEAT_LOOK_S
            passed_s = self.now - began
            hangs += [(passed_s, *hang) for hang in self.heartbeats.look(beats(passed_s), self.now).items()]
        return hangs


@pytest.fixture
def looker() -> Looker:
    return Looker()


def test_front_whose_beat_stands_still_hangs_after_ten_seconds_and_its_neighbour_does_not(looker: Looker) -> None:
    """Reported with how long it was silent, once, and again only after as long again."""
    hangs = looker.look_for(15, lambda passed_s: {1: 7, 2: int(passed_s * 4)})
    assert hangs == [(SILENCE_S + HEARTBEAT_LOOK_S, 1, SILENCE_S)]
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


def test_machine_that_was_suspended_finds_no_process_silent(looker: Looker) -> None:
    """Hours between two looks are one look: the fronts slept as long, and have all of their time to beat again."""
    assert looker.look_for(5, lambda _: {1: 7}) == []
    for _ in range(4):
        looker.now += 3600
        assert looker.heartbeats.look({1: 7}, looker.now) == {}
    assert looker.look_for(30, lambda passed_s: {1: 8 + int(passed_s)}) == []
