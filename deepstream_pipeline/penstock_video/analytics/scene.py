"""One frame as the rules see it: tracks with positions, trails and entry times; the Protocol of a rule's evaluator."""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock_video.analytics.rules import LineMode, Point, Polygon
from penstock_video.types import AnalyticsEvent, CrossingDirection, Detections, Frame, Tracks

Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Scale = tuple[float, float]

MOST_DEGREES = {LineMode.LOOSE: 90.0, LineMode.BALANCED: 60.0, LineMode.STRICT: 30.0}

BORDER = 0.001  # pixels: the precision of recorded coordinates
_JITTER = 0.05  # of a box's diagonal: so far its foot may tremble without having moved
_NO_FEET, _NO_SLACK = np.empty((0, 2)), np.empty(0)


def foot_points(xyxy: npt.NDArray[np.float32]) -> tuple[Array, Array]:
    """Foot points of boxes, the middle of the lower edge, (n, 2), and their uncertainty, (n,).

    Coordinates are rounded to a thousandth of a pixel, as recorded, so that a replay equals the live run.
    """
    if not len(xyxy):
        return _NO_FEET, _NO_SLACK
    boxes = np.rint(xyxy.astype(np.float64) * 1000) / 1000
    sides = boxes[:, 2:] - boxes[:, :2]
    feet = np.stack(((boxes[:, 0] + boxes[:, 2]) / 2, boxes[:, 3]), axis=1)
    return feet, _JITTER * np.sqrt(sides[:, 0] ** 2 + sides[:, 1] ** 2)


def scaled(points: tuple[Point, ...], scale: Scale) -> Array:
    """Points (m, 2) in source pixels."""
    return np.array(points, np.float64) * scale


class Area:
    """A polygon with its border. It may cross itself, and may extend beyond the picture.

    A point is inside if a ray from it crosses the edges an odd number of times.
    """

    def __init__(self, corners: Array) -> None:
        self._x, self._y = corners.T
        self._next_x, self._next_y = np.roll(corners, -1, axis=0).T
        self._edge_x, self._edge_y = self._next_x - self._x, self._next_y - self._y
        height = np.where(self._edge_y == 0, 1, self._edge_y)  # a level edge is never crossed
        self._slope = self._edge_x / height
        self._squares = self._edge_x**2 + self._edge_y**2
        self._squares[self._squares == 0] = 1

    def holds(self, points: Array) -> BoolArray:
        """(n,) whether each of (n, 2) points is inside."""
        x, y = points[:, :1], points[:, 1:]
        is_beside = (self._y > y) != (self._next_y > y)
        is_crossed = is_beside & (x < self._x + (y - self._y) * self._slope)
        odd: BoolArray = np.bitwise_xor.reduce(is_crossed, axis=1)
        return odd | (self.distances(points) <= BORDER)

    def distances(self, points: Array) -> Array:
        """(n,) distances in pixels of (n, 2) points to their nearest edges."""
        to_x, to_y = points[:, :1] - self._x, points[:, 1:] - self._y
        along = ((to_x * self._edge_x + to_y * self._edge_y) / self._squares).clip(0, 1)
        squares = (to_x - along * self._edge_x) ** 2 + (to_y - along * self._edge_y) ** 2
        nearest: Array = np.sqrt(squares.min(axis=1))
        return nearest


LOST_AFTER_S = 5.0  # unseen for so long an object is gone; found again later, it is there for the first time
TRAIL_S = 1.0  # the time over which a motion is measured
_NO_SEGMENT = -1  # no frame has it
MOST_OBJECTS = 10_000  # remembered at once; of more, those not seen for longest are taken for gone

Trail = deque[tuple[float, float, float]]


@dataclass(slots=True)
class Sighting:
    """An object's last sighting. trail: (pts_s, x, y) of its foot, beginning at least TRAIL_S ago."""

    class_id: int
    pts_s: float
    trail: Trail


@dataclass(frozen=True, slots=True)
class Gone:
    """An object that counts as gone. pts_s: when it was last seen."""

    track_id: int
    class_id: int
    pts_s: float


@dataclass(frozen=True, slots=True)
class Crowd:
    """Some of a frame's objects; rows: indices of their tracks. feet: (n, 2). slack: uncertainty of each foot,
    pixels."""

    rows: list[int]
    track_ids: list[int]
    class_ids: list[int]
    feet: Array
    slack: list[float]


