"""The database file: schema, permissions, the writer's lock, and what happens to a damaged file."""

import fcntl
import os
import sqlite3
import time
from contextlib import suppress
from pathlib import Path

import structlog

from penstock_video.errors import SinkFailed

FILE = "events.sqlite"
VERSION = 1
PAGE_BYTES = 4096
MAX_DAMAGED_FILES = 3
_APPLICATION_ID = 0x50_45_4E_45  # PENE
_BUSY_TIMEOUT_S = 5.0
_WAL_BYTES = 16 << 20
_CHECKED_BYTES = 64 << 20  # a larger file is not checked at the start, since that reads all of it
_COMPANIONS = ("", "-wal", "-shm")
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

log = structlog.get_logger(component="video")

# The columns after the time are there so that filters are answered from the index alone.
_SCHEMA = """
CREATE TABLE events (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, source_id TEXT NOT NULL, kind TEXT NOT NULL, rule TEXT NOT NULL,
    direction TEXT, label TEXT, class_id INTEGER, track_id INTEGER, value REAL NOT NULL, score REAL,
    x1 REAL, y1 REAL, x2 REAL, y2 REAL, width INTEGER NOT NULL, height INTEGER NOT NULL,
    frame_num INTEGER NOT NULL, pts_s REAL NOT NULL, snapshot INTEGER, clip TEXT NOT NULL DEFAULT '',
    clip_offset_s REAL NOT NULL DEFAULT 0
);
CREATE INDEX events_at ON events (at, id, source_id, rule, kind, label);
CREATE INDEX events_source ON events (source_id, at, id, rule, kind, label, direction);
CREATE INDEX events_rule ON events (rule, at, id, source_id, kind, label);
CREATE INDEX events_kind ON events (kind, at, id, source_id, rule, label);
CREATE INDEX events_label ON events (label, at, id, source_id, rule, kind);
CREATE INDEX events_clip ON events (clip, at) WHERE clip != '';
CREATE TABLE snapshots (id INTEGER PRIMARY KEY, at REAL NOT NULL, jpeg BLOB NOT NULL);
CREATE INDEX snapshots_at ON snapshots (at);
CREATE TABLE tracks (
    id INTEGER PRIMARY KEY, source_id TEXT NOT NULL, track_id INTEGER NOT NULL, label TEXT NOT NULL,
    class_id INTEGER NOT NULL, first_at REAL NOT NULL, last_at REAL NOT NULL, first_pts_s REAL NOT NULL,
    last_pts_s REAL NOT NULL, frames INTEGER NOT NULL, score REAL NOT NULL,
    x1 REAL NOT NULL, y1 REAL NOT NULL, x2 REAL NOT NULL, y2 REAL NOT NULL,
    width INTEGER NOT NULL, height INTEGER NOT NULL, zones TEXT NOT NULL, path BLOB NOT NULL, event_id INTEGER
);
CREATE INDEX tracks_first ON tracks (first_at, id, last_at, source_id, label);
CREATE INDEX tracks_source ON tracks (source_id, first_at, id, last_at, label);
CREATE INDEX tracks_label ON tracks (label, first_at, id, last_at, source_id);
CREATE TABLE track_zones (
    rule TEXT NOT NULL, first_at REAL NOT NULL, id INTEGER NOT NULL, PRIMARY KEY (rule, first_at, id)
) WITHOUT ROWID;
CREATE INDEX track_zones_at ON track_zones (first_at);
CREATE TABLE occupancy (
    source_id TEXT NOT NULL, kind TEXT NOT NULL, rule TEXT NOT NULL, minute INTEGER NOT NULL,
    samples INTEGER NOT NULL, total INTEGER NOT NULL, most INTEGER NOT NULL,
    events INTEGER NOT NULL, entered INTEGER NOT NULL, left INTEGER NOT NULL,
    PRIMARY KEY (source_id, minute, kind, rule)
) WITHOUT ROWID;
CREATE INDEX occupancy_minute ON occupancy (minute);
CREATE TABLE heat (
    source_id TEXT NOT NULL, hour INTEGER NOT NULL, seconds BLOB NOT NULL, PRIMARY KEY (source_id, hour)
) WITHOUT ROWID;
CREATE INDEX heat_hour ON heat (hour);
CREATE TABLE sources (source_id TEXT PRIMARY KEY, began_at REAL NOT NULL, is_live INTEGER NOT NULL) WITHOUT ROWID;
"""


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the file is damaged, so that retries cannot help."""
    return error_code(error) in _DAMAGE


def error_code(error: sqlite3.Error) -> int:
    """SQLite's primary result code, 0 for an error of the Python module."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def reason_of(error: sqlite3.Error | OSError) -> str:
    """The reason as text."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error)


class _DamageFound(sqlite3.DatabaseError):
    """The check found a damaged page."""

    sqlite_errorcode = sqlite3.SQLITE_CORRUPT


class StoreFolder:
    """The folder with the database, locked for one writer until `close`."""

    def __init__(self, folder: Path) -> None:
        """Creates the folder (0700) and locks it. Raises SinkFailed, also if another program writes there."""
        self.file = folder / FILE
        self._lock = -1
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise SinkFailed(
                f"{folder}: another run stores its events there; choose another folder with --events-folder"
            ) from None
        except OSError as error:
            self.close()
            raise SinkFailed(
                f"{folder}: events cannot be stored there ({reason_of(error)}); "
                "choose another folder with --events-folder"
            ) from error

    def open(self) -> sqlite3.Connection:
        """The writer's connection. Renames a damaged file and creates a new one. Raises SinkFailed."""
        try:
            return self._opened()
        except sqlite3.Error as error:
            if not is_damage(error):
                raise SinkFailed(f"{self.file}: cannot be opened ({reason_of(error)})") from error
            self.move_damaged(reason_of(error))
        try:
            return self._opened()
        except sqlite3.Error as error:
            raise SinkFailed(f"{self.file}: cannot be opened ({reason_of(error)})") from error

    def move_damaged(self, reason: str) -> None:
        """Renames the damaged file; it is never deleted. Raises SinkFailed if that fails or there are too many."""
        former = [
            path for path in self.file.parent.glob(f"{FILE}.damaged-*") if not path.name.endswith(_COMPANIONS[1:])
        ]
        if len(former) >= MAX_DAMAGED_FILES:
            raise SinkFailed(
                f"{self.file} is damaged ({reason}), and {len(former)} earlier damaged files exist: check the disk, "
                f"and remove {FILE}.damaged-*"
            )
        stem = f"{FILE}.damaged-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}"
        target, number = self.file.with_name(stem), 2
        while target.exists():
            target, number = self.file.with_name(f"{stem}-{number}"), number + 1
        try:
            _rename(self.file, target)
        except OSError as error:
            raise SinkFailed(f"{self.file} is damaged ({reason}) and cannot be renamed ({reason_of(error)})") from error
        log.error("the event store was damaged; started a new one", moved_to=str(target), reason=reason)

    def close(self) -> None:
        """Releases the lock. A second call does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _opened(self) -> sqlite3.Connection:
        try:
            os.close(os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            os.chmod(self.file, 0o600)  # SQLite gives its companions the same
        except OSError as error:
            raise SinkFailed(f"{self.file}: cannot be opened ({reason_of(error)})") from error
        connection = sqlite3.connect(
            self.file, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=64
        )
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        version, name = _number(connection, "user_version"), _number(connection, "application_id")
        tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if tables and name != _APPLICATION_ID:
            raise SinkFailed(
                f"{self.file} is a database of another program; choose another folder with --events-folder"
            )
        if version > VERSION:
            raise SinkFailed(
                f"{self.file} was written by a newer version of Penstock; choose another folder with --events-folder"
            )
        if not tables:
            connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
        connection.execute("PRAGMA cache_size = -8000")
        if not tables:
            connection.executescript(
                f"BEGIN;{_SCHEMA}PRAGMA application_id = {_APPLICATION_ID};PRAGMA user_version = {VERSION};COMMIT;"
            )
        if self.file.stat().st_size < _CHECKED_BYTES:
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise _DamageFound(str(found))


def move_store_aside(folder: Path) -> Path | None:
    """Renames the store of an earlier run to FILE.1, so that two runs over the same files are not counted together.
    Returns the new name; None if there is none, or a program is writing to it."""
    if not (folder / FILE).is_file():
        return None
    target = folder / f"{FILE}.1"
    try:
        held = StoreFolder(folder)
    except SinkFailed:
        return None
    try:
        for companion in _COMPANIONS:
            target.with_name(target.name + companion).unlink(missing_ok=True)
        _rename(folder / FILE, target)
    except OSError:
        return None
    finally:
        held.close()
    return target


def _rename(file: Path, target: Path) -> None:
    """Renames the database with its companions, the file itself last."""
    for companion in _COMPANIONS[::-1]:
        with suppress(FileNotFoundError):
            file.with_name(file.name + companion).rename(target.with_name(target.name + companion))


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    return int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])


def size_bytes(connection: sqlite3.Connection) -> tuple[int, int]:
    """Size of the file in bytes, and how many of them are unused."""
    page = _number(connection, "page_size")
    return _number(connection, "page_count") * page, _number(connection, "freelist_count") * page
