"""Draws the rules of a source: zones, lines, directions, their names with counts, and the panel of counters."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.vision.lettering import drawable
from penstock.vision.palette import ALARM, INK, WHITE, Color, color_of
from penstock_video.sinks.canvas import Canvas, LabelLayout, Pixel
from penstock_video.types import CrossingDirection, FrameResult, counter_name

FLASH_S = 1.0  # a rule that fired is highlighted for this long
_ZONE_COLORS = {"roi-filtering": color_of(0), "overcrowding": color_of(4), "dwell": color_of(6)}
_TINT, _ALARM_TINT = 0.15, 0.3
_LINE, _DIRECTION = "line-crossing", "direction-detection"
_PANEL_SHARE = 0.5  # of the picture's width and height at most
_MAX_PANEL_CLASSES = 4
_BETWEEN = "     "  # two counters in a line
_MAX_NAME = 24  # characters of a rule in the picture

Point = tuple[float, float]


class NamedRule(Protocol):
    """A rule."""

    @property
    def name(self) -> str: ...


class NamedRegion(NamedRule, Protocol):
    """A rule with a polygon."""

    @property
    def polygon(self) -> Sequence[Point]: ...


class NamedLine(NamedRule, Protocol):
    """A rule with a line; direction: from, to, or None if it counts both ways."""

    @property
    def line(self) -> tuple[Point, Point]: ...
    @property
    def direction(self) -> tuple[Point, Point] | None: ...


class NamedDirection(NamedRule, Protocol):
    """A rule with a direction: from, to."""

    @property
    def direction(self) -> tuple[Point, Point]: ...


class RuleShapes(Protocol):
    """The shapes of analytics.rules.Rules. scale: factors from a shape's points to pixels of a picture."""

    def scale(self, points: Sequence[Point], width: int, height: int) -> tuple[float, float]: ...
    @property
    def roi_filtering(self) -> Sequence[NamedRegion]: ...
    @property
    def overcrowding(self) -> Sequence[NamedRegion]: ...
    @property
    def dwell(self) -> Sequence[NamedRegion]: ...
    @property
    def line_crossing(self) -> Sequence[NamedLine]: ...
    @property
    def direction_detection(self) -> Sequence[NamedDirection]: ...


@dataclass(frozen=True, slots=True)
class Sheet:
    """scale: pixels of the canvas per pixel of the source."""

    canvas: Canvas
    scale: float
    result: FrameResult

    def pixel(self, x: float, y: float) -> Pixel:
        return self.canvas.pixel(x * self.scale, y * self.scale)

    def of_shape(self, rules: RuleShapes, points: Sequence[Point]) -> list[Pixel]:
        """The pixels of a shape of the rules."""
        across, down = rules.scale(points, self.result.frame.width, self.result.frame.height)
        return [self.pixel(x * across, y * down) for x, y in points]