@dataclass(slots=True)
class Scene:
    """A frame's objects. is_cut: the scene changed with it, and all earlier objects are gone."""

    frame: Frame
    pts_s: float
    detections: Detections
    everybody: Crowd
    gone: list[Gone]
    sightings: dict[int, Sighting]
    is_cut: bool
    _crowds: dict[tuple[int, ...], Crowd] = field(default_factory=dict)

    def crowd(self, class_ids: tuple[int, ...]) -> Crowd:
        """The objects of the classes, all if none is named."""
        if not class_ids:
            return self.everybody
        if class_ids not in self._crowds:
            self._crowds[class_ids] = self._chosen(class_ids)
        return self._crowds[class_ids]

    def _chosen(self, class_ids: tuple[int, ...]) -> Crowd:
        everybody = self.everybody
        chosen = [row for row, class_id in enumerate(everybody.class_ids) if class_id in class_ids]
        if len(chosen) == len(everybody.rows):
            return everybody
        track_ids = [everybody.track_ids[row] for row in chosen]
        slack = [everybody.slack[row] for row in chosen]
        return Crowd(chosen, track_ids, [everybody.class_ids[row] for row in chosen], everybody.feet[chosen], slack)

    def motion(self, track_id: int) -> tuple[float, float]:
        """Movement of its foot over the last second, or since its first sighting."""
        trail = self.sightings[track_id].trail
        (_, from_x, from_y), (_, to_x, to_y) = trail[0], trail[-1]
        return to_x - from_x, to_y - from_y

    def event(
        self,
        kind: str,
        rule: str,
        value: float,
        *,
        track_id: int | None = None,
        class_id: int | None = None,
        direction: CrossingDirection | None = None,
    ) -> AnalyticsEvent:
        """An event of this frame, with the object's box and score if it is in the frame."""
        frame, found, xyxy, score = self.frame, self.detections, None, None
        if track_id is not None and track_id in self.everybody.track_ids:
            row = self.everybody.track_ids.index(track_id)
            left, top, right, bottom = (round(side, 3) for side in found.xyxy[row].tolist())  # as recorded
            xyxy, score = (left, top, right, bottom), round(float(found.score[row]), 6)
        return AnalyticsEvent(
            kind, frame.source_id, frame.frame_num, self.pts_s, track_id, rule, value, class_id, direction, xyxy, score
        )


class Presence:
    """Recently seen objects. Bounded by LOST_AFTER_S, cuts and MOST_OBJECTS."""

    def __init__(self) -> None:
        self._seen: dict[int, Sighting] = {}  # who was not seen for longest comes first
        self._segment: int | None = None

    def __len__(self) -> int:
        return len(self._seen)

    def restart(self) -> None:
        """The next frame begins another segment."""
        self._segment = _NO_SEGMENT if self._segment is not None else None

    def see(self, frame: Frame, tracks: Tracks) -> Scene:
        """The scene of a frame. Tracks without an identity (track_id below 0) are included, but not followed."""
        pts_s = round(frame.pts_s, 6)
        is_cut = self._segment not in (None, frame.segment)
        self._segment = frame.segment
        detections = tracks.detections
        feet, slack = foot_points(detections.xyxy)
        track_ids, class_ids = tracks.track_id.tolist(), detections.class_id.tolist()
        gone = self._leave(math.inf if is_cut else pts_s - LOST_AFTER_S)
        for track_id, class_id, (x, y) in zip(track_ids, class_ids, feet.tolist(), strict=True):
            if track_id >= 0:
                self._follow(track_id, class_id, (pts_s, x, y))
        everybody = Crowd(list(range(len(track_ids))), track_ids, class_ids, feet, slack.tolist())
        return Scene(frame, pts_s, detections, everybody, gone, self._seen, is_cut)

    def _leave(self, before_s: float) -> list[Gone]:
        gone = []
        while self._seen:
            track_id, sighting = next(iter(self._seen.items()))
            if sighting.pts_s >= before_s and len(self._seen) <= MOST_OBJECTS:
                break
            del self._seen[track_id]
            gone.append(Gone(track_id, sighting.class_id, sighting.pts_s))
        return gone

    def _follow(self, track_id: int, class_id: int, place: tuple[float, float, float]) -> None:
        sighting = self._seen.pop(track_id, None)
        if sighting is None:
            sighting = Sighting(class_id, place[0], deque())
        self._seen[track_id] = sighting
        sighting.pts_s = place[0]
        trail = sighting.trail
        trail.append(place)
        while len(trail) > 2 and trail[1][0] <= place[0] - TRAIL_S:
            trail.popleft()


