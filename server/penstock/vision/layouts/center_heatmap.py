"""Detectors with a heatmap of object centres and the distances to the box's edges, over one grid.

`heatmap` has a logit per class and cell. `distances` has the logarithms of the distances, in cells, from the cell's
centre to the left, top, right and bottom edge. Each local maximum of 3 x 3 cells gives a box.
"""

import math
from itertools import product

import numpy as np

from penstock.protocol.inference import FloatArray, IntArray
from penstock.protocol.vision_results import Detections
from penstock.vision.layouts.layout import Layout, LayoutOptions, Outputs, finish_detections
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import NetworkType

HEATMAP, DISTANCES = "heatmap", "distances"

_LOGARITHMS = (-20.0, 20.0)  # clipped: exp() beyond it has no meaning for a picture
_MIN_LOGIT = -60.0  # exp() overflows far below it
_MAX_LOGIT = 60.0  # the probability is 1 in 32 bits


def parse_center_heatmap(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses one image's heatmap (classes, rows, columns) and distances (4, rows, columns). Raises EngineFailed."""
    heat = outputs.floats(HEATMAP, rank=3)
    distances = outputs.floats(DISTANCES, rank=3)
    _, rows, columns = heat.shape
    if 0 in heat.shape:
        raise outputs.refuse(HEATMAP, heat, "[classes, rows, columns]")
    if distances.shape != (4, rows, columns):
        raise outputs.refuse(DISTANCES, distances, f"[4, {rows}, {columns}] (a box a cell of {HEATMAP!r})")
    class_id, row, column = _peaks_over(options.lowest_threshold(), heat)
    score = _probability(heat[class_id, row, column])
    xyxy = _boxes(distances[:, row, column], row, column, (rows, columns))
    return finish_detections(xyxy, score, class_id, options, geometry.normalised_to_source)


def _probability(logits: FloatArray) -> FloatArray:
    shares: FloatArray = (1 / (1 + np.exp(-np.maximum(logits, _MIN_LOGIT)))).astype(np.float32)
    return shares


def _peaks_over(threshold: float, heat: FloatArray) -> tuple[IntArray, IntArray, IntArray]:
    """Class, row and column of each cell of at least this probability, of which no neighbour of its class is higher."""
    _, rows, columns = heat.shape
    hot = np.flatnonzero(heat.reshape(-1) >= _logit(threshold))
    class_id, row, column = np.unravel_index(hot, heat.shape)
    height = heat[class_id, row, column]
    is_peak = np.ones(len(hot), np.bool_)
    for down, right in product((-1, 0, 1), repeat=2):
        near_row, near_column = np.clip(row + down, 0, rows - 1), np.clip(column + right, 0, columns - 1)
        is_peak &= height >= heat[class_id, near_row, near_column]
    return class_id[is_peak], row[is_peak], column[is_peak]


def _logit(probability: float) -> float:
    if 0.0 < probability < 1.0:
        return math.log(probability / (1.0 - probability)) - 1e-3  # rounding; the exact threshold follows
    return -math.inf if probability <= 0.0 else _MAX_LOGIT


def _boxes(distances: FloatArray, row: IntArray, column: IntArray, size: tuple[int, int]) -> FloatArray:
    """distances: (4, n) logarithms. Returns (n, 4) xyxy in fractions of the network's image."""
    reach = np.exp(np.clip(distances.astype(np.float64), *_LOGARITHMS))
    middle = np.stack([column + 0.5, row + 0.5])
    xyxy = np.concatenate([middle - reach[:2], middle + reach[2:]]).T
    scaled: FloatArray = (xyxy / np.array([size[1], size[0]] * 2)).astype(np.float32)
    return scaled


LAYOUTS = (
    Layout(
        "center-heatmap",
        NetworkType.DETECTOR,
        parse_center_heatmap,
        "`heatmap` float `[classes, rows, columns]`: a logit per class and cell; `distances` float `[4, rows, columns]`"
        ": natural logarithms of the distances, in cells, from the cell's centre to the box's left, top, right and "
        "bottom edges",
        threshold=0.2,
        iou=0.3,
    ),
)
