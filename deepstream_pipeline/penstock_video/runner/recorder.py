"""Smart record: analytics events start recordings in the decode processes, which are listed in an index."""

import threading
import time
from collections import Counter
from collections.abc import Callable

import structlog

from penstock_video.errors import PipelineError, SinkFailed, SourceNotOpen, SourceNotRecordable
from penstock_video.metrics import VideoMetrics
from penstock_video.runner.sink_worker import Channel
from penstock_video.sinks.recordings import (
    FinishedRecording,
    RecordingsFolder,
    RecordOptions,
    RecordPolicy,
    RecordRequest,
)
from penstock_video.sources.options import SourceSnapshot
from penstock_video.sources.protocol import Cut, Recorded
from penstock_video.sources.sources import Sources
from penstock_video.types import FrameResult, SourceState

log = structlog.get_logger(component="video")
LOOK_S = 0.5
LOG_EVERY_S = 60.0
LEAST_CACHE_S = 2.0  # an event follows its frame, which its recording must contain
MOST_WAITING = 256  # recordings without a line in the index yet
_ADVICE = {SourceState.PAUSED: "resume it first"} | dict.fromkeys(
    (SourceState.ENDED, SourceState.FAILED), "start it over first"
)


class SmartRecorder:
    """Starts and ends recordings; writes to disk in its own thread. Thread-safe. Raises SinkFailed if unwritable."""

    def __init__(
        self,
        options: RecordOptions,
        metrics: VideoMetrics,
        on_added: Callable[[FinishedRecording], None] = lambda _: None,
    ) -> None:
        """on_added: called with each finished recording; must not wait."""
        self._options, self._metrics, self._on_added = options, metrics, on_added
        self._policy = RecordPolicy(options)
        self._folder = RecordingsFolder(options)
        self._lock = threading.Lock()
        self._unrecorded: Counter[str] = Counter()  # not logged yet, by reason
        self._failed: Counter[str] = Counter()  # by log message
        self._unwritable_of: dict[str, str] = {}  # reason by source, until a recording of it can be written
        self._unwritable, self._index_fails = Counter[str](), ""
        self._tell_at = self._tell_failed_at = 0.0
        self._over: Channel[FinishedRecording] = Channel(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="recordings", daemon=True)

    def start(self) -> None:
        """Starts adding finished recordings to the index."""
        self._thread.start()

    def cache_s(self, source_id: str) -> float:
        """Seconds of packets to cache for recordings that begin before their event; 0 if the source is not recorded."""
        sources = self._options.sources
        return max(self._options.before_s, LEAST_CACHE_S) if not sources or source_id in sources else 0.0

    def failures(self) -> tuple[str, ...]:
        """A message for each reason of failed recordings, and for the index."""
        with self._lock:
            reasons = [f"record failed: {reason} ({n} recordings lost)" for reason, n in self._unwritable.items()]
        return (*reasons, *([f"record failed: {self._index_fails}"] if self._index_fails else []))

    def observe(self, result: FrameResult, sources: Sources) -> None:
        """Starts recordings for the result's events, and finishes those that are due. Call it for every result."""
        frame, at = result.frame, time.monotonic()
        unix_s = frame.captured_unix_s or time.time()
        with self._lock:
            request = self._policy.observe(frame.source_id, result.analytics.events, frame.pts_s, unix_s)
            over = self._policy.passed(frame.source_id, frame.pts_s, at)
            unrecorded, self._policy.unrecorded = self._policy.unrecorded, Counter()
        if unrecorded or self._unrecorded:
            self._tell_unrecorded(unrecorded, at)
        if request is not None:
            self._begin(request, sources, frame.frame_num)
        self._name(over)

    def ask(self, source_id: str, sources: Sources, *, before_s: float, after_s: float) -> str:
        """Starts a recording on request; returns its file path. Raises SourceNotOpen, SourceNotRecordable."""
        source = _open_source(source_id, sources)
        with self._lock:
            request = self._policy.asked(source_id, before_s, after_s, source.pts_s, time.time())
        self._begin(request, sources, -1)
        return request.path

    def ended(self, source_id: str, recorded: Recorded) -> None:
        """Records that a recording ended."""
        with self._lock:
            over = self._policy.finished(recorded.path, recorded.before_s, recorded.after_s, recorded.error)
            is_logged = self._is_to_tell(source_id, recorded)
        if is_logged:
            log.error("a recording failed", source=source_id, path=recorded.path, reason=recorded.error)
        self._name(over)

    def forget(self, source_id: str) -> None:
        """Ends the source's recordings."""
        with self._lock:
            over = self._policy.forget(source_id, time.monotonic())
            self._unwritable_of.pop(source_id, None)
        self._name(over)

    def _is_to_tell(self, source_id: str, recorded: Recorded) -> bool:
        """Whether to log: an unwritable source once; other failures again after LOG_EVERY_S, as all may fail alike."""
        if recorded.is_unwritable:
            self._unwritable[recorded.error] += 1
            before, self._unwritable_of[source_id] = self._unwritable_of.get(source_id), recorded.error
            return before != recorded.error
        if recorded.result != "failed":
            self._unwritable_of.pop(source_id, None)
            return False
        now, what = time.monotonic(), f"{source_id} {recorded.error}"
        if now >= self._tell_failed_at:
            self._tell_failed_at = now + LOG_EVERY_S
            self._failed.clear()
        self._failed[what] += 1
        return self._failed[what] == 1

    def _tell_unrecorded(self, unrecorded: Counter[tuple[str, str]], now: float) -> None:
        for (source_id, reason), count in unrecorded.items():
            self._metrics.unrecorded(source_id, reason, count)
            self._unrecorded[reason] += count
        if now >= self._tell_at:
            self._tell_at = now + LOG_EVERY_S
            self._say_unrecorded()

    def _say_unrecorded(self) -> None:
        unrecorded, self._unrecorded = self._unrecorded, Counter()
        if unrecorded["max_at_once"]:
            log.warning(
                "events without a recording", events=unrecorded["max_at_once"], most_at_once=self._options.max_at_once
            )
        if unrecorded["cool_down"]:
            cool_down_s = self._options.cool_down_s
            log.info("events without a recording", events=unrecorded["cool_down"], cool_down_s=cool_down_s)

    def _begin(self, request: RecordRequest, sources: Sources, frame_num: int) -> None:
        cut = Cut(request.path, request.before_s, request.after_s, frame_num)
        try:
            sources.record(request.source_id, cut)
        except PipelineError as error:  # removed at this moment
            self.ended(request.source_id, Recorded(request.path, error.message))

    def _name(self, over: list[FinishedRecording]) -> None:
        for recording in over:
            self._over.put(recording)

    def close(self, timeout_s: float) -> bool:
        """Returns whether the index has all recordings within the time."""
        with self._lock:
            left = self._policy.give_up()
        self._name(left)
        self._say_unrecorded()
        self._over.close()
        if self._thread.ident is None:  # never started
            self._folder.close()
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._over.is_over:
            recording = self._over.take(LOOK_S)
            if recording is None:
                continue
            try:
                self._add(recording)
            except Exception:  # the thread's root: continue with the next one
                log.exception("a recording could not be named in the index", path=recording.path)
        self._folder.close()

    def _add(self, recording: FinishedRecording) -> None:
        with self._lock:
            running = self._policy.running_paths()
        self._on_added(recording)
        try:
            self._folder.add(recording, time.monotonic(), running=running)
        except SinkFailed as failure:
            self._index_fails = failure.message
            log.error("the index of recordings fails", reason=failure.message)


def _open_source(source_id: str, sources: Sources) -> SourceSnapshot:
    """The open source, since the decode process caches packets only while it is open and not paused."""
    source = next((one for one in sources.snapshot() if one.source_id == source_id), None)
    if source is None or not source.is_open or source.state is SourceState.PAUSED:
        state, why = (source.state, source.reason) if source is not None else (SourceState.CONNECTING, "")
        advice = _ADVICE.get(state, "ask again once it is running")
        state_text = f"{state.value} ({why})" if why else state.value
        raise SourceNotOpen(f"{source_id!r} is {state_text}: nothing of it is there to be recorded; {advice}")
    if source.opened is not None and not source.opened.is_recordable:
        raise SourceNotRecordable(f"{source_id!r} is {source.opened.codec}, whose packets do not fit into MP4")
    return source
