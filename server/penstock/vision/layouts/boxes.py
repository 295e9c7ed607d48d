"""Detectors that output boxes directly: `boxes`, `scores`, `class_ids`."""

import numpy as np

from penstock.protocol.vision_results import Detections
from penstock.vision.layouts.layout import Layout, LayoutOptions, Outputs, finish_detections
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import NetworkType


def parse_boxes(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses boxes (n, 4) xyxy in network pixels, scores (n,), class_ids (n,). Raises EngineFailed."""
    xyxy = outputs.floats("boxes", rank=2)
    score = outputs.floats("scores", rank=1)
    class_id = outputs.integers("class_ids", rank=1)
    count = len(xyxy)
    if xyxy.shape != (count, 4):
        raise outputs.refuse("boxes", xyxy, "[n, 4]")
    if score.shape != (count,):
        raise outputs.refuse("scores", score, f"[{count}] (one score a box)")
    if class_id.shape != (count,):
        raise outputs.refuse("class_ids", class_id, f"[{count}] (one class a box)")
    if np.any((score > options.pre_cluster_threshold) & (class_id < 0)):
        raise outputs.broken("class_ids", f"holds {class_id.min()}; classes are counted from 0")
    return finish_detections(xyxy, score, class_id, options, geometry.to_source)


LAYOUTS = (
    Layout(
        "boxes",
        NetworkType.DETECTOR,
        parse_boxes,
        "`boxes` float `[n, 4]`: x1, y1, x2, y2 in pixels of the network's input; `scores` float `[n]`, 0 to 1; "
        "`class_ids` integers `[n]`, from 0. Fill up a batch with rows of score 0",
        threshold=0.2,
        iou=0.3,
    ),
)
