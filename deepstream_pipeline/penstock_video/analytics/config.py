"""Reads the analytics section of a configuration into rules. Invalid shapes are rejected with the fix."""

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pydantic import ValidationError

from penstock_video.analytics.registry import USER_RULES, known_kinds
from penstock_video.analytics.rules import (
    DirectionDetection,
    Dwell,
    LineCrossing,
    LineMode,
    Overcrowding,
    Point,
    Polygon,
    RoiFiltering,
    Rules,
    Segment,
    UserRule,
    section_of,
)
from penstock_video.errors import RuleRefused

_LEAST_AREA = 1.0  # square pixels
_LEAST_LENGTH = 1.0  # pixels


def refused(where: str, value: object, fix: str) -> RuleRefused:
    """The error for a key path, its value, and the fix."""
    text = repr(value)
    return RuleRefused(f"{where}: {text if len(text) <= 80 else text[:77] + '...'}: {fix}")


@dataclass(frozen=True, slots=True)
class PictureSize:
    """Size of the picture that points refer to; 0 × 0 for the source's own size."""

    width: float = 0.0
    height: float = 0.0

    def polygon(self, value: object, where: str) -> Polygon:
        """A polygon from [[x, y], ...] or "x;y;x;y;..."."""
        corners = self._points(value, where)
        if len(corners) < 3:
            raise refused(where, value, "a polygon has three corners or more, [[x, y], [x, y], [x, y]]")
        if _area(corners) < _LEAST_AREA:
            raise refused(where, value, "its corners lie on one line or in one place; it has no area")
        return corners

    def segment(self, value: object, where: str, *, may_leave: bool = False) -> Segment:
        """A segment from [[x, y], [x, y]] or "x;y;x;y". may_leave: for an arrow, which may lie outside the picture."""
        points = self._points(value, where, may_leave=may_leave)
        if len(points) != 2:
            raise refused(where, value, "this takes two points, [[x, y], [x, y]]")
        if math.dist(*points) < _LEAST_LENGTH:
            raise refused(where, value, "its two points are the same; put them apart")
        return points[0], points[1]

    def _points(self, value: object, where: str, *, may_leave: bool = False) -> tuple[Point, ...]:
        if isinstance(value, str):
            numbers = split_numbers(value, where)
            if len(numbers) % 2:
                raise refused(where, value, f"{len(numbers)} numbers are no pairs of x and y")
            pairs: list[object] = [list(pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
        elif isinstance(value, list | tuple):
            pairs = list(value)
        else:
            raise refused(where, value, 'points are written [[x, y], ...], or "x;y;x;y;..." as nvdsanalytics does')
        return tuple(self._point(pair, f"{where}[{number}]", may_leave=may_leave) for number, pair in enumerate(pairs))

    def _point(self, pair: object, where: str, *, may_leave: bool) -> Point:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise refused(where, pair, "a point is [x, y]")
        x, y = (number(value, where) for value in pair)
        is_inside = 0 <= x <= (self.width or math.inf) and 0 <= y <= (self.height or math.inf)
        if not may_leave and not is_inside:
            size = f"{self.width:g} x {self.height:g} picture" if self.width else "picture, whose corner is [0, 0]"
            raise refused(where, list(pair), f"that is outside the {size}; see config-width and config-height")
        return x, y


def number(value: object, where: str) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refused(where, value, "this takes a number")
    try:
        finite = float(value)
    except OverflowError:
        finite = math.inf
    if not math.isfinite(finite):
        raise refused(where, value, "this takes a finite number")
    return finite


def split_numbers(text: str, where: str) -> list[float]:
    """Of "1;2;3" or "1;2;3;", as nvdsanalytics writes lists."""
    parts = text.strip().removesuffix(";").split(";")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        raise refused(where, text, 'this takes numbers with ";" between them') from None
    return [number(one, where) for one in numbers]


def _area(corners: Polygon) -> float:
    """The area of the smallest rotated box around the corners: 0 if all lie on one line."""
    (left, top), farthest = corners[0], max(corners, key=lambda corner: math.dist(corners[0], corner))
    length = math.dist(corners[0], farthest)
    if not length:
        return 0.0
    across = (farthest[0] - left) / length, (farthest[1] - top) / length
    offsets = [across[0] * (y - top) - across[1] * (x - left) for x, y in corners]
    return length * (max(offsets) - min(offsets))


__all__ = ["rules_from", "section_of"]

R = TypeVar("R", UserRule, RoiFiltering, Overcrowding, LineCrossing, DirectionDetection, Dwell)

_SECTION = ("config-width", "config-height")
_LISTS: dict[str, tuple[str, ...]] = {
    "roi-filtering": ("name", "roi", "inverse-roi", "class-id"),
    "overcrowding": ("name", "roi", "object-threshold", "time-threshold", "class-id"),
    "line-crossing": ("name", "line", "direction", "mode", "extended", "class-id"),
    "direction-detection": ("name", "direction", "mode", "class-id"),
    "dwell": ("name", "roi", "time-threshold-s", "class-id"),
}
_NEED_TRACKS = ("line-crossing", "direction-detection", "dwell")
_MOST_NAME = 64


def rules_from(section: object, labels: Sequence[str], *, where: str = "analytics", has_tracker: bool = True) -> Rules:
    """The rules of a section from YAML or JSON; None for none. labels: by class_id; empty if unknown, then class-id
    takes numbers only. where: the section's key path. has_tracker: False refuses rules that follow objects. Raises
    RuleRefused."""
    if section is None:
        return Rules()
    keys = _mapping(section, where, (*_SECTION, *known_kinds()))
    width, height = (_size(keys.get(key, 0), f"{where}.{key}") for key in _SECTION)
    if bool(width) != bool(height):
        raise refused(where, dict(zip(_SECTION, (width, height), strict=True)), "give both, or none")
    reading = _Reading(keys, where, PictureSize(width, height), tuple(labels), has_tracker)
    return Rules(
        config_width=width,
        config_height=height,
        roi_filtering=reading.rules("roi-filtering", _roi),
        overcrowding=reading.rules("overcrowding", _overcrowding),
        line_crossing=reading.rules("line-crossing", _line),
        direction_detection=reading.rules("direction-detection", _direction),
        dwell=reading.rules("dwell", _dwell),
        users=tuple(rule for kind in USER_RULES for rule in reading.rules(kind, partial(_user_rule, kind))),
    )


@dataclass(frozen=True, slots=True)
class _Entry:
    """One rule of a list, and its position."""

    keys: Mapping[str, object]
    where: str
    canvas: PictureSize
    labels: tuple[str, ...]

    def path(self, key: str) -> str:
        return f"{self.where}.{key}"

    def has(self, key: str) -> bool:
        return self.keys.get(key) is not None

    def get(self, key: str) -> object:
        if not self.has(key):
            raise RuleRefused(f"{self.where}: {key} is missing")
        return self.keys[key]

    @property
    def name(self) -> str:
        value, where = self.get("name"), self.path("name")
        if not isinstance(value, str):
            raise refused(where, value, "a name is text; put it in quotes")
        if not value.strip() or len(value) > _MOST_NAME or not value.isprintable() or "/" in value:
            raise refused(where, value, f'a name has 1 to {_MOST_NAME} printable characters, and no "/"')
        return value

    @property
    def class_ids(self) -> tuple[int, ...]:
        value, where = self.keys.get("class-id"), self.path("class-id")
        if value is None:
            return ()
        if isinstance(value, str) and ";" in value:
            listed: list[object] = [int(one) for one in split_numbers(value, where)]
        else:
            listed = list(value) if isinstance(value, list | tuple) else [value]
        class_ids = sorted({self._class_id(one, where) for one in listed})
        return () if -1 in class_ids else tuple(class_ids)

    def _class_id(self, value: object, where: str) -> int:
        if isinstance(value, str):
            if value in self.labels:
                return self.labels.index(value)
            if not self.labels:
                raise refused(where, value, "the model's labels are not known here; give the class's number")
            raise refused(where, value, f"the model has no such class{_nearest(value, self.labels)}")
        if isinstance(value, bool) or not isinstance(value, int) or value < -1:
            raise refused(where, value, "a class is its number or its label, -1 stands for all")
        if self.labels and value >= len(self.labels):
            raise refused(where, value, f"the model has classes 0 to {len(self.labels) - 1}")
        return value

    def mode(self, default: LineMode) -> LineMode:
        value = self.keys.get("mode", default)
        if value not in tuple(LineMode):
            raise refused(self.path("mode"), value, f"modes are loose, balanced, strict{_nearest(value, LineMode)}")
        return LineMode(str(value))

    def is_true(self, key: str) -> bool:
        value = self.keys.get(key, False)
        if value not in (True, False):  # and so 0 and 1
            raise refused(self.path(key), value, "this takes true or false")
        return bool(value)

    def duration(self, key: str, default: float, unit: str) -> float:
        """A duration in the key's own unit."""
        value = number(self.keys.get(key, default), self.path(key))
        if value < 0:
            raise refused(self.path(key), value, f"this takes {unit}, 0 or more")
        return value


@dataclass(frozen=True, slots=True)
class _Reading:
    keys: Mapping[str, object]
    where: str
    canvas: PictureSize
    labels: tuple[str, ...]
    has_tracker: bool

    def rules(self, kind: str, read: Callable[[_Entry], R]) -> tuple[R, ...]:
        listed, where = self.keys.get(kind), f"{self.where}.{kind}"
        if listed is None:
            return ()
        if not isinstance(listed, list | tuple):
            raise refused(where, listed, "this takes a list of rules, each with a name")
        rules: list[R] = []
        for place, entry in enumerate(listed):
            at = f"{where}[{place}]"
            if not self.has_tracker and _needs_tracks(kind):
                raise RuleRefused(
                    f"{at}: {kind} needs tracks, and the tracker's type is none; "
                    "set tracker type bytetrack, or remove the rule"
                )
            if kind == "dwell":
                _refuse_milliseconds(entry, at)
            known = _LISTS.get(kind) or USER_RULES[kind].keys
            rule = read(_Entry(_mapping(entry, at, known), at, self.canvas, self.labels))
            if any(rule.name == other.name for other in rules):
                raise refused(f"{at}.name", rule.name, f"another rule of {kind} has that name; names tell them apart")
            rules.append(rule)
        return tuple(rules)


def _roi(entry: _Entry) -> RoiFiltering:
    polygon = entry.canvas.polygon(entry.get("roi"), entry.path("roi"))
    return RoiFiltering(entry.name, polygon, entry.is_true("inverse-roi"), entry.class_ids)


def _overcrowding(entry: _Entry) -> Overcrowding:
    threshold, where = entry.get("object-threshold"), entry.path("object-threshold")
    if isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 1:
        raise refused(where, threshold, "this takes a whole number, 1 or more")
    polygon = entry.canvas.polygon(entry.get("roi"), entry.path("roi"))
    threshold_s = entry.duration("time-threshold", 2000, "milliseconds") / 1000
    return Overcrowding(entry.name, polygon, threshold, threshold_s, entry.class_ids)


def _line(entry: _Entry) -> LineCrossing:
    line, direction = _line_and_direction(entry)
    if direction is not None and _is_parallel(line, direction):
        fix = "the direction runs along the line; nothing can cross it that way"
        raise refused(entry.path("direction"), direction, fix)
    mode, is_extended = entry.mode(LineMode.LOOSE), entry.is_true("extended")
    return LineCrossing(entry.name, line, direction, mode, is_extended, entry.class_ids)


def _line_and_direction(entry: _Entry) -> tuple[Segment, Segment | None]:
    value, where = entry.get("line"), entry.path("line")
    numbers = split_numbers(value, where) if isinstance(value, str) else []
    if len(numbers) == 8:
        if entry.has("direction"):
            raise refused(where, value, "eight numbers hold the direction, too; leave the key direction out")
        arrow, line = (";".join(map(repr, part)) for part in (numbers[:4], numbers[4:]))
        return entry.canvas.segment(line, where), entry.canvas.segment(arrow, where, may_leave=True)
    arrow_at = entry.path("direction")
    direction = (
        entry.canvas.segment(entry.get("direction"), arrow_at, may_leave=True) if entry.has("direction") else None
    )
    return entry.canvas.segment(value, where), direction


def _is_parallel(line: Segment, direction: Segment) -> bool:
    """Whether they are parallel within a degree."""
    (ax, ay), (bx, by) = ((end[0] - start[0], end[1] - start[1]) for start, end in (line, direction))
    return abs(ax * by - ay * bx) < 0.0175 * math.hypot(ax, ay) * math.hypot(bx, by)


def _direction(entry: _Entry) -> DirectionDetection:
    direction = entry.canvas.segment(entry.get("direction"), entry.path("direction"), may_leave=True)
    return DirectionDetection(entry.name, direction, entry.mode(LineMode.BALANCED), entry.class_ids)


def _dwell(entry: _Entry) -> Dwell:
    polygon = entry.canvas.polygon(entry.get("roi"), entry.path("roi"))
    return Dwell(entry.name, polygon, entry.duration("time-threshold-s", 0.0, "seconds"), entry.class_ids)


def _needs_tracks(kind: str) -> bool:
    user = USER_RULES.get(kind)
    return kind in _NEED_TRACKS if user is None else user.needs_tracks


def _user_rule(kind: str, entry: _Entry) -> UserRule:
    """A rule of a user's kind. Raises RuleRefused with the first fault that its model finds."""
    user = USER_RULES[kind]
    name = entry.name
    try:
        options = user.options.validate_python(dict(entry.keys))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = str(fault["loc"][0]) if fault["loc"] else ""
        if fault["type"] == "missing":
            raise RuleRefused(f"{entry.where}: {key} is missing") from None
        raise refused(entry.path(key) if key else entry.where, fault["input"], fault["msg"]) from None
    return UserRule(kind, name, json.dumps(entry.keys, sort_keys=True), partial(user.evaluator, options))


def _refuse_milliseconds(entry: object, where: str) -> None:
    """Refuses dwell's former key, with the value converted to the new unit."""
    if not isinstance(entry, Mapping) or "time-threshold" not in entry:
        return
    at, value = f"{where}.time-threshold", entry["time-threshold"]
    seconds = number(value, at) / 1000
    raise refused(at, value, f"dwell takes seconds; write time-threshold-s: {seconds:g}")


def _mapping(value: object, where: str, known: Sequence[str]) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise refused(where, value, f"this takes keys and values: {', '.join(known)}")
    for key in value:
        if key not in known:
            raise RuleRefused(f"{where}: there is no key {key!r}{_nearest(key, known)}; keys: {', '.join(known)}")
    return value


def _nearest(value: object, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(value).lower().replace("_", "-"), list(known), n=1)
    return f"; did you mean {str(near[0])!r}?" if near else ""


def _size(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 65_536:
        raise refused(where, value, "this takes a number of pixels, 0 for the source's own")
    return value
