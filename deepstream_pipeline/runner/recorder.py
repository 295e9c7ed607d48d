"""Smart record: events of the results become recordings of the sources' decode processes, and lines of an index."""

import threading
import time

import structlog

from deepstream_pipeline.errors import PipelineError, SinkFailed
from deepstream_pipeline.sinks.recordings import Recording, RecordingsFolder, RecordOptions, RecordPolicy, RecordRequest
from deepstream_pipeline.sources.sources import Sources
from deepstream_pipeline.types import FrameResult

log = structlog.get_logger(component="video")


class Recorder:
    """From any thread. Raises SinkFailed at once where the folder cannot be written to."""

    def __init__(self, options: RecordOptions) -> None:
        self._policy = RecordPolicy(options)
        self._folder = RecordingsFolder(options)
        self._lock = threading.Lock()

    def observe(self, result: FrameResult, sources: Sources) -> None:
        """Of every result: begin the recording that its events ask for, and give up what was never finished."""
        now, frame = time.monotonic(), result.frame
        with self._lock:
            request = self._policy.observe(frame.source_id, result.analytics.events, now, time.time())
            late = self._policy.overdue(now)
        if request is not None:
            _begin(request, sources)
        for recording in late:
            self._add(recording)

    def ask(self, source_id: str, sources: Sources, *, before_s: float, after_s: float) -> str:
        """Begin one because somebody says so; the path of the file that will be there."""
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
            self._add(recording)

    def forget(self, source_id: str) -> None:
        """The source is over."""
        with self._lock:
            self._policy.forget(source_id)

    def close(self) -> None:
        self._folder.close()

    def _add(self, recording: Recording) -> None:
        try:
            with self._lock:
                self._folder.add(recording, time.monotonic(), running=self._policy.running_paths())
        except SinkFailed as failure:
            log.error("the index of recordings fails", reason=failure.message)


def _begin(request: RecordRequest, sources: Sources) -> None:
    try:
        sources.record(request.source_id, request.path, request.before_s, request.after_s)
    except PipelineError as error:  # taken out in this moment
        log.warning("no recording", source=request.source_id, reason=error.message)
