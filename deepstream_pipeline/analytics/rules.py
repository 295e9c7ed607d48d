"""The rules that tracks are held against, named as DeepStream's nvdsanalytics names them.

Points are in pixels of a picture of config_width × config_height, scaled to the source's own size; (0, 0) for pixels
of the source itself. class_ids: whom a rule is about; empty for everybody. A rule has a name of its own in its kind.
"""

from dataclasses import dataclass
from enum import StrEnum

Point = tuple[float, float]
Polygon = tuple[Point, ...]
Segment = tuple[Point, Point]


class LineMode(StrEnum):
    """How closely an object's motion must follow a direction: nvdsanalytics' modes, with our angles.

    The motion is that of the last second. loose: up to 90 degrees off: any crossing to the direction's side of a line,
    anything that does not move backwards. balanced: up to 60. strict: up to 30.
    """

    LOOSE = "loose"
    BALANCED = "balanced"
    STRICT = "strict"


@dataclass(frozen=True, slots=True)
class RoiFiltering:
    """Objects whose foot is inside the polygon (is_inverse: outside)."""

    name: str
    polygon: Polygon
    is_inverse: bool = False
    class_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Overcrowding:
    """object_threshold objects or more in the polygon, for time_threshold_s. Breaks of under 0.5 s do not end it."""

    name: str
    polygon: Polygon
    object_threshold: int
    time_threshold_s: float = 2.0
    class_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LineCrossing:
    """Objects that cross the line the way that direction points; None: either way, whatever the mode.

    is_extended: it has no ends.
    """

    name: str
    line: Segment
    direction: Segment | None = None
    mode: LineMode = LineMode.LOOSE
    is_extended: bool = False
    class_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DirectionDetection:
    """Objects that move the way that direction points."""

    name: str
    direction: Segment
    mode: LineMode = LineMode.BALANCED
    class_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Dwell:
    """How long objects stay in the polygon; told when it is over after_s, and when they leave. Ours."""

    name: str
    polygon: Polygon
    after_s: float = 0.0
    class_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Rules:
    """A source's analytics section."""

    config_width: int = 0
    config_height: int = 0
    roi_filtering: tuple[RoiFiltering, ...] = ()
    overcrowding: tuple[Overcrowding, ...] = ()
    line_crossing: tuple[LineCrossing, ...] = ()
    direction_detection: tuple[DirectionDetection, ...] = ()
    dwell: tuple[Dwell, ...] = ()


NO_RULES = Rules()
