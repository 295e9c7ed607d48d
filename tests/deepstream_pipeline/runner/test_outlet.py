"""A sink behind its channel."""

import time
from dataclasses import replace

import numpy as np
import pytest
from structlog.testing import capture_logs

from penstock.protocol.vision_results import Mask
from penstock_video.metrics import VideoMetrics
from penstock_video.runner.sink_worker import PICTURES_BYTES, SinkWorker, SinkWorkerOptions
from penstock_video.types import Detections, Frame, FrameResult, Tracks, no_tracks
from tests.deepstream_pipeline.runner.fakes import KeptSink

WAIT_S = 30.0


def result(number: int) -> FrameResult:
    return FrameResult(Frame("cam", number, number / 10, 0.0, 8, 6, np.zeros((6, 8, 3), np.uint8)), no_tracks())


def test_sink_is_given_everything_in_order_and_closed() -> None:
    """Closing waits for what was taken."""
    sink = KeptSink()
    outlet = SinkWorker(sink, SinkWorkerOptions("kept", 100), VideoMetrics())
    outlet.start()
    for number in range(20):
        outlet.put(result(number), may_wait=False)
    outlet.put("cam", may_wait=False)
    assert outlet.close(WAIT_S)
    assert [one.frame.frame_num for one in sink.results] == list(range(20))
    assert (sink.ended, sink.is_closed) == (["cam"], True)


def test_sink_with_a_spool_is_written_to_at_once_and_closed_by_a_thread() -> None:
    """It has a queue of its own, so results do not wait in a second one; those after its end are counted as lost."""
    sink = KeptSink()
    outlet = SinkWorker(sink, SinkWorkerOptions("spool", 100, has_spool=True), VideoMetrics())
    outlet.start()
    outlet.put(result(0), may_wait=False)
    assert [one.frame.frame_num for one in sink.results] == [0]
    assert outlet.is_alive
    outlet.end()
    outlet.put(result(1), may_wait=False)
    assert outlet.close(WAIT_S)
    assert (len(sink.results), sink.is_closed, outlet.lost, outlet.is_alive) == (1, True, 1, False)


