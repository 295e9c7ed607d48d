"""Analytics rules as values, named as in DeepStream's nvdsanalytics, and how each key of the configuration is read."""

import difflib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, TypeAdapter, ValidationInfo

Point = tuple[float, float]
Polygon = tuple[Point, ...]
Segment = tuple[Point, Point]

_LEAST_AREA = 1.0  # square pixels
_LEAST_LENGTH = 1.0  # pixels
_LEAST_RELATIVE = 0.001  # of the picture, for a relative length; its square for an area
_MOST_NAME = 64


class Unfit(ValueError):
    """A value of the configuration is invalid. fix: what to write instead. at: path of the value below its key."""

    def __init__(self, value: object, fix: str, at: str = "") -> None:
        super().__init__(fix)
        self.value, self.fix, self.at = value, fix, at


@dataclass(frozen=True, slots=True)
class Reading:
    """Context for reading values. width, height: of the picture, 0 for the source's own. labels: by class_id."""

    width: float = 0.0
    height: float = 0.0
    labels: tuple[str, ...] = ()


class LineMode(StrEnum):
    """How closely an object's motion must follow a direction: nvdsanalytics' modes, with our angles.

    The motion is that of the last second. loose: up to 90 degrees off: any crossing to the direction's side of a line,
    anything that does not move backwards. balanced: up to 60. strict: up to 30.
    """

    LOOSE = "loose"
    BALANCED = "balanced"
    STRICT = "strict"


def finite(value: object, at: str = "") -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unfit(value, "this takes a number", at)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise Unfit(value, "this takes a finite number", at)
    return number


def split_numbers(text: str) -> list[float]:
    """The numbers of "1;2;3" or "1;2;3;", as nvdsanalytics writes lists."""
    try:
        numbers = [float(part) for part in text.strip().removesuffix(";").split(";")]
    except ValueError:
        raise Unfit(text, 'this takes numbers with ";" between them') from None
    return [finite(one) for one in numbers]


def nearest(value: object, known: Iterable[str]) -> str:
    """The closest known word, as the end of a sentence; empty if none is close."""
    near = difflib.get_close_matches(str(value).lower().replace("_", "-"), list(known), n=1)
    return f"; did you mean {str(near[0])!r}?" if near else ""


def is_relative(points: Sequence[Point]) -> bool:
    """Whether all coordinates are from 0 to 1: then they are shares of the picture's width and height, not pixels."""
    return bool(points) and all(0 <= x <= 1 and 0 <= y <= 1 for x, y in points)


def _pairs(value: object) -> tuple[Point, ...]:
    """Pairs of numbers from [[x, y], ...] or "x;y;x;y;..."."""
    if isinstance(value, str):
        numbers = split_numbers(value)
        if len(numbers) % 2:
            raise Unfit(value, f"{len(numbers)} numbers are no pairs of x and y")
        value = list(zip(numbers[::2], numbers[1::2], strict=True))
    if not isinstance(value, list | tuple):
        raise Unfit(value, 'points are written [[x, y], ...], or "x;y;x;y;..." as nvdsanalytics does')
    points = []
    for place, pair in enumerate(value):
        at = f"[{place}]"
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise Unfit(pair, "a point is [x, y]", at)
        x, y = (finite(one, at) for one in pair)
        points.append((x, y))
    return tuple(points)


def _points(value: object, reading: Reading, *, may_leave: bool = False) -> tuple[Point, ...]:
    """Points of the picture, all relative or all in pixels. may_leave: pixels may lie outside the picture."""
    points = _pairs(value)
    for place, (x, y) in enumerate(points):
        is_inside = 0 <= x <= (reading.width or math.inf) and 0 <= y <= (reading.height or math.inf)
        if not may_leave and not is_inside:
            size = (
                f"{reading.width:g} x {reading.height:g} picture"
                if reading.width
                else "picture, whose corner is [0, 0]"
            )
            fix = f"that is outside the {size}; see config-width and config-height"
            raise Unfit([_plain(x), _plain(y)], fix, f"[{place}]")
    shares = [one for point in points for one in point if 0 < one < 1]
    if shares and not is_relative(points):
        fix = "coordinates are either all pixels, or all from 0 to 1 of the picture's width and height"
        raise Unfit(shares[0], fix)
    return points


