"""Reads the store, also during writes: pages of events and tracks, snapshots, occupancy, positions, counters."""

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from penstock_video.errors import SinkFailed
from penstock_video.store.database import FILE, VERSION, reason_of
from penstock_video.store.records import (
    GRID_HEIGHT,
    GRID_WIDTH,
    Occupancy,
    RuleCount,
    SourceTimes,
    StoredEvent,
    StoredTrack,
)
from penstock_video.store.statements import unpacked_grid
from penstock_video.store.summaries import Grid, unpacked_path

MAX_PAGE = 1_000
QUERY_TIMEOUT_S = 5.0
_LOOK_STEPS = 20_000  # instructions of SQLite's virtual machine between two checks of the deadline
_EVENT_COLUMNS = (
    "id, at, source_id, kind, rule, direction, label, class_id, track_id, value, score, x1, y1, x2, y2, width, height,"
    " frame_num, pts_s, snapshot, clip, clip_offset_s"
)
_TRACK_COLUMNS = (
    "t.id, t.source_id, t.track_id, t.label, t.class_id, t.first_at, t.last_at, t.first_pts_s, t.last_pts_s, t.frames,"
    " t.score, t.x1, t.y1, t.x2, t.y2, t.width, t.height, t.zones, t.path, t.event_id,"
    " EXISTS (SELECT 1 FROM events e WHERE e.id = t.event_id AND e.snapshot IS NOT NULL)"
)
T = TypeVar("T")
Position = tuple[float, int]  # time and ID of the last row of a page


class StoreUnreadable(SinkFailed):
    """The store cannot be read: missing, damaged, another program's database, or a read timed out."""

    reason = "store_unreadable"


@dataclass(frozen=True, slots=True)
class Filter:
    """Filter of events or tracks; empty or None matches all.

    since, until: unix seconds; since is inclusive. rule: for tracks, a rule that matched them. after: position of the
    last row of the previous page; rows are older than it.
    """

    source_id: str = ""
    rule: str = ""
    kind: str = ""
    label: str = ""
    since: float | None = None
    until: float | None = None
    limit: int = 100
    after: Position | None = None


