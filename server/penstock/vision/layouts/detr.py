"""Transformers that output queries: a box per query as centre and size in fractions of the image, without NMS.

Sources: facebookresearch/detr models/detr.py, roboflow/rf-detr PostProcess, ultralytics models/rtdetr/predict.py (read,
not used). The boxes refer to the network's image.
"""

import numpy as np

from penstock.protocol.inference import FloatArray
from penstock.protocol.vision_results import Detections
from penstock.vision.layouts.layout import (
    FINAL_BOX_OPTIONS,
    Candidates,
    Layout,
    LayoutOptions,
    Outputs,
    best_classes,
    corners_of,
    finish_boxes,
    sigmoid,
)
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import NetworkType

_BOXES = ("dets", "pred_boxes")
_LOGITS = ("labels", "pred_logits", "logits")


def parse_rt_detr_ultralytics(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses the first output, (queries, 4 + classes). Raises EngineFailed."""
    name = options.output_names[0]
    rows = outputs.floats(name, rank=2)
    if rows.shape[1] <= 4:
        raise outputs.refuse(name, rows, "[queries, 4 + classes]")
    found = best_classes(rows[:, 4:].T, options)
    return _finish(rows[found.row, :4], found, options, geometry)


def parse_detr(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses pred_logits (queries, classes + 1) and pred_boxes (queries, 4). Raises EngineFailed."""
    logit_name, box_name = outputs.pick(options, _LOGITS, _BOXES)
    boxes, logits = query_outputs(outputs, box_name, logit_name)
    if logits.shape[1] < 2:
        raise outputs.refuse(logit_name, logits, "[queries, classes + 1]")
    powers = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf), dtype=np.float64)
    shares = powers[:, :-1] / powers.sum(axis=1, keepdims=True)
    found = best_classes(shares.T.astype(np.float32), options)
    return _finish(boxes[found.row], found, options, geometry)


def parse_rf_detr(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses dets (queries, 4) and labels (queries, classes) of logits. Raises EngineFailed."""
    box_name, logit_name = outputs.pick(options, _BOXES, _LOGITS)
    boxes, logits = query_outputs(outputs, box_name, logit_name)
    found = best_pairs(logits, options)
    return _finish(boxes[found.row], found, options, geometry)


def query_outputs(outputs: Outputs, box_name: str, logit_name: str) -> tuple[FloatArray, FloatArray]:
    """Boxes (queries, 4) and logits (queries, columns) of one image. Raises EngineFailed."""
    boxes, logits = outputs.floats(box_name, rank=2), outputs.floats(logit_name, rank=2)
    if boxes.shape[1:] != (4,):
        raise outputs.refuse(box_name, boxes, "[queries, 4]")
    if len(logits) != len(boxes) or logits.shape[1] == 0:
        raise outputs.refuse(logit_name, logits, f"[{len(boxes)}, classes] (a row for each box of {box_name!r})")
    return boxes, logits.astype(np.float64)


def best_pairs(logits: FloatArray, options: LayoutOptions) -> Candidates:
    """The highest-scoring pairs of query and class over the lowest threshold; at most as many as queries.

    logits: (queries, classes) of independent classes. A query can have several classes, each a candidate.
    """
    scores = sigmoid(logits).astype(np.float32)
    row, class_id = np.nonzero(scores > options.lowest_threshold())
    score = scores[row, class_id]
    best = np.argsort(-score, kind="stable")[: len(logits)]
    return Candidates(row[best], class_id[best], score[best])


def _finish(boxes: FloatArray, found: Candidates, options: LayoutOptions, geometry: Geometry) -> Detections:
    to_source = geometry.normalised_to_source
    return finish_boxes(corners_of(boxes), found.score, found.class_id, options, to_source, needs_suppression=False)[0]


LAYOUTS = (
    Layout(
        "rt-detr-ultralytics",
        NetworkType.DETECTOR,
        parse_rt_detr_ultralytics,
        "the first output, float `[queries, 4 + classes]`: centre x, centre y, width, height in fractions of the "
        "network's image, then a score per class, 0 to 1; no NMS",
        uses=FINAL_BOX_OPTIONS,
    ),
    Layout(
        "detr",
        NetworkType.DETECTOR,
        parse_detr,
        "`pred_logits` or `logits` float `[queries, classes + 1]`, the last one for no object; `pred_boxes` float "
        "`[queries, 4]`: centre x, centre y, width, height in fractions of the network's image; no NMS",
        uses=FINAL_BOX_OPTIONS,
    ),
    Layout(
        "rf-detr",
        NetworkType.DETECTOR,
        parse_rf_detr,
        "`dets` or `pred_boxes` float `[queries, 4]`: centre x, centre y, width, height in fractions of the network's "
        "image; `labels` or `logits` float `[queries, classes]`: a logit per class; no NMS",
        uses=FINAL_BOX_OPTIONS,
    ),
)
