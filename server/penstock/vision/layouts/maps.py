"""Networks that output a map of the picture: semantic segmentation and depth."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import overload

import cv2
import numpy as np
import numpy.typing as npt

from penstock.protocol.inference import Array, FloatArray, IntArray
from penstock.protocol.vision_results import BoolArray, DepthMap, Mask, SegmentationMap
from penstock.vision.layouts.layout import Layout, LayoutOptions, Outputs, logit
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import NetworkType

_STRIPE_PIXELS = 1 << 18  # pixels of the picture that are resampled at a time: few enough for the CPU's cache
_WHOLE_PIXELS = 1 << 22  # of pictures that a faster function resizes as a whole
_MAX_CLASSES = 1 << 16
_MAX_COMPARED_PIXELS = 1 << 32  # of all classes: about ten seconds
_MAX_RESAMPLED_PIXELS = 1 << 30  # of all classes of a picture: about two seconds
_MAX_SKEW = math.log(2.0)  # how much a map's width : height may differ from the network's
_MAX_VALUE = 1e30  # larger values are clipped: their differences overflow float32


def parse_semantic(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> SegmentationMap:
    """Parses the first output: (classes, h, w) or (h, w, classes) floats, or integers (h, w). Raises EngineFailed."""
    name = options.output_names[0]
    if _is_integer(outputs, name):
        return _map_of_labels(_enlarged(_class_map(outputs, name), geometry), options)
    planes = _class_planes(outputs, name, geometry)
    if len(planes) > _MAX_CLASSES:
        raise outputs.refuse(name, planes, f"at most {_MAX_CLASSES} classes")
    if len(planes) == 1 or options.has_sigmoid:
        return _map_of_levels(outputs, planes, options, geometry)
    return _map_of_labels(_best_class(planes, geometry), options)


def parse_semantic_multilabel(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> SegmentationMap:
    """Parses the first output: (classes, h, w) or (h, w, classes) floats, independent classes. Raises EngineFailed."""
    name = options.output_names[0]
    planes = _class_planes(outputs, name, geometry)
    if len(planes) > _MAX_CLASSES:
        raise outputs.refuse(name, planes, f"at most {_MAX_CLASSES} classes")
    return _map_of_levels(outputs, planes, options, geometry)


def parse_depth(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> DepthMap:
    """Parses the first output, (1, h, w) or (h, w). Raises EngineFailed."""
    name = options.output_names[0]
    plane = _only_plane(outputs, name, outputs.floats(name, rank=_rank(outputs, name)))
    with np.errstate(over="ignore"):
        scaled = np.clip(plane.astype(np.float64) * options.depth_scale, -_MAX_VALUE, _MAX_VALUE)
    values = np.empty((geometry.source_height, geometry.source_width), np.float32)
    for rows in _stripes(geometry):
        values[rows] = _resample(scaled.astype(np.float32), geometry, rows)
    return DepthMap(values)


def _rank(outputs: Outputs, name: str) -> int:
    """Dimensions of one image's part: 2 or 3."""
    tensor = outputs.response.output(name)
    rank = 3 if tensor is None else len(tensor.shape) - (outputs.row is not None)
    return min(max(rank, 2), 3)


def _is_integer(outputs: Outputs, name: str) -> bool:
    tensor = outputs.response.output(name)
    return tensor is not None and "INT" in tensor.datatype


def _only_plane(outputs: Outputs, name: str, array: Array) -> Array:
    """(h, w) of an array (h, w), (1, h, w) or (h, w, 1)."""
    if array.ndim == 3 and 1 in (array.shape[0], array.shape[2]):
        array = array[0] if array.shape[0] == 1 else array[..., 0]
    if array.ndim != 2 or 0 in array.shape:
        raise outputs.refuse(name, array, "[1, h, w] or [h, w]")
    return array


def _class_map(outputs: Outputs, name: str) -> Array:
    """(h, w) uint8 or uint16: the class of each of the network's pixels."""
    classes = _only_plane(outputs, name, outputs.integers(name, rank=_rank(outputs, name)))
    low, high = int(classes.min()), int(classes.max())
    if low < 0 or high >= _MAX_CLASSES:
        raise outputs.broken(name, f"holds class {low if low < 0 else high}; 0 to {_MAX_CLASSES - 1} was expected")
    return classes.astype(_label_type(high + 1))