def _polygon(value: object, info: ValidationInfo[Reading]) -> Polygon:
    corners = _points(value, info.context)
    if len(corners) < 3:
        raise Unfit(value, "a polygon has three corners or more, [[x, y], [x, y], [x, y]]")
    if _area(corners) < (_LEAST_RELATIVE**2 if is_relative(corners) else _LEAST_AREA):
        raise Unfit(value, "its corners lie on one line or in one place; it has no area")
    return corners


def _quad(value: object, corners: tuple[Point, ...]) -> Polygon:
    """Four corners of a convex area, in their order around it."""
    sides = [
        (corners[number - 1], corners[number], corners[(number + 1) % len(corners)]) for number in range(len(corners))
    ]
    turns = [(bx - ax) * (cy - by) - (by - ay) * (cx - bx) for (ax, ay), (bx, by), (cx, cy) in sides]
    if len(corners) != 4 or not (min(turns) > 0 or max(turns) < 0):
        raise Unfit(value, "this takes four points, in their order around an area, no three of them on a line")
    return corners


def _area(corners: Polygon) -> float:
    """The area of the smallest rotated box around the corners: 0 if all lie on one line."""
    (left, top), farthest = corners[0], max(corners, key=lambda corner: math.dist(corners[0], corner))
    length = math.dist(corners[0], farthest)
    if not length:
        return 0.0
    across = (farthest[0] - left) / length, (farthest[1] - top) / length
    offsets = [across[0] * (y - top) - across[1] * (x - left) for x, y in corners]
    return length * (max(offsets) - min(offsets))


def _picture_quad(value: object, info: ValidationInfo[Reading]) -> Polygon:
    return _quad(value, _points(value, info.context))


def _metres_per_pixel(value: object) -> float:
    if not 0 < (number := finite(value)) <= 1000:
        raise Unfit(value, "this takes metres, above 0")
    return number


def _segment(value: object, info: ValidationInfo[Reading], *, may_leave: bool = False) -> Segment:
    points = _points(value, info.context, may_leave=may_leave)
    if len(points) != 2:
        raise Unfit(value, "this takes two points, [[x, y], [x, y]]")
    if math.dist(*points) < (_LEAST_RELATIVE if is_relative(points) else _LEAST_LENGTH):
        raise Unfit(value, "its two points are the same; put them apart")
    return points[0], points[1]


def _arrow(value: object, info: ValidationInfo[Reading]) -> Segment:
    return _segment(value, info, may_leave=True)


def rule_name(value: object) -> str:
    """A valid name of a rule, of any kind."""
    if not isinstance(value, str):
        raise Unfit(value, "a name is text; put it in quotes")
    if not value.strip() or len(value) > _MOST_NAME or not value.isprintable() or "/" in value:
        raise Unfit(value, f'a name has 1 to {_MOST_NAME} printable characters, and no "/"')
    return value


def _class_ids(value: object, info: ValidationInfo[Reading]) -> tuple[int, ...]:
    if isinstance(value, str) and ";" in value:
        listed: Sequence[object] = [int(one) for one in split_numbers(value)]
    else:
        listed = value if isinstance(value, list | tuple) else [value]
    class_ids = sorted({_class_id(one, info.context.labels) for one in listed})
    return () if -1 in class_ids else tuple(class_ids)


