"""The thread of the results: what ends it, and what does not."""

import threading
from typing import Any

from deepstream_pipeline.metrics import VideoMetrics
from deepstream_pipeline.runner.results import Results, ResultsParts
from deepstream_pipeline.runner.way import Outcome
from tests.deepstream_pipeline.runner.fakes import NETWORK

WAIT_S = 30.0


class Failing:
    """A dispatcher with a bug, whenever it is asked."""

    def __init__(self) -> None:
        self.asked, self.again = 0, threading.Event()

    def take(self, timeout_s: float) -> Outcome | None:
        self.asked += 1
        if self.asked > 1:
            self.again.set()
        raise RuntimeError("a bug")


def test_thread_of_the_results_outlives_a_bug() -> None:
    """Without it nothing would ever come any more: it is logged, and the thread goes on."""
    dispatcher: Any = Failing()
    parts = ResultsParts(
        dispatcher, NETWORK, (), None, VideoMetrics(),
        is_live=lambda: False, is_drawn=lambda _: False, on_result=lambda _: None, on_over=lambda _: None,
    )  # fmt: skip
    results = Results(parts)
    results.start()
    assert dispatcher.again.wait(WAIT_S)
    assert results.is_alive
    assert results.close(WAIT_S)
    assert not results.is_running
