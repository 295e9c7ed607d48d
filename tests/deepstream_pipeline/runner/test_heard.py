"""How loudly it is told what becomes of a source."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from deepstream_pipeline.metrics import VideoMetrics
from deepstream_pipeline.runner.heard import Heard, HeardParts
from deepstream_pipeline.sources.watch import TAKEN_OUT, WAITS_FOR_CARD
from deepstream_pipeline.types import SourceState

CONNECTING, RUNNING, PAUSED = SourceState.CONNECTING, SourceState.RUNNING, SourceState.PAUSED
LOST, ENDED = SourceState.RECONNECTING, SourceState.ENDED

COURSES = {
    "paused and resumed": ([RUNNING, PAUSED, CONNECTING, RUNNING], ["info"] * 3),
    "lost, paused, back": ([RUNNING, LOST, PAUSED, CONNECTING, RUNNING], ["info", "warning", "info", "warning"]),
    "lost and back": ([RUNNING, LOST, RUNNING, RUNNING], ["info", "warning", "warning", "info"]),
    "never opened": ([(CONNECTING, "cannot be reached"), RUNNING], ["warning", "warning"]),
    "waits for its turn": ([(CONNECTING, WAITS_FOR_CARD), RUNNING], ["info"]),
    "over": ([RUNNING, ENDED], ["info", "info"]),
    "lost and removed": ([RUNNING, LOST, TAKEN_OUT, RUNNING], ["info", "warning", "info", "info"]),
}


@pytest.mark.parametrize("course", COURSES)
def test_state_that_a_person_asked_for_is_no_warning(course: str) -> None:
    """Nor what follows from it; a loss is one, and so is what ends it."""
    states, levels = COURSES[course]
    nobody: Any = None
    heard = Heard(HeardParts(nobody, VideoMetrics(), nobody, None, lambda _: None, lambda _: None, lambda: False))
    with capture_logs() as lines:
        for state in states:
            told = (ENDED, TAKEN_OUT) if state == TAKEN_OUT else (state, "") if isinstance(state, str) else state
            heard.on_state("a", SourceState(told[0]), told[1])
    assert [line["log_level"] for line in lines] == levels
    assert {line["source"] for line in lines} == {"a"}