def _class_id(value: object, labels: tuple[str, ...]) -> int:
    if isinstance(value, str):
        if value in labels:
            return labels.index(value)
        if not labels:
            raise Unfit(value, "the model's labels are not known here; give the class's number")
        raise Unfit(value, f"the model has no such class{nearest(value, labels)}")
    if isinstance(value, bool) or not isinstance(value, int) or value < -1:
        raise Unfit(value, "a class is its number or its label, -1 stands for all")
    if labels and value >= len(labels):
        raise Unfit(value, f"the model has classes 0 to {len(labels) - 1}")
    return value


def _mode(value: object) -> LineMode:
    if value not in tuple(LineMode):
        raise Unfit(value, f"modes are loose, balanced, strict{nearest(value, LineMode)}")
    return LineMode(str(value))


def _is_true(value: object) -> bool:
    if value not in (True, False):  # and so 0 and 1
        raise Unfit(value, "this takes true or false")
    return bool(value)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Unfit(value, "this takes a whole number, 1 or more")
    return value


def _seconds(value: object, unit: str, in_a_second: int) -> float:
    number = finite(value)
    if number < 0:
        raise Unfit(number, f"this takes {unit}, 0 or more")
    return number / in_a_second


def _plain(value: float) -> float:
    """A whole number without its .0, as people write it."""
    return int(value) if value == int(value) else value


_AS_PAIRS = PlainSerializer(lambda points: [[_plain(x), _plain(y)] for x, y in points])
_Name = Annotated[str, BeforeValidator(rule_name)]
_Region = Annotated[Polygon, BeforeValidator(_polygon), _AS_PAIRS, Field(alias="roi")]
_Direction = Annotated[Segment, BeforeValidator(_arrow), _AS_PAIRS]
_Mode = Annotated[LineMode, BeforeValidator(_mode)]
_Flag = BeforeValidator(_is_true)
_ClassIds = Annotated[tuple[int, ...], BeforeValidator(_class_ids), Field(alias="class-id")]
_Milliseconds = Annotated[
    float,
    BeforeValidator(lambda value: _seconds(value, "milliseconds", 1000)),
    PlainSerializer(lambda seconds: _plain(round(seconds * 1000, 6))),
]
_Seconds = Annotated[
    float,
    BeforeValidator(lambda value: _seconds(value, "seconds", 1)),
    PlainSerializer(lambda seconds: _plain(round(seconds, 6))),
]


@dataclass(frozen=True, slots=True)
class RoiFiltering:
    """Objects whose foot is inside the polygon (is_inverse: outside)."""

    name: _Name
    polygon: _Region
    is_inverse: Annotated[bool, _Flag, Field(alias="inverse-roi")] = False
    class_ids: _ClassIds = ()


@dataclass(frozen=True, slots=True)
class Overcrowding:
    """object_threshold objects or more in the polygon, for time_threshold_s. Breaks of under 0.5 s do not end it."""

    name: _Name
    polygon: _Region
    object_threshold: Annotated[int, BeforeValidator(_count), Field(alias="object-threshold")]
    time_threshold_s: Annotated[_Milliseconds, Field(alias="time-threshold")] = 2.0
    class_ids: _ClassIds = ()


@dataclass(frozen=True, slots=True)
class LineCrossing:
    """Objects that cross the line the way that direction points. None: both ways, whatever the mode, with a counter for
    each: in is from left to right, as seen in the picture by who looks from the line's first point to its second.

    is_extended: it has no ends.
    """

    name: _Name
    line: Annotated[Segment, BeforeValidator(_segment), _AS_PAIRS]
    direction: _Direction | None = None
    mode: _Mode = LineMode.LOOSE
    is_extended: Annotated[bool, _Flag, Field(alias="extended")] = False
    class_ids: _ClassIds = ()


@dataclass(frozen=True, slots=True)
class DirectionDetection:
    """Objects that move the way that direction points."""

    name: _Name
    direction: _Direction
    mode: _Mode = LineMode.BALANCED
    class_ids: _ClassIds = ()


