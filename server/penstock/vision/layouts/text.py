"""Text: recognisers that read one line (CTC), and detectors that find the lines (differentiable binarisation).

Source: PaddlePaddle/PaddleOCR, ppocr/postprocess/rec_postprocess.py and db_postprocess.py.
"""

from collections.abc import Sequence

import cv2
import numpy as np

from penstock.protocol.inference import Array, FloatArray
from penstock.protocol.vision_results import BoolArray, TextLine, TextLines
from penstock.vision.decode import Image
from penstock.vision.layouts.layout import Layout, LayoutOptions, Outputs, probabilities
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import NetworkType

_BLANK = 0
_MAX_REGIONS = 1000
_MAX_RUNS = 1 << 15  # of pixels in a row that are text
_MIN_SIDE = 3.0  # of a region, in the network's pixels
_MIN_GROWN_SIDE = 5.0


def parse_ctc(outputs: Outputs, options: LayoutOptions, _: Geometry) -> TextLines:
    """Parses the first output, (steps, characters + 1 or + 2). No line if all steps are blank. Raises EngineFailed."""
    name = options.output_names[0]
    scores = outputs.floats(name, rank=2)
    count = len(options.characters)
    if scores.shape[1] not in (count + 1, count + 2):
        expected = f"[steps, {count + 2}] or [steps, {count + 1}] (a blank and the {count} characters of the card)"
        raise outputs.refuse(name, scores, expected)
    best = scores.argmax(axis=1)
    is_kept = (best != _BLANK) & (best != np.append(_BLANK, best[:-1]))
    kept = np.flatnonzero(is_kept)
    if not len(kept):
        return TextLines(())
    alphabet = options.characters + " "
    text = "".join(alphabet[index - 1] for index in best[kept].tolist())
    likelihood = probabilities(scores[kept].T, options).max(axis=0)
    score = float(likelihood.clip(0.0, 1.0).mean(dtype=np.float64))
    return TextLines((TextLine(text, score),) if score > options.pre_cluster_threshold else ())


def parse_db(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> TextLines:
    """Parses the first output, (1, h, w) or (h, w): the probability that a pixel is text. Raises EngineFailed."""
    likelihood = _likelihood(outputs, options.output_names[0], options)
    found = []
    for outline in _outlines(likelihood > options.segmentation_threshold):
        middle, sides, angle = cv2.minAreaRect(outline)
        if min(sides) < _MIN_SIDE:
            continue
        score = _mean_inside(likelihood, cv2.boxPoints((middle, sides, angle)))
        growth = 2 * sides[0] * sides[1] * options.unclip_ratio / (2 * (sides[0] + sides[1]))
        grown = (sides[0] + growth, sides[1] + growth)
        if score > options.pre_cluster_threshold and min(grown) >= _MIN_GROWN_SIDE:
            found.append((score, cv2.boxPoints((middle, grown, angle))))
    found = sorted(found, key=lambda one: -one[0])[: options.topk]
    corners = _clockwise(np.array([box for _, box in found], np.float64).reshape(-1, 4, 2))
    height, width = likelihood.shape
    corners *= (geometry.network_width / width, geometry.network_height / height)
    polygons = geometry.points_to_source(corners)
    order = np.lexsort((polygons[:, 0, 0], polygons[:, 0, 1])).tolist()
    return TextLines(tuple(TextLine("", min(found[index][0], 1.0), polygons[index]) for index in order))


def _likelihood(outputs: Outputs, name: str, options: LayoutOptions) -> FloatArray:
    """(h, w) float32."""
    tensor = outputs.response.output(name)
    rank = 3 if tensor is None else min(max(len(tensor.shape) - (outputs.row is not None), 2), 3)
    array = outputs.floats(name, rank=rank)
    if array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 2 or 0 in array.shape:
        raise outputs.refuse(name, array, "[1, h, w] or [h, w]")
    return probabilities(array, options) if options.has_sigmoid else array


def _outlines(is_text: BoolArray) -> Sequence[Array]:
    """Outlines (n, 1, 2) int32, x and y, of the largest regions of neighbouring pixels. is_text: (h, w)."""
    bitmap: Image = is_text.view(np.uint8)
    if np.count_nonzero(bitmap[:, 1:] > bitmap[:, :-1]) > _MAX_RUNS:  # specks: regions that are too small, anyway
        bitmap = cv2.morphologyEx(bitmap, cv2.MORPH_OPEN, np.ones((3, 3), np.uint8)).astype(np.uint8)
    outlines, parents = cv2.findContours(bitmap, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    if not outlines:
        return ()
    outer = [outlines[index] for index in np.flatnonzero(parents[0, :, 3] < 0).tolist()]  # the others are holes
    return sorted(outer, key=cv2.contourArea, reverse=True)[:_MAX_REGIONS] if len(outer) > _MAX_REGIONS else outer


def _mean_inside(likelihood: FloatArray, corners: FloatArray) -> float:
    """Mean of the map's pixels in the polygon and on its edge. corners: (4, 2)."""
    height, width = likelihood.shape
    left, top = np.floor(corners.min(axis=0)).astype(int).clip(0, (width - 1, height - 1)).tolist()
    right, bottom = np.ceil(corners.max(axis=0)).astype(int).clip(0, (width - 1, height - 1)).tolist()
    mask = np.zeros((bottom - top + 1, right - left + 1), np.uint8)
    cv2.fillPoly(mask, [(corners - (left, top)).astype(np.int32)], (1,))
    return cv2.mean(likelihood[top : bottom + 1, left : right + 1], mask)[0]


def _clockwise(corners: Array) -> Array:
    """Corners of rectangles (n, 4, 2) from the top left one on: the upper one of the two that are farthest left."""
    ordered = np.take_along_axis(corners, corners[..., :1].argsort(axis=1, kind="stable"), axis=1)
    left, right = (
        np.take_along_axis(pair, pair[..., 1:].argsort(axis=1, kind="stable"), axis=1)
        for pair in (ordered[:, :2], ordered[:, 2:])
    )
    return np.stack([left[:, 0], right[:, 0], right[:, 1], left[:, 1]], axis=1)


LAYOUTS = (
    Layout(
        "ctc",
        NetworkType.OTHER,
        parse_ctc,
        "the first output, float `[steps, characters + 2]`: a score per character and step: the blank, the card's "
        "`characters`, the space; or without the space. Logits with `apply-softmax: 1`",
        threshold=0.0,
        uses=frozenset(("conf",)),
    ),
    Layout(
        "db",
        NetworkType.OTHER,
        parse_db,
        "the first output, float `[1, h, w]` or `[h, w]`: the probability that a pixel is text, or logits with "
        "`apply-sigmoid: 1`. Regions over `segmentation-threshold` (0.3) whose mean is over `pre-cluster-threshold` "
        "become rectangles, which grow by `unclip-ratio`",
        threshold=0.6,
        segmentation_threshold=0.3,
        uses=frozenset(("conf", "max_detections")),
    ),
)
