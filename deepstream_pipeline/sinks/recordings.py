"""Smart record: which events begin a recording, sans-IO, and the folder with the index of what was recorded.

The policy says what to record; a source's decode process cuts it out of the packets that it keeps. An event during a
recording of its source belongs to that one; where it wants more behind it than the recording has, another goes on.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import structlog

from deepstream_pipeline.errors import SinkFailed
from deepstream_pipeline.sinks.folders import made_folder
from deepstream_pipeline.sinks.jsonl import LineFile
from deepstream_pipeline.sinks.schemas import iso_time
from deepstream_pipeline.types import AnalyticsEvent, AnalyticsKind

MAX_EVENTS = 1_000  # that a recording's line in the index names
LATE_S = 60.0  # a recording that was not told finished so long after its end is given up
_OVERLAP_S = 1.0  # of a recording that goes on with the one before it

log = structlog.get_logger(component="video")


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """folder: of the recordings and recordings.jsonl. before_s, after_s: around an event. kinds, sources: whose events
    begin one; empty for all. cool_down_s: after a recording's end its source begins none. max_at_once: over all
    sources. quota_bytes: of all recordings in the folder; the oldest are deleted.
    """

    folder: Path
    before_s: float = 5.0
    after_s: float = 10.0
    kinds: tuple[AnalyticsKind, ...] = ()
    sources: tuple[str, ...] = ()
    cool_down_s: float = 10.0
    max_at_once: int = 8
    quota_bytes: int = 10 * 1024**3


@dataclass(frozen=True, slots=True)
class RecordRequest:
    """A recording to begin now: from so long ago to so long from now, into that file, which is not there yet."""

    source_id: str
    path: str
    before_s: float
    after_s: float


@dataclass(frozen=True, slots=True)
class Recording:
    """One that is over. time: of its request, on the wall clock. events: that it shows; none of one asked by hand.
    error: empty where the file is whole."""

    source_id: str
    path: str
    unix_s: float
    before_s: float
    after_s: float
    events: tuple[AnalyticsEvent, ...]
    error: str


@dataclass(slots=True)
class _Running:
    request: RecordRequest
    unix_s: float
    until: float
    is_automatic: bool
    events: list[AnalyticsEvent] = field(default_factory=list)
    wanted_until: float = 0.0


class RecordPolicy:
    """Decides. `now` is monotonic seconds, unix_s the same moment on the wall clock. `refused` counts events that got
    no recording, because max_at_once were running."""

    def __init__(self, options: RecordOptions) -> None:
        self.refused = 0
        self._options = options
        self._folder = str(options.folder.absolute())
        self._running: dict[str, _Running] = {}  # by path
        self._automatic: dict[str, _Running] = {}  # the newest of each source, also a while after its end

    def observe(
        self, source_id: str, events: Iterable[AnalyticsEvent], now: float, unix_s: float
    ) -> RecordRequest | None:
        """The recording that a source's frame begins, or None. For every frame of it, also one without events."""
        chosen = [event for event in events if self._is_chosen(event)]
        current = self._automatic.get(source_id)
        if current is not None and now < current.until:
            self._join(current, chosen, now)
            return None
        if current is not None and current.wanted_until > now:
            return self._go_on(current, chosen, now, unix_s)
        if current is not None and now < current.until + self._options.cool_down_s:
            return None
        self._automatic.pop(source_id, None)
        if not chosen:
            return None
        return self._begin(source_id, chosen, (self._options.before_s, self._options.after_s), now, unix_s)

    def asked(self, source_id: str, before_s: float, after_s: float, now: float, unix_s: float) -> RecordRequest:
        """A recording that a person or program asks for; neither cool-down nor max_at_once hinder it."""
        return self._started(source_id, (before_s, after_s), now, unix_s, is_automatic=False).request

    def finished(self, path: str, error: str) -> Recording | None:
        """What is to be known of a recording whose file is finished, or failed; None where it is not known."""
        running = self._running.pop(path, None)
        return None if running is None else _over(running, error)

    def overdue(self, now: float) -> list[Recording]:
        """Recordings of which no word came (their decode process died): given up."""
        late = [path for path, running in self._running.items() if now > running.until + LATE_S]
        return [_over(self._running.pop(path), "its decode process did not finish it") for path in late]

    def forget(self, source_id: str) -> None:
        """The source is over; what is running of it is still told by `finished` or `overdue`."""
        self._automatic.pop(source_id, None)

    def running_paths(self) -> set[str]:
        """Of files that are being written."""
        return set(self._running)

    def _is_chosen(self, event: AnalyticsEvent) -> bool:
        kinds, sources = self._options.kinds, self._options.sources
        return (not kinds or event.kind in kinds) and (not sources or event.source_id in sources)

    def _join(self, current: _Running, events: list[AnalyticsEvent], now: float) -> None:
        if events:
            current.events += events[: MAX_EVENTS - len(current.events)]
            current.wanted_until = max(current.wanted_until, now + self._options.after_s)

    def _go_on(
        self, current: _Running, events: list[AnalyticsEvent], now: float, unix_s: float
    ) -> RecordRequest | None:
        span = (now - current.until + _OVERLAP_S, current.wanted_until - now)
        current.wanted_until = 0.0
        return self._begin(current.request.source_id, events, span, now, unix_s)

    def _begin(
        self, source_id: str, events: list[AnalyticsEvent], span: tuple[float, float], now: float, unix_s: float
    ) -> RecordRequest | None:
        if sum(running.is_automatic for running in self._running.values()) >= self._options.max_at_once:
            self.refused += max(1, len(events))
            return None
        running = self._started(source_id, span, now, unix_s, is_automatic=True)
        self._automatic[source_id] = running
        self._join(running, events, now)
        return running.request

    def _started(
        self, source_id: str, span: tuple[float, float], now: float, unix_s: float, *, is_automatic: bool
    ) -> _Running:
        stem = f"{self._folder}/{source_id}-{iso_time(unix_s).replace(':', '')}"
        path, number = f"{stem}.mp4", 2
        while path in self._running:
            path, number = f"{stem}-{number}.mp4", number + 1
        request = RecordRequest(source_id, path, *span)
        running = _Running(request, unix_s, now + span[1], is_automatic)
        self._running[path] = running
        return running


