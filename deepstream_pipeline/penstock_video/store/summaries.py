"""Aggregates results between two writes: tracks, occupancy per minute, and positions. Sans-IO."""

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock_video.detections import foot_cells
from penstock_video.store.records import GRID_HEIGHT, GRID_WIDTH, Box
from penstock_video.types import FrameResult

MAX_LIVE_TRACKS = 20_000
MAX_PATH_POINTS = 32
MAX_ZONES = 32
MAX_OPEN_MINUTES = 16_384  # of all rules of all sources
LOST_AFTER_S = 10.0
SWEEP_S = 2.0  # between two checks for lost tracks of a source
_MOST_STEP_S = 1.0  # maximum time that a position counts after a gap
_WHOLE = 65_535

Grid = npt.NDArray[np.float32]
Point = tuple[float, float]


class PathSummary:
    """Relative positions of an object at equal intervals, at most MAX_PATH_POINTS."""

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._last: Point = (0.0, 0.0)
        self._step, self._count = 1, 0

    def add(self, point: Point) -> None:
        """Adds a position. When the list is full, drops every second one and doubles the interval."""
        if self._count % self._step == 0:
            if len(self._points) == MAX_PATH_POINTS - 1:
                self._points, self._step = self._points[::2], self._step * 2
            if self._count % self._step == 0:
                self._points.append(point)
        self._last = point
        self._count += 1

    def packed(self) -> bytes:
        """The positions, including the last one, as two 16-bit numbers each."""
        points = self._points if self._points and self._points[-1] == self._last else [*self._points, self._last]
        values = [round(min(max(value, 0.0), 1.0) * _WHOLE) for point in points for value in point]
        return struct.pack(f"<{len(values)}H", *values)


