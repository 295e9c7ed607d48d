"""The store's writer: a sink that writes results in one transaction per second."""

import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from penstock_video.backoff import Backoff, Outage
from penstock_video.errors import SinkFailed
from penstock_video.sinks.osd import Osd
from penstock_video.sinks.recordings import FinishedRecording
from penstock_video.sinks.rule_drawing import RuleShapes
from penstock_video.store.database import StoreFolder, error_code, is_damage, reason_of
from penstock_video.store.options import EventsOptions
from penstock_video.store.retention import Retention
from penstock_video.store.snapshot import SnapshotMaker
from penstock_video.store.statements import (
    Row,
    add_grid,
    add_minutes,
    direction_of,
    event_row,
    link_clip,
    next_id,
    write_events,
    write_tracks,
)
from penstock_video.store.summaries import Grid, HeatBook, LiveTrack, MinuteCount, MinuteKey, OccupancyBook, TrackBook
from penstock_video.types import FrameResult

FLUSH_S = 1.0
HEAT_S = 20.0  # between two writes of the grids
MAX_PENDING = 1_000  # events, and ended tracks, that are buffered while writes fail
MAX_PENDING_BYTES = 32 << 20  # of buffered snapshots
MAX_CLIPS = 256  # recordings that wait for their events
CLIP_ATTEMPTS = 30
RETRY = Backoff(5.0, 5.0)

log = structlog.get_logger(component="video")


