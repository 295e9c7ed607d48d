"""Sources over several cards: who decodes which, and what becomes of those whose card is gone or full."""

import sys
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from penstock.gpu.cards import Card
from penstock.gpu.placement import PIXELS_PER_DECODER_S
from penstock_video.sources.admission import DecoderReading, Verdict
from penstock_video.sources.decoder_cards import CARD_GONE_FOR_S, DecoderCard, DecoderCards
from penstock_video.sources.options import GpuSources
from penstock_video.types import DecoderKind, SourceState
from tests.deepstream_pipeline.sources.parent import NEEDS, OPTIONS, EventLog, camera, one, running

pytestmark = pytest.mark.xdist_group("decoder_cards")
SHARED = (sys.executable, "-m", "tests.deepstream_pipeline.sources.fake_shared_child")
CARDS = tuple(
    DecoderCard(Card(f"GPU-{index}", index, "L4"), 1, {"CUDA_VISIBLE_DEVICES": f"GPU-{index}"}) for index in range(2)
)
HALF = 0.5 * PIXELS_PER_DECODER_S


def takes(cards: DecoderCards, source_id: str, now: float = 0.0) -> bool:
    return cards.choose(source_id, now).verdict is Verdict.ADMIT


def placed(*source_ids: str) -> DecoderCards:
    """Sources that each take half of a card's decoder."""
    cards = DecoderCards(CARDS)
    for source_id in source_ids:
        assert takes(cards, source_id)
        cards.opened(source_id, HALF, 0.0)
    return cards


def test_sources_are_spread_and_return_to_their_card() -> None:
    """By the rate that they had; a source without a process takes no room, and finds its card again."""
    cards = placed(*"abcd")
    assert [cards.position(name) for name in "abcd"] == [0, 1, 0, 1]
    assert not takes(cards, "e")
    assert cards.refusals == 1
    cards.leave("c")
    assert cards.position("c") is None
    assert takes(cards, "e")
    assert cards.position("e") == 0
    cards.forget("e")
    assert takes(cards, "c")
    assert cards.position("c") == 0
    assert cards.environ("c") == {"CUDA_VISIBLE_DEVICES": "GPU-0"}


def test_source_whose_card_is_gone_moves_while_another_has_room() -> None:
    """For a while it avoids the card; what does not fit has none, and others are not touched."""
    cards = placed(*"abc")
    for name, has_other in (("a", True), ("c", True)):
        assert cards.avoid(name, 1.0) is has_other
        cards.leave(name)
    assert takes(cards, "a", 1.0)
    assert (cards.position("a"), cards.position("b")) == (1, 1)
    assert not takes(cards, "c", 1.0)
    assert takes(cards, "c", 1.0 + CARD_GONE_FOR_S)
    assert cards.position("c") == 0


def test_one_card_has_every_source_and_no_variables() -> None:
    """As without the choice: its driver says when it is full."""
    cards = DecoderCards(CARDS[:1])
    assert takes(cards, "a")
    assert (cards.position("a"), dict(cards.environ("a")), cards.avoid("a", 0.0)) == (None, {}, False)


def test_measured_load_decides_and_waits_for_sources_that_it_does_not_show() -> None:
    """Cameras that were opened a moment ago count beside the reading, so that not too many are admitted at once."""
    cards = DecoderCards(CARDS[:1])
    cards.measured([DecoderReading(0.4, 0.0)])
    assert takes(cards, "a")
    cards.opened("a", HALF, 1.0)
    cards.measured([DecoderReading(0.45, 2.0)])
    assert cards.choose("b", 2.0).verdict is Verdict.WAIT
    cards.measured([DecoderReading(0.9, 6.5)])
    refused = cards.choose("b", 6.5)
    assert refused.verdict is Verdict.REFUSE
    assert refused.reason.startswith("the video decoders are full (GPU 0: 90% busy with 1 streams of this program; ")
    assert "this one adds 50.0%, the limit is 97%); use fewer streams" in refused.reason
    assert cards.snapshots()[0].utilisation == 0.9
    assert takes(cards, "b", 60.0), "the reading is too old to refuse by it"
    unlimited = DecoderCards(CARDS[:1], 1.0)
    unlimited.measured([DecoderReading(1.0, 0.0)])
    assert takes(unlimited, "a")


