"""A tracker: the nearest centre of the last frame gives the ID. `tracker: {type: nearest_tracker:NearestTracker}`"""

import numpy as np
from pydantic import BaseModel, Field

from penstock_video.types import Detections, Frame, Tracks, no_tracks


class NearestTracker:
    """Tracks of one source."""

    class Options(BaseModel):
        max_distance: float = Field(default=50, alias="max-distance", gt=0, le=10_000)  # pixels

    def __init__(self, options: Options) -> None:
        self._max_distance, self._next_id = options.max_distance, 1
        self._last: dict[int, tuple[np.ndarray, int]] = {}  # by ID: centre, age in frames

    def update(self, frame: Frame, detections: Detections) -> Tracks:
        found: dict[int, tuple[np.ndarray, int]] = {}
        for centre in (detections.xyxy[:, :2] + detections.xyxy[:, 2:]) / 2:
            ways = {one: float(np.linalg.norm(at - centre)) for one, (at, _) in self._last.items() if one not in found}
            nearest = min(ways, key=ways.__getitem__, default=0)
            if not nearest or ways[nearest] > self._max_distance:
                nearest, self._next_id = self._next_id, self._next_id + 1
            found[nearest] = centre, self._last.get(nearest, (centre, 0))[1] + 1
        self._last = found
        return Tracks(
            detections, np.array(list(found), np.int64), np.array([age for _, age in found.values()], np.int64)
        )

    def coast(self, frame: Frame) -> Tracks:
        return no_tracks()

    def reset(self) -> None:
        self._last = {}