@dataclass(slots=True)
class _Clip:
    recording: FinishedRecording
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows of one transaction, except events."""

    minutes: dict[MinuteKey, MinuteCount]
    grids: dict[tuple[str, int], Grid]
    tracks: list[LiveTrack]
    clips: list[_Clip]

    def __bool__(self) -> bool:
        return bool(self.minutes or self.grids or self.tracks or self.clips)


class EventStore:
    """A Sink; its thread calls `write`, `idle`, `end_source` and `close`. lost: events and tracks that were not stored.
    alarm: why nothing is stored now, or empty."""

    def __init__(
        self,
        options: EventsOptions,
        osd: Osd,
        *,
        recordings: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """osd: used for snapshots only. recordings: folder of the clips. Raises SinkFailed for an unusable folder."""
        assert options.folder is not None, "the settings name a folder"
        self._folder = StoreFolder(options.folder)
        self._clock, self._osd, self._snapshots = clock, osd, SnapshotMaker(osd)
        self._outage, self._retention = Outage(RETRY), Retention(options, recordings)
        self._is_live: dict[str, bool] = {}
        self._began: dict[str, float] = {}
        self._new_sources: list[Row] = []
        self._events: list[Row] = []
        self._jpegs: list[Row] = []
        self._jpeg_bytes = 0
        self._clips: deque[_Clip] = deque(maxlen=MAX_CLIPS)
        self._clips_lock = threading.Lock()
        self._tracks, self._occupancy, self._heat = TrackBook(), OccupancyBook(), HeatBook()
        self._flushed_at = self._heat_at = clock()
        self._connection: sqlite3.Connection | None = None
        self._next_event = self._next_snapshot = 1
        self._is_closed = False
        self.lost, self.alarm = 0, ""
        try:
            self._open()
        except BaseException:
            self._folder.close()
            raise

    def set_source(self, source_id: str, *, name: str, rules: RuleShapes, is_live: bool) -> None:
        """Sets the rules that snapshots show, and whether a source is live.

        The times of a file's occupancy are its start plus the position in the file.
        """
        self._is_live[source_id] = is_live
        self._osd.set_source(source_id, name=name, rules=rules, is_live=is_live)

    def forget_source(self, source_id: str) -> None:
        """Removes the state of a source. Stored rows are not deleted."""
        self._is_live.pop(source_id, None)
        self._osd.forget(source_id)

    def note_clip(self, recording: FinishedRecording) -> None:
        """Links a finished recording to its events. Thread-safe; does not block."""
        if recording.events and (recording.before_s or recording.after_s):
            with self._clips_lock:
                self._clips.append(_Clip(recording))

    def write(self, result: FrameResult) -> None:
        """Adds a result. Raises SinkFailed when the first of several writes fails."""
        frame = result.frame
        at = frame.captured_unix_s or time.time()
        shown_at = self._shown_at(result, at)
        self._tracks.observe(result, at)
        self._occupancy.observe(frame.source_id, result.analytics.counts, shown_at)
        self._heat.observe(result, shown_at)
        if result.analytics.events:
            self._add_events(result, at, shown_at)
        self._flush_if_due(is_urgent=len(self._events) >= MAX_PENDING)

    def idle(self) -> None:
        """Writes pending rows while no results arrive. Raises SinkFailed as `write`."""
        self._flush_if_due()

    def end_source(self, source_id: str) -> None:
        """Ends the source's tracks and writes its pending rows."""
        self._osd.drop_pictures(source_id)
        self._end(source_id)
        self._heat_at = float("-inf")
        self._flush_if_due(is_urgent=True)

    def close(self) -> None:
        """Writes everything and closes the database. A second call does nothing. Raises SinkFailed."""
        if self._is_closed:
            return
        self._is_closed = True
        for source_id in list(self._began):
            self._end(source_id)
        try:
            if self._connection is not None:
                self._heat_at = float("-inf")
                self._flush(self._connection, self._clock())
        finally:
            self._let_go()
            self._folder.close()

    # inside

    def _open(self) -> None:
        connection = self._folder.open()
        try:
            self._retention.limit(connection)
            self._next_event = max(self._next_event, next_id(connection, "events"))
            self._next_snapshot = max(self._next_snapshot, next_id(connection, "snapshots"))
            self._tracks.begin_at(next_id(connection, "tracks"))
        except sqlite3.Error as error:
            connection.close()
            raise SinkFailed(f"{self._folder.file}: cannot be read ({reason_of(error)})") from error
        self._connection = connection

    def _let_go(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    def _end(self, source_id: str) -> None:
        self._tracks.end_source(source_id)
        self._occupancy.end_source(source_id)
        self._heat.end_source(source_id)
        self._began.pop(source_id, None)

    def _shown_at(self, result: FrameResult, at: float) -> float:
        """The time for occupancy and positions; for a file, its start plus the position in it."""
        source_id, pts_s = result.frame.source_id, result.frame.pts_s
        is_live = self._is_live.get(source_id, True)
        if source_id not in self._began:
            self._began[source_id] = at - pts_s
            self._new_sources.append((source_id, at - pts_s, int(is_live)))
        return at if is_live else self._began[source_id] + pts_s

    def _add_events(self, result: FrameResult, at: float, shown_at: float) -> None:
        snapshot_id = None
        jpeg = self._snapshots.make(result) if self._jpeg_bytes < MAX_PENDING_BYTES else None
        if jpeg is not None:
            snapshot_id, self._next_snapshot = self._next_snapshot, self._next_snapshot + 1
            self._jpegs.append((snapshot_id, at, jpeg))
            self._jpeg_bytes += len(jpeg)
        for event in result.analytics.events:
            self._events.append(event_row(self._next_event, at, result, event, snapshot_id))
            direction = direction_of(event)
            self._occupancy.note_event(event.source_id, str(event.kind), event.rule, direction, shown_at)
            if event.track_id is not None:
                self._tracks.note_event(event.source_id, event.track_id, event.rule, self._next_event)
            self._next_event += 1

    def _flush_if_due(self, *, is_urgent: bool = False) -> None:
        now = self._clock()
        if not self._outage.may_try(now) or (now - self._flushed_at < FLUSH_S and not is_urgent):
            self._drop_excess()
            return
        self._flushed_at = now
        if self._connection is None:
            try:
                self._open()
            except SinkFailed as error:
                self._fail(error.message, now)
                return
        assert self._connection is not None
        self._flush(self._connection, now)

    def _flush(self, connection: sqlite3.Connection, now: float) -> None:
        try:
            self._write_all(connection, now)
            self._retention.apply(connection, time.time(), now)
        except sqlite3.Error as error:
            self._failed(error, now)
            return
        self.alarm = ""
        if self._outage.is_open:
            log.warning("storing events again", file=str(self._folder.file), lost=self._outage.worked())

    def _write_all(self, connection: sqlite3.Connection, now: float) -> None:
        is_heat_due = now - self._heat_at >= HEAT_S
        batch = _Batch(
            self._occupancy.take(),
            self._heat.take() if is_heat_due else {},
            self._tracks.changed(),
            self._taken_clips(),
        )
        if not (batch or self._events or self._new_sources):
            return
        try:
            unlinked = self._commit(connection, batch)
        except sqlite3.Error as error:
            if error_code(error) != sqlite3.SQLITE_FULL or not self._retention.is_full(connection):
                raise
            self._retention.make_room(connection)
            unlinked = self._commit(connection, batch)
        self._new_sources.clear()
        self._drop_events(len(self._events))
        self._tracks.written()
        self._heat_at = now if is_heat_due else self._heat_at
        with self._clips_lock:
            self._clips.extend(one for one in unlinked if one.attempts < CLIP_ATTEMPTS)

    def _commit(self, connection: sqlite3.Connection, batch: _Batch) -> list[_Clip]:
        """Runs one transaction. Returns the clips with events that are not stored yet."""
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.executemany("INSERT OR REPLACE INTO sources VALUES (?, ?, ?)", self._new_sources)
            write_events(connection, self._events, self._jpegs)
            write_tracks(connection, batch.tracks)
            add_minutes(connection, batch.minutes)
            for (source_id, hour), grid in batch.grids.items():
                add_grid(connection, source_id, hour, grid)
            unlinked = [one for one in batch.clips if not link_clip(connection, one.recording)]
            connection.execute("COMMIT")
        except sqlite3.Error:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise
        return unlinked

    def _taken_clips(self) -> list[_Clip]:
        with self._clips_lock:
            clips = list(self._clips)
            self._clips.clear()
        for one in clips:
            one.attempts += 1
        return clips

    def _failed(self, error: sqlite3.Error, now: float) -> None:
        reason = reason_of(error)
        if is_damage(error):
            self._let_go()
            try:
                self._folder.move_damaged(reason)
                self._open()
            except SinkFailed as failure:
                self._fail(failure.message, now)
                return
            self._fail(f"{self._folder.file} was damaged ({reason}) and renamed; started a new store", now)
            return
        self._fail(f"{self._folder.file}: {reason}; events are lost and counted; retrying every 5 s", now)

    def _fail(self, text: str, now: float) -> None:
        self.alarm = text
        self._jpegs.clear()
        self._jpeg_bytes = 0
        self._events = [(*row[:-1], None) for row in self._events]  # without their snapshots
        self._drop_excess()
        if self._outage.failed(now):
            raise SinkFailed(text)

    def _drop_excess(self) -> None:
        """Drops and counts the oldest rows that cannot be written."""
        excess = max(len(self._events) - MAX_PENDING, 0)
        self._drop_events(excess)
        lost = excess + self._tracks.drop_over(MAX_PENDING)
        self.lost += lost
        self._outage.lost += lost

    def _drop_events(self, count: int) -> None:
        if count and count == len(self._events):
            self._jpegs.clear()
            self._jpeg_bytes = 0
        del self._events[:count]
