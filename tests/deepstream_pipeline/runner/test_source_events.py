"""Log levels of the states of a source."""

from typing import Any
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from penstock_video.metrics import VideoMetrics
from penstock_video.runner.source_events import SourceEvents, SourceEventsParts
from penstock_video.sources.lifecycle import TAKEN_OUT, WAITS_FOR_CARD
from penstock_video.types import SourceState

CONNECTING, RUNNING, PAUSED = SourceState.CONNECTING, SourceState.RUNNING, SourceState.PAUSED
LOST, ENDED = SourceState.RECONNECTING, SourceState.ENDED

SEQUENCES = {
    "paused and resumed": ([RUNNING, PAUSED, CONNECTING, RUNNING], ["info"] * 3),
    "lost, paused, back": ([RUNNING, LOST, PAUSED, CONNECTING, RUNNING], ["info", "warning", "info", "warning"]),
    "lost and back": ([RUNNING, LOST, RUNNING, RUNNING], ["info", "warning", "warning", "info"]),
    "never opened": ([(CONNECTING, "cannot be reached"), RUNNING], ["warning", "warning"]),
    "waits for its turn": ([(CONNECTING, WAITS_FOR_CARD), RUNNING], ["info"]),
    "over": ([RUNNING, ENDED], ["info", "info"]),
    "lost and removed": ([RUNNING, LOST, TAKEN_OUT, RUNNING], ["info", "warning", "info", "info"]),
}


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_state_that_a_person_asked_for_is_no_warning(sequence: str) -> None:
    """Nor is its consequence. A loss is a warning, and so is its end."""
    states, levels = SEQUENCES[sequence]
    unused: Any = None
    dispatcher: Any = Mock()
    events = SourceEvents(
        SourceEventsParts(dispatcher, VideoMetrics(), unused, None, lambda _: None, lambda _: None, lambda: False)
    )
    with capture_logs() as lines:
        for state in states:
            event = (ENDED, TAKEN_OUT) if state == TAKEN_OUT else (state, "") if isinstance(state, str) else state
            events.on_state("a", SourceState(event[0]), event[1])
    assert [line["log_level"] for line in lines] == levels
    assert {line["source"] for line in lines} == {"a"}