def _label_type(classes: int) -> npt.DTypeLike:
    return np.uint8 if classes <= 256 else np.uint16


def _class_planes(outputs: Outputs, name: str, geometry: Geometry) -> FloatArray:
    """(classes, h, w): the axes are those whose h : w is the network's height : width."""
    array = outputs.floats(name, rank=_rank(outputs, name))
    if array.ndim == 2:
        array = array[np.newaxis]
    if 0 in array.shape:
        raise outputs.refuse(name, array, "[classes, h, w] or [h, w, classes]")
    height, width = geometry.network_height, geometry.network_width
    first, last = (
        abs(math.log(rows * width / (columns * height))) for rows, columns in (array.shape[1:], array.shape[:2])
    )
    if min(first, last) > _MAX_SKEW:
        expected = f"[classes, h, w] or [h, w, classes] with h : w as {height} : {width}, the network's input"
        raise outputs.refuse(name, array, expected)
    planes = array if first <= last else np.ascontiguousarray(array.transpose(2, 0, 1))
    if max(planes.max(), -planes.min()) > _MAX_VALUE:
        planes = planes.clip(-_MAX_VALUE, _MAX_VALUE)
    return planes


def _stripes(geometry: Geometry) -> Iterator[slice]:
    """Rows of the picture, from top to bottom."""
    is_whole = geometry.is_stretched and geometry.source_width * geometry.source_height <= _WHOLE_PIXELS
    count = geometry.source_height if is_whole else max(_STRIPE_PIXELS // geometry.source_width, 1)
    for top in range(0, geometry.source_height, count):
        yield slice(top, min(top + count, geometry.source_height))


def _resample(plane: FloatArray, geometry: Geometry, rows: slice) -> FloatArray:
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


def _enlarged(classes: Array, geometry: Geometry) -> Array:
    """The class of each pixel of the picture: that of the nearest of the network's pixels. classes: (h, w)."""

    def nearest(count: int, scale: float, pad: int, step: float, size: int) -> IntArray:
        place = ((np.arange(count) + 0.5) * scale + pad) * step
        index: IntArray = np.clip(np.floor(place), 0, size - 1).astype(np.int64)
        return index

    height, width = classes.shape
    step_x, step_y = width / geometry.network_width, height / geometry.network_height
    column = nearest(geometry.source_width, geometry.scale_x, geometry.pad_x, step_x, width)
    row = nearest(geometry.source_height, geometry.scale_y, geometry.pad_y, step_y, height)
    if height * len(column) < len(row) * width:  # the smaller of both: of a picture of one row the other is very large
        return classes.take(column, axis=1).take(row, axis=0)
    return classes.take(row, axis=0).take(column, axis=1)


def _best_class(planes: FloatArray, geometry: Geometry) -> Array:
    """(height, width) of the picture, uint8 or uint16: the class of the highest value; ties by class.

    Noise of many classes on a large picture is not resampled: it gets the class of the nearest of the network's pixels.
    """
    labels = np.empty((geometry.source_height, geometry.source_width), _label_type(len(planes)))
    is_contender = _contenders(planes, labels.size)
    if is_contender.sum() / planes.shape[1] * labels.size > _MAX_COMPARED_PIXELS:
        return _enlarged(planes.argmax(axis=0).astype(labels.dtype), geometry)
    step = planes.shape[1] / geometry.network_height
    for rows in _stripes(geometry):
        first, last = (((row * geometry.scale_y) + geometry.pad_y) * step for row in (rows.start, rows.stop))
        low = min(max(int(first) - 1, 0), planes.shape[1] - 1)
        contenders = np.flatnonzero(is_contender[:, low : max(int(last) + 2, low + 1)].any(axis=1)).tolist()
        best, part = _resample(planes[contenders[0]], geometry, rows), labels[rows]
        part[:] = contenders[0]
        for class_id in contenders[1:]:
            values = _resample(planes[class_id], geometry, rows)
            is_better = np.negative((values > best).astype(labels.dtype))  # all bits, or none
            part ^= (part ^ labels.dtype.type(class_id)) & is_better  # a tenth of the time of copyto(…, where=…)
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


class _Masks(Sequence[Mask]):
    """Masks that are computed when they are read: all masks of a large picture at once would need gigabytes."""

    def __init__(self, count: int, bits_of: Callable[[int], BoolArray]) -> None:
        """bits_of: the pixels of the picture, (height, width), of a mask by its index."""
        self._count, self._bits_of = count, bits_of

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Mask: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Mask]: ...

    def __getitem__(self, index: int | slice) -> Mask | Sequence[Mask]:
        chosen = range(self._count)[index]
        if isinstance(chosen, range):
            return [self[one] for one in chosen]
        bits = self._bits_of(chosen)
        left, top, width, height = cv2.boundingRect(bits.view(np.uint8))
        return Mask(bits.shape[0], bits.shape[1], left, top, bits[top : top + height, left : left + width])


