"""Which decoder a source is given, and with whom it shares a process."""

import pytest

from penstock_video.sources.decode_host import (
    ALONE,
    ALONE_FOR_S,
    CARD_GONE_FOR_S,
    CPU_FOR_S,
    LOSSES_WITHIN_S,
    DecoderChoice,
    fitness,
)
from penstock_video.sources.process import Pictures
from penstock_video.types import DecoderKind

HD, FULL_HD = ("h264", 1280, 720), ("h264", 1920, 1080)
AUTO, CPU, NVDEC = DecoderKind.AUTO, DecoderKind.CPU, DecoderKind.NVDEC


@pytest.mark.parametrize(
    ("wish", "absence", "kind", "is_refused"),
    [
        (AUTO, None, NVDEC, False),
        (AUTO, "no GPU", CPU, False),
        (CPU, None, CPU, False),
        (CPU, "no GPU", CPU, False),
        (NVDEC, None, NVDEC, False),
        (NVDEC, "no GPU", CPU, True),
    ],
)
def test_decoder_follows_from_the_wish_and_the_card(
    wish: DecoderKind, absence: str | None, kind: DecoderKind, is_refused: bool
) -> None:
    """auto takes the card where there is one; nvdec without one is refused, with why."""
    choice = DecoderChoice(wish, absence)
    assert (choice.kind(0.0), bool(choice.refusal)) == (kind, is_refused)
    assert choice.may_use_cpu is (wish is not NVDEC)


def test_stream_that_needs_the_cpu_is_shown_to_the_card_again_after_an_hour() -> None:
    """Until then it is the CPU's, however often it is opened."""
    choice = DecoderChoice(AUTO, None)
    choice.needs_cpu(100.0)
    assert choice.kind(100.0 + CPU_FOR_S - 1) is CPU
    assert choice.kind(100.0 + CPU_FOR_S) is NVDEC


@pytest.mark.parametrize("wish", [AUTO, NVDEC])
def test_who_finds_no_room_on_the_card_is_shown_to_it_again_after_a_minute(wish: DecoderKind) -> None:
    """Until then it is the CPU's, unless it is to be decoded by the card and nothing else."""
    choice = DecoderChoice(wish, None)
    choice.has_no_card(100.0)
    assert choice.kind(100.0 + CARD_GONE_FOR_S - 1) is (CPU if wish is AUTO else NVDEC)
    assert choice.kind(100.0 + CARD_GONE_FOR_S) is NVDEC


def test_who_lost_a_process_sits_with_those_who_lost_it_for_a_while() -> None:
    """And then with anybody again."""
    choice = DecoderChoice(AUTO, None)
    assert choice.company(0.0) == ""
    choice.lost_process(10.0, "after 7")
    assert choice.company(10.0) == "after 7"
    assert choice.company(10.0 + LOSSES_WITHIN_S) == ""


def test_who_loses_two_processes_soon_sits_alone_for_ten_minutes() -> None:
    """Two that lie further apart count once each."""
    choice = DecoderChoice(AUTO, None)
    choice.lost_process(0.0, "after 7")
    choice.lost_process(LOSSES_WITHIN_S + 1, "after 8")
    assert choice.company(LOSSES_WITHIN_S + 1) == "after 8"
    choice.lost_process(LOSSES_WITHIN_S + 2, "after 9")
    assert choice.company(LOSSES_WITHIN_S + 2) == ALONE
    assert choice.company(LOSSES_WITHIN_S + 2 + ALONE_FOR_S) == ""


def test_who_broke_a_promise_sits_alone_at_once() -> None:
    """Its fault is known."""
    choice = DecoderChoice(AUTO, None)
    choice.broke_promise(5.0)
    assert choice.company(5.0) == ALONE


def test_stream_comes_back_to_a_card_that_was_away_sooner_than_to_one_that_does_not_take_it() -> None:
    """A minute, and an hour; the longer of the two."""
    choice = DecoderChoice(DecoderKind.AUTO, None)
    choice.has_no_card(0.0)
    assert [choice.kind(now) for now in (59.0, 60.0)] == [DecoderKind.CPU, DecoderKind.NVDEC]
    choice.needs_cpu(100.0)
    choice.has_no_card(101.0)
    assert [choice.kind(now) for now in (3699.0, 3700.0)] == [DecoderKind.CPU, DecoderKind.NVDEC]


@pytest.mark.parametrize(
    ("members", "pictures", "expected"),
    [
        ([HD], HD, 0),  # it has a partner
        ([HD, HD], HD, 1),  # the next source will be its partner
        ([HD, HD, HD], FULL_HD, 2),  # it takes the last place, alone
        ([HD, FULL_HD], FULL_HD, 0),
        ([None], HD, 0),  # not open yet: most cameras are alike
        ([None, None], None, 1),
    ],
)
def test_camera_prefers_a_process_in_which_it_may_share_a_decoder(
    members: list[Pictures | None], pictures: Pictures | None, expected: int
) -> None:
    """Decoders are shared within a process only, by two streams of the same codec and size."""
    assert fitness(members, pictures, 4) == expected
