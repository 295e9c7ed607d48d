"""Detectors that output boxes directly: `boxes`, `scores`, `class_ids`."""

import numpy as np

from penstock.protocol.inference import Detections
from penstock.vision.layouts.layout import Outputs, ParserOptions, finish_detections
from penstock.vision.preprocess import Geometry


def parse_boxes(outputs: Outputs, options: ParserOptions, geometry: Geometry) -> Detections:
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
