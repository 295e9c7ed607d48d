"""The results thread: an engine response becomes detections, tracks, events and a FrameResult for every sink."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import structlog

from penstock_video.errors import InferFailed
from penstock_video.infer.calls import classes_of, detections_of
from penstock_video.infer.network import Network
from penstock_video.metrics import VideoMetrics
from penstock_video.runner.dispatch import Dispatcher, FrameOutcome, StreamPipeline
from penstock_video.runner.secondary import Secondaries
from penstock_video.runner.sink_worker import LOOK_S, SinkWorker
from penstock_video.types import (
    ClassScore,
    Detections,
    DropPolicy,
    DropReason,
    Frame,
    FrameResult,
    FrameTimes,
    no_detections,
)

log = structlog.get_logger(component="video")

STALE_S = 60.0  # longer than a result may wait for a sink, so the thread hangs


@dataclass(frozen=True, slots=True)
class ResultsParts:
    """network: None for no inference. is_drawn: whether a sink draws that source's pictures. on_result: called with
    each result, like a sink; None for nothing."""

    dispatcher: Dispatcher
    network: Network | None
    outlets: Sequence[SinkWorker]
    secondaries: Secondaries | None
    metrics: VideoMetrics
    is_drawn: Callable[[str], bool]
    on_result: Callable[[FrameResult], None] | None
    on_over: Callable[[StreamPipeline], None]


class Results:
    """Call `start`, and `close` when every source is over."""

    def __init__(self, parts: ResultsParts) -> None:
        self._parts = parts
        self._has_snapshots = any(outlet.options.has_snapshots for outlet in parts.outlets)
        self._stop = threading.Event()
        self._turned_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="results", daemon=True)
        if parts.secondaries is not None:
            parts.secondaries.deliver, parts.secondaries.ended = self._emit, self._over

    def start(self) -> None:
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread exists."""
        return self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether the thread's loop runs."""
        return self.is_running and time.monotonic() - self._turned_at < STALE_S

    def close(self, timeout_s: float) -> bool:
        """Returns whether the thread ended in time; the rest is dropped."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._turned_at = time.monotonic()
            try:
                self._turn()
            except Exception:  # the thread's root: continue with the next result
                log.exception("the results' thread failed unexpectedly")
                self._stop.wait(LOOK_S)

    def _turn(self) -> None:
        if (outcome := self._parts.dispatcher.take(LOOK_S)) is not None:
            self._guarded(outcome)
        if self._parts.secondaries is not None:
            self._parts.secondaries.pump()

    def _guarded(self, outcome: FrameOutcome) -> None:
        try:
            if outcome.prepared is None:
                (self._over if self._parts.secondaries is None else self._parts.secondaries.finish)(outcome.way)
            else:
                self._work(outcome, outcome.prepared.frame)
        except Exception:  # a bug costs only the frame that triggers it
            log.exception("a frame failed unexpectedly", source=outcome.way.source_id)
            self._parts.dispatcher.count_drop(outcome.way, DropReason.INFER_FAILED)
        finally:
            if outcome.prepared is not None:
                outcome.prepared.release()

    def _work(self, outcome: FrameOutcome, frame: Frame) -> None:
        way = outcome.way
        if way.next_analytics:
            way.analytics = way.next_analytics.pop()
        detections, classes = self._seen(outcome, frame)
        tracks = way.tracker.coast(frame) if detections is None else way.tracker.update(frame, detections)
        analytics = way.analytics.observe(frame, tracks)
        result = FrameResult(
            frame=self._with_own_image(frame, has_events=bool(analytics.events)),
            tracks=tracks,
            analytics=analytics,
            labels=self._parts.network.labels if self._parts.network is not None else (),
            skeleton=self._parts.network.skeleton if self._parts.network is not None else (),
            classes=classes,
            is_inferred=detections is not None,
            times=FrameTimes(outcome.mux_s, outcome.answer.infer_s if outcome.answer is not None else 0.0),
        )
        if self._parts.secondaries is None:
            self._emit(way, result)
        else:
            self._parts.secondaries.look(way, result, frame.image)

    def _with_own_image(self, frame: Frame, *, has_events: bool) -> Frame:
        """The frame with a copy of its picture, which outlives the ring's slot, or without it if no sink uses it."""
        if frame.image is None:
            return frame
        is_used = (has_events and self._has_snapshots) or self._parts.is_drawn(frame.source_id)
        return replace(frame, image=frame.image.copy() if is_used else None)

    def _seen(self, outcome: FrameOutcome, frame: Frame) -> tuple[Detections | None, tuple[ClassScore, ...]]:
        """Detections (None if not inferred or failed), and classes of the whole picture."""
        network, answer = self._parts.network, outcome.answer
        if network is None or answer is None or answer.error_of(outcome.index) is not None:
            return None, ()
        try:
            if network.is_classifier:
                return no_detections(), classes_of(network, answer, outcome.index)
            return detections_of(network, answer, outcome.index, frame.width, frame.height), ()
        except InferFailed as error:
            log.warning("an answer cannot be read", source=frame.source_id, reason=error.message)
            outcome.way.unreadable += 1
            self._parts.dispatcher.count_drop(outcome.way, DropReason.INFER_FAILED)
            return None, ()

    def _emit(self, way: StreamPipeline, result: FrameResult) -> None:
        """Passes the result to every sink, with the picture only to those that draw."""
        total_s = (now := time.monotonic()) - result.frame.captured_at
        whole = replace(result, times=replace(result.times, total_s=total_s))
        bare = whole if whole.frame.image is None else replace(whole, frame=replace(whole.frame, image=None))
        way.last = bare
        way.note_latency(now, total_s)
        way.note_events(bare)
        self._parts.metrics.glass_to_event(way.source_id, total_s)
        for event in bare.analytics.events:
            self._parts.metrics.event(way.source_id, event.kind, event.direction or "")
        may_wait = way.policy is DropPolicy.BLOCK and not self._parts.dispatcher.has_cameras
        for outlet in self._parts.outlets:
            outlet.emit(whole, bare, may_wait=may_wait)
        if self._parts.on_result is not None:
            self._parts.on_result(bare)

    def _over(self, way: StreamPipeline) -> None:
        """After a source's last frame: ends it at the sinks."""
        for outlet in self._parts.outlets:
            outlet.put(way.source_id, may_wait=True)
        self._parts.on_over(way)
