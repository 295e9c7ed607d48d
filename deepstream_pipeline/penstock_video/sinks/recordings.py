"""Smart record: which events start a recording, the folder of recordings and its index."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import msgspec
import structlog
from pydantic import Field

from penstock_video.errors import SinkFailed
from penstock_video.sinks.jsonl import Folder, LineFile, made_folder
from penstock_video.sinks.schemas import iso_time
from penstock_video.types import AnalyticsEvent, AnalyticsKind

MAX_EVENTS = 1_000  # listed in a recording's line of the index
LATE_S = 60.0  # a recording without an end is abandoned this long after its time or its source's end
_OVERLAP_S = 1.0  # of a recording that continues the one before
_NEARLY_S = 0.5  # a recording that ends earlier by more than this starts no cool-down

log = structlog.get_logger(component="video")


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """folder: of the recordings and recordings.jsonl. before_s, after_s: around an event. kinds, sources: whose events
    start a recording; empty for all. cool_down_s: video time after a recording in which its source starts none.
    max_at_once: over all sources. quota_bytes: of all recordings; the oldest are deleted, never the newest."""

    folder: Folder
    before_s: Annotated[float, Field(alias="before", ge=0, le=600)] = 5.0
    after_s: Annotated[float, Field(alias="after", ge=0.5, le=600)] = 10.0
    kinds: tuple[AnalyticsKind, ...] = ()
    sources: tuple[str, ...] = ()
    cool_down_s: Annotated[float, Field(alias="cool-down", ge=0, le=86_400)] = 10.0
    max_at_once: Annotated[int, Field(alias="max-at-once", ge=1, le=1000)] = 8
    quota_bytes: Annotated[int, Field(alias="quota-bytes", ge=1 << 20, le=1 << 50)] = 10 * 1024**3


@dataclass(frozen=True, slots=True)
class RecordRequest:
    """A recording to start, from before_s before its moment to after_s after it, into a new file."""

    source_id: str
    path: str
    before_s: float
    after_s: float


@dataclass(frozen=True, slots=True)
class FinishedRecording:
    """A finished recording. unix_s: its moment as wall clock. before_s, after_s: recorded around it, both 0 without a
    file. events: that it shows; none for a manual one. error: empty, or why it is missing or short."""

    source_id: str
    path: str
    unix_s: float
    before_s: float
    after_s: float
    events: tuple[AnalyticsEvent, ...]
    error: str


@dataclass(slots=True)
class _Running:
    """until: in its source's video time. given_up_at: monotonic. over: set while frames are still to be observed."""

    request: RecordRequest
    unix_s: float
    until: float
    is_automatic: bool
    given_up_at: float = math.inf
    over: FinishedRecording | None = None
    events: list[AnalyticsEvent] = field(default_factory=list)
    wanted_until: float = 0.0


