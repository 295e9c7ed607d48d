"""The thread of the results: what ends it, and what does not."""

import threading
from dataclasses import replace
from typing import Any

import pytest

from penstock_video.cli.summary import is_failed
from penstock_video.errors import InferFailed
from penstock_video.metrics import VideoMetrics
from penstock_video.runner import results as results_module
from penstock_video.runner.dispatch import FrameOutcome
from penstock_video.runner.results import Results, ResultsParts
from penstock_video.runner.source_events import statistics_of
from penstock_video.types import no_detections
from tests.deepstream_pipeline.runner.fakes import NETWORK, FakeEngine, Slots, a_dispatcher, a_way

WAIT_S = 30.0


class Failing:
    """A dispatcher with a bug, whenever it is asked."""

    def __init__(self) -> None:
        self.asked, self.again = 0, threading.Event()

    def take(self, timeout_s: float) -> FrameOutcome | None:
        self.asked += 1
        if self.asked > 1:
            self.again.set()
        raise RuntimeError("a bug")


def test_thread_of_the_results_outlives_a_bug() -> None:
    """Without it nothing would ever come any more: it is logged, and the thread goes on."""
    dispatcher: Any = Failing()
    parts = ResultsParts(
        dispatcher, NETWORK, (), None, VideoMetrics(),
        is_drawn=lambda _: False, on_result=lambda _: None, on_over=lambda _: None,
    )  # fmt: skip
    results = Results(parts)
    results.start()
    assert dispatcher.again.wait(WAIT_S)
    assert results.is_alive
    assert results.close(WAIT_S)
    assert not results.is_running


@pytest.mark.parametrize("is_readable", [True, False])
def test_answers_that_cannot_be_read_are_no_inferred_frames(monkeypatch: pytest.MonkeyPatch, is_readable: bool) -> None:
    """A run with only such answers fails, although the engine answered every frame."""

    def detections_of(*_: object) -> object:
        if not is_readable:
            raise InferFailed("output 'boxes' is missing")
        return no_detections()

    monkeypatch.setattr(results_module, "detections_of", detections_of)
    way, engine, over = a_way("film"), FakeEngine(), threading.Event()
    dispatcher = a_dispatcher(engine, way)
    parts = ResultsParts(
        dispatcher, NETWORK, (), None, VideoMetrics(),
        is_drawn=lambda _: False, on_result=lambda _: over.set(), on_over=lambda _: None,
    )  # fmt: skip
    results = Results(parts)
    results.start()
    dispatcher.on_frame(Slots().prepared("film", 0))
    engine.asked[0].answer()
    assert over.wait(WAIT_S)
    assert results.close(WAIT_S)
    statistics = replace(statistics_of(way), frames=1)
    assert statistics.inferred == (1 if is_readable else 0)
    assert is_failed(statistics) is not is_readable
