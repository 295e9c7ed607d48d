"""Networks that output a map of the picture: semantic segmentation and depth."""

import math
from collections.abc import Callable, Sequence
from typing import overload

import cv2
import numpy as np

from penstock.protocol.inference import Array, FloatArray, IntArray
from penstock.protocol.vision_results import BoolArray, DepthMap, Mask, SegmentationMap
from penstock.vision.layouts.class_map import (
    Regions,
    best_class,
    enlarged,
    label_type,
    resample,
    stripes,
    whole_picture,
)
from penstock.vision.layouts.layout import Layout, LayoutOptions, Outputs, logit
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import NetworkType

_MAX_CLASSES = 1 << 16
_MAX_RESAMPLED_PIXELS = 1 << 30  # of all classes of a picture: about two seconds
_MAX_SKEW = math.log(2.0)  # how much a map's width : height may differ from the network's
_MAX_VALUE = 1e30  # larger values are clipped: their differences overflow float32


Part = tuple[tuple[int, int], BoolArray]  # top and left of a part of the picture, and its pixels of a mask


def parse_semantic(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> SegmentationMap:
    """Parses the first output: (classes, h, w) or (h, w, classes) floats, or integers (h, w). Raises EngineFailed."""
    name = options.output_names[0]
    if _is_integer(outputs, name):
        return _map_of_labels(enlarged(_class_map(outputs, name), geometry), whole_picture, options)
    planes = _class_planes(outputs, name, geometry)
    if len(planes) > _MAX_CLASSES:
        raise outputs.refuse(name, planes, f"at most {_MAX_CLASSES} classes")
    if len(planes) == 1 or options.has_sigmoid:
        return _map_of_levels(outputs, planes, options, geometry)
    return _map_of_labels(*best_class(planes, geometry), options)


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
    for rows in stripes(geometry):
        values[rows] = resample(scaled.astype(np.float32), geometry, rows)
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
    return classes.astype(label_type(high + 1))


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
    if cv2.norm(planes.reshape(len(planes), -1), cv2.NORM_INF) > _MAX_VALUE:
        planes = planes.clip(-_MAX_VALUE, _MAX_VALUE)
    return planes


class _Masks(Sequence[Mask]):
    """Masks that are computed when they are read: all masks of a large picture at once would need gigabytes."""

    def __init__(self, size: tuple[int, int], count: int, part_of: Callable[[int], Part]) -> None:
        """size: (height, width) of the picture. part_of: of a mask by its index."""
        self._size, self._count, self._part_of = size, count, part_of

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
        (first_row, first_column), bits = self._part_of(chosen)
        left, top, width, height = cv2.boundingRect(bits.view(np.uint8))
        return Mask(*self._size, first_column + left, first_row + top, bits[top : top + height, left : left + width])


def _map_of_labels(labels: Array, region_of: Regions, options: LayoutOptions) -> SegmentationMap:
    """labels: (height, width) uint8 or uint16, the network's class of each pixel of the picture."""

    def part_of(class_id: int) -> Part:
        rows, columns = region_of(class_id)
        return (rows.start or 0, columns.start or 0), labels[rows, columns] == class_id

    count = 1 << (8 * labels.itemsize)
    present = np.flatnonzero(cv2.calcHist([labels], [0], None, [count], [0, count]))
    return _segmentation((labels.shape[0], labels.shape[1]), present, options, part_of)


def _map_of_levels(outputs: Outputs, planes: FloatArray, options: LayoutOptions, geometry: Geometry) -> SegmentationMap:
    """Each class has the pixels over segmentation-threshold. planes: (classes, h, w). Raises TooLarge."""
    level = logit(options.segmentation_threshold) if options.has_sigmoid else options.segmentation_threshold
    size = (geometry.source_height, geometry.source_width)

    def bits_of(class_id: int) -> BoolArray:
        bits = np.empty(size, np.bool_)
        for rows in stripes(geometry):
            np.greater(resample(planes[class_id], geometry, rows), level, out=bits[rows])
        return bits

    likely = np.flatnonzero(planes.max(axis=(1, 2)) > level).tolist()
    if len(likely) > 1 and len(likely) * size[0] * size[1] > _MAX_RESAMPLED_PIXELS:
        raise outputs.too_large(
            options.output_names[0],
            f"has {len(likely)} classes over the threshold, each for {size[1]}x{size[0]} pixels; at most "
            f"{_MAX_RESAMPLED_PIXELS} pixels of all classes are computed. Send a smaller picture",
        )
    present = np.array([class_id for class_id in likely if bits_of(class_id).any()], np.int64)
    return _segmentation(size, present, options, lambda class_id: ((0, 0), bits_of(class_id)))


def _segmentation(
    size: tuple[int, int], present: IntArray, options: LayoutOptions, part_of: Callable[[int], Part]
) -> SegmentationMap:
    """present: the network's classes that have pixels. part_of: of one of them."""
    class_id = options.mapped(present)
    if options.class_filter is not None:
        is_selected = np.isin(class_id, list(options.class_filter))
        present, class_id = present[is_selected], class_id[is_selected]
    order = np.argsort(class_id, kind="stable")
    chosen = present[order].tolist()
    masks = _Masks(size, len(chosen), lambda index: part_of(chosen[index]))
    return SegmentationMap(size[0], size[1], class_id[order], masks)


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