class HeldSink(KeptSink):
    """Takes nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held = True

    def write(self, result: FrameResult) -> None:
        while self.is_held:
            time.sleep(0.01)
        super().write(result)


def test_sink_that_hangs_delays_no_other_and_its_losses_are_counted() -> None:
    """FAULTS 58: a slow sink never delays the pipeline; the oldest results are dropped and counted."""
    sink, metrics = HeldSink(), VideoMetrics()
    outlet = SinkWorker(sink, SinkWorkerOptions("held", 2), metrics)
    outlet.start()
    began = time.monotonic()
    for number in range(50):
        outlet.put(result(number), may_wait=False)
    assert time.monotonic() - began < 5.0
    sink.is_held = False
    assert outlet.close(WAIT_S)
    numbers = [one.frame.frame_num for one in sink.results]
    assert numbers[-2:] == [48, 49]
    assert numbers == sorted(numbers)
    assert outlet.lost == 50 - len(numbers) > 0
    assert f'penstock_video_sink_dropped_total{{sink="held"}} {50 - len(numbers)}.0' in metrics.page().decode()


def test_masks_that_wait_for_a_sink_are_bounded() -> None:
    """Results without a picture wait by their number, and by the bytes of their masks."""
    sink, metrics = HeldSink(), VideoMetrics()
    outlet = SinkWorker(sink, SinkWorkerOptions("held", 1000), metrics)
    pixels = np.broadcast_to(np.True_, (PICTURES_BYTES // 8192 // 2, 8192))  # half of what may wait, in one byte
    seen = Detections(np.ones((1, 4), np.float32), np.ones(1, np.float32), np.zeros(1, np.int64))
    seen = replace(seen, masks=(Mask(*pixels.shape, 0, 0, pixels),))
    tracks = Tracks(seen, np.ones(1, np.int64), np.ones(1, np.int64))
    outlet.start()
    for number in range(20):
        outlet.put(replace(result(number), tracks=tracks), may_wait=False)
    sink.is_held = False
    assert outlet.close(WAIT_S)
    assert len(sink.results) <= 3
    assert sink.results[-1].frame.frame_num == 19


def test_sink_that_hangs_holds_up_neither_an_end_nor_a_file_for_ever() -> None:
    """FAULTS 58: the end of a source waits for no sink, and a file no longer than the timeout; the end is not lost."""
    sink = HeldSink()
    outlet = SinkWorker(sink, SinkWorkerOptions("held", 2), VideoMetrics(), max_wait_s=0.2)
    outlet.start()
    began = time.monotonic()
    outlet.put("first", may_wait=True)
    for number in range(10):
        outlet.put(result(number), may_wait=True)
    outlet.put("cam", may_wait=True)
    for number in range(10, 20):
        outlet.put(result(number), may_wait=False)
    assert time.monotonic() - began < 5.0
    sink.is_held = False
    assert outlet.close(WAIT_S)
    assert sink.ended == ["first", "cam"]


def test_sink_of_a_file_run_loses_nothing() -> None:
    """Where there is no camera the run waits for its sinks."""
    sink = HeldSink()
    outlet = SinkWorker(sink, SinkWorkerOptions("held", 2), VideoMetrics())
    outlet.start()
    sink.is_held = False
    for number in range(30):
        outlet.put(result(number), may_wait=True)
    assert outlet.close(WAIT_S)
    assert len(sink.results) == 30


def test_sink_that_fails_is_asked_again_with_the_next_result() -> None:
    """A full disk is logged once and costs that sink only what it does not take."""
    sink, metrics = KeptSink(fails=True), VideoMetrics()
    outlet = SinkWorker(sink, SinkWorkerOptions("full", 100), metrics)
    outlet.start()
    outlet.put(result(0), may_wait=False)
    until = time.monotonic() + WAIT_S
    while not outlet.failure and time.monotonic() < until:
        time.sleep(0.01)
    sink.fails = False
    outlet.put(result(1), may_wait=False)
    assert outlet.close(WAIT_S)
    assert outlet.failure == "full"
    assert [one.frame.frame_num for one in sink.results] == [1]
    assert 'penstock_video_sink_errors_total{sink="full"} 1.0' in metrics.page().decode()


@pytest.mark.parametrize(("every_s", "times"), [(3600.0, 1), (0.0, 3)])
def test_sink_that_fails_the_same_way_is_logged_again_after_a_while(
    every_s: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full a second time is logged again; an error with each result does not fill the log."""
    monkeypatch.setattr("penstock_video.runner.sink_worker.LOG_EVERY_S", every_s)
    outlet = SinkWorker(KeptSink(fails=True), SinkWorkerOptions("full", 100), VideoMetrics())
    with capture_logs() as lines:
        outlet.start()
        for number in range(3):
            outlet.put(result(number), may_wait=False)
        assert outlet.close(WAIT_S)
    assert [line["event"] for line in lines] == ["a sink fails"] * times


class BrokenSink(KeptSink):
    """Has a bug."""

    def write(self, result: FrameResult) -> None:
        raise ZeroDivisionError(result.frame.frame_num)


def test_sink_with_a_bug_costs_the_others_nothing() -> None:
    """Its thread lives on, and the log has the place."""
    sink = BrokenSink()
    outlet = SinkWorker(sink, SinkWorkerOptions("broken", 100), VideoMetrics())
    outlet.start()
    outlet.put(result(0), may_wait=False)
    outlet.put("cam", may_wait=False)
    assert outlet.close(WAIT_S)
    assert sink.ended == ["cam"]
    assert outlet.failure.startswith("internal error")


def test_result_without_a_picture_is_not_for_previews() -> None:
    """They would be woken for each frame, and draw nothing; a sink that needs every frame gets it."""
    bare = FrameResult(Frame("cam", 0, 0.0, 0.0, 8, 6), no_tracks())
    assert not SinkWorkerOptions("preview", 2, draws=True).shows(bare)
    assert SinkWorkerOptions("preview", 2, draws=True).shows(result(0))
    assert SinkWorkerOptions("annotated", 2, draws=True, always_draws=True).shows(bare)
    assert SinkWorkerOptions("jsonl", 2).shows(bare)


@pytest.mark.parametrize(
    ("has_spool", "sentence"), [(True, "s failed: full"), (False, "s failed: full (0 results lost)")]
)
def test_sink_that_failed_tells_one_number(has_spool: bool, sentence: str) -> None:
    """A spool's own words say how many messages were lost: beside them no second number stands that contradicts."""
    outlet = SinkWorker(KeptSink(fails=True), SinkWorkerOptions("s", 100, has_spool=has_spool), VideoMetrics())
    outlet.start()
    outlet.put(result(0), may_wait=False)
    assert outlet.close(WAIT_S)
    assert outlet.sentence == sentence
