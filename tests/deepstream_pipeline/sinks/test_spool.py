"""The bounded spool: order, bounds and counts, whatever is done to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_video.sinks.spool import Message, Spool


def message(number: int, size_bytes: int = 10) -> Message:
    """The number-th message."""
    return Message("cam", str(number), "events", b"x" * size_bytes)


def ids(messages: tuple[Message, ...]) -> list[str]:
    """Of each."""
    return [one.id for one in messages]


def filled(count: int, max_messages: int = 100, max_bytes: int = 10_000) -> Spool:
    """With messages 0, 1, 2, …"""
    spool = Spool(max_messages, max_bytes)
    for number in range(count):
        spool.put(message(number))
    return spool


def test_spool_gives_messages_in_the_order_they_came() -> None:
    """First in, first out, and no more at once than both bounds of the asker allow."""
    spool = filled(5)
    assert ids(spool.take(2, 1_000)) == ["0", "1"]
    assert ids(spool.take(10, 25)) == ["2", "3"]
    assert ids(spool.take(10, 1)) == ["4"]
    assert spool.take(10, 1_000) == ()


@pytest.mark.parametrize(("max_messages", "max_bytes"), [(3, 10_000), (100, 35)])
def test_spool_that_is_full_drops_its_oldest_and_says_how_many(max_messages: int, max_bytes: int) -> None:
    """Messages and bytes are both bounds; what is lost is the oldest."""
    spool = filled(3, max_messages, max_bytes)
    assert spool.put(message(3)) == 1
    assert ids(spool.take(10, 1_000)) == ["1", "2", "3"]
    assert spool.statistics().dropped == 1


def test_spool_drops_as_many_as_a_large_message_needs() -> None:
    """One large message may cost several small ones, never itself while it fits."""
    spool = filled(3, 100, 35)
    assert spool.put(message(3, 25)) == 2
    assert ids(spool.take(10, 1_000)) == ["2", "3"]


def test_spool_given_a_message_larger_than_itself_drops_only_that() -> None:
    """What cannot fit at all costs the others nothing."""
    spool = filled(3, 100, 35)
    assert spool.put(message(3, 36)) == 1
    assert ids(spool.take(10, 1_000)) == ["0", "1", "2"]


def test_spool_does_not_drop_what_is_on_its_way() -> None:
    """What is taken counts against the bound, but the oldest that waits is dropped in its place."""
    spool = filled(3, 3)
    taken = spool.take(2, 1_000)
    assert spool.put(message(3)) == 1
    spool.put_back(taken)
    assert ids(spool.take(10, 1_000)) == ["0", "1", "3"]


def test_spool_with_everything_on_its_way_drops_the_new_message() -> None:
    """Nothing else can be given up, and the bound holds."""
    spool = filled(3, 3)
    spool.take(3, 1_000)
    assert spool.put(message(3)) == 1
    assert len(spool) == 3


def test_spool_puts_back_before_all_others_in_order() -> None:
    """Some delivered, one refused, the rest again in front: order is kept."""
    spool = filled(6)
    taken = spool.take(5, 1_000)
    spool.done(taken[:1])
    spool.refuse(taken[2:3])
    spool.put_back([taken[1], *taken[3:]])
    assert ids(spool.take(10, 1_000)) == ["1", "3", "4", "5"]
    said = spool.statistics()
    assert (said.written, said.sent, said.refused, said.dropped, said.depth, said.size_bytes) == (6, 1, 1, 0, 4, 40)


@pytest.mark.parametrize(("max_messages", "max_bytes"), [(0, 1), (1, 0)])
def test_spool_without_room_for_anything_is_refused(max_messages: int, max_bytes: int) -> None:
    """A bound of nothing is a mistake."""
    with pytest.raises(ValueError, match="at least one"):
        Spool(max_messages, max_bytes)


STEPS = st.lists(st.tuples(st.sampled_from(["put", "take", "done", "back", "refuse"]), st.integers(0, 40)), max_size=80)


@given(steps=STEPS)
def test_spool_whatever_is_done_to_it_keeps_bounds_counts_and_order(steps: list[tuple[str, int]]) -> None:
    """At every moment both bounds hold and put = sent + dropped + refused + depth; what is taken rises in number."""
    spool, taken, number = Spool(8, 100), list[Message](), 0
    for step, size in steps:
        if step == "put":
            spool.put(message(number, size))
            number += 1
        elif step == "take" and not taken:
            taken = list(spool.take(4, 60))
            assert [int(one.id) for one in taken] == sorted(int(one.id) for one in taken)
        elif step == "back":
            spool.put_back(taken)
            taken = []
        elif taken:
            (spool.done if step == "done" else spool.refuse)([taken.pop(0)])
        said = spool.statistics()
        assert said.depth == len(spool) <= 8
        assert 0 <= said.size_bytes <= 100
        assert said.written == said.sent + said.dropped + said.refused + said.depth
    spool.put_back_all()
    rest = [int(one.id) for one in spool.take(100, 10_000)]
    assert rest == sorted(rest)
    assert spool.statistics().size_bytes == sum(len(one.body) for one in spool._taken.values())
