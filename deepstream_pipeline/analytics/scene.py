"""What every rule sees of a frame: who is there, where, who was there before, and who is gone for good."""

import math
from collections import deque
from dataclasses import dataclass, field

from deepstream_pipeline.analytics.geometry import Array, places
from deepstream_pipeline.types import AnalyticsEvent, AnalyticsKind, Frame, Tracks

LOST_AFTER_S = 5.0  # unseen for so long an object is gone; found again later, it is there for the first time
TRAIL_S = 1.0  # the time over which a motion is measured
MOST_OBJECTS = 10_000  # remembered at once; of more, those not seen for longest are taken for gone

Trail = deque[tuple[float, float, float]]


@dataclass(slots=True)
class Sighting:
    """An object's last sighting. trail: (pts_s, x, y) of its foot, the first of them TRAIL_S old or a little older."""

    class_id: int
    pts_s: float
    trail: Trail


@dataclass(frozen=True, slots=True)
class Gone:
    """An object that is taken for gone. pts_s: when it was last seen."""

    track_id: int
    class_id: int
    pts_s: float


@dataclass(frozen=True, slots=True)
class Crowd:
    """Some of a frame's objects; rows: which of its tracks. feet: (n, 2). slack: how uncertain each foot is, pixels."""

    rows: list[int]
    track_ids: list[int]
    class_ids: list[int]
    feet: Array
    slack: list[float]


@dataclass(slots=True)
class Scene:
    """A frame's objects. is_cut: what is seen began anew with it, and everybody from before is gone."""

    frame: Frame
    pts_s: float
    everybody: Crowd
    gone: list[Gone]
    sightings: dict[int, Sighting]
    is_cut: bool
    _crowds: dict[tuple[int, ...], Crowd] = field(default_factory=dict)

    def crowd(self, class_ids: tuple[int, ...]) -> Crowd:
        """Those of the classes, everybody where none is named."""
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
        """By how much its foot has moved in the last second, or since it is known."""
        trail = self.sightings[track_id].trail
        (_, from_x, from_y), (_, to_x, to_y) = trail[0], trail[-1]
        return to_x - from_x, to_y - from_y

    def event(
        self, kind: AnalyticsKind, rule: str, value: float, *, track_id: int | None = None, class_id: int | None = None
    ) -> AnalyticsEvent:
        """With this frame."""
        frame = self.frame
        return AnalyticsEvent(kind, frame.source_id, frame.frame_num, self.pts_s, track_id, rule, value, class_id)


class Presence:
    """Who was seen lately. Bounded: by LOST_AFTER_S, by a cut, and by MOST_OBJECTS."""

    def __init__(self) -> None:
        self._seen: dict[int, Sighting] = {}  # who was not seen for longest comes first
        self._segment: int | None = None

    def __len__(self) -> int:
        return len(self._seen)

    def see(self, frame: Frame, tracks: Tracks) -> Scene:
        """The frame as the rules see it. Tracks without an identity (track_id below 0) are there, but not followed."""
        pts_s = round(frame.pts_s, 6)
        is_cut = self._segment not in (None, frame.segment)
        self._segment = frame.segment
        detections = tracks.detections
        feet, slack = places(detections.xyxy)
        track_ids, class_ids = tracks.track_id.tolist(), detections.class_id.tolist()
        gone = self._leave(math.inf if is_cut else pts_s - LOST_AFTER_S)
        for track_id, class_id, (x, y) in zip(track_ids, class_ids, feet.tolist(), strict=True):
            if track_id >= 0:
                self._follow(track_id, class_id, (pts_s, x, y))
        everybody = Crowd(list(range(len(track_ids))), track_ids, class_ids, feet, slack.tolist())
        return Scene(frame, pts_s, everybody, gone, self._seen, is_cut)

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