class RuleNames:
    """Names of rules with their counts, inside the picture. Names at one place are listed below each other."""

    def __init__(self, canvas: Canvas) -> None:
        self._canvas = canvas
        self._placed: list[tuple[str, Pixel, Color, Pixel]] = []

    def add(self, text: str, at: Pixel, color: Color, *, is_centred: bool = False) -> None:
        """at: the upper left corner, or the centre, if there is room."""
        lettering = self._canvas.lettering
        text = lettering.fitted(text, self._canvas.width)
        width, height = lettering.width(text), lettering.height
        left, top = (at[0] - width // 2, at[1] - height // 2) if is_centred else at
        left = max(0, min(left, self._canvas.width - width))
        top = max(0, min(top, self._canvas.height - height))
        taken = [y for _, (x, y), _, (right, _) in self._placed if x < left + width and left < right]
        beside = (y + step for y in taken for step in (height, -height))
        inside = (y for y in beside if 0 <= y <= self._canvas.height - height)
        rows = [top, *sorted(inside, key=lambda y: (y < top, abs(y - top)))]
        top = next((row for row in rows if all(abs(row - y) >= height for y in taken)), top)
        self._placed.append((text, (left, top), color, (left + width, top + height)))

    def reserve(self, at: Pixel, width: int, rows: int) -> None:
        """No name is placed on these rows of text."""
        for row in range(rows):
            top = at[1] + row * self._canvas.lettering.height
            self._placed.append(("", (at[0], top), INK, (at[0] + width, top)))

    def keep_free(self, places: LabelLayout) -> None:
        """Reserves the areas of these names in the label layout."""
        for _, at, _, (right, _) in self._placed:
            places.keep_free(at, right - at[0])

    def draw(self) -> None:
        """Draws all names on top."""
        for text, at, color, (right, _) in self._placed:
            if text:
                self._canvas.plate(text, at, color, width=right - at[0])


def draw_rules(sheet: Sheet, rules: RuleShapes, flashes: Mapping[str, float], names: RuleNames) -> None:
    """Draws the shapes of the rules, and adds their names. flashes: when each KIND/RULE fired, in pts."""
    for kind, zones in _zones(rules):
        for zone in zones:
            key = f"{kind}/{zone.name}"
            points = sheet.of_shape(rules, zone.polygon)
            is_flashing = _is_flashing(key, sheet, flashes)
            color = ALARM if is_flashing else _ZONE_COLORS[kind]
            sheet.canvas.tint(points, color, _ALARM_TINT if is_flashing else _TINT)
            sheet.canvas.polyline(points, color, is_closed=True)
            names.add(_counted(key, zone.name, sheet), max(points, key=lambda point: point[1]), color)
    for line in rules.line_crossing:
        _draw_line(sheet, rules, line, flashes, names)
    for rule in rules.direction_detection:
        key = f"{_DIRECTION}/{rule.name}"
        color = ALARM if _is_flashing(key, sheet, flashes) else WHITE
        tail, head = sheet.of_shape(rules, rule.direction)
        sheet.canvas.arrow(tail, head, color)
        names.add(_counted(key, rule.name, sheet), head, color)


def _zones(rules: RuleShapes) -> Iterator[tuple[str, Sequence[NamedRegion]]]:
    yield from zip(_ZONE_COLORS, (rules.roi_filtering, rules.overcrowding, rules.dwell), strict=True)


def _draw_line(
    sheet: Sheet, rules: RuleShapes, line: NamedLine, flashes: Mapping[str, float], names: RuleNames
) -> None:
    """With an arrow to the side that counts; a line that counts both ways has a count on each side of it."""
    canvas, key = sheet.canvas, f"{_LINE}/{line.name}"
    color = ALARM if _is_flashing(key, sheet, flashes) else WHITE
    begin, end = sheet.of_shape(rules, line.line)
    middle = (begin[0] + end[0]) // 2, (begin[1] + end[1]) // 2
    canvas.polyline([begin, end], color, width_px=canvas.line_px * 2)
    if line.direction is not None:
        tail, head = sheet.of_shape(rules, line.direction)
        canvas.arrow(tail, head, color)
        gap = canvas.lettering.text_px // 2
        names.add(_counted(key, line.name, sheet), (middle[0] + gap, middle[1] + gap), color)
        return
    inward = _right_of(begin, end)
    length, height = canvas.lettering.text_px * 2, canvas.lettering.height
    canvas.arrow(middle, _moved(middle, inward, length), color)
    into, out_of = (sheet.result.analytics.counts.get(counter_name(key, way), 0) for way in CrossingDirection)
    for text, distance in ((f"{_short(line.name)}  in {into}", length + height), (f"out {out_of}", -height)):
        half = canvas.lettering.width(text) / 2 * abs(inward[0])  # of the plate, beyond the end of the arrow
        names.add(text, _moved(middle, inward, distance + math.copysign(half, distance)), color, is_centred=True)


def _right_of(begin: Pixel, end: Pixel) -> Point:
    """The direction to the right of the way from begin to end, as seen in the picture: `in`."""
    length = math.dist(begin, end) or 1.0
    return (begin[1] - end[1]) / length, (end[0] - begin[0]) / length


def _moved(at: Pixel, direction: Point, distance: float) -> Pixel:
    return round(at[0] + direction[0] * distance), round(at[1] + direction[1] * distance)


def _is_flashing(key: str, sheet: Sheet, flashes: Mapping[str, float]) -> bool:
    at = flashes.get(key)
    return at is not None and 0 <= sheet.result.frame.pts_s - at < FLASH_S


def _counted(key: str, name: str, sheet: Sheet) -> str:
    count = sheet.result.analytics.counts.get(key)
    return _short(name) if count is None else f"{_short(name)}  {count}"


def _short(name: str) -> str:
    name = drawable(name)
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 1]}…"


class Panel:
    """Lines of text in the upper left corner, on one dark plate."""

    def __init__(self, canvas: Canvas, title: Sequence[str], counters: Sequence[str]) -> None:
        """title: a line each. counters: as many in a line as fit. Lines without room are left out."""
        self._canvas = canvas
        lettering = canvas.lettering
        rows = max(1, int(canvas.height * _PANEL_SHARE) // lettering.height)
        most_px = min(canvas.width, max(round(canvas.width * _PANEL_SHARE), 16 * lettering.text_px))
        lines = [*title, *_packed(counters, lambda line: lettering.width(line) <= most_px)]
        self.lines = [lettering.fitted(line, most_px) for line in lines[:rows]]
        self.width = max(map(lettering.width, self.lines), default=0)

    def draw(self) -> None:
        for row, line in enumerate(self.lines):
            at = 0, row * self._canvas.lettering.height
            self._canvas.plate(line, at, INK, width=self.width, strength=0.7)


def _packed(items: Sequence[str], fits: Callable[[str], bool]) -> list[str]:
    """Lines of the items, as many in each as fit."""
    lines: list[str] = []
    for item in items:
        longer = f"{lines[-1]}{_BETWEEN}{item}" if lines else item
        if lines and fits(longer):
            lines[-1] = longer
        else:
            lines.append(item)
    return lines


def counters_of(result: FrameResult, rules: RuleShapes | None) -> list[str]:
    """The counters for the panel: objects by class, then each rule."""
    present = Counter(result.tracks.detections.class_id.tolist()).most_common(_MAX_PANEL_CLASSES)
    texts = [f"{_short(result.label(class_id))} {count}" for class_id, count in present]
    if rules is None:
        return texts
    counts = result.analytics.counts
    for line in rules.line_crossing:
        key, name = f"{_LINE}/{line.name}", _short(line.name)
        if line.direction is None:
            ways = (f"{way} {counts.get(counter_name(key, way), 0)}" for way in CrossingDirection)
            texts.append("  ".join((name, *ways)))
        else:
            texts.append(f"{name}  {counts.get(key, 0)}")
    groups: tuple[tuple[str, Sequence[NamedRule]], ...] = (*_zones(rules), (_DIRECTION, rules.direction_detection))
    return texts + [
        f"{_short(rule.name)}  {counts.get(f'{kind}/{rule.name}', 0)}" for kind, group in groups for rule in group
    ]
