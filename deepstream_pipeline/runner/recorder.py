"""Smart record: events of the results become recordings of the sources' decode processes, and lines of an index."""

import threading
import time

import structlog

from deepstream_pipeline.channel import Channel
from deepstream_pipeline.errors import PipelineError, SinkFailed, SourceNotOpen
from deepstream_pipeline.sinks.recordings import Recording, RecordingsFolder, RecordOptions, RecordPolicy, RecordRequest
from deepstream_pipeline.sources.sources import Sources
from deepstream_pipeline.types import DropPolicy, FrameResult, SourceState

log = structlog.get_logger(component="video")
LOOK_S = 0.5
TELL_EVERY_S = 60.0
MOST_WAITING = 256  # recordings whose line in the index is not written yet
_ADVICE = {SourceState.PAUSED: "resume it first"} | dict.fromkeys(
    (SourceState.ENDED, SourceState.FAILED), "remove it and add it again first"
)


class Recorder:
    """From any thread; the disk is waited for by one of its own. Raises SinkFailed at once where the folder cannot be
    written to."""

    def __init__(self, options: RecordOptions) -> None:
        self._options = options
        self._policy = RecordPolicy(options)
        self._folder = RecordingsFolder(options)
        self._lock = threading.Lock()
        self._told_refused, self._tell_at = 0, 0.0
        self._over: Channel[Recording] = Channel(MOST_WAITING, DropPolicy.DROP_OLDEST)
        self._thread = threading.Thread(target=self._run, name="recordings", daemon=True)

    def start(self) -> None:
        """Recordings that are over are named in the index from now on."""
        self._thread.start()

    def cache_s(self, source_id: str) -> float:
        """How much of the source has to be kept for recordings that begin before their event."""
        sources = self._options.sources
        return self._options.before_s if not sources or source_id in sources else 0.0

    def observe(self, result: FrameResult, sources: Sources) -> None:
        """Of every result: begin the recording that its events ask for, and give up what was never finished."""
        now, frame = time.monotonic(), result.frame
        with self._lock:
            request = self._policy.observe(frame.source_id, result.analytics.events, now, time.time())
            late = self._policy.overdue(now)
            refused = self._policy.refused - self._told_refused
            is_told = refused and now >= self._tell_at
            if is_told:
                self._told_refused, self._tell_at = self._policy.refused, now + TELL_EVERY_S
        if is_told:
            log.warning("events without a recording", events=refused, most_at_once=self._options.max_at_once)
        if request is not None:
            _begin(request, sources)
        for recording in late:
            self._over.put(recording)

    def ask(self, source_id: str, sources: Sources, *, before_s: float, after_s: float) -> str:
        """Begin one because somebody says so; the path of the file that will be there. Raises SourceNotOpen."""
        _refuse_closed(source_id, sources)
        with self._lock:
            request = self._policy.asked(source_id, before_s, after_s, time.monotonic(), time.time())
        _begin(request, sources)
        return request.path

    def ended(self, path: str, error: str) -> None:
        """A decode process is done with that file."""
        with self._lock:
            recording = self._policy.finished(path, error)
        if error:
            log.error("a recording failed", path=path, reason=error)
        if recording is not None:
            self._over.put(recording)

    def forget(self, source_id: str) -> None:
        """The source is over."""
        with self._lock:
            self._policy.forget(source_id)

    def close(self, timeout_s: float) -> bool:
        """Whether the index names within the time all that was recorded."""
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
            except Exception:  # the thread's root: the next one is named all the same
                log.exception("a recording could not be named in the index", path=recording.path)
        self._folder.close()

    def _add(self, recording: Recording) -> None:
        with self._lock:
            running = self._policy.running_paths()
        try:
            self._folder.add(recording, time.monotonic(), running=running)
        except SinkFailed as failure:
            log.error("the index of recordings fails", reason=failure.message)


def _refuse_closed(source_id: str, sources: Sources) -> None:
    """Packets are kept in the decode process: while none has the source open there is nothing, also from before."""
    source = next((one for one in sources.snapshot() if one.source_id == source_id), None)
    if source is not None and source.is_open:
        return
    state, why = (source.state, source.reason) if source is not None else (SourceState.CONNECTING, "")
    advice = _ADVICE.get(state, "ask again once it is running")
    raise SourceNotOpen(
        f"{source_id!r} is {state.value}{f' ({why})' if why else ''}: nothing of it is there to be recorded; {advice}"
    )


def _begin(request: RecordRequest, sources: Sources) -> None:
    try:
        sources.record(request.source_id, request.path, request.before_s, request.after_s)
    except PipelineError as error:  # taken out in this moment
        log.warning("no recording", source=request.source_id, reason=error.message)
