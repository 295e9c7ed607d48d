"""The queue between two threads."""

import threading

from penstock_video.runner.sink_worker import Channel

WAIT_S = 30.0


def test_channel_hands_out_in_the_order_of_coming() -> None:
    """First in, first out."""
    channel: Channel[int] = Channel(3)
    for number in range(3):
        assert channel.put(number)
    assert [channel.take(0) for _ in range(4)] == [0, 1, 2, None]


def test_channel_that_is_full_loses_the_oldest_and_counts() -> None:
    """What is lost is counted."""
    channel: Channel[int] = Channel(2)
    assert [channel.put(number) for number in range(3)] == [True, True, True]
    assert (len(channel), channel.dropped) == (2, 1)
    assert [channel.take(0), channel.take(0)] == [1, 2]


def test_channel_that_blocks_waits_until_there_is_room() -> None:
    """Nothing is lost: who puts waits for who takes."""
    channel: Channel[int] = Channel(1)
    thread = threading.Thread(target=lambda: [channel.put(number, may_wait=True) for number in range(20)])
    thread.start()
    assert [channel.take(WAIT_S) for _ in range(20)] == list(range(20))
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert channel.dropped == 0


def test_channel_that_is_closed_wakes_who_waits_and_keeps_what_is_inside() -> None:
    """A closed channel takes nothing, and gives what it has."""
    channel: Channel[int] = Channel(1)
    channel.put(1)
    refused: list[bool] = []
    thread = threading.Thread(target=lambda: refused.append(channel.put(2, may_wait=True)))
    thread.start()
    channel.close()
    thread.join(WAIT_S)
    assert refused == [False]
    assert not channel.is_over
    assert (channel.take(0), channel.take(WAIT_S), channel.is_over) == (1, None, True)


def test_channel_that_is_closed_in_a_hurry_is_empty() -> None:
    """What was inside counts as lost."""
    channel: Channel[int] = Channel(4)
    channel.put(1)
    channel.close(is_hurried=True)
    assert (channel.take(WAIT_S), channel.is_over, channel.dropped) == (None, True, 1)


def test_channel_whose_taker_hangs_is_not_waited_for() -> None:
    """Who puts waits for a taker that comes again, and for no other: the oldest is lost then, and counted."""
    channel: Channel[int] = Channel(1, max_wait_s=0.05)
    thread = threading.Thread(target=lambda: [channel.put(number, may_wait=True) for number in range(3)], daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert (channel.take(0), channel.dropped) == (2, 2)


def test_channel_never_loses_nor_waits_for_what_is_kept() -> None:
    """It comes in though there is no room, and what loses its place is another."""
    channel: Channel[str] = Channel(1)
    for word in ("end of a", "end of b"):
        assert channel.put(word, is_kept=True)
    for word in ("first", "second"):
        channel.put(word)
    assert [channel.take(0) for _ in range(4)] == ["end of a", "end of b", "second", None]
    assert channel.dropped == 1


def test_channel_holds_no_more_bytes_than_it_may() -> None:
    """Big items fill it before their number does; one that is larger than all of it has it for itself."""
    channel: Channel[int] = Channel(10, size_of=lambda item: item, capacity_bytes=100)
    for size in (40, 50, 60, 30, 500):
        assert channel.put(size)
        assert channel.size_bytes <= max(100, size)
    assert (channel.take(0), channel.take(0), channel.size_bytes) == (500, None, 0)