def unpacked_path(packed: bytes) -> tuple[Point, ...]:
    """The positions of PathSummary.packed, rounded to 4 digits."""
    values = struct.unpack(f"<{len(packed) // 2}H", packed[: len(packed) // 2 * 2])
    return tuple((round(x / _WHOLE, 4), round(y / _WHOLE, 4)) for x, y in zip(values[::2], values[1::2], strict=False))


@dataclass(slots=True)
class LiveTrack:
    """A live track. is_changed: since it was last written."""

    id: int
    source_id: str
    track_id: int
    label: str
    class_id: int
    size: tuple[int, int]
    first_at: float
    first_pts_s: float
    last_at: float = 0.0
    last_pts_s: float = 0.0
    frames: int = 0
    score: float = -1.0
    xyxy: Box = (0.0, 0.0, 0.0, 0.0)
    zones: set[str] = field(default_factory=set)
    path: PathSummary = field(default_factory=PathSummary)
    event_id: int | None = None
    is_changed: bool = True

    def add_zones(self, names: Iterable[str]) -> None:
        """Adds rules that match the track, at most MAX_ZONES."""
        for name in names:
            if len(self.zones) < MAX_ZONES:
                self.zones.add(name)


class TrackBook:
    """Live tracks of all sources, and ended tracks that are not written yet."""

    def __init__(self) -> None:
        self._next_id = 1
        self._live: dict[str, dict[int, LiveTrack]] = {}
        self._count = 0
        self._over: list[LiveTrack] = []
        self._swept_s: dict[str, float] = {}

    def __len__(self) -> int:
        return self._count

    def begin_at(self, next_id: int) -> None:
        """Sets the lowest ID of the next new track."""
        self._next_id = max(self._next_id, next_id)

    def observe(self, result: FrameResult, at: float) -> None:
        """Adds the positions of a frame. Ends tracks that were not seen for LOST_AFTER_S. at: unix seconds."""
        frame, tracks = result.frame, result.tracks
        seen, rules_of = tracks.detections, result.analytics.rules_of
        rows = zip(
            tracks.track_id.tolist(), tracks.age_frames.tolist(), seen.class_id.tolist(), seen.score.tolist(),
            seen.xyxy.tolist(), strict=True,
        )  # fmt: skip
        for row, (track_id, age, class_id, score, box) in enumerate(rows):
            if track_id < 0 or not all(map(math.isfinite, box)):
                continue
            live = self._of(result, track_id, class_id, at)
            live.last_at, live.last_pts_s, live.is_changed = at, frame.pts_s, True
            live.frames = max(live.frames, age)
            if score > live.score:
                live.score, live.xyxy = score, tuple(box)
            if rules_of:
                live.add_zones(rules_of[row])
            live.path.add(((box[0] + box[2]) / 2 / frame.width, box[3] / frame.height))
        if frame.pts_s - self._swept_s.setdefault(frame.source_id, frame.pts_s) > SWEEP_S:
            self._swept_s[frame.source_id] = frame.pts_s
            live_tracks = self._live.get(frame.source_id, {})
            self._end([one for one in live_tracks.values() if frame.pts_s - one.last_pts_s > LOST_AFTER_S])

    def note_event(self, source_id: str, track_id: int, rule: str, event_id: int) -> None:
        """Sets the newest event of a track."""
        live = self._live.get(source_id, {}).get(track_id)
        if live is not None:
            live.event_id, live.is_changed = event_id, True
            live.add_zones((rule,))

    def end_source(self, source_id: str) -> None:
        """Ends all tracks of the source."""
        self._end(list(self._live.get(source_id, {}).values()))
        self._live.pop(source_id, None)
        self._swept_s.pop(source_id, None)

    def changed(self) -> list[LiveTrack]:
        """Tracks to write: those that ended since the last `written`, and live ones that changed."""
        live = (one for tracks in self._live.values() for one in tracks.values() if one.is_changed)
        return [*self._over, *live]

    def written(self) -> None:
        """Marks the changes as written."""
        for one in self.changed():
            one.is_changed = False
        self._over.clear()

    def drop_over(self, most: int) -> int:
        """Drops the oldest unwritten tracks beyond this number. Returns how many."""
        lost = max(len(self._over) - most, 0)
        del self._over[:lost]
        return lost

    def _of(self, result: FrameResult, track_id: int, class_id: int, at: float) -> LiveTrack:
        frame = result.frame
        of_source = self._live.setdefault(frame.source_id, {})
        live = of_source.get(track_id)
        if live is None:
            if self._count >= MAX_LIVE_TRACKS and of_source:
                self._end([next(iter(of_source.values()))])
            size = (frame.width, frame.height)
            live = of_source[track_id] = LiveTrack(
                self._next_id, frame.source_id, track_id, result.label(class_id), class_id, size, at, frame.pts_s
            )
            self._next_id += 1
            self._count += 1
        return live

    def _end(self, tracks: Iterable[LiveTrack]) -> None:
        for one in tracks:
            del self._live[one.source_id][one.track_id]
            self._count -= 1
            self._over.append(one)


@dataclass(slots=True)
class MinuteCount:
    """Counts of a rule in a minute, to be added to the stored ones.

    samples: number of frames. total: sum over the frames. most: maximum.
    """

    samples: int = 0
    total: int = 0
    most: int = 0
    events: int = 0
    entered: int = 0
    left: int = 0


MinuteKey = tuple[str, int, str, str]  # source, minute, kind, rule


@dataclass(slots=True)
class _OpenMinute:
    """new: counts since the last `take`. samples: frames of the source in this minute that are already stored."""

    new: MinuteCount = field(default_factory=MinuteCount)
    samples: int = 0


class OccupancyBook:
    """Counts by rule and minute. Minutes without objects and events of a rule are not stored."""

    def __init__(self) -> None:
        self._minutes: dict[MinuteKey, _OpenMinute] = {}
        self._frames: dict[tuple[str, int], int] = {}
        self._newest: dict[str, int] = {}
        self._names: dict[str, tuple[str, str] | None] = {}

    def observe(self, source_id: str, counts: Mapping[str, int], at: float) -> None:
        """Adds a frame's FrameAnalytics.counts."""
        minute = int(at // 60)
        self._newest[source_id] = minute
        self._frames[source_id, minute] = self._frames.get((source_id, minute), 0) + 1
        for key, count in counts.items():
            name = self._name(key, counts) if count > 0 else None
            if name is not None:
                new = self._new((source_id, minute, *name))
                new.total += count
                new.most = max(new.most, count)

    def note_event(self, source_id: str, kind: str, rule: str, direction: str | None, at: float) -> None:
        """Adds an event."""
        new = self._new((source_id, int(at // 60), kind, rule))
        new.events += 1
        new.entered += direction == "in"
        new.left += direction == "out"

    def end_source(self, source_id: str) -> None:
        """Closes the source's minutes at the next `take`."""
        self._newest.pop(source_id, None)

    def take(self) -> dict[MinuteKey, MinuteCount]:
        """Counts since the last call."""
        taken: dict[MinuteKey, MinuteCount] = {}
        for key, one in list(self._minutes.items()):
            source_id, minute = key[:2]
            is_over = self._newest.get(source_id) != minute
            one.new.samples = self._frames.get((source_id, minute), 0) - one.samples
            if is_over or one.new.total or one.new.events:
                taken[key] = one.new
                one.samples += one.new.samples
                one.new = MinuteCount()
            if is_over:
                del self._minutes[key]
        self._frames = {key: count for key, count in self._frames.items() if self._newest.get(key[0]) == key[1]}
        return taken

    def _new(self, key: MinuteKey) -> MinuteCount:
        found = self._minutes.get(key)
        if found is None:
            if len(self._minutes) >= MAX_OPEN_MINUTES:
                return MinuteCount()  # is not stored
            found = self._minutes[key] = _OpenMinute()
        return found.new

    def _name(self, key: str, counts: Mapping[str, int]) -> tuple[str, str] | None:
        """(kind, rule) of a number that says how many objects there are now; None for totals and for one class."""
        if key not in self._names:
            kind, _, rule = key.partition("/")
            is_of_class = any(key.startswith(f"{other}/") for other in counts if other != key)
            if len(self._names) >= MAX_OPEN_MINUTES:
                self._names.clear()
            self._names[key] = None if kind == "line-crossing" or is_of_class else (kind, rule)
        return self._names[key]


class HeatBook:
    """Seconds with an object's foot in each grid cell, by source and hour, since the last `take`."""

    def __init__(self) -> None:
        self._grids: dict[tuple[str, int], Grid] = {}
        self._seen_s: dict[str, float] = {}

    def observe(self, result: FrameResult, at: float) -> None:
        """Adds the foot points of a frame, weighted by the time since the source's last frame, at most 1 s."""
        frame, found = result.frame, result.tracks.detections
        before_s = self._seen_s.get(frame.source_id)
        self._seen_s[frame.source_id] = frame.pts_s
        if before_s is None or not len(found):
            return
        step_s = min(max(frame.pts_s - before_s, 0.0), _MOST_STEP_S)
        key = (frame.source_id, int(at // 3600))
        grid = self._grids.get(key)
        if grid is None:
            grid = self._grids[key] = np.zeros((GRID_HEIGHT, GRID_WIDTH), np.float32)
        np.add.at(grid, foot_cells(found, frame.width, frame.height, grid.shape), step_s)

    def end_source(self, source_id: str) -> None:
        """Resets the time of the source's last frame."""
        self._seen_s.pop(source_id, None)

    def take(self) -> dict[tuple[str, int], Grid]:
        """The seconds since the last call, to be added to those of the same hour."""
        taken, self._grids = self._grids, {}
        return taken
