"""Admission of sources to cards by what NVML measures of their decoders."""

import pytest

from penstock.gpu.cards import Card
from penstock.gpu.placement import PIXELS_PER_DECODER_S, CameraNeed
from penstock_video.sources.admission import FRESH_S, Admission, CardDecoders, DecoderReading, Verdict, admit, cost_of
from penstock_video.sources.decoder_meter import DecoderMeter

H200 = Card("GPU-0", 0, "NVIDIA H200")
HD, FULL_HD = cost_of(1280, 720, 30, "h264"), cost_of(1920, 1080, 30, "h264")


def decide(
    busy: float, need: float, *, pending: float = 0.0, age_s: float = 0.0, engines: int = 7, sources: int = 1
) -> Admission:
    card = CardDecoders(H200, engines, DecoderReading(busy, 10.0 - age_s), sources, 0.0, pending)
    return admit([card], CameraNeed("a", need), 10.0)


@pytest.mark.parametrize(
    ("streams", "need", "busy", "verdict"),
    [
        (265, HD, 0.737, Verdict.ADMIT),
        (315, HD, 0.876, Verdict.ADMIT),
        (170, FULL_HD, 0.9585, Verdict.ADMIT),
        (178, FULL_HD, 1.0, Verdict.REFUSE),
        (241, cost_of(1920, 1080, 30, "hevc"), 0.8726, Verdict.ADMIT),
        (266, cost_of(1920, 1080, 30, "hevc"), 0.9769, Verdict.REFUSE),
    ],
)
def test_next_source_is_admitted_where_an_h200_held_its_streams_and_refused_where_it_did_not(
    streams: int, need: float, busy: float, verdict: Verdict
) -> None:
    """Streams and NVML's utilization are those of the report of an H200; 315 is extrapolated."""
    assert decide(busy, need, sources=streams).verdict is verdict


def test_sources_that_are_not_measured_yet_make_the_next_one_wait() -> None:
    """It is admitted if it fits beside them, and refused only by the measurement."""
    assert decide(0.5, HD, pending=30 * HD).verdict is Verdict.ADMIT
    assert decide(0.9, HD, pending=30 * HD).verdict is Verdict.WAIT
    assert decide(0.99, HD, pending=30 * HD).verdict is Verdict.REFUSE


def test_card_without_a_recent_reading_or_known_decoders_is_not_judged() -> None:
    """It is admitted; the driver still refuses when it has no more decoders."""
    assert decide(1.0, HD, age_s=FRESH_S + 1).verdict is Verdict.ADMIT
    assert decide(1.0, HD, engines=0).verdict is Verdict.ADMIT


def test_refusal_names_each_card_its_load_and_what_to_do() -> None:
    """One sentence, also for a GPU that is lost and for one without a measurement."""
    cards = [
        CardDecoders(H200, 7, DecoderReading(0.965, 0.0), 170),
        CardDecoders(Card("GPU-1", 1), 1, None, 20, PIXELS_PER_DECODER_S),
        CardDecoders(Card("GPU-2", 2), 7, is_avoided=True),
        CardDecoders(Card("GPU-3", 3), 0),
    ]
    found = admit(cards, CameraNeed("a", FULL_HD), 0.0)
    assert found.reason == (
        "the video decoders are full (GPU 0: 96% busy with 170 streams of this program; this one adds 0.6%, the limit "
        "is 97%; GPU 1: 100% by their streams' rates with 20 streams of this program; this one adds 4.3%, the limit is "
        "100%; GPU 2 is lost, or could not create a decoder just now; GPU 3 has no video decoder); use fewer streams, "
        "a lower frame rate or size, or decoder: auto, which decodes the rest on the CPU"
    )


def test_meter_averages_the_last_seconds_and_keeps_the_time_of_a_silent_card() -> None:
    """A card that does not answer any more keeps its last reading, which grows old."""
    meter, busy = DecoderMeter(["GPU-0", "GPU-1"]), {"GPU-0": 0.5, "GPU-1": 1.0}

    def read(uuid: str) -> float:
        if busy[uuid] < 0:
            raise OSError("GPU is lost")
        return busy[uuid]

    assert meter.readings() == (None, None)
    meter.read_once(read, 1.0)
    busy.update({"GPU-0": 1.0, "GPU-1": -1.0})
    meter.read_once(read, 2.0)
    assert meter.readings() == (DecoderReading(0.75, 2.0), DecoderReading(1.0, 1.0))
