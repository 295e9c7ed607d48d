"""Events of the sources: routing to the pipeline's parts, source statistics and gauges."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from penstock_video.decode.uri import is_live, redacted
from penstock_video.interfaces import SourceStatistics
from penstock_video.metrics import DECODERS, VideoMetrics
from penstock_video.runner.dispatch import Dispatcher, StreamPipeline
from penstock_video.runner.recorder import SmartRecorder
from penstock_video.sources.decoder_cards import CardSnapshot
from penstock_video.sources.lifecycle import TAKEN_OUT, WAITS_FOR_CARD, WAITS_FOR_READING
from penstock_video.sources.options import ProcessSnapshot, SourceSnapshot
from penstock_video.sources.protocol import Beat, Opened, Recorded
from penstock_video.types import DropReason, SourceState


@dataclass(slots=True)
class _LastCounts:
    decoded: int = 0
    decode_s: float = 0.0
    prepare_s: float = 0.0
    restarts: int = 0


class SourceGauges:
    """Gauges of the sources. Thread-safe: the sources' thread calls beat, a reader of the metrics calls refresh."""

    def __init__(self, metrics: VideoMetrics) -> None:
        self._metrics = metrics
        self._last_counts: dict[str, _LastCounts] = {}
        self._lock = threading.Lock()  # prevents double counting

    def beat(self, source_id: str, beat: Beat) -> None:
        """Counts each frame of the last second with that second's mean."""
        if beat.sharing is not None:
            self._metrics.sharing(source_id, beat.sharing)
        with self._lock:
            counts = self._last_counts.setdefault(source_id, _LastCounts())
            frames = beat.decoded - counts.decoded
            if frames <= 0:
                return
            decode_s, prepare_s = beat.decode_s - counts.decode_s, beat.prepare_s - counts.prepare_s
            counts.decoded, counts.decode_s, counts.prepare_s = beat.decoded, beat.decode_s, beat.prepare_s
        self._metrics.decoded(source_id, frames)
        self._metrics.decode_s(source_id, max(decode_s, 0.0) / frames, frames)
        self._metrics.prepare_s(source_id, max(prepare_s, 0.0) / frames, frames)

    def refresh(
        self,
        snapshots: Iterable[SourceSnapshot],
        processes: Sequence[ProcessSnapshot],
        cards: Sequence[CardSnapshot] = (),
        refusals: int = 0,
    ) -> None:
        """refusals: of sources by cards whose decoders were full, so far."""
        self._metrics.cards({card.label: card.utilisation for card in cards}, refusals)
        for decoder in DECODERS:
            self._metrics.decode_processes(decoder, sum(process.decoder == decoder for process in processes))
        for snapshot in snapshots:
            self._metrics.fps(snapshot.source_id, snapshot.fps)
            self._metrics.frozen(snapshot.source_id, snapshot.is_frozen)
            if snapshot.opened is not None:
                self._metrics.decoder(snapshot.source_id, snapshot.opened.decoder)
            for _ in range(self._new_restarts(snapshot)):
                self._metrics.restarted(snapshot.source_id)

    def forget(self, source_id: str) -> None:
        with self._lock:
            self._last_counts.pop(source_id, None)

    def _new_restarts(self, snapshot: SourceSnapshot) -> int:
        with self._lock:
            counts = self._last_counts.setdefault(snapshot.source_id, _LastCounts())
            count = max(snapshot.restarts - counts.restarts, 0)
            counts.restarts += count
        return count


log = structlog.get_logger(component="video")


@dataclass(frozen=True, slots=True)
class SourceEventsParts:
    """way_of: a source's pipeline, or None. note_last: called with a source's last state, before its end."""

    dispatcher: Dispatcher
    metrics: VideoMetrics
    gauges: SourceGauges
    recorder: SmartRecorder | None
    way_of: Callable[[str], StreamPipeline | None]
    note_last: Callable[[str], None]
    is_stopping: Callable[[], bool]


