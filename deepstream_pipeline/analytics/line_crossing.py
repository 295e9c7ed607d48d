"""line-crossing: who crosses a line. Counts crossings so far; an event for each, with the count.

An object crosses when its foot was clearly on one side of the line and now is clearly on the other: farther from it
than a foot may tremble. So jitter on the line counts nothing, going back and forth counts each time, and an object that
is lost before the line and found behind it under the same identity counts once. Found under another identity, it counts
nothing: that another object was there is as likely. Where it crossed is where its way last met the line: beyond the
line's ends does not count, unless the line is extended.
"""

import math
from collections import Counter
from dataclasses import dataclass

from deepstream_pipeline.analytics.geometry import BORDER, MOST_DEGREES, Scale, scaled
from deepstream_pipeline.analytics.rules import LineCrossing, LineMode
from deepstream_pipeline.analytics.scene import Crowd, Scene
from deepstream_pipeline.analytics.watch import Said
from deepstream_pipeline.types import AnalyticsKind


@dataclass(slots=True)
class _Place:
    """Beside the line. side: where it clearly was last, 1 or -1, 0 before it was. distance: of the foot, signed.

    along: of the foot, in lengths of the line from its start. met: the same, where its way last met the line.
    """

    side: int
    distance: float
    along: float
    met: float


class LineWatch:
    """The direction's side of the line is its positive one; without a direction, the one to the left of its way."""

    def __init__(self, rule: LineCrossing) -> None:
        self._rule = rule
        self._total = 0
        self._by_class: Counter[int] = Counter()
        self._places: dict[int, _Place] = {}
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

    def observe(self, scene: Scene) -> Said:
        """The rule holds for those who cross with this frame."""
        for gone in scene.gone:
            self._places.pop(gone.track_id, None)
        crowd = scene.crowd(self._rule.class_ids)
        said = Said(0, self._by_class)
        if crowd.rows:
            for number in self._crossing(crowd):
                self._count(scene, crowd, number, said)
        said.total = self._total
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
                self._places[track_id] = _Place(side, distance, along[number], along[number])
                continue
            if _moves(place, distance, along[number], side) and self._counts(place):
                crossing.append(number)
        return crossing

    def _counts(self, place: _Place) -> bool:
        is_on_line = self._rule.is_extended or 0 <= place.met <= 1
        return is_on_line and (self._rule.direction is None or place.side > 0)

    def _count(self, scene: Scene, crowd: Crowd, number: int, said: Said) -> None:
        track_id, class_id = crowd.track_ids[number], crowd.class_ids[number]
        if self._rule.direction is not None and self._rule.mode is not LineMode.LOOSE:
            x, y = scene.motion(track_id)
            if x * self._way[0] + y * self._way[1] < self._least_cosine * math.hypot(x, y):
                return
        self._total += 1
        self._by_class[class_id] += 1
        said.rows.append(crowd.rows[number])
        said.events.append(
            scene.event(
                AnalyticsKind.LINE_CROSSING, self._rule.name, float(self._total), track_id=track_id, class_id=class_id
            )
        )


def _moves(place: _Place, distance: float, along: float, side: int) -> bool:
    """Whether it clearly changed sides with this step."""
    if place.distance * distance <= 0 and place.distance != distance:
        share = place.distance / (place.distance - distance)
        place.met = place.along + share * (along - place.along)
    place.distance, place.along = distance, along
    was, place.side = place.side, side or place.side
    return bool(was) and place.side != was
