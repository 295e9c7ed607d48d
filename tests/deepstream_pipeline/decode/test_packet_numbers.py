"""Which packet a picture came of, and which packets are lost."""

import heapq

import pytest

from penstock_video.decode.timeline import MOST_AWAITED, MOST_LATE, PacketNumbers, Sent


def given(numbers: PacketNumbers, *packets: str) -> list[int]:
    """The packets' stamps. Packets: a time in seconds, K before it for a keyframe, - for none."""
    times = [None if "-" in one else float(one.strip("K")) for one in packets]
    return [numbers.next(Sent(time, "K" in one, is_corrupt=False)) for one, time in zip(packets, times, strict=True)]


def lost(numbers: PacketNumbers, *stamps: int) -> list[int]:
    """How many are reported lost with each picture that comes out; -1 for a picture of no packet."""
    found = [numbers.came_out(stamp) for stamp in stamps]
    return [-1 if sent is None else sent.lost for sent in found]


def test_pictures_in_the_order_of_showing_are_their_packets() -> None:
    """The lowest stamp of those that a decoder holds is the packet's that is shown next."""
    numbers = PacketNumbers()
    stamps = given(numbers, "K0", "3", "1", "2", "K4")
    out = [numbers.came_out(stamp) for stamp in sorted(stamps)]
    assert [sent and (sent.raw_s, sent.lost) for sent in out] == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0)]


def test_packets_without_times_are_known_by_their_order() -> None:
    """Among others that have one, too."""
    numbers = PacketNumbers()
    stamps = given(numbers, "K-", "-", "-", "K5", "-")
    assert stamps == sorted(set(stamps))
    assert lost(numbers, *stamps) == [0] * 5


def test_clock_that_goes_back_leaves_the_order_as_it_is() -> None:
    """A keyframe of another clock is shown after all that was coded before it, and so is what follows it."""
    numbers = PacketNumbers()
    stamps = given(numbers, "K100", "102", "101", "K0", "2", "1", "K200", "202", "201")
    order = sorted(range(len(stamps)), key=stamps.__getitem__)
    assert order == [0, 2, 1, 3, 5, 4, 6, 8, 7]


@pytest.mark.parametrize(
    "times",
    [
        (0, 15.1, 0.1, 15.3, 15.2, 15.4),  # a screen that stood still
        (0, 20, 10, 5, 15, 40, 30, 25, 35),  # a picture each five seconds
    ],
)
def test_long_gaps_between_pictures_are_no_other_clock(times: tuple[float, ...]) -> None:
    """Each picture has its packet's time, however long the one before it was shown."""
    numbers, heap, out = PacketNumbers(), list[int](), list[float | None]()
    for place, time in enumerate(times):
        heapq.heappush(heap, numbers.next(Sent(time, place == 0, is_corrupt=False)))
        if place >= 3:  # as the decoder holds some back
            sent = numbers.came_out(heapq.heappop(heap))
            out.append(sent and sent.raw_s)
    out += [sent.raw_s for stamp in sorted(heap) if (sent := numbers.came_out(stamp)) is not None]
    assert out == sorted(times)


def test_clock_that_goes_back_within_a_group_is_known_by_what_came_out() -> None:
    """Nothing is shown before what was shown already: what is missing there is lost, and no leading picture."""
    numbers = PacketNumbers()
    shown = given(numbers, "K100", "100.04", "100.08")
    assert lost(numbers, *shown) == [0, 0, 0]
    later = given(numbers, "95", "95.04", "95.08", "95.12")
    assert shown[-1] < later[0]
    assert later == sorted(later)
    assert lost(numbers, later[0], later[3]) == [0, 2]


def test_time_that_is_none_is_no_stamp_that_a_decoder_cannot_take() -> None:
    """What a damaged container says; the order counts then."""
    numbers = PacketNumbers()
    stamps = given(numbers, "K0", "1e300", "-1e300", "9.3e12", "1")
    assert stamps == sorted(stamps)
    assert max(map(abs, stamps)) < 2**62


def test_same_time_twice_is_two_packets() -> None:
    """Both pictures come."""
    numbers = PacketNumbers()
    stamps = given(numbers, "K0", "1", "1", "1")
    assert lost(numbers, *sorted(stamps)) == [0] * 4


def test_picture_comes_once() -> None:
    """A stamp of no packet, or a second time, is no picture."""
    numbers = PacketNumbers()
    (stamp,) = given(numbers, "K0")
    assert lost(numbers, stamp, stamp, stamp + 7) == [0, -1, -1]


def test_missing_picture_is_reported_with_the_next_one_shown() -> None:
    """Before that one is judged."""
    numbers = PacketNumbers()
    stamps = given(numbers, "K0", "1", "2", "3", "4")
    assert lost(numbers, stamps[0], *stamps[3:]) == [0, 2, 0]


def test_picture_that_is_shown_later_is_not_missing() -> None:
    """A reference that waits for its B-frames."""
    numbers = PacketNumbers()
    key, third, _, second, _ = given(numbers, "K0", "3", "1", "2", "6")
    assert lost(numbers, key, second) == [0, 1]  # "1" is gone; "3" is still to come
    assert lost(numbers, third) == [0]


def test_leading_picture_is_not_missed() -> None:
    """What was coded after a keyframe and is shown before it builds on what lies before where a stream was joined."""
    numbers = PacketNumbers()
    key, *_, last = given(numbers, "K5", "3", "4", "6")
    assert lost(numbers, key, last) == [0, 0]


def test_picture_that_was_given_up_may_come() -> None:
    """It is a picture all the same."""
    numbers = PacketNumbers()
    stamps = given(numbers, "K0", "1", "2")
    assert lost(numbers, stamps[2], stamps[1]) == [2, 0]


def test_too_many_are_not_awaited() -> None:
    """The oldest is given up, one with each packet; of those given up a few are known."""
    numbers = PacketNumbers()
    stamps = given(numbers, "K0", *["-"] * (MOST_AWAITED - 1))
    assert numbers.lose_oldest() is False
    stamps += given(numbers, "-")
    assert numbers.lose_oldest() is True
    numbers.report_lost()
    assert lost(numbers, stamps[-1]) == [MOST_AWAITED - 1]
    assert lost(numbers, stamps[-MOST_LATE - 2], stamps[-MOST_LATE - 1]) == [-1, 0]


def test_forgotten_packets_are_not_lost() -> None:
    """After a seek no one misses them; after a change of decoders they count."""
    numbers = PacketNumbers()
    given(numbers, "K0", "1")
    numbers.forget()
    assert lost(numbers, *given(numbers, "K0")) == [0]
    given(numbers, "1")
    numbers.lose_all()
    other = numbers.anew()
    assert lost(other, *given(other, "K0")) == [1]