def test_many_sources_that_start_together_fill_a_card_to_its_limit_and_no_further() -> None:
    """Readings are means of the last seconds, so they lag: sources wait for them, and none is refused too early."""
    cards, share, opened, waiting = DecoderCards(CARDS[:1]), 0.04, 0, [f"c{number}" for number in range(40)]
    kept: deque[float] = deque(maxlen=5)
    for second in range(60):
        kept.append(min(opened * share, 1.0))
        cards.measured([DecoderReading(fmean(kept), second)])
        found = {name: cards.choose(name, second).verdict for name in waiting[:8]}
        assert Verdict.REFUSE not in found.values() or opened == 24
        for name in [name for name, verdict in found.items() if verdict is Verdict.ADMIT]:
            waiting.remove(name)
            cards.opened(name, share * PIXELS_PER_DECODER_S, second)
            opened += 1
    assert opened == 24


def test_measured_load_of_other_programs_moves_a_source_to_the_other_card() -> None:
    """The placement uses what NVML reads, not only the streams of this program."""
    cards = DecoderCards(CARDS)
    cards.measured([DecoderReading(0.8, 0.0), DecoderReading(0.1, 0.0)])
    assert takes(cards, "a")
    assert cards.position("a") == 1


def test_source_that_a_full_card_refuses_shows_the_reason_and_is_decoded_by_the_cpu_or_tried_again() -> None:
    """With `auto` the CPU decodes it at once; with `nvdec` it is retried, and runs once the card has room."""
    busy = [0.99]
    read = lambda: [DecoderReading(busy[0], time.monotonic())]  # noqa: E731
    options = replace(OPTIONS, gpu=GpuSources(command=SHARED, cards=CARDS[:1], read_decoders=read))
    event_log = EventLog()
    with running(event_log, options) as sources:
        sources.add(camera("live?fps=25", "a", decoder=DecoderKind.AUTO), NEEDS)
        event_log.wait_for("opened", 1, "a")
        assert one(sources, "a").decoder == "cpu"
        assert one(sources, "a").decoder_reason.startswith("the video decoders are full (GPU 0: 99% busy")
        sources.add(camera("live?fps=25", "b", decoder=DecoderKind.NVDEC), NEEDS)
        event_log.wait(lambda: one(sources, "b").reason.startswith("the video decoders are full"))
        assert one(sources, "b").pid is None
        busy[0] = 0.5
        event_log.wait_for("opened", 1, "b")
        assert (one(sources, "b").decoder, one(sources, "b").decoder_reason) == ("nvdec", "")
        snapshots, refusals = sources.cards()
        assert (snapshots[0].label, refusals >= 2) == ("GPU 0", True)


def environ_of(pid: int | None) -> str:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return next((pair for pair in pairs if pair.startswith("CUDA_VISIBLE_DEVICES=")), "")


def test_cameras_have_processes_of_both_cards_and_leave_one_that_is_gone() -> None:
    """A process sees its own card only. A camera whose card cannot be used goes to the other, and then to the CPU."""
    options = replace(OPTIONS, gpu=GpuSources(command=SHARED, cards=CARDS))
    event_log = EventLog()
    with running(event_log, options) as sources:
        for name in "ab":
            sources.add(camera("live?fps=25", name), NEEDS)
            event_log.wait_for("opened", 1, name)
        seen = {name: environ_of(one(sources, name).pid) for name in "ab"}
        assert seen == {"a": "CUDA_VISIBLE_DEVICES=GPU-0", "b": "CUDA_VISIBLE_DEVICES=GPU-1"}
        assert [one(sources, name).decoder for name in "ab"] == ["nvdec", "nvdec"]
        sources.add(camera("no_card?fps=25", "c", decoder=DecoderKind.AUTO), NEEDS)
        event_log.wait_for("opened", 1, "c")
        event_log.wait(lambda: one(sources, "c").state is SourceState.RUNNING)
        assert one(sources, "c").decoder == "cpu"
        assert [one(sources, name).restarts for name in "ab"] == [0, 0]