class EventReader:
    """Reads a store's folder. Thread-safe: each call has its own connection and deadline."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / FILE

    def events(self, which: Filter) -> list[StoredEvent]:
        """Events, newest first, at most `limit`. Raises StoreUnreadable."""
        terms, values = _terms(which, ("source_id", "rule", "kind", "label"))
        if which.since is not None:
            terms, values = [*terms, "at >= ?"], [*values, which.since]
        if which.until is not None:
            terms, values = [*terms, "at < ?"], [*values, which.until]
        if which.after is not None:
            terms, values = [*terms, "(at, id) < (?, ?)"], [*values, *which.after]
        query = f"SELECT {_EVENT_COLUMNS} FROM events {_where(terms)} ORDER BY at DESC, id DESC LIMIT ?"
        return [_event(row) for row in self._rows(query, [*values, min(which.limit, MAX_PAGE)])]

    def event(self, event_id: int) -> StoredEvent | None:
        """One event; None if there is none. Raises StoreUnreadable."""
        rows = self._rows(f"SELECT {_EVENT_COLUMNS} FROM events WHERE id = ?", [event_id])
        return _event(rows[0]) if rows else None

    def snapshot(self, snapshot_id: int) -> bytes | None:
        """The JPEG; None if there is none. Raises StoreUnreadable."""
        rows = self._rows("SELECT jpeg FROM snapshots WHERE id = ?", [snapshot_id])
        return bytes(rows[0][0]) if rows else None

    def tracks(self, which: Filter) -> list[StoredTrack]:
        """Tracks that overlap the time range, latest start first. Ignores `kind`. Raises StoreUnreadable."""
        terms, values = _terms(which, ("source_id", "label"), "t.")
        table = "tracks t"
        if which.rule:
            table = "track_zones z JOIN tracks t ON t.id = z.id"
            terms, values = [*terms, "z.rule = ?"], [*values, which.rule]
        first = "z" if which.rule else "t"
        if which.since is not None:
            terms, values = [*terms, "t.last_at >= ?"], [*values, which.since]
        if which.until is not None:
            terms, values = [*terms, f"{first}.first_at < ?"], [*values, which.until]
        if which.after is not None:
            terms, values = [*terms, f"({first}.first_at, {first}.id) < (?, ?)"], [*values, *which.after]
        query = (
            f"SELECT {_TRACK_COLUMNS} FROM {table} {_where(terms)} "
            f"ORDER BY {first}.first_at DESC, {first}.id DESC LIMIT ?"
        )
        return [_track(row) for row in self._rows(query, [*values, min(which.limit, MAX_PAGE)])]

    def occupancy(self, source_id: str, since: float, until: float, step_s: int) -> list[Occupancy]:
        """Counts by rule and step, in order of time. step_s: a multiple of 60. Raises StoreUnreadable."""
        query = """SELECT kind, rule, minute / :step * :step * 60.0, sum(1.0 * total / max(samples, 1)) / :step,
            max(most), sum(events), sum(entered), sum(left)
            FROM occupancy WHERE source_id = :source AND minute >= :since AND minute < :until
            GROUP BY minute / :step, kind, rule ORDER BY 3, 1, 2 LIMIT 50000"""
        minutes = max(step_s // 60, 1)
        values = {
            "source": source_id,
            "since": int(since // 60) // minutes * minutes,
            "until": -int(-until // 60),
            "step": minutes,
        }
        return [Occupancy(*row) for row in self._rows(query, values)]

    def heat(self, source_id: str, since: float, until: float) -> Grid:
        """Seconds with an object's foot in each cell (GRID_HEIGHT, GRID_WIDTH). Raises StoreUnreadable."""
        query = "SELECT seconds FROM heat WHERE source_id = ? AND hour >= ? AND hour < ?"
        rows = self._rows(query, [source_id, int(since // 3600), -int(-until // 3600)])
        whole = np.zeros((GRID_HEIGHT, GRID_WIDTH), np.float32)
        for (packed,) in rows:
            whole += unpacked_grid(packed)
        return whole

    def counters(self, source_id: str, since: float, until: float) -> list[RuleCount]:
        """Event counts of each rule. Raises StoreUnreadable."""
        query = """SELECT kind, rule, count(*), sum(direction IS 'in'), sum(direction IS 'out') FROM events
            WHERE source_id = ? AND at >= ? AND at < ? GROUP BY kind, rule ORDER BY kind, rule LIMIT 1000"""
        return [RuleCount(*row) for row in self._rows(query, [source_id, since, until])]

    def minutes(self) -> list[tuple[str, float, float]]:
        """Each source with its first and last minute of occupancy, in unix seconds. Raises StoreUnreadable."""
        query = """SELECT source_id, min(minute) * 60.0, max(minute) * 60.0 FROM occupancy
            GROUP BY source_id ORDER BY source_id"""
        return [(source_id, first, last) for source_id, first, last in self._rows(query, [])]

    def source_times(self, source_id: str) -> SourceTimes | None:
        """Times of the source; None if nothing is stored for it. Raises StoreUnreadable."""
        query = """SELECT began_at, is_live, (SELECT max(minute) FROM occupancy o WHERE o.source_id = s.source_id),
            (SELECT max(last_pts_s) FROM (SELECT last_pts_s FROM tracks t
                WHERE t.source_id = s.source_id AND first_at >= began_at ORDER BY first_at DESC LIMIT 1000))
            FROM sources s WHERE source_id = ?"""
        rows = self._rows(query, [source_id])
        if not rows:
            return None
        began, is_live, minute, last_pts_s = rows[0]
        end = began if minute is None else 60.0 * (minute + 1)
        if not is_live and last_pts_s is not None:
            end = min(end, max(began + last_pts_s, 60.0 * minute))
        return SourceTimes(began, bool(is_live), end)

    def _rows(self, query: str, values: Sequence[object] | dict[str, object]) -> list[tuple[Any, ...]]:
        until = time.monotonic() + QUERY_TIMEOUT_S
        if not self.file.is_file():
            raise StoreUnreadable(f"there is no event store at {self.file}")
        try:
            with closing(sqlite3.connect(f"{self.file.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0)) as reading:
                if reading.execute("PRAGMA user_version").fetchone()[0] != VERSION:
                    raise StoreUnreadable(f"{self.file} is not an event store of this version; choose another folder")
                reading.set_progress_handler(lambda: time.monotonic() > until, _LOOK_STEPS)
                return list(reading.execute(query, values))
        except sqlite3.Error as error:
            raise StoreUnreadable(f"{self.file} cannot be read ({reason_of(error)})") from error


@dataclass(frozen=True, slots=True)
class EventArchive:
    """Data of the event store for the control API.

    recordings: folder of the clips, or None. alarm: returns why events are not stored at present, or "".
    """

    reader: EventReader
    recordings: Path | None
    alarm: Callable[[], str]

    def clip(self, event: StoredEvent) -> Path | None:
        """Path of the event's clip, in the folder of recordings; None without one."""
        if not event.clip or self.recordings is None or Path(event.clip).name != event.clip:
            return None
        return self.recordings / event.clip


def pages(read: Callable[[Filter], list[T]], which: Filter, position: Callable[[T], Position]) -> Iterator[list[T]]:
    """Yields pages until `limit` rows, or the end."""
    left = which.limit
    while left > 0:
        page = read(replace(which, limit=min(left, MAX_PAGE)))
        if not page:
            return
        yield page
        left -= len(page)
        which = replace(which, after=position(page[-1]))


def _terms(which: Filter, names: Sequence[str], prefix: str = "") -> tuple[list[str], list[object]]:
    given = [(f"{prefix}{name} = ?", getattr(which, name)) for name in names if getattr(which, name)]
    return [term for term, _ in given], [value for _, value in given]


def _where(terms: Sequence[str]) -> str:
    return f"WHERE {' AND '.join(terms)}" if terms else ""


def _event(row: tuple[Any, ...]) -> StoredEvent:
    box = None if row[11] is None else (row[11], row[12], row[13], row[14])
    return StoredEvent(*(*row[:11], box, *row[15:]))


def _track(row: tuple[Any, ...]) -> StoredTrack:
    zones, path, event_id, has_snapshot = row[17:]
    names, points = tuple(json.loads(zones)), unpacked_path(path)
    return StoredTrack(*(*row[:11], row[11:15], *row[15:17], names, points, event_id, bool(has_snapshot)))
