"""Limits the store: removes rows older than max-days, and the oldest rows beyond max-bytes."""

import math
import sqlite3
from pathlib import Path

import structlog

from penstock_video.store.database import PAGE_BYTES, size_bytes
from penstock_video.store.options import EventsOptions

LOOK_S = 10.0  # between two checks
STEPS_AT_ONCE = 20  # each removes a twentieth of a table
ROWS_AT_ONCE = 500  # per table and transaction, so that results are not delayed for long
FULL_SHARE, ENOUGH_SHARE = 0.95, 0.85  # fractions of max-bytes at which removal starts and stops
PAGES_AT_ONCE = 2_000  # released to the file system per call
_DAY_S = 86_400.0
_TABLES = (
    ("events", "at", 1.0),
    ("snapshots", "at", 1.0),
    ("tracks", "first_at", 1.0),
    ("occupancy", "minute", 60.0),
    ("heat", "hour", 3600.0),
    ("track_zones", "first_at", 1.0),
)

log = structlog.get_logger(component="video")


class Retention:
    """Removes a bounded number of rows at each call of `apply`."""

    def __init__(self, options: EventsOptions, recordings: Path | None) -> None:
        """recordings: folder of the clips, which are deleted at the age of their events; None for no clips."""
        self._max_bytes, self._max_age_s = options.max_bytes, options.max_days * _DAY_S
        self._recordings = recordings
        self._look_at = 0.0
        self._is_shrinking = False

    def limit(self, connection: sqlite3.Connection) -> None:
        """Sets the maximum size of the file."""
        connection.execute(f"PRAGMA max_page_count = {self._max_bytes // PAGE_BYTES}")

    def apply(self, connection: sqlite3.Connection, unix_s: float, now: float) -> None:
        """Removes expired rows. unix_s: wall clock. now: monotonic seconds. Raises sqlite3.Error."""
        if now < self._look_at and not self._is_shrinking:
            return
        self._look_at = now + LOOK_S
        self._delete_clips(connection, unix_s - self._max_age_s)
        is_done = _delete_before(connection, unix_s - self._max_age_s)
        whole, free = size_bytes(connection)
        if not self._is_shrinking and whole - free > FULL_SHARE * self._max_bytes:
            log.info("the event store is full; removing its oldest events", max_bytes=self._max_bytes)
            self._is_shrinking = True
        if self._is_shrinking:
            self._is_shrinking = not self.make_room(connection)
        if free > PAGES_AT_ONCE * PAGE_BYTES or (free and whole > self._max_bytes):
            connection.execute(f"PRAGMA incremental_vacuum({PAGES_AT_ONCE})").fetchall()
        if not is_done:
            self._look_at = now

    def is_full(self, connection: sqlite3.Connection) -> bool:
        """Whether the file has reached its maximum size (False if the disk is full). Raises sqlite3.Error."""
        whole, free = size_bytes(connection)
        return whole - free > FULL_SHARE / 2 * self._max_bytes and whole > FULL_SHARE * self._max_bytes

    def make_room(self, connection: sqlite3.Connection) -> bool:
        """Removes the oldest rows, in a bounded number of steps; returns whether it is done. Raises sqlite3.Error."""
        for _ in range(STEPS_AT_ONCE):
            whole, free = size_bytes(connection)
            if whole - free <= ENOUGH_SHARE * self._max_bytes or not _delete_oldest(connection):
                return True
        return False

    def _delete_clips(self, connection: sqlite3.Connection, before: float) -> None:
        """Deletes clips whose events are all expired."""
        if self._recordings is None:
            return
        found = connection.execute(
            "SELECT clip FROM events WHERE clip != '' GROUP BY clip HAVING max(at) < ? LIMIT ?", (before, ROWS_AT_ONCE)
        )
        for (name,) in found.fetchall():
            path = self._recordings / Path(name).name
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("cannot delete an old recording", path=str(path), reason=error.strerror)
                continue
            connection.execute("UPDATE events SET clip = '' WHERE clip = ?", (name,))
            log.info("deleted an old recording", path=str(path))


def _delete_before(connection: sqlite3.Connection, before: float) -> bool:
    """Deletes about ROWS_AT_ONCE rows of each table. Returns whether none are left."""
    is_done = [_delete(connection, table, column, before / unit) for table, column, unit in _TABLES]
    return all(is_done)


def _delete_oldest(connection: sqlite3.Connection) -> bool:
    """Deletes a twentieth of one table, at most ROWS_AT_ONCE rows, and rows of the same age in the others.

    Returns whether rows were deleted.
    """
    found = [
        (_nth_oldest(connection, table, column, _step(connection, table)), unit) for table, column, unit in _TABLES
    ]
    times = [value * unit for value, unit in found if value is not None]
    if times:
        _delete_before(connection, math.nextafter(min(times), math.inf))
    return bool(times)


def _step(connection: sqlite3.Connection, table: str) -> int:
    """A twentieth of the table's rows, estimated from its IDs."""
    if table not in ("events", "snapshots", "tracks"):
        return ROWS_AT_ONCE
    first, last = connection.execute(f"SELECT min(id), max(id) FROM {table}").fetchone()
    return 0 if first is None else min((last - first) // 20, ROWS_AT_ONCE)


def _nth_oldest(connection: sqlite3.Connection, table: str, column: str, rows: int = ROWS_AT_ONCE) -> float | None:
    query = f"SELECT {column} FROM {table} ORDER BY {column} LIMIT 1 OFFSET {rows}"
    row = connection.execute(query).fetchone()
    return None if row is None else float(row[0])


def _delete(connection: sqlite3.Connection, table: str, column: str, before: float) -> bool:
    """Deletes rows up to the limit. Returns whether none are left."""
    last = _nth_oldest(connection, table, column)
    has_more = last is not None and last < before
    limit = math.nextafter(last, math.inf) if last is not None and has_more else before
    connection.execute(f"DELETE FROM {table} WHERE {column} < ?", (limit,))
    return not has_more
