"""Positions of points relative to polygons and lines. Arrays are float64, coordinates in pixels.

Borders: points on the edges and corners of a polygon (within a thousandth of a pixel) are inside it. So a polygon
that extends to the edges of the picture contains every point in it, and a point on an edge that two polygons share is
in both. A point on a line is on neither side of it; a line includes its end points.
"""

import numpy as np
import numpy.typing as npt

from deepstream_pipeline.analytics.rules import LineMode, Point

Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Scale = tuple[float, float]

MOST_DEGREES = {LineMode.LOOSE: 90.0, LineMode.BALANCED: 60.0, LineMode.STRICT: 30.0}

BORDER = 0.001  # pixels: the precision of recorded coordinates
_JITTER = 0.05  # of a box's diagonal: so far its foot may tremble without having moved
_NO_FEET, _NO_SLACK = np.empty((0, 2)), np.empty(0)


def places(xyxy: npt.NDArray[np.float32]) -> tuple[Array, Array]:
    """Of each box its foot, the middle of its lower edge, (n, 2), and the slack within which that is uncertain, (n,).

    From places rounded to a thousandth of a pixel, as they are recorded: a replay sees what was seen live.
    """
    if not len(xyxy):
        return _NO_FEET, _NO_SLACK
    boxes = np.rint(xyxy.astype(np.float64) * 1000) / 1000
    sides = boxes[:, 2:] - boxes[:, :2]
    feet = np.stack(((boxes[:, 0] + boxes[:, 2]) / 2, boxes[:, 3]), axis=1)
    return feet, _JITTER * np.sqrt(sides[:, 0] ** 2 + sides[:, 1] ** 2)


def scaled(points: tuple[Point, ...], scale: Scale) -> Array:
    """(m, 2), in the source's pixels."""
    return np.array(points, np.float64) * scale


class Area:
    """A polygon with its border. It may cross itself, and may extend beyond the picture.

    A point is inside if a ray from it crosses the edges an odd number of times.
    """

    def __init__(self, corners: Array) -> None:
        self._x, self._y = corners.T
        self._next_x, self._next_y = np.roll(corners, -1, axis=0).T
        self._edge_x, self._edge_y = self._next_x - self._x, self._next_y - self._y
        height = np.where(self._edge_y == 0, 1, self._edge_y)  # a level edge is never crossed
        self._slope = self._edge_x / height
        self._squares = self._edge_x**2 + self._edge_y**2
        self._squares[self._squares == 0] = 1

    def holds(self, points: Array) -> BoolArray:
        """(n,) of (n, 2) points."""
        x, y = points[:, :1], points[:, 1:]
        is_beside = (self._y > y) != (self._next_y > y)
        is_crossed = is_beside & (x < self._x + (y - self._y) * self._slope)
        odd: BoolArray = np.bitwise_xor.reduce(is_crossed, axis=1)
        return odd | (self.distances(points) <= BORDER)

    def distances(self, points: Array) -> Array:
        """(n,) distances in pixels of (n, 2) points to their nearest edges."""
        to_x, to_y = points[:, :1] - self._x, points[:, 1:] - self._y
        along = ((to_x * self._edge_x + to_y * self._edge_y) / self._squares).clip(0, 1)
        squares = (to_x - along * self._edge_x) ** 2 + (to_y - along * self._edge_y) ** 2
        nearest: Array = np.sqrt(squares.min(axis=1))
        return nearest