@dataclass(slots=True)
class RuleResult:
    """A rule's result for one frame. rows: tracks for which the rule holds.

    total, by_class: the total so far, or the current number; by class_id. by_direction: totals so far by class_id, for
    each direction of a rule that counts both; then total and by_class are not shown.
    """

    total: int
    by_class: Counter[int]
    rows: list[int] = field(default_factory=list)
    events: list[AnalyticsEvent] = field(default_factory=list)
    by_direction: Mapping[CrossingDirection, Counter[int]] = field(default_factory=dict)


class RuleEvaluator(Protocol):
    """One rule of one source, with its state of objects that are not gone. Sans-IO."""

    def fit(self, scale: Scale) -> None:
        """Scales the rule's shapes to source pixels. Called before the first scene and after each size change."""
        ...

    def observe(self, scene: Scene) -> RuleResult:
        """Evaluates the next frame. Forgets scene.gone."""
        ...


def present_result(rows: list[int], class_ids: Iterable[int], events: list[AnalyticsEvent]) -> RuleResult:
    """The result of a rule that counts current objects."""
    return RuleResult(len(rows), Counter(class_ids), rows, events)


@dataclass(frozen=True, slots=True)
class Stay:
    """An object in the polygon. until_s: when it left, or was last seen; None while it is inside."""

    track_id: int
    class_id: int
    since_s: float
    until_s: float | None = None


class Stays:
    """Stays of objects, by their foot. It is in or out at its first sighting; later it changes sides only when it is
    farther from the edge than its uncertainty, so jitter has no effect."""

    def __init__(self, polygon: Polygon, *, is_inverse: bool = False) -> None:
        self._polygon, self._is_inverse = polygon, is_inverse
        self._area = Area(scaled(polygon, (1.0, 1.0)))
        self._stays: dict[int, Stay | None] = {}  # None: known, and outside

    def __len__(self) -> int:
        return len(self._stays)

    def fit(self, scale: Scale) -> None:
        """Scales the polygon to source pixels."""
        self._area = Area(scaled(self._polygon, scale))

    def _leave(self, gone: list[Gone]) -> list[Stay]:
        """The stays that end with these objects."""
        found = [(self._stays.pop(one.track_id, None), one.pts_s) for one in gone]
        return [Stay(stay.track_id, stay.class_id, stay.since_s, until_s) for stay, until_s in found if stay]

    def move(self, scene: Scene, crowd: Crowd) -> tuple[list[bool], list[Stay]]:
        """Whether each object is inside, and the stays that began or ended with this frame, those of objects that are
        gone first."""
        inside: list[bool] = []
        changed = self._leave(scene.gone)
        raw = self._area.holds(crowd.feet).tolist() if crowd.rows else []
        for number, track_id in enumerate(crowd.track_ids):
            is_inside = raw[number] != self._is_inverse
            if track_id >= 0:
                stay = self._stays.get(track_id)
                if track_id not in self._stays or (stay is not None) != is_inside:
                    stay = self._turn(scene, crowd, number, is_inside, changed)
                is_inside = stay is not None
            inside.append(is_inside)
        return inside, changed

    def stay(self, track_id: int) -> Stay:
        """The stay of an object that is inside."""
        stay = self._stays[track_id]
        if stay is None:
            raise KeyError(track_id)
        return stay

    def _turn(self, scene: Scene, crowd: Crowd, number: int, is_inside: bool, changed: list[Stay]) -> Stay | None:
        """The object is new, or may have changed sides."""
        track_id = crowd.track_ids[number]
        was = self._stays.get(track_id)
        if track_id in self._stays and self._area.distances(crowd.feet[number : number + 1])[0] < crowd.slack[number]:
            return was
        stay = Stay(track_id, crowd.class_ids[number], scene.pts_s) if is_inside else None
        self._stays[track_id] = stay
        if stay is not None:
            changed.append(stay)
        elif was is not None:
            changed.append(Stay(track_id, was.class_id, was.since_s, scene.pts_s))
        return stay
