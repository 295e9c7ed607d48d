"""Points, lines and polygons as a configuration writes them; what cannot be meant is refused, with the fix."""

import math
from dataclasses import dataclass

from deepstream_pipeline.analytics.rules import Point, Polygon, Segment
from deepstream_pipeline.errors import RuleRefused

_LEAST_AREA = 1.0  # square pixels
_LEAST_LENGTH = 1.0  # pixels


def refused(where: str, value: object, fix: str) -> RuleRefused:
    """Of a key path, what stands there, and what to write instead."""
    text = repr(value)
    return RuleRefused(f"{where}: {text if len(text) <= 80 else text[:77] + '...'}: {fix}")


@dataclass(frozen=True, slots=True)
class Canvas:
    """The picture that points lie in; 0 × 0 where its size is the source's own, not known yet."""

    width: float = 0.0
    height: float = 0.0

    def polygon(self, value: object, where: str) -> Polygon:
        """Of [[x, y], ...] or "x;y;x;y;..."."""
        corners = self._points(value, where)
        if len(corners) < 3:
            raise refused(where, value, "a polygon has three corners or more, [[x, y], [x, y], [x, y]]")
        if _area(corners) < _LEAST_AREA:
            raise refused(where, value, "its corners lie on one line or in one place; it has no area")
        return corners

    def segment(self, value: object, where: str, *, may_leave: bool = False) -> Segment:
        """Of [[x, y], [x, y]] or "x;y;x;y". may_leave: for an arrow, whose place says nothing."""
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
    """A finite one."""
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
    """Of the smallest box around them that may be turned: none where all lie on one line."""
    (left, top), farthest = corners[0], max(corners, key=lambda corner: math.dist(corners[0], corner))
    length = math.dist(corners[0], farthest)
    if not length:
        return 0.0
    across = (farthest[0] - left) / length, (farthest[1] - top) / length
    offsets = [across[0] * (y - top) - across[1] * (x - left) for x, y in corners]
    return length * (max(offsets) - min(offsets))
