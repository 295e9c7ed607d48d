"""Analytics rules as values, named as in DeepStream's nvdsanalytics, and their form in the configuration."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock_video.analytics.scene import RuleEvaluator

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
    """How long objects stay in the polygon: an event when it exceeds after_s, one when they leave. Ours."""

    name: str
    polygon: Polygon
    after_s: float = 0.0
    class_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class UserRule:
    """A rule of a user's kind. entry: its keys and values as JSON. new: makes its RuleEvaluator."""

    kind: str
    name: str
    entry: str
    new: Callable[[], "RuleEvaluator"] = field(compare=False, repr=False)


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
    users: tuple[UserRule, ...] = ()


NO_RULES = Rules()


Entry = dict[str, object]


def section_of(rules: Rules) -> dict[str, object]:
    """Plain dicts, lists, numbers and strings; rules_from makes equal rules of it. What is not there is left out."""
    section: dict[str, object] = {}
    if rules.config_width and rules.config_height:
        section |= {"config-width": rules.config_width, "config-height": rules.config_height}
    lists: dict[str, list[Entry]] = {
        "roi-filtering": [_roi(rule) for rule in rules.roi_filtering],
        "overcrowding": [_overcrowding(rule) for rule in rules.overcrowding],
        "line-crossing": [_line(rule) for rule in rules.line_crossing],
        "direction-detection": [_direction(rule) for rule in rules.direction_detection],
        "dwell": [_dwell(rule) for rule in rules.dwell],
    }
    for user in rules.users:
        lists.setdefault(user.kind, []).append(json.loads(user.entry))
    return section | {kind: entries for kind, entries in lists.items() if entries}


def _roi(rule: RoiFiltering) -> Entry:
    entry: Entry = {"name": rule.name, "roi": _points(rule.polygon)}
    if rule.is_inverse:
        entry["inverse-roi"] = True
    return entry | _classes(rule.class_ids)


def _overcrowding(rule: Overcrowding) -> Entry:
    entry: Entry = {"name": rule.name, "roi": _points(rule.polygon), "object-threshold": rule.object_threshold}
    return entry | {"time-threshold": _plain(round(rule.time_threshold_s * 1000, 6))} | _classes(rule.class_ids)


def _line(rule: LineCrossing) -> Entry:
    entry: Entry = {"name": rule.name, "line": _points(rule.line)}
    if rule.direction is not None:
        entry["direction"] = _points(rule.direction)
    return entry | {"mode": str(rule.mode), "extended": rule.is_extended} | _classes(rule.class_ids)


def _direction(rule: DirectionDetection) -> Entry:
    entry: Entry = {"name": rule.name, "direction": _points(rule.direction), "mode": str(rule.mode)}
    return entry | _classes(rule.class_ids)


def _dwell(rule: Dwell) -> Entry:
    entry: Entry = {"name": rule.name, "roi": _points(rule.polygon)}
    return entry | {"time-threshold-s": _plain(round(rule.after_s, 6))} | _classes(rule.class_ids)


def _classes(class_ids: tuple[int, ...]) -> Entry:
    return {"class-id": list(class_ids)} if class_ids else {}


def _points(points: tuple[Point, ...]) -> list[list[float]]:
    return [[_plain(x), _plain(y)] for x, y in points]


def _plain(value: float) -> float:
    """A whole number without its .0, as people write it."""
    return int(value) if value == int(value) else value
