"""What sources tell, on the thread that they all share: it goes on to who it is for, and nothing of it waits."""

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from deepstream_pipeline.metrics import VideoMetrics
from deepstream_pipeline.runner.dispatch import Dispatcher
from deepstream_pipeline.runner.gauges import Gauges
from deepstream_pipeline.runner.recorder import Recorder
from deepstream_pipeline.runner.way import SourceWay
from deepstream_pipeline.sources.messages import Beat, Opened, Recorded
from deepstream_pipeline.sources.watch import TAKEN_OUT, WAITS_FOR_CARD
from deepstream_pipeline.types import DropReason, PreparedFrame, SourceState

log = structlog.get_logger(component="video")


@dataclass(frozen=True, slots=True)
class HeardParts:
    """Whom it is for. way_of: of a source, None where it is not known any more. note_last: how a source is, before the
    dispatcher hears of its end."""

    dispatcher: Dispatcher
    metrics: VideoMetrics
    gauges: Gauges
    recorder: Recorder | None
    way_of: Callable[[str], SourceWay | None]
    note_last: Callable[[str], None]
    is_stopping: Callable[[], bool]


class Heard:
    """The pipeline's SourceListener."""

    def __init__(self, parts: HeardParts) -> None:
        self._parts = parts
        self._troubled: set[str] = set()

    def on_frame(self, prepared: PreparedFrame) -> None:
        way = self._parts.way_of(prepared.frame.source_id)
        if way is not None:
            way.note_frame(prepared.frame.captured_at)
        self._parts.dispatcher.on_frame(prepared)

    def on_lost(self, source_id: str, reason: str, count: int) -> None:
        way = self._parts.way_of(source_id)
        if way is not None:
            self._parts.dispatcher.count_drop(way, DropReason(reason), count)

    def on_state(self, source_id: str, state: SourceState, reason: str) -> None:
        self._parts.metrics.state(source_id, state)
        if state is SourceState.CONNECTING and reason in ("", WAITS_FOR_CARD):
            return
        if state is SourceState.PAUSED:  # by a person: whether it was in trouble before holds on
            log.info("source", source=source_id, state=state.value)
            return
        if reason == TAKEN_OUT:  # by a person, too; as the summary calls it
            self._troubled.discard(source_id)
            log.info("source", source=source_id, state="stopped" if self._parts.is_stopping() else "removed")
            return
        is_trouble = state not in (SourceState.RUNNING, SourceState.ENDED)
        tell = log.warning if is_trouble or source_id in self._troubled else log.info  # its end as its beginning
        (self._troubled.add if is_trouble else self._troubled.discard)(source_id)
        tell("source", source=source_id, state=state.value, **({"reason": reason} if reason else {}))

    def on_opened(self, source_id: str, opened: Opened) -> None:
        log.debug("source opened", source=source_id, width=opened.width, height=opened.height, codec=opened.codec)

    def on_beat(self, source_id: str, beat: Beat) -> None:
        self._parts.gauges.beat(source_id, beat)

    def on_ended(self, source_id: str) -> None:
        self._parts.note_last(source_id)
        self._parts.dispatcher.on_end(source_id)

    def on_recorded(self, source_id: str, recorded: Recorded) -> None:
        self._parts.metrics.recording(source_id, recorded.result)
        if self._parts.recorder is not None:
            self._parts.recorder.ended(source_id, recorded)

    def forget(self, source_id: str) -> None:
        """From any thread: the source is gone, another of its id was not in trouble."""
        self._troubled.discard(source_id)