class RecordPolicy:
    """Decides which events start a recording. `now` is the frame's pts in seconds; unix_s the same as wall clock.
    unrecorded: events without a recording since it was last emptied, by (source, reason): cool_down or max_at_once."""

    def __init__(self, options: RecordOptions) -> None:
        self.unrecorded: Counter[tuple[str, str]] = Counter()
        self._options = options
        self._folder = str(options.folder.absolute())
        self._running: dict[str, _Running] = {}  # by path
        self._automatic: dict[str, _Running] = {}  # the newest of each source, for a while also after its end

    def observe(
        self, source_id: str, events: Iterable[AnalyticsEvent], now: float, unix_s: float
    ) -> RecordRequest | None:
        """The recording that a source's frame starts, or None. Call it for every frame, also without events."""
        chosen = [event for event in events if self._is_chosen(event)]
        current = self._automatic.get(source_id)
        if current is not None and now < current.until:
            self._join(current, chosen, now)
            return None
        if current is not None and current.wanted_until > now:
            return self._go_on(current, chosen, now, unix_s)
        if current is not None and now < current.until + self._options.cool_down_s:
            self._refuse(source_id, "cool_down", len(chosen))
            return None
        self._automatic.pop(source_id, None)
        if not chosen:
            return None
        return self._begin(source_id, chosen, (self._options.before_s, self._options.after_s), now, unix_s)

    def asked(self, source_id: str, before_s: float, after_s: float, now: float, unix_s: float) -> RecordRequest:
        """A requested recording; cool-down and max_at_once do not apply."""
        return self._started(source_id, (before_s, after_s), now, unix_s, is_automatic=False).request

    def finished(self, path: str, before_s: float, after_s: float, error: str) -> list[FinishedRecording]:
        """Ends a recording with its recorded seconds. Returns it if it is complete. Otherwise events of its time are
        still to come (a file is read ahead), and `passed` returns it."""
        running = self._running.get(path)
        if running is None or running.over is not None:
            return []
        running.over = _over(running, before_s, after_s, error)
        if not running.is_automatic:
            return self._with_events_of([path])
        if after_s < running.request.after_s - _NEARLY_S:  # a new event is not in it
            if self._automatic.get(running.request.source_id) is running:
                del self._automatic[running.request.source_id]
            return self._with_events_of([path])
        return []

    def passed(self, source_id: str, now: float, at: float) -> list[FinishedRecording]:
        """Recordings whose frames were all observed, and those of dead decode processes. at: monotonic seconds."""
        over = {path for path, one in self._running.items() if at > one.given_up_at}
        for path, one in self._running.items():
            if one.request.source_id == source_id and now >= one.until:
                one.given_up_at = min(one.given_up_at, at + LATE_S)
                over |= {path} if one.over is not None else set()
        return self._with_events_of(sorted(over))

    def forget(self, source_id: str, at: float) -> list[FinishedRecording]:
        """Ends the source: returns its finished recordings. `finished` or `passed` returns the others."""
        self._automatic.pop(source_id, None)
        mine = {path: one for path, one in self._running.items() if one.request.source_id == source_id}
        for one in mine.values():
            one.given_up_at = min(one.given_up_at, at + LATE_S)
        return self._with_events_of([path for path, one in mine.items() if one.over is not None])

    def give_up(self) -> list[FinishedRecording]:
        """Returns all remaining recordings."""
        return self._with_events_of(list(self._running))

    def running_paths(self) -> set[str]:
        """Files that are being written."""
        return set(self._running)

    def _is_chosen(self, event: AnalyticsEvent) -> bool:
        kinds, sources = self._options.kinds, self._options.sources
        return (not kinds or event.kind in kinds) and (not sources or event.source_id in sources)

    def _refuse(self, source_id: str, reason: str, count: int) -> None:
        if count:
            self.unrecorded[source_id, reason] += count

    def _with_events_of(self, paths: list[str]) -> list[FinishedRecording]:
        return [_with_events(self._running.pop(path)) for path in paths]

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
        if self._at_once(source_id, now) >= self._options.max_at_once:
            self._refuse(source_id, "max_at_once", max(1, len(events)))
            return None
        running = self._started(source_id, span, now, unix_s, is_automatic=True)
        self._automatic[source_id] = running
        self._join(running, events, now)
        return running.request

    def _at_once(self, source_id: str, now: float) -> int:
        """Running recordings, without the source's own whose time is over."""
        return sum(
            one.is_automatic and one.over is None and (one.request.source_id != source_id or one.until > now)
            for one in self._running.values()
        )

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
    """Files to delete for the quota, from (path, bytes, time): the oldest, never the newest."""
    newest_first = sorted(files, key=lambda file: (file[2], str(file[0])), reverse=True)
    total, doomed = 0, []
    for path, size_bytes, _ in newest_first:
        total += size_bytes
        if total > quota_bytes and path != newest_first[0][0]:
            doomed.append(path)
    return doomed[::-1]


class RecordingsFolder:
    """The recordings' files and their index. Raises SinkFailed at once if the folder is not writable."""

    def __init__(self, options: RecordOptions) -> None:
        self._folder = made_folder(options.folder)
        self._quota_bytes = options.quota_bytes
        self._index = LineFile(self._folder / "recordings.jsonl")

    def add(self, recording: FinishedRecording, now: float, *, running: Iterable[str] = ()) -> None:
        """Adds it to the index, and deletes the oldest over the quota. Raises SinkFailed, once, if not writable."""
        self.keep_quota({*running, recording.path})
        failure = self._index.append([msgspec.json.encode(_line(recording))], now)
        if failure is not None:
            raise failure

    def keep_quota(self, running: Iterable[str] = ()) -> list[Path]:
        """Deletes the oldest recordings over the quota; returns them."""
        kept = {Path(path).absolute() for path in running}
        files = self._files()
        doomed = [path for path in over_quota(files, self._quota_bytes) if path.absolute() not in kept]
        for path in doomed:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise SinkFailed(f"{path}: cannot be deleted ({error.strerror}); recordings are over quota") from error
            log.info("old recording deleted", path=str(path), quota_bytes=self._quota_bytes)
        left_bytes = sum(size_bytes for path, size_bytes, _ in files if path not in doomed)
        if left_bytes > self._quota_bytes:
            log.warning("recordings are over quota", size_bytes=left_bytes, quota_bytes=self._quota_bytes)
        return doomed

    def close(self) -> None:
        """A second call does nothing."""
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


def _over(running: _Running, before_s: float, after_s: float, error: str) -> FinishedRecording:
    return FinishedRecording(
        running.request.source_id, running.request.path, running.unix_s, before_s, after_s, (), error
    )


def _with_events(running: _Running) -> FinishedRecording:
    over = running.over or _over(running, 0.0, 0.0, "its process never reported its end")
    return replace(over, events=tuple(running.events))


def _line(recording: FinishedRecording) -> dict[str, object]:
    """A line of recordings.jsonl. time: ISO 8601 of its moment; the file begins before_s before it."""
    path = Path(recording.path)
    return {
        "source_id": recording.source_id,
        "path": path.name,
        "time": iso_time(recording.unix_s),
        "before_s": round(recording.before_s, 3),
        "after_s": round(recording.after_s, 3),
        "size_bytes": path.stat().st_size if path.exists() else 0,
        "error": recording.error,
        "events": [
            {
                "kind": str(event.kind),
                "rule": event.rule,
                "direction": event.direction,
                "frame_num": event.frame_num,
                "pts_s": round(event.pts_s, 6),
                "track_id": event.track_id,
            }
            for event in recording.events
        ],
    }
