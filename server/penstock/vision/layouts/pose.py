"""Poses: detectors with a fixed number of keypoints for each box.

Sources: ultralytics/ultralytics ultralytics/nn/modules/head.py, open-mmlab/mmdeploy configs/mmpose/
pose-detection_rtmo_onnxruntime_dynamic.py (read, not used). Keypoints are x and y in pixels of the
network's input, and perhaps a visibility, 0 to 1.
"""

from dataclasses import replace

import numpy as np

from penstock.protocol.inference import FloatArray
from penstock.protocol.vision_results import Detections
from penstock.vision.layouts.detection_rows import rows_over_threshold
from penstock.vision.layouts.layout import (
    FINAL_BOX_OPTIONS,
    Layout,
    LayoutOptions,
    Outputs,
    best_classes,
    finish_boxes,
    probabilities,
)
from penstock.vision.layouts.yolo import anchor_columns, boxes_of_anchors
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import NetworkType

_BOX = 4
_FINAL = 6  # columns before the keypoints: corners, score, class


def parse_yolov8_pose(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses (4 + classes + k * d, n) or its transpose: cxcywh, scores, keypoints. Raises EngineFailed."""
    name = options.output_names[0]
    count = _keypoint_columns(outputs, options)
    columns = anchor_columns(outputs, name, geometry, least_columns=_BOX + 1)
    if len(columns) <= _BOX + count:
        raise outputs.refuse(name, columns.T, f"[n, {_BOX} + classes + {count}] ({_shape_text(options)})")
    boxes, row = boxes_of_anchors(columns, probabilities(columns[_BOX:-count], options), options, geometry)
    return _with_keypoints(boxes, columns[-count:, row].T, options, geometry)


def parse_end2end_pose(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses rows (n, 6 + k * d): xyxy in network pixels, score, class, keypoints. Final. Raises EngineFailed."""
    count = _keypoint_columns(outputs, options)
    meaning = f"x0, y0, x1, y1, score, class, {_shape_text(options)}"
    rows, class_id = rows_over_threshold(outputs, options.output_names[0], options, _FINAL + count, meaning)
    boxes, index = finish_boxes(
        rows[:, :_BOX], rows[:, _BOX], class_id, options, geometry.to_source, needs_suppression=False
    )
    return _with_keypoints(boxes, rows[index, _FINAL:], options, geometry)


def parse_rtmo(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses dets (n, 5): xyxy in network pixels, score; keypoints (n, k, d). One class, final. Raises EngineFailed."""
    box_name, point_name = outputs.pick(options, ("dets",), ("keypoints",))
    _keypoint_columns(outputs, options)
    rows, points = outputs.floats(box_name, rank=2), outputs.floats(point_name, rank=3)
    if rows.shape[1] != _BOX + 1:
        raise outputs.refuse(box_name, rows, "[n, 5] (x0, y0, x1, y1, score)")
    if points.shape != (len(rows), *options.keypoint_shape):
        count, values = options.keypoint_shape
        raise outputs.refuse(point_name, points, f"[{len(rows)}, {count}, {values}] ({_shape_text(options)})")
    found = best_classes(rows[:, _BOX][np.newaxis], options)
    boxes, index = finish_boxes(
        rows[found.row, :_BOX], found.score, found.class_id, options, geometry.to_source, needs_suppression=False
    )
    return _with_keypoints(boxes, points[found.row[index]], options, geometry)


def _keypoint_columns(outputs: Outputs, options: LayoutOptions) -> int:
    count, values = options.keypoint_shape
    if not count:
        raise outputs.broken(options.output_names[0], "has keypoints; the card needs keypoint-shape, such as 17;3")
    return count * values


def _shape_text(options: LayoutOptions) -> str:
    count, values = options.keypoint_shape
    return f"{count} keypoints of {values} values, by keypoint-shape"


def _with_keypoints(boxes: Detections, values: FloatArray, options: LayoutOptions, geometry: Geometry) -> Detections:
    """values: (boxes, k * d) or (boxes, k, d)."""
    points = values.reshape(-1, *options.keypoint_shape)
    keypoints = np.ones((*points.shape[:2], 3), np.float32)
    keypoints[..., :2] = geometry.points_to_source(points[..., :2])
    if points.shape[2] > 2:
        keypoints[..., 2] = points[..., 2].clip(0.0, 1.0)
    return replace(boxes, keypoints=keypoints)


_KEYPOINTS = "keypoints by `keypoint-shape`: x and y in pixels of the network's input, and perhaps a score, 0 to 1"
LAYOUTS = (
    Layout(
        "yolov8-pose",
        NetworkType.DETECTOR,
        parse_yolov8_pose,
        "the first output, float `[n, 4 + classes + k * d]` or its transpose: centre x, y, width and height in pixels "
        f"of the network's input, a score per class, {_KEYPOINTS}. YOLOv8 and YOLO11",
    ),
    Layout(
        "yolo-end2end-pose",
        NetworkType.DETECTOR,
        parse_end2end_pose,
        "the first output, float `[n, 6 + k * d]`: x0, y0, x1, y1 in pixels of the network's input, score, class, "
        f"{_KEYPOINTS}; no NMS. YOLO26",
        uses=FINAL_BOX_OPTIONS,
    ),
    Layout(
        "rtmo",
        NetworkType.DETECTOR,
        parse_rtmo,
        "`dets` float `[n, 5]`: x0, y0, x1, y1 in pixels of the network's input, score; `keypoints` float `[n, k, d]`: "
        "x, y in the same pixels, and perhaps a score, 0 to 1, by `keypoint-shape`; one class, final: nothing is "
        "suppressed. RTMO exported by mmdeploy",
        uses=FINAL_BOX_OPTIONS,
    ),
)
