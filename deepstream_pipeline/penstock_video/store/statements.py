"""Writes events, snapshots, tracks, minutes, grids and links to clips. The caller opens the transaction."""

import json
import sqlite3
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from penstock_video.sinks.recordings import FinishedRecording
from penstock_video.store.records import GRID_HEIGHT, GRID_WIDTH
from penstock_video.store.summaries import Grid, LiveTrack, MinuteCount, MinuteKey
from penstock_video.types import AnalyticsEvent, AnalyticsKind, FrameResult

_CLIP_SLACK_S = 120.0  # tolerance between the times of an event and its recording, for files that are read ahead
_EVENT = f"INSERT INTO events VALUES ({', '.join('?' * 20)}, '', 0)"
_TRACK = f"INSERT OR REPLACE INTO tracks VALUES ({', '.join('?' * 20)})"
_MINUTE = """INSERT INTO occupancy VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (source_id, minute, kind, rule) DO UPDATE SET
samples = samples + excluded.samples, total = total + excluded.total,
most = max(most, excluded.most), events = events + excluded.events, entered = entered + excluded.entered,
left = left + excluded.left"""
_CLIP = """UPDATE events SET clip = ?, clip_offset_s = max(0.0, ? + pts_s - ?)
WHERE source_id = ? AND at BETWEEN ? AND ? AND frame_num = ? AND kind = ? AND rule = ?"""

Row = tuple[object, ...]


def next_id(connection: sqlite3.Connection, table: str) -> int:
    """The ID of the table's next row; IDs of removed rows are not reused while the newest row is there."""
    return int(connection.execute(f"SELECT coalesce(max(id), 0) + 1 FROM {table}").fetchone()[0])


def direction_of(event: AnalyticsEvent) -> str | None:
    """in or out: of a line that counts both ways, and of a region that is entered or left."""
    if event.direction is not None:
        return str(event.direction)
    if event.kind == AnalyticsKind.ROI_FILTERING:
        return "in" if event.value > 0 else "out"
    return None


def event_row(event_id: int, at: float, result: FrameResult, event: AnalyticsEvent, snapshot_id: int | None) -> Row:
    """The event's row."""
    frame = result.frame
    label = None if event.class_id is None else result.label(event.class_id)
    box = event.xyxy or (None,) * 4
    return (
        event_id, at, event.source_id, str(event.kind), event.rule, direction_of(event), label, event.class_id,
        event.track_id, event.value, event.score, *box, frame.width, frame.height, event.frame_num, event.pts_s,
        snapshot_id,
    )  # fmt: skip


def write_events(connection: sqlite3.Connection, rows: Iterable[Row], snapshots: Iterable[Row]) -> None:
    """rows: of event_row. snapshots: ID, time, JPEG."""
    connection.executemany(_EVENT, rows)
    connection.executemany("INSERT INTO snapshots VALUES (?, ?, ?)", snapshots)


def write_tracks(connection: sqlite3.Connection, tracks: Iterable[LiveTrack]) -> None:
    """Writes new and changed tracks."""
    rows, zones = [], []
    for one in tracks:
        rows.append((
            one.id, one.source_id, one.track_id, one.label, one.class_id, one.first_at, one.last_at, one.first_pts_s,
            one.last_pts_s, one.frames, one.score, *one.xyxy, *one.size, json.dumps(sorted(one.zones)),
            one.path.packed(), one.event_id,
        ))  # fmt: skip
        zones += [(name, one.first_at, one.id) for name in one.zones]
    connection.executemany(_TRACK, rows)
    connection.executemany("INSERT OR IGNORE INTO track_zones VALUES (?, ?, ?)", zones)


def add_minutes(connection: sqlite3.Connection, minutes: Mapping[MinuteKey, MinuteCount]) -> None:
    """Adds the counts to those of the same minute."""
    connection.executemany(
        _MINUTE,
        [
            (source_id, kind, rule, minute, one.samples, one.total, one.most, one.events, one.entered, one.left)
            for (source_id, minute, kind, rule), one in minutes.items()
        ],
    )


def add_grid(connection: sqlite3.Connection, source_id: str, hour: int, grid: Grid) -> None:
    """Adds the grid to that of the same hour."""
    key = (source_id, hour)
    found = connection.execute("SELECT seconds FROM heat WHERE source_id = ? AND hour = ?", key).fetchone()
    whole = grid if found is None else grid + unpacked_grid(found[0])
    packed = zlib.compress(whole.astype("<f4").tobytes(), 1)
    connection.execute("INSERT OR REPLACE INTO heat VALUES (?, ?, ?)", (*key, packed))


def unpacked_grid(packed: bytes) -> Grid:
    """The grid (GRID_HEIGHT, GRID_WIDTH) float32 of a row, in seconds."""
    values = zlib.decompressobj().decompress(packed, GRID_HEIGHT * GRID_WIDTH * 4)
    return np.frombuffer(values, "<f4").astype(np.float32).reshape(GRID_HEIGHT, GRID_WIDTH)


def link_clip(connection: sqlite3.Connection, recording: FinishedRecording) -> bool:
    """Writes the recording's file name to its events. Returns whether all of them are stored."""
    events, name = recording.events, Path(recording.path).name
    since = recording.unix_s - recording.before_s - _CLIP_SLACK_S
    until = recording.unix_s + recording.after_s + _CLIP_SLACK_S
    rows = {
        (name, recording.before_s, events[0].pts_s, one.source_id, since, until, one.frame_num, str(one.kind), one.rule)
        for one in events
    }
    linked = [connection.execute(_CLIP, row).rowcount for row in rows]
    return all(linked)