def over_quota(files: Iterable[tuple[Path, int, float]], quota_bytes: int) -> list[Path]:
    """Which of the files, given as (path, bytes, time), are to be deleted so that the rest fits: the oldest."""
    newest_first = sorted(files, key=lambda file: (file[2], str(file[0])), reverse=True)
    total, doomed = 0, []
    for path, size_bytes, _ in newest_first:
        total += size_bytes
        if total > quota_bytes:
            doomed.append(path)
    return doomed[::-1]


class RecordingLine(msgspec.Struct, frozen=True):
    """A line of recordings.jsonl. time: ISO 8601 of the request; the file begins about before_s before it."""

    source_id: str
    path: str
    time: str
    before_s: float
    after_s: float
    size_bytes: int
    error: str
    events: tuple["RecordedEvent", ...]


class RecordedEvent(msgspec.Struct, frozen=True):
    """An event that a recording shows."""

    kind: str
    rule: str
    frame_num: int
    pts_s: float
    track_id: int | None


class RecordingsFolder:
    """The recordings' files and their index. Raises SinkFailed at once where the folder cannot be written to."""

    def __init__(self, options: RecordOptions) -> None:
        self._folder = made_folder(options.folder)
        self._quota_bytes = options.quota_bytes
        self._index = LineFile(self._folder / "recordings.jsonl")

    def add(self, recording: Recording, now: float, *, running: Iterable[str] = ()) -> None:
        """Name it in the index, and delete the oldest recordings over the quota, none that is running.

        Raises SinkFailed, once, where the index takes nothing more.
        """
        self.keep_quota(running)
        failure = self._index.append([msgspec.json.encode(_line(recording))], now)
        if failure is not None:
            raise failure

    def keep_quota(self, running: Iterable[str] = ()) -> list[Path]:
        """Delete the oldest recordings over the quota; which those were."""
        kept = {Path(path) for path in running}
        doomed = [path for path in over_quota(self._files(), self._quota_bytes) if path.absolute() not in kept]
        for path in doomed:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise SinkFailed(f"{path}: cannot be deleted ({error.strerror}); recordings are over quota") from error
            log.info("old recording deleted", path=str(path), quota_bytes=self._quota_bytes)
        return doomed

    def close(self) -> None:
        """Twice does nothing."""
        self._index.close()

    def _files(self) -> list[tuple[Path, int, float]]:
        found = []
        for path in self._folder.glob("*.mp4"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            found.append((path, status.st_size, status.st_mtime))
        return found


def _over(running: _Running, error: str) -> Recording:
    request = running.request
    events = tuple(running.events)
    return Recording(request.source_id, request.path, running.unix_s, request.before_s, request.after_s, events, error)


def _line(recording: Recording) -> RecordingLine:
    path = Path(recording.path)
    events = (
        RecordedEvent(event.kind.value, event.rule, event.frame_num, round(event.pts_s, 6), event.track_id)
        for event in recording.events
    )
    return RecordingLine(
        source_id=recording.source_id,
        path=path.name,
        time=iso_time(recording.unix_s),
        before_s=round(recording.before_s, 3),
        after_s=round(recording.after_s, 3),
        size_bytes=path.stat().st_size if path.exists() else 0,
        error=recording.error,
        events=tuple(events),
    )
