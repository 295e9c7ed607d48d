"""NanoDet and PicoDet: scores per class and, for each side of the box, a distribution of its distance in strides.

Sources: RangiLyu/nanodet nanodet_plus_head.py, hpc203/nanodet-opncv-dnn-cpp-python main_nanodet.py, PaddleDetection's
PicoDet (read, not used). A side's distance is stride * sum(bin * softmax(logits)[bin]) from the anchor's centre.
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from penstock.protocol.inference import FloatArray, IntArray
from penstock.protocol.vision_results import Detections
from penstock.vision.layouts.layout import Layout, LayoutOptions, Outputs, best_classes, finish_detections, stride_of
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import NetworkType

_DISTANCE_COLUMNS = 32  # columns of four distributions over 0 to 7 strides, as all published weights have
_STRIDES = ((8, 16, 32), (8, 16, 32, 64))


class _Level(NamedTuple):
    """One feature map. scores: (cells, classes). distances: (cells, 4 * bins) logits: left, top, right, bottom."""

    stride: int
    scores: FloatArray
    distances: FloatArray


class _Centre(NamedTuple):
    """An anchor's centre in pixels: (cell + cell_part) * stride + pixels."""

    cell_part: float
    pixels: float


def parse_pairs(outputs: Outputs, options: LayoutOptions, geometry: Geometry, *, centre: _Centre) -> Detections:
    """Parses a pair of outputs a stride: scores (cells, classes), distances (cells, 4 * bins). Raises EngineFailed."""
    groups: dict[int, list[tuple[str, FloatArray]]] = {}
    for name in options.output_names:
        array = outputs.floats(name, rank=2)
        groups.setdefault(len(array), []).append((name, array))
    levels = []
    for cells, pair in groups.items():
        stride = stride_of(cells, geometry)
        if stride is None or len(pair) != 2:
            size = f"{geometry.network_width}x{geometry.network_height}"
            expected = f"[cells, columns], and two outputs for each grid over the network's {size} pixels"
            raise outputs.refuse(pair[0][0], pair[0][1], expected)
        levels.append(_Level(stride, *_scores_first(outputs, pair)))
    return _finish(levels, options, geometry, centre)


def parse_nanodet_plus(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses the first output, (cells of all strides, classes + 32). Raises EngineFailed."""
    name = options.output_names[0]
    rows = outputs.floats(name, rank=2)
    counts = [[_cells(stride, geometry) for stride in strides] for strides in _STRIDES]
    if len(rows) not in map(sum, counts) or rows.shape[1] <= _DISTANCE_COLUMNS:
        expected = " or ".join(str(sum(count)) for count in counts)
        raise outputs.refuse(name, rows, f"[{expected}, classes + {_DISTANCE_COLUMNS}]")
    levels, first = [], 0
    for stride, cells in zip(_STRIDES[-1], next(one for one in counts if sum(one) == len(rows)), strict=False):
        part = rows[first : first + cells]
        levels.append(_Level(stride, part[:, :-_DISTANCE_COLUMNS], part[:, -_DISTANCE_COLUMNS:]))
        first += cells
    return _finish(levels, options, geometry, _Centre(0.0, 0.0))


def _cells(stride: int, geometry: Geometry) -> int:
    return -(-geometry.network_width // stride) * -(-geometry.network_height // stride)


def _scores_first(outputs: Outputs, pair: list[tuple[str, FloatArray]]) -> tuple[FloatArray, FloatArray]:
    """Scores and distances: distances have a multiple of 4 columns; if both have it, the first ones are scores.

    Unless only the second ones are all from 0 to 1.
    """
    can_be_distances = [array.shape[1] >= 8 and array.shape[1] % 4 == 0 for _, array in pair]
    (_, one), (name, other) = pair
    if not any(can_be_distances) or 0 in (one.shape[1], other.shape[1]):
        raise outputs.refuse(name, other, f"[{len(other)}, 4 x bins]")
    if can_be_distances[0] and (not can_be_distances[1] or (_are_probabilities(other) and not _are_probabilities(one))):
        return other, one
    return one, other


def _are_probabilities(values: FloatArray) -> bool:
    return bool(values.min() >= 0 and values.max() <= 1)


def _finish(levels: list[_Level], options: LayoutOptions, geometry: Geometry, centre: _Centre) -> Detections:
    found = [(level, best_classes(level.scores.T, options)) for level in levels]
    boxes = [_boxes(level, one.row, geometry, centre) for level, one in found]
    return finish_detections(
        np.concatenate([np.zeros((0, 4)), *boxes]),
        np.concatenate([np.zeros(0, np.float32), *(one.score for _, one in found)]),
        np.concatenate([np.zeros(0, np.int64), *(one.class_id for _, one in found)]),
        options,
        geometry.to_source,
    )


def _boxes(level: _Level, row: IntArray, geometry: Geometry, centre: _Centre) -> FloatArray:
    """(n, 4) xyxy float64 in network pixels, of the given cells."""
    columns = -(-geometry.network_width // level.stride)
    logits = level.distances[row].reshape(len(row), 4, level.distances.shape[1] // 4).astype(np.float64)
    powers = np.exp(logits - logits.max(axis=2, keepdims=True, initial=-np.inf))
    reach = powers @ np.arange(logits.shape[2]) / powers.sum(axis=2) * level.stride
    cell = np.stack([row % columns, row // columns], axis=1)
    middle = (cell + centre.cell_part) * level.stride + centre.pixels
    return np.concatenate([middle - reach[:, :2], middle + reach[:, 2:]], axis=1)


_PAIRS = (
    "two outputs for each stride, in any order: float `[cells, classes]`, scores from 0 to 1, and float "
    "`[cells, 4 x bins]`, logits of the distances to the left, top, right and bottom edge in strides"
)

LAYOUTS = (
    Layout("nanodet", NetworkType.DETECTOR, partial(parse_pairs, centre=_Centre(0.5, -0.5)), _PAIRS),
    Layout(
        "nanodet-plus",
        NetworkType.DETECTOR,
        parse_nanodet_plus,
        "the first output, float `[cells of strides 8, 16, 32 and perhaps 64, classes + 32]`: scores from 0 to 1, then "
        "logits of four distances of 8 bins",
    ),
    Layout(
        "picodet",
        NetworkType.DETECTOR,
        partial(parse_pairs, centre=_Centre(0.5, 0.0)),
        "as `nanodet`; the centres of the cells lie half a pixel further",
    ),
)
