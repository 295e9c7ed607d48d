"""Which packet a picture came of, and which packets are lost."""

from deepstream_pipeline.decode.packet_numbers import MOST_AWAITED, MOST_REORDERED, PacketNumbers, Sent


def given(numbers: PacketNumbers, *packets: str) -> list[int]:
    """Packets: a time in frames, K before it for a keyframe, - for none."""
    times = [None if "-" in one else float(one.strip("K")) for one in packets]
    return [numbers.next(Sent(time, "K" in one, is_corrupt=False)) for one, time in zip(packets, times, strict=True)]


def lost(numbers: PacketNumbers, *out: int) -> list[int]:
    """How many are told lost with each picture that comes out; -1 for a picture of no packet."""
    found = [numbers.came_out(number) for number in out]
    return [-1 if sent is None else sent.lost for sent in found]


def test_every_picture_is_known() -> None:
    """In the order of decoding, or of showing: none is lost, and each is its packet's."""
    numbers = PacketNumbers()
    assert given(numbers, "K0", "3", "1", "2", "K4") == [0, 1, 2, 3, 4]
    out = [numbers.came_out(number) for number in (0, 2, 3, 1, 4)]
    assert [sent and (sent.raw_s, sent.lost) for sent in out] == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0)]


def test_picture_comes_once() -> None:
    """A number of no packet, or a second time, is no picture."""
    numbers = PacketNumbers()
    given(numbers, "K0")
    assert lost(numbers, 0, 0, 7) == [0, -1, -1]


def test_missing_picture_is_told_with_the_next_one_shown() -> None:
    """Before that one is judged."""
    numbers = PacketNumbers()
    given(numbers, "K0", "1", "2", "3", "4")
    assert lost(numbers, 0, 3, 4) == [0, 2, 0]


def test_picture_that_is_shown_later_is_not_missing() -> None:
    """A reference that waits for its B-frames."""
    numbers = PacketNumbers()
    given(numbers, "K0", "3", "1", "2", "6")
    assert lost(numbers, 0, 3) == [0, 1]  # "1" is gone; "3" is still to come
    assert lost(numbers, 1) == [0]


def test_leading_picture_is_not_missed() -> None:
    """What was coded after a keyframe and is shown before it builds on what lies before where a stream was joined."""
    numbers = PacketNumbers()
    given(numbers, "K5", "3", "4", "6")
    assert lost(numbers, 0, 3) == [0, 0]


def test_keyframe_passes_over_all_before_it() -> None:
    """Without times, too."""
    numbers = PacketNumbers()
    given(numbers, "K-", "-", "-", "K-")
    assert lost(numbers, 0, 3) == [0, 2]


def test_missing_picture_without_a_time_is_told_some_time() -> None:
    """No stream shows a picture so much later."""
    numbers = PacketNumbers()
    given(numbers, "K-", *["-"] * 30)
    assert lost(numbers, 0, *range(2, 3 + MOST_REORDERED)) == [0] * (MOST_REORDERED + 1) + [1]


def test_times_that_are_not_those_of_showing_are_known_by_a_late_picture() -> None:
    """AVI tells the order of decoding: once one was given up too early, only the order counts."""
    numbers = PacketNumbers()
    given(numbers, "K1", "2", "3", "4", "5", "6", "7")
    assert lost(numbers, 0, 2, 3, 1) == [0, 1, 0, 0]
    assert lost(numbers, 5, 6, 4) == [0, 0, 0]


def test_names_are_those_that_the_decoder_may_use() -> None:
    """The picture's number among those that were decoded, and among all where some gave nothing."""
    numbers = PacketNumbers()
    given(numbers, "K0", "1", "2", "3")
    out = [numbers.came_out(number) for number in (0, 1, 3)]
    assert [sent and sent.names for sent in out] == [(0,), (1,), (2, 3)]


def test_too_many_are_not_awaited() -> None:
    """The oldest is given up, one with each packet."""
    numbers = PacketNumbers()
    given(numbers, "K0", *["-"] * (MOST_AWAITED - 1))
    assert numbers.lose_oldest() is False
    given(numbers, "-")
    assert numbers.lose_oldest() is True
    numbers.told_lost()
    assert lost(numbers, MOST_AWAITED) == [MOST_AWAITED - MOST_REORDERED - 1]


def test_forgotten_packets_are_not_lost() -> None:
    """After a seek nobody misses them; after a change of decoders they count."""
    numbers = PacketNumbers()
    given(numbers, "K0", "1")
    numbers.forget()
    given(numbers, "K0")
    assert lost(numbers, 2) == [0]
    given(numbers, "1")
    numbers.lose_all()
    other = numbers.anew()
    given(other, "K0")
    assert lost(other, 0) == [1]
