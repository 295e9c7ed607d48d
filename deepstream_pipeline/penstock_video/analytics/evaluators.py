"""Evaluators of the built-in rules."""

import math
from collections import Counter
from dataclasses import dataclass

from penstock_video.analytics.rules import DirectionDetection, Dwell, LineCrossing, LineMode, Overcrowding, RoiFiltering
from penstock_video.analytics.scene import (
    BORDER,
    MOST_DEGREES,
    Area,
    Crowd,
    RuleResult,
    Scale,
    Scene,
    Stay,
    Stays,
    present_result,
    scaled,
)
from penstock_video.types import AnalyticsEvent, AnalyticsKind, CrossingDirection


class RoiEvaluator:
    """Who appears inside enters; who is lost inside leaves when it is taken for gone (scene.LOST_AFTER_S)."""

    def __init__(self, rule: RoiFiltering) -> None:
        self._rule = rule
        self._stays = Stays(rule.polygon, is_inverse=rule.is_inverse)

    def fit(self, scale: Scale) -> None:
        """In the source's pixels."""
        self._stays.fit(scale)

    def observe(self, scene: Scene) -> RuleResult:
        """The rule holds for those inside."""
        crowd = scene.crowd(self._rule.class_ids)
        inside, changed = self._stays.move(scene, crowd)
        there = [number for number, is_inside in enumerate(inside) if is_inside]
        events = [
            scene.event(
                AnalyticsKind.ROI_FILTERING, self._rule.name, 1.0 if stay.until_s is None else 0.0,
                track_id=stay.track_id, class_id=stay.class_id,
            )
            for stay in changed
        ]  # fmt: skip
        rows = [crowd.rows[number] for number in there]
        return present_result(rows, (crowd.class_ids[number] for number in there), events)


class DwellEvaluator:
    """An event when an object has been inside for after_s, and one when it leaves after that; its value: seconds
    inside. A shorter stay gives no event. An object that is lost inside was there until it was last seen, and is
    reported when it counts as gone (scene.LOST_AFTER_S).
    """

    def __init__(self, rule: Dwell) -> None:
        self._rule = rule
        self._stays = Stays(rule.polygon)
        self._over: set[int] = set()

    def fit(self, scale: Scale) -> None:
        """In the source's pixels."""
        self._stays.fit(scale)

    def observe(self, scene: Scene) -> RuleResult:
        """The rule holds for those who are inside and over the time."""
        crowd = scene.crowd(self._rule.class_ids)
        inside, changed = self._stays.move(scene, crowd)
        left = [stay for stay in changed if stay.until_s is not None]
        events = [self._event(scene, stay) for stay in left if stay.track_id in self._over]
        self._over.difference_update(stay.track_id for stay in left)
        over = []
        for number, track_id in enumerate(crowd.track_ids):
            if inside[number] and track_id >= 0 and self._is_over(scene, track_id, events):
                over.append(number)
        return present_result(
            [crowd.rows[number] for number in over], (crowd.class_ids[number] for number in over), events
        )

    def _is_over(self, scene: Scene, track_id: int, events: list[AnalyticsEvent]) -> bool:
        if track_id not in self._over:
            stay = self._stays.stay(track_id)
            if round(scene.pts_s - stay.since_s, 6) < self._rule.after_s:
                return False
            self._over.add(track_id)
            events.append(self._event(scene, stay))
        return True

    def _event(self, scene: Scene, stay: Stay) -> AnalyticsEvent:
        until_s = scene.pts_s if stay.until_s is None else stay.until_s
        seconds = round(until_s - stay.since_s, 6)
        return scene.event(
            AnalyticsKind.DWELL, self._rule.name, seconds, track_id=stay.track_id, class_id=stay.class_id
        )


BREAK_S = 0.5  # fewer objects for less than this count as missed by the detector


