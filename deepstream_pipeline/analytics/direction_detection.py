"""direction-detection: who moves a given way. Counts who does now; an event when an object begins to."""

import math

from deepstream_pipeline.analytics.geometry import MOST_DEGREES, Scale, scaled
from deepstream_pipeline.analytics.rules import DirectionDetection
from deepstream_pipeline.analytics.scene import Crowd, Scene
from deepstream_pipeline.analytics.watch import Said, now_there
from deepstream_pipeline.types import AnalyticsEvent, AnalyticsKind

_ON_DEGREES = 10.0  # an object that moves so goes on to, up to so much beyond the mode's angle


class DirectionWatch:
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

    def observe(self, scene: Scene) -> Said:
        """The rule holds for those who move so now."""
        self._moving.difference_update(gone.track_id for gone in scene.gone)
        crowd = scene.crowd(self._rule.class_ids)
        events: list[AnalyticsEvent] = []
        there = [
            number
            for number, track_id in enumerate(crowd.track_ids)
            if track_id >= 0 and self._moves(scene, crowd, number, events)
        ]
        return now_there(
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