@dataclass(frozen=True, slots=True)
class Dwell:
    """How long objects stay in the polygon: an event when it exceeds after_s, one when they leave. Ours."""

    name: _Name
    polygon: _Region
    after_s: Annotated[_Seconds, Field(alias="time-threshold-s")] = 0.0
    class_ids: _ClassIds = ()


@dataclass(frozen=True, slots=True)
class Ground:
    """Scale of the picture, for the speed of objects; ours. picture, metres: four points on the ground, and where they
    are on it in metres, in the same order. Or metres_per_pixel, for a camera that looks straight down."""

    picture: Annotated[Polygon, BeforeValidator(_picture_quad), _AS_PAIRS] = ()
    metres: Annotated[Polygon, BeforeValidator(lambda value: _quad(value, _pairs(value))), _AS_PAIRS] = ()
    metres_per_pixel: Annotated[float, BeforeValidator(_metres_per_pixel), Field(alias="metres-per-pixel")] = 0.0


GROUND: TypeAdapter[Ground] = TypeAdapter(Ground)


@dataclass(frozen=True, slots=True)
class UserRule:
    """A rule of a user's kind. entry: its keys and values as JSON. new: makes its evaluator (scene.RuleEvaluator)."""

    kind: str
    name: str
    entry: str
    new: Callable[[], Any] = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Rules:
    """A source's analytics section. Points are pixels of config_width x config_height, or of the source if they are 0;
    or relative (is_relative)."""

    config_width: int = 0
    config_height: int = 0
    roi_filtering: tuple[RoiFiltering, ...] = ()
    overcrowding: tuple[Overcrowding, ...] = ()
    line_crossing: tuple[LineCrossing, ...] = ()
    direction_detection: tuple[DirectionDetection, ...] = ()
    dwell: tuple[Dwell, ...] = ()
    users: tuple[UserRule, ...] = ()
    ground: Ground | None = None

    def scale(self, points: Sequence[Point], width: int, height: int) -> tuple[float, float]:
        """Factors from the points of a rule to the pixels of a picture of that size."""
        if is_relative(points):
            return float(width), float(height)
        return width / (self.config_width or width), height / (self.config_height or height)

    def of(self, kind: str) -> tuple[Any, ...]:
        """The rules of a built-in kind."""
        rules: tuple[Any, ...] = getattr(self, kind.replace("-", "_"))
        return rules


NO_RULES = Rules()
MODELS: dict[str, TypeAdapter[Any]] = {  # by kind
    "roi-filtering": TypeAdapter(RoiFiltering),
    "overcrowding": TypeAdapter(Overcrowding),
    "line-crossing": TypeAdapter(LineCrossing),
    "direction-detection": TypeAdapter(DirectionDetection),
    "dwell": TypeAdapter(Dwell),
}


def section_of(rules: Rules) -> dict[str, object]:
    """Plain dicts, lists, numbers and strings; rules_from makes equal rules of it. What is not there is left out."""
    section: dict[str, object] = {}
    if rules.config_width and rules.config_height:
        section |= {"config-width": rules.config_width, "config-height": rules.config_height}
    if rules.ground is not None:
        section["ground"] = GROUND.dump_python(rules.ground, mode="json", by_alias=True, exclude_defaults=True)
    lists: dict[str, list[dict[str, object]]] = {}
    for kind, model in MODELS.items():
        lists[kind] = [_entry(model, rule) for rule in rules.of(kind)]
    for user in rules.users:
        lists.setdefault(user.kind, []).append(json.loads(user.entry))
    return section | {kind: entries for kind, entries in lists.items() if entries}


def _entry(model: TypeAdapter[Any], rule: object) -> dict[str, object]:
    entry: dict[str, object] = model.dump_python(rule, mode="json", by_alias=True, exclude_none=True)
    if not entry["class-id"]:
        del entry["class-id"]
    if entry.get("inverse-roi") is False:
        del entry["inverse-roi"]
    return entry