class SourceEvents:
    """The pipeline's SourceListener."""

    def __init__(self, parts: SourceEventsParts) -> None:
        self._parts = parts
        self._troubled: set[str] = set()
        self.on_frame = parts.dispatcher.on_frame  # a direct reference saves one call for each frame

    def on_lost(self, source_id: str, reason: str, count: int) -> None:
        way = self._parts.way_of(source_id)
        if way is not None:
            self._parts.dispatcher.count_drop(way, DropReason(reason), count)

    def on_state(self, source_id: str, state: SourceState, reason: str) -> None:
        self._parts.metrics.state(source_id, state)
        if state is SourceState.CONNECTING and reason in ("", WAITS_FOR_CARD, WAITS_FOR_READING):
            return
        if state is SourceState.PAUSED:  # by a user: earlier trouble still counts
            log.info("source", source=source_id, state=state.value)
            return
        if reason == TAKEN_OUT:  # by a user, too; named as in the summary
            self._troubled.discard(source_id)
            log.info("source", source=source_id, state="stopped" if self._parts.is_stopping() else "removed")
            return
        is_trouble = state not in (SourceState.RUNNING, SourceState.ENDED)
        tell = log.warning if is_trouble or source_id in self._troubled else log.info  # its end as its begin
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
        """Forgets a removed source's troubles. Thread-safe."""
        self._troubled.discard(source_id)


def statistics_of(way: StreamPipeline) -> SourceStatistics:
    """The last statistics of the stream."""
    config, last, snapshot = way.config, way.last, way.snapshot
    opened = snapshot.opened if snapshot is not None else None
    return SourceStatistics(
        source_id=config.source_id,
        camera_name=config.camera_name,
        uri=redacted(config.uri),
        state=snapshot.state if snapshot is not None else SourceState.CONNECTING,
        reason=snapshot.reason if snapshot is not None else "",
        fps=snapshot.fps if snapshot is not None else 0.0,
        frames=snapshot.frames if snapshot is not None else 0,
        frames_total=opened.frames_total if opened is not None else None,
        inferred=way.inferred - way.unreadable,
        drops=dict(Counter(way.drops)),
        restarts=snapshot.restarts if snapshot is not None else 0,
        width=opened.width if opened is not None else 0,
        height=opened.height if opened is not None else 0,
        codec=opened.codec if opened is not None else "",
        decoder=opened.decoder if opened is not None else "",
        decoder_reason=snapshot.decoder_reason if snapshot is not None else "",
        is_live=opened.is_live if opened is not None else is_live(config.uri),
        is_frozen=snapshot.is_frozen if snapshot is not None else False,
        latency_s=way.typical_latency_s(),
        position_s=last.frame.pts_s if last is not None else 0.0,
        duration_s=opened.duration_s if opened is not None else None,
        counts=last.analytics.counts if last is not None else {},
        events=dict(way.events),
        is_loop=config.is_loop,
        active_s=way.active_s,
        is_recordable=opened.is_recordable if opened is not None else True,
    )


class Removed:
    """Last statistics of sources removed at run time. Beyond `most` the oldest are merged, which keeps the sums."""

    OTHERS = "(others)"

    def __init__(self, most: int = 1_000) -> None:
        self._most = most
        self._kept: deque[SourceStatistics] = deque()

    def keep(self, source: SourceStatistics) -> None:
        self._kept.append(source)
        if len(self._kept) > self._most:
            self._kept.appendleft(_joined(self._kept.popleft(), self._kept.popleft()))

    def all(self) -> tuple[SourceStatistics, ...]:
        """In order of removal."""
        return tuple(self._kept)


def _joined(one: SourceStatistics, other: SourceStatistics) -> SourceStatistics:
    return replace(
        other,
        source_id=Removed.OTHERS,
        camera_name="",
        uri="",
        frames=one.frames + other.frames,
        inferred=one.inferred + other.inferred,
        restarts=one.restarts + other.restarts,
        active_s=one.active_s + other.active_s,
        drops=_sum(one.drops, other.drops),
        events=_sum(one.events, other.events),
        decoder="",
        counts={},
    )


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return dict(Counter(one) + Counter(other))
