"""What callers have asked of several processes together, by a manual clock; each process is an object over one file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.access.quotas import Held, Quotas
from server.core.caller import Caller, Quota
from server.core.errors import QuotaExceeded
from server.local.quota_table import SLOTS, QuotaTable


def process(folder: Path, column: int, now: float = 0.0) -> tuple[Quotas, QuotaTable]:
    table = QuotaTable(folder / "quotas", column, clock=lambda: now)
    return Quotas(max_requests=10, max_bytes=1000, board=table), table


def caller(name: str = "camera", *, rate: int = 0, share: float = 1.0) -> Caller:
    return Caller(name, quota=Quota(rate, 1.0, share))


def test_rate_is_one_for_all_processes(tmp_path: Path) -> None:
    """Four a second are four, wherever they are asked; a refusal says when, and a second later there are four again."""
    (one, _), (other, _) = process(tmp_path, 1), process(tmp_path, 2)
    asked = caller(rate=4)
    for quotas in (one, other, one, other):
        quotas.take(asked, 100.0)
    for quotas in (one, other):
        with pytest.raises(QuotaExceeded, match=r"retry after 0\.25 s"):
            quotas.look(asked, 100.0)
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

    assert Quotas(max_requests=10, max_bytes=1000, board=TwoSlots()).in_flight() == {"camera": 5, "other": 1}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(0, 5)), max_size=60))
def test_table_knows_what_each_caller_has_elsewhere(
    tmp_path_factory: pytest.TempPathFactory, noted: list[tuple[int, int, int]]
) -> None:
    """Whoever notes what in whatever order: others sees the sum of all other processes' last words."""
    folder = tmp_path_factory.mktemp("table")
    tables = {column: process(folder, column)[1] for column in (1, 2, 3)}
    last: dict[tuple[int, int], int] = {}
    for column, who, requests in noted:
        tables[column].note(f"key {who}", Held(requests, 10 * requests))
        last[column, who] = requests
    for column, table in tables.items():
        for who in range(5):
            elsewhere = sum(count for (other, name), count in last.items() if name == who and other != column)
            assert table.others(f"key {who}") == Held(elsewhere, 10 * elsewhere)