def _map_of_labels(labels: Array, options: LayoutOptions) -> SegmentationMap:
    """labels: (height, width) uint8 or uint16, the network's class of each pixel of the picture."""
    count = 1 << (8 * labels.itemsize)
    present = np.flatnonzero(cv2.calcHist([labels], [0], None, [count], [0, count]))
    return _segmentation((labels.shape[0], labels.shape[1]), present, options, lambda class_id: labels == class_id)


def _map_of_levels(outputs: Outputs, planes: FloatArray, options: LayoutOptions, geometry: Geometry) -> SegmentationMap:
    """Each class has the pixels over segmentation-threshold. planes: (classes, h, w). Raises TooLarge."""
    level = logit(options.segmentation_threshold) if options.has_sigmoid else options.segmentation_threshold
    size = (geometry.source_height, geometry.source_width)

    def bits_of(class_id: int) -> BoolArray:
        bits = np.empty(size, np.bool_)
        for rows in _stripes(geometry):
            np.greater(_resample(planes[class_id], geometry, rows), level, out=bits[rows])
        return bits

    likely = np.flatnonzero(planes.max(axis=(1, 2)) > level).tolist()
    if len(likely) > 1 and len(likely) * size[0] * size[1] > _MAX_RESAMPLED_PIXELS:
        raise outputs.too_large(
            options.output_names[0],
            f"has {len(likely)} classes over the threshold, each for {size[1]}x{size[0]} pixels; at most "
            f"{_MAX_RESAMPLED_PIXELS} pixels of all classes are computed. Send a smaller picture",
        )
    present = np.array([class_id for class_id in likely if bits_of(class_id).any()], np.int64)
    return _segmentation(size, present, options, bits_of)


def _segmentation(
    size: tuple[int, int], present: IntArray, options: LayoutOptions, bits_of: Callable[[int], BoolArray]
) -> SegmentationMap:
    """present: the network's classes that have pixels. bits_of: the pixels of one of them."""
    class_id = options.mapped(present)
    if options.class_filter is not None:
        is_selected = np.isin(class_id, list(options.class_filter))
        present, class_id = present[is_selected], class_id[is_selected]
    order = np.argsort(class_id, kind="stable")
    chosen = present[order].tolist()
    return SegmentationMap(size[0], size[1], class_id[order], _Masks(len(chosen), lambda index: bits_of(chosen[index])))


LAYOUTS = (
    Layout(
        "semantic",
        NetworkType.SEGMENTATION,
        parse_semantic,
        "the first output, float `[classes, h, w]` or `[h, w, classes]`: a score per class, of which a pixel gets the "
        "best; with one class, or logits and `apply-sigmoid: 1`, all classes over `segmentation-threshold`. Or integers"
        " `[h, w]` or `[1, h, w]`: the class",
    ),
    Layout(
        "semantic-multilabel",
        NetworkType.SEGMENTATION,
        parse_semantic_multilabel,
        "the first output, float `[classes, h, w]` or `[h, w, classes]`: independent probabilities, or logits and "
        "`apply-sigmoid: 1`; a pixel has all classes over `segmentation-threshold`",
    ),
    Layout(
        "depth",
        NetworkType.OTHER,
        parse_depth,
        "the first output, float `[1, h, w]` or `[h, w]`: depth or inverse depth; multiplied by `depth-scale`",
    ),
)
