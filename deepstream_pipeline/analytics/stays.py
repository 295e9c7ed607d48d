"""Who is in a polygon, since when: what roi-filtering and dwell have in common."""

from dataclasses import dataclass

from deepstream_pipeline.analytics.geometry import Area, Scale, scaled
from deepstream_pipeline.analytics.rules import Polygon
from deepstream_pipeline.analytics.scene import Crowd, Gone, Scene


@dataclass(frozen=True, slots=True)
class Stay:
    """An object in the polygon. until_s: when it left, or was last seen; None while it is there."""

    track_id: int
    class_id: int
    since_s: float
    until_s: float | None = None


class Stays:
    """An object's foot decides. It is in or out by its first sighting; later it changes sides only when its foot is
    farther from the edge than it may tremble, so jitter neither enters nor leaves.
    """

    def __init__(self, polygon: Polygon, *, is_inverse: bool = False) -> None:
        self._polygon, self._is_inverse = polygon, is_inverse
        self._area = Area(scaled(polygon, (1.0, 1.0)))
        self._stays: dict[int, Stay | None] = {}  # None: known, and outside

    def __len__(self) -> int:
        return len(self._stays)

    def fit(self, scale: Scale) -> None:
        """The polygon in the source's pixels."""
        self._area = Area(scaled(self._polygon, scale))

    def leave(self, gone: list[Gone]) -> list[Stay]:
        """The stays that end with these."""
        found = [(self._stays.pop(one.track_id, None), one.pts_s) for one in gone]
        return [Stay(stay.track_id, stay.class_id, stay.since_s, until_s) for stay, until_s in found if stay]

    def move(self, scene: Scene, crowd: Crowd) -> tuple[list[bool], list[Stay]]:
        """Whether each of the crowd is inside, and the stays that began or ended with this frame."""
        inside: list[bool] = []
        changed: list[Stay] = []
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
        """Of one that is inside."""
        stay = self._stays[track_id]
        if stay is None:
            raise KeyError(track_id)
        return stay

    def _turn(self, scene: Scene, crowd: Crowd, number: int, is_inside: bool, changed: list[Stay]) -> Stay | None:
        """The object is new, or seems to have changed sides."""
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