class OvercrowdingEvaluator:
    """An event with the count when object_threshold or more have been there for time_threshold_s; one with 0 when they
    have been fewer for BREAK_S. Needs no identities. A cut ends it: what was before it is over.
    """

    def __init__(self, rule: Overcrowding) -> None:
        self._rule = rule
        self._area = Area(scaled(rule.polygon, (1.0, 1.0)))
        self._since_s: float | None = None
        self._short_since_s: float | None = None
        self._is_over = False

    def fit(self, scale: Scale) -> None:
        """In the source's pixels."""
        self._area = Area(scaled(self._rule.polygon, scale))

    def observe(self, scene: Scene) -> RuleResult:
        """The rule holds for those inside while there are too many."""
        crowd = scene.crowd(self._rule.class_ids)
        inside = self._area.holds(crowd.feet).tolist() if crowd.rows else []
        there = [number for number, is_inside in enumerate(inside) if is_inside]
        events = self._ends(scene) if scene.is_cut else []
        if len(there) >= self._rule.object_threshold:
            events += self._lasts(scene, len(there))
        elif self._since_s is not None:
            if self._short_since_s is None:
                self._short_since_s = scene.pts_s
            if round(scene.pts_s - self._short_since_s, 6) >= BREAK_S:
                events += self._ends(scene)
        said = present_result(
            [crowd.rows[number] for number in there], (crowd.class_ids[number] for number in there), events
        )
        if not self._is_over:
            said.rows = []
        return said

    def _lasts(self, scene: Scene, count: int) -> list[AnalyticsEvent]:
        self._short_since_s = None
        if self._since_s is None:
            self._since_s = scene.pts_s
        if self._is_over or round(scene.pts_s - self._since_s, 6) < self._rule.time_threshold_s:
            return []
        self._is_over = True
        return [scene.event(AnalyticsKind.OVERCROWDING, self._rule.name, float(count))]

    def _ends(self, scene: Scene) -> list[AnalyticsEvent]:
        was_over, self._is_over = self._is_over, False
        self._since_s = self._short_since_s = None
        return [scene.event(AnalyticsKind.OVERCROWDING, self._rule.name, 0.0)] if was_over else []


@dataclass(slots=True)
class _LinePosition:
    """Beside the line. side: where it clearly was last, 1 or -1, 0 before it was. distance: of the foot, signed.

    along: of the foot, in lengths of the line from its start. met: the same, where its way last met the line.
    """

    side: int
    distance: float
    along: float
    met: float


class LineCrossingEvaluator:
    """The positive side of the line: the direction's, which is the one that counts; without a direction, the side to
    the right of who looks from the line's first point to its second, which is in."""

    def __init__(self, rule: LineCrossing) -> None:
        self._rule = rule
        self._by_direction: dict[CrossingDirection, Counter[int]] = {
            CrossingDirection.IN: Counter(),
            CrossingDirection.OUT: Counter(),
        }  # of a rule with a direction, only in
        self._places: dict[int, _LinePosition] = {}
        self._least_cosine = math.cos(math.radians(MOST_DEGREES[rule.mode]))
        self.fit((1.0, 1.0))

    def __len__(self) -> int:
        return len(self._places)

    def fit(self, scale: Scale) -> None:
        """In the source's pixels."""
        (from_x, from_y), (to_x, to_y) = scaled(self._rule.line, scale).tolist()
        self._start = (from_x, from_y)
        length = math.hypot(to_x - from_x, to_y - from_y)
        self._along = ((to_x - from_x) / length**2, (to_y - from_y) / length**2)
        normal = (-(to_y - from_y) / length, (to_x - from_x) / length)
        self._way = (0.0, 0.0)
        if self._rule.direction is not None:
            (from_x, from_y), (to_x, to_y) = scaled(self._rule.direction, scale).tolist()
            length = math.hypot(to_x - from_x, to_y - from_y)
            self._way = ((to_x - from_x) / length, (to_y - from_y) / length)
            if normal[0] * self._way[0] + normal[1] * self._way[1] < 0:
                normal = (-normal[0], -normal[1])
        self._normal = normal

    def observe(self, scene: Scene) -> RuleResult:
        """The rule holds for those who cross with this frame."""
        for gone in scene.gone:
            self._places.pop(gone.track_id, None)
        crowd = scene.crowd(self._rule.class_ids)
        said = RuleResult(0, self._by_direction[CrossingDirection.IN])
        if self._rule.direction is None:
            said.by_direction = self._by_direction
        if crowd.rows:
            for number in self._crossing(crowd):
                self._count(scene, crowd, number, said)
        said.total = said.by_class.total()
        return said

    def _crossing(self, crowd: Crowd) -> list[int]:
        """Who of the crowd is now clearly on another side than before, and counts there."""
        offset = crowd.feet - self._start
        distances, along = (offset @ self._normal).tolist(), (offset @ self._along).tolist()
        crossing = []
        for number, track_id in enumerate(crowd.track_ids):
            if track_id < 0:
                continue
            distance, slack = distances[number], crowd.slack[number]
            side = 0 if abs(distance) <= max(slack, BORDER) else 1 if distance > 0 else -1
            place = self._places.get(track_id)
            if place is None:
                self._places[track_id] = _LinePosition(side, distance, along[number], along[number])
                continue
            if _moves(place, distance, along[number], side) and self._counts(place):
                crossing.append(number)
        return crossing

    def _counts(self, place: _LinePosition) -> bool:
        is_on_line = self._rule.is_extended or 0 <= place.met <= 1
        return is_on_line and (self._rule.direction is None or place.side > 0)

    def _count(self, scene: Scene, crowd: Crowd, number: int, said: RuleResult) -> None:
        track_id, class_id = crowd.track_ids[number], crowd.class_ids[number]
        if self._rule.direction is not None and self._rule.mode is not LineMode.LOOSE:
            x, y = scene.motion(track_id)
            if x * self._way[0] + y * self._way[1] < self._least_cosine * math.hypot(x, y):
                return
        way = CrossingDirection.IN if self._places[track_id].side > 0 else CrossingDirection.OUT
        counted = self._by_direction[way]
        counted[class_id] += 1
        said.rows.append(crowd.rows[number])
        said.events.append(
            scene.event(
                AnalyticsKind.LINE_CROSSING, self._rule.name, float(counted.total()), track_id=track_id,
                class_id=class_id, direction=way if self._rule.direction is None else None,
            )
        )  # fmt: skip


