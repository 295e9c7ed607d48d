"""Detectors whose boxes are final: corners, class ids and scores, after NMS in the graph.

Class ids are as the network has them; in those of torchvision, TensorFlow and most SSD, 0 is the background.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock.protocol.inference import FLOATS, FloatArray, IntArray
from penstock.protocol.vision_results import Detections
from penstock.vision.layouts.layout import FINAL_BOX_OPTIONS, Layout, LayoutOptions, Outputs, finish_boxes
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import NetworkType

_BOXES, _SCORES, _LABELS = ("boxes", "bboxes"), ("scores",), ("labels",)
_TENSORFLOW = (("detection_boxes",), ("detection_classes",), ("detection_scores",))
_COUNT = "num_detections"
_SSD_COLUMNS = 7


class FinalBoxes(NamedTuple):
    """xyxy: (n, 4) corners. class_id: (n,) int64, of the network. score: (n,)."""

    xyxy: FloatArray
    class_id: IntArray
    score: FloatArray


def parse_rt_detr(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses boxes (n, 4) in pixels of the source, whose size the network was given. Raises EngineFailed."""
    unscaled = replace(geometry, scale_x=1.0, scale_y=1.0, pad_x=0, pad_y=0)
    return _finish(_read(outputs, options), options, unscaled, is_normalised=False)


def parse_torchvision(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses boxes (n, 4) in pixels of the network's image. Raises EngineFailed."""
    return _finish(_read(outputs, options), options, geometry, is_normalised=False)


def parse_ssd(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses boxes in fractions of the network's image: rows of 7 for all images, or three outputs."""
    name = options.output_names[0]
    found = _read_rows(outputs, name) if len(options.output_names) == 1 else _read(outputs, options)
    return _finish(found, options, geometry, is_normalised=True)


def parse_tf_detection(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses detection_boxes (n, 4), y first, and the outputs that go with it. Raises EngineFailed."""
    box_name, class_name, score_name = names = outputs.pick(options, *_TENSORFLOW)
    others = [name for name in options.output_names if name not in names]
    counts = [name for name in others if name.partition(":")[0] == _COUNT] or (others if len(others) == 1 else [])
    first = outputs.count(counts[0]) if counts else None
    yxyx = outputs.floats(box_name, rank=2, first=first)
    if yxyx.shape[1:] != (4,):
        raise outputs.refuse(box_name, yxyx, "[n, 4]")
    if first is not None and len(yxyx) < first:
        raise outputs.broken(counts[0], f"is {first}; {box_name!r} has {len(yxyx)} rows")
    score = outputs.floats(score_name, rank=1, first=first)
    found = FinalBoxes(yxyx[:, [1, 0, 3, 2]], outputs.class_ids(class_name, first), score)
    _check_counts(outputs, found, (box_name, class_name, score_name))
    return _finish(found, options, geometry, is_normalised=True)


def _read(outputs: Outputs, options: LayoutOptions) -> FinalBoxes:
    box_name, class_name, score_name = names = _names(outputs, options)
    xyxy = outputs.floats(box_name, rank=2)
    if xyxy.shape[1:] != (4,):
        raise outputs.refuse(box_name, xyxy, "[n, 4]")
    found = FinalBoxes(xyxy, outputs.class_ids(class_name), outputs.floats(score_name, rank=1))
    _check_counts(outputs, found, names)
    return found


def _names(outputs: Outputs, options: LayoutOptions) -> tuple[str, str, str]:
    """Names of boxes, class ids and scores: the usual names, else by type, axes, and the four corners."""
    plain = {name.lower(): name for name in options.output_names}
    usual = [next((plain[name] for name in role if name in plain), "") for role in (_BOXES, _LABELS, _SCORES)]
    if all(usual):
        return usual[0], usual[1], usual[2]
    tensors = [tensor for name in options.output_names if (tensor := outputs.response.output(name)) is not None]
    floats = [tensor for tensor in tensors if tensor.datatype in FLOATS]
    labels = [tensor for tensor in tensors if "INT" in tensor.datatype]
    pairs = [
        (boxes, scores)
        for boxes in floats
        for scores in floats
        if boxes.shape[-1:] == (4,) and boxes.shape[:-1] == scores.shape
    ]
    if len(pairs) != 1 or len(labels) != 1:
        has = ", ".join(f"{tensor.name!r} {tensor.datatype} {list(tensor.shape)}" for tensor in tensors)
        raise outputs.broken(
            options.output_names[0],
            f"and the others ({has}) are not boxes [n, 4], scores [n] and integers [n]; name the three by "
            "output-blob-names, if the model has more outputs",
        )
    return pairs[0][0].name, labels[0].name, pairs[0][1].name


def _read_rows(outputs: Outputs, name: str) -> FinalBoxes:
    """Of rows (n, 7): image id, class id, score, corners. An image id below 0 ends them."""
    rows = outputs.float_rows(name, _SSD_COLUMNS)
    ends = np.flatnonzero(rows[:, 0] < 0)
    rows = outputs.finite(name, rows[: ends[0]] if len(ends) else rows)
    rows = rows[rows[:, 0] == (outputs.row or 0)]
    return FinalBoxes(rows[:, 3:], outputs.whole_numbers(name, rows[:, 1]), rows[:, 2])


def _check_counts(outputs: Outputs, found: FinalBoxes, names: tuple[str, str, str]) -> None:
    count = len(found.xyxy)
    for name, array in ((names[1], found.class_id), (names[2], found.score)):
        if len(array) != count:
            raise outputs.refuse(name, array, f"[{count}] (one for each box of {names[0]!r})")


def _finish(found: FinalBoxes, options: LayoutOptions, geometry: Geometry, *, is_normalised: bool) -> Detections:
    to_source = geometry.normalised_to_source if is_normalised else geometry.to_source
    return finish_boxes(found.xyxy, found.score, found.class_id, options, to_source, needs_suppression=False)[0]


_ROWS = "class ids `[n]`, integers or whole floats; scores float `[n]`, 0 to 1; no NMS"

LAYOUTS = (
    Layout(
        "rt-detr",
        NetworkType.DETECTOR,
        parse_rt_detr,
        f"`boxes` float `[n, 4]`: x1, y1, x2, y2 in pixels of the picture, whose size an `image-size-input` takes; "
        f"`labels`, {_ROWS.replace('; scores', '; `scores`')}. RT-DETR, D-FINE, DEIM",
        uses=FINAL_BOX_OPTIONS,
        needs_size_input=True,
    ),
    Layout(
        "torchvision",
        NetworkType.DETECTOR,
        parse_torchvision,
        f"three outputs of any name and order: boxes float `[n, 4]`, x1, y1, x2, y2 in pixels of the network's input; "
        f"{_ROWS}. n is not the batch",
        uses=FINAL_BOX_OPTIONS,
    ),
    Layout(
        "ssd",
        NetworkType.DETECTOR,
        parse_ssd,
        "one output float `[…, n, 7]`: image id (below 0 after the last row), class id, score, x1, y1, x2, y2 in "
        "fractions of the network's image; or three outputs as in `torchvision`, in fractions; no NMS",
        uses=FINAL_BOX_OPTIONS,
    ),
    Layout(
        "tf-detection",
        NetworkType.DETECTOR,
        parse_tf_detection,
        "`detection_boxes` float `[n, 4]`: y1, x1, y2, x2 in fractions of the network's image; `detection_classes` "
        "`[n]`, whole floats; `detection_scores` float `[n]`; `num_detections`: how many rows are valid; "
        "no NMS",
        uses=FINAL_BOX_OPTIONS,
    ),
)
