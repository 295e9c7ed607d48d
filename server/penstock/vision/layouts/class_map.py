"""The best class of each pixel of a picture, from a network's map of scores per class."""

from collections.abc import Callable, Iterator

import cv2
import numpy as np
import numpy.typing as npt

from penstock.protocol.inference import Array, FloatArray, IntArray
from penstock.protocol.vision_results import BoolArray
from penstock.vision.preprocess import Geometry

_STRIPE_PIXELS = 1 << 18  # pixels of the picture that are resampled at a time: few enough for the CPU's cache
_WHOLE_PIXELS = 1 << 22  # of pictures that a faster function resizes as a whole
_MAX_COMPARED_PIXELS = 1 << 32  # of all classes: about ten seconds
_OPEN_SHARE = 0.25  # of a map's cells, up to which only their pixels are compared
_MANY = 4  # classes from which that is faster
_LARGE_PIXELS = 1 << 20  # of a picture whose masks are read in parts

Regions = Callable[[int], tuple[slice, slice]]  # rows and columns of the picture that have all pixels of a class


def label_type(classes: int) -> npt.DTypeLike:
    """The smallest type of so many class ids: uint8 or uint16."""
    return np.uint8 if classes <= 256 else np.uint16


def stripes(geometry: Geometry) -> Iterator[slice]:
    """Rows of the picture, from top to bottom."""
    is_whole = geometry.is_stretched and geometry.source_width * geometry.source_height <= _WHOLE_PIXELS
    count = geometry.source_height if is_whole else max(_STRIPE_PIXELS // geometry.source_width, 1)
    for top in range(0, geometry.source_height, count):
        yield slice(top, min(top + count, geometry.source_height))


def resample(plane: FloatArray, geometry: Geometry, rows: slice) -> FloatArray:
    """Rows of the picture, bilinear, from the network's map of its whole input, (h, w). Edges are repeated."""
    size = (geometry.source_width, rows.stop - rows.start)
    if size[1] == geometry.source_height and geometry.is_stretched:
        whole: FloatArray = cv2.resize(plane, size, interpolation=cv2.INTER_LINEAR)  # the same, in a fifth of the time
        return whole
    step_x, step_y = plane.shape[1] / geometry.network_width, plane.shape[0] / geometry.network_height
    first_x = (0.5 * geometry.scale_x + geometry.pad_x) * step_x - 0.5
    first_y = ((rows.start + 0.5) * geometry.scale_y + geometry.pad_y) * step_y - 0.5
    to_map = np.array([[geometry.scale_x * step_x, 0.0, first_x], [0.0, geometry.scale_y * step_y, first_y]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    resampled: FloatArray = cv2.warpAffine(plane, to_map, size, flags=flags, borderMode=cv2.BORDER_REPLICATE)
    return resampled


def enlarged(classes: Array, geometry: Geometry) -> Array:
    """The class of each pixel of the picture: that of the nearest of the network's pixels. classes: (h, w)."""

    def nearest(count: int, scale: float, pad: int, step: float, size: int) -> IntArray:
        place = ((np.arange(count) + 0.5) * scale + pad) * step
        index: IntArray = np.clip(np.floor(place), 0, size - 1).astype(np.int64)
        return index

    height, width = classes.shape
    step_x, step_y = width / geometry.network_width, height / geometry.network_height
    column = nearest(geometry.source_width, geometry.scale_x, geometry.pad_x, step_x, width)
    return _taken(classes, nearest(geometry.source_height, geometry.scale_y, geometry.pad_y, step_y, height), column)


def _taken(classes: Array, row: IntArray, column: IntArray) -> Array:
    """classes[row][:, column]. The smaller result is taken first: for a picture of one row, the other is very large."""
    if classes.shape[0] * len(column) < len(row) * classes.shape[1]:
        return classes.take(column, axis=1).take(row, axis=0)
    return classes.take(row, axis=0).take(column, axis=1)


def best_class(planes: FloatArray, geometry: Geometry) -> tuple[Array, Regions]:
    """(height, width) of the picture, uint8 or uint16: the class of the highest value; ties by class. Regions of each.

    Noise of many classes on a large picture is not resampled: it gets the class of the nearest of the network's pixels.
    """
    size = (geometry.source_height, geometry.source_width)
    is_enlarged = size[0] * size[1] >= 4 * planes[0].size
    if len(planes) >= _MANY and (is_enlarged or not geometry.is_stretched):  # else, resampling all is as fast
        best = _best_of_map(planes)
        is_open = _differs_within(best)
        if is_open.mean() <= _OPEN_SHARE:
            cells = _Cells(planes, best, is_open, geometry)
            return cells.labels(size), cells.region_of
    is_contender = _contenders(planes, size[0] * size[1])
    if is_contender.sum() / planes.shape[1] * size[0] * size[1] > _MAX_COMPARED_PIXELS:
        return enlarged(_best_of_map(planes), geometry), whole_picture
    return _densely_compared(planes, is_contender, geometry), whole_picture


def _best_of_map(planes: FloatArray) -> Array:
    """(h, w) uint8 or uint16: the class of the highest value; ties by class. A fifth of the time of argmax."""
    labels = np.zeros(planes.shape[1:], label_type(len(planes)))
    best = planes[0].copy()
    for class_id, plane in enumerate(planes[1:], 1):
        _set_higher(labels, class_id, plane > best)
        np.maximum(best, plane, out=best)
    return labels


def _set_higher(labels: Array, class_id: int, is_better: BoolArray) -> None:
    """Sets labels, which are below class_id, where it is better. A tenth of the time of copyto(…, where=…)."""
    np.maximum(labels, is_better.view(np.uint8) * labels.dtype.type(class_id), out=labels)


def _differs_within(best: Array) -> BoolArray:
    """(h, w): whether the four values around a cell, from row y to y + 1 and column x to x + 1, differ.

    If one class is the best of four neighbours, it is the best of all bilinear values between them.
    """
    differs = np.zeros(best.shape, np.bool_)
    differs[:-1] = best[1:] != best[:-1]
    across = best[:, 1:] != best[:, :-1]
    differs[:, :-1] |= across
    differs[:-1, :-1] |= across[1:]
    return differs


def _densely_compared(planes: FloatArray, is_contender: BoolArray, geometry: Geometry) -> Array:
    """Labels by resampling the planes of all contenders. is_contender: (classes, h)."""
    labels = np.empty((geometry.source_height, geometry.source_width), label_type(len(planes)))
    step = planes.shape[1] / geometry.network_height
    for rows in stripes(geometry):
        first, last = (((row * geometry.scale_y) + geometry.pad_y) * step for row in (rows.start, rows.stop))
        low = min(max(int(first) - 1, 0), planes.shape[1] - 1)
        contenders = np.flatnonzero(is_contender[:, low : max(int(last) + 2, low + 1)].any(axis=1)).tolist()
        best, part = resample(planes[contenders[0]], geometry, rows), labels[rows]
        part[:] = contenders[0]
        for class_id in contenders[1:]:
            values = resample(planes[class_id], geometry, rows)
            _set_higher(part, class_id, values > best)
            np.maximum(best, values, out=best)
    return labels


def _contenders(planes: FloatArray, pixels: int) -> BoolArray:
    """(classes, h): whether a class can be the best of a pixel between rows y and y + 1.

    A bilinear value lies between the least and the greatest of its four neighbours. A class whose greatest is below
    another's least is not the best there. Small pictures have too few pixels for this to save time.
    """
    if len(planes) <= 2 or pixels < 4 * planes[0].size:
        return np.ones(planes.shape[:2], np.bool_)
    kernel = np.ones((2, 2), np.uint8)
    least = np.full(planes.shape[1:], -np.inf, np.float32)
    for plane in planes:
        np.maximum(least, cv2.erode(plane, kernel, anchor=(0, 0)), out=least)
    return np.stack([(cv2.dilate(plane, kernel, anchor=(0, 0)) >= least).any(axis=1) for plane in planes])


class _Cells:
    """Finds the best class of a picture's pixels: known where the four values around a cell agree, else compared.

    A cell is the area between four neighbouring values of the map.
    """

    def __init__(self, planes: FloatArray, best: Array, is_open: BoolArray, geometry: Geometry) -> None:
        """planes: (classes, h, w). best: (h, w), their best class. is_open: (h, w), cells whose corners differ."""
        height, width = best.shape
        step_x, step_y = width / geometry.network_width, height / geometry.network_height
        self._flat, self._best, self._is_open = planes.reshape(-1), best, is_open
        self._row, self._row_share = _between(
            geometry.source_height, geometry.scale_y * step_y, geometry.pad_y * step_y, height
        )
        self._column, self._column_share = _between(
            geometry.source_width, geometry.scale_x * step_x, geometry.pad_x * step_x, width
        )
        is_seen = np.zeros(height, np.bool_)
        is_seen[self._row] = True
        cells = np.flatnonzero(is_open & is_seen[:, np.newaxis])
        self._classes, counts = _contenders_of_cells(planes, cells)
        self._owners = np.repeat(cells, counts)  # the cell of each of _classes
        self._count, self._start = np.zeros(best.size, np.int64), np.zeros(best.size, np.int64)
        self._count[cells] = counts
        self._start[cells] = np.cumsum(counts) - counts  # of a cell's contenders in _classes

    def labels(self, size: tuple[int, int]) -> Array:
        """(height, width) of the picture: the class of each pixel."""
        labels = np.empty(size, self._best.dtype)
        count = max(_STRIPE_PIXELS // size[1], 1)
        for top in range(0, size[0], count):
            row = self._row[top : top + count]
            low, high = row[0], row[-1] + 1
            part = _taken(self._best[low:high], row - low, self._column)
            y, x = np.nonzero(_taken(self._is_open[low:high], row - low, self._column))
            if len(y):
                part[y, x] = self._compared(y + top, x)
            labels[top : top + count] = part
        return labels

    def _compared(self, y: IntArray, x: IntArray) -> IntArray:
        """The best class of the pixels (n,), whose cells are open."""
        height, width = self._best.shape
        row, column = self._row[y], self._column[x]
        cell = row * width + column
        right, below = (column < width - 1).astype(np.int64), (row < height - 1) * width
        share_x, share_y = self._column_share[x], self._row_share[y]
        start, count = self._start[cell], self._count[cell]
        best, found = np.full(len(y), -np.inf, np.float32), np.zeros(len(y), np.int64)
        for rank in range(int(count.max())):
            at = slice(None) if rank < 2 else np.flatnonzero(count > rank)
            class_id = self._classes[start[at] + rank]
            place = class_id * (height * width) + cell[at]
            upper, lower = (self._along_row(one, right[at], share_x[at]) for one in (place, place + below[at]))
            values = upper + (lower - upper) * share_y[at]
            is_better = values > best[at]
            found[at] = np.where(is_better, class_id, found[at])
            best[at] = np.maximum(values, best[at])
        return found

    def _along_row(self, place: IntArray, right: IntArray, share: FloatArray) -> FloatArray:
        left = self._flat.take(place, mode="clip")
        between: FloatArray = left + (self._flat.take(place + right, mode="clip") - left) * share
        return between

    def region_of(self, class_id: int) -> tuple[slice, slice]:
        """Rows and columns of the picture beyond which no pixel has the class: all, where that is as fast to read."""
        if len(self._row) * len(self._column) < _LARGE_PIXELS:
            return whole_picture(class_id)
        is_near = self._best == class_id
        is_near.reshape(-1)[self._owners[self._classes == class_id]] = True
        return _near(is_near.any(axis=1), self._row), _near(is_near.any(axis=0), self._column)


def _contenders_of_cells(planes: FloatArray, cells: IntArray) -> tuple[IntArray, IntArray]:
    """Classes that can be the best in each of the cells (n,), cell by cell, in rising order; and their numbers (n,).

    A bilinear value lies between the least and the greatest of its four neighbours. A class whose greatest is below
    another's least is not the best there.
    """
    height, width = planes.shape[1:]
    flat = planes.reshape(len(planes), -1)
    classes, counts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    step = max(_STRIPE_PIXELS // len(planes), 1)
    for first in range(0, len(cells), step):
        part = cells[first : first + step]
        below, right = (part // width < height - 1) * width, (part % width < width - 1).astype(np.int64)
        corners = [flat.take(part + shift, axis=1, mode="clip") for shift in (0, right, below, below + right)]
        least = np.minimum(np.minimum(corners[0], corners[1]), np.minimum(corners[2], corners[3])).max(axis=0)
        greatest = np.maximum(np.maximum(corners[0], corners[1]), np.maximum(corners[2], corners[3]))
        cell, class_id = np.nonzero(np.ascontiguousarray((greatest >= least).T))
        classes.append(class_id)
        counts.append(np.bincount(cell, minlength=len(part)))
    return np.concatenate(classes), np.concatenate(counts)


def _between(count: int, step: float, first: float, size: int) -> tuple[IntArray, FloatArray]:
    """For each of a picture's rows or columns: the map's one before it, and how far it is from it to the next."""
    place = np.clip((np.arange(count) + 0.5) * step + first - 0.5, 0.0, size - 1.0)
    low = np.floor(place)
    return low.astype(np.int64), (place - low).astype(np.float32)


def _near(is_near: BoolArray, low: IntArray) -> slice:
    """The part of a picture's side whose cells lie between the first and the last near one. low: its cells."""
    near = np.flatnonzero(is_near)
    if not len(near):
        return slice(0, 0)
    return slice(int(np.searchsorted(low, near[0])), int(np.searchsorted(low, near[-1], "right")))


def whole_picture(class_id: int) -> tuple[slice, slice]:
    """The region of a class that can be anywhere."""
    return slice(None), slice(None)