def _moves(place: _LinePosition, distance: float, along: float, side: int) -> bool:
    """Whether it clearly changed sides with this step."""
    if place.distance * distance <= 0 and place.distance != distance:
        share = place.distance / (place.distance - distance)
        place.met = place.along + share * (along - place.along)
    place.distance, place.along = distance, along
    was, place.side = place.side, side or place.side
    return bool(was) and place.side != was


_ON_DEGREES = 10.0  # an object that moves so goes on to, up to so much beyond the mode's angle


class DirectionEvaluator:
    """An object moves when its foot has gone farther in the last second than twice what it may tremble, and moves on
    until that is less than once. The event's value: its direction in degrees, 0 to the right, 90 up, below 360.
    """

    def __init__(self, rule: DirectionDetection) -> None:
        self._rule = rule
        self._moving: set[int] = set()
        most = MOST_DEGREES[rule.mode]
        self._begin_cosine, self._on_cosine = (
            math.cos(math.radians(degrees)) for degrees in (most, most + _ON_DEGREES)
        )
        self.fit((1.0, 1.0))

    def fit(self, scale: Scale) -> None:
        """In the source's pixels."""
        (from_x, from_y), (to_x, to_y) = scaled(self._rule.direction, scale).tolist()
        length = math.hypot(to_x - from_x, to_y - from_y)
        self._way = ((to_x - from_x) / length, (to_y - from_y) / length)

    def observe(self, scene: Scene) -> RuleResult:
        """The rule holds for those who move so now."""
        self._moving.difference_update(gone.track_id for gone in scene.gone)
        crowd = scene.crowd(self._rule.class_ids)
        events: list[AnalyticsEvent] = []
        there = [
            number
            for number, track_id in enumerate(crowd.track_ids)
            if track_id >= 0 and self._moves(scene, crowd, number, events)
        ]
        return present_result(
            [crowd.rows[number] for number in there], (crowd.class_ids[number] for number in there), events
        )

    def _moves(self, scene: Scene, crowd: Crowd, number: int, events: list[AnalyticsEvent]) -> bool:
        track_id = crowd.track_ids[number]
        was_moving = track_id in self._moving
        x, y = scene.motion(track_id)
        far = math.hypot(x, y)
        cosine = self._on_cosine if was_moving else self._begin_cosine
        least = crowd.slack[number] * (1 if was_moving else 2)
        if far <= least or x * self._way[0] + y * self._way[1] < cosine * far:
            self._moving.discard(track_id)
            return False
        if not was_moving:
            self._moving.add(track_id)
            degrees = round(math.degrees(math.atan2(-y, x)) % 360, 3) % 360
            kind, name = AnalyticsKind.DIRECTION_DETECTION, self._rule.name
            events.append(scene.event(kind, name, degrees, track_id=track_id, class_id=crowd.class_ids[number]))
        return True
