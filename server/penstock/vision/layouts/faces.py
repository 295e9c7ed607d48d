"""Face detectors: UltraFace, YuNet and CenterFace. The latter two have five keypoints a face.

Sources: Linzaer/Ultra-Light-Fast-Generic-Face-Detector-1MB run_video_face_detect_onnx.py, opencv/opencv
face_detect.cpp, the package deface, centerface.py (read, not used).
"""

from dataclasses import replace

import numpy as np

from penstock.protocol.inference import Array, FloatArray, IntArray
from penstock.protocol.vision_results import Detections
from penstock.vision.layouts.layout import (
    Layout,
    LayoutOptions,
    Outputs,
    best_classes,
    finish_boxes,
    finish_detections,
    stride_of,
)
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import NetworkType

_POINTS = 5
_LOGARITHMS = (-20.0, 20.0)  # clipped: exp() beyond it has no meaning for a picture
_CENTERFACE_STRIDE = 4
_HEAT, _SCALE, _OFFSET, _LANDMARKS = ("heatmap",), ("scale",), ("offset",), ("landmarks", "lms")


def parse_ultraface(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses scores (n, 2) and boxes (n, 4). Raises EngineFailed."""
    score_name, box_name = outputs.pick(options, ("scores",), ("boxes",))
    scores, boxes = outputs.floats(score_name, rank=2), outputs.floats(box_name, rank=2)
    if scores.shape[1] != 2:
        raise outputs.refuse(score_name, scores, "[n, 2]")
    if boxes.shape != (len(scores), 4):
        raise outputs.refuse(box_name, boxes, f"[{len(scores)}, 4]")
    found = best_classes(scores[:, 1][np.newaxis], options)
    to_source = geometry.normalised_to_source
    return finish_detections(boxes[found.row], found.score, found.class_id, options, to_source)


def parse_yunet(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses four outputs a stride, distinguished by their shapes: scores, objectness, boxes, points."""
    groups: dict[int, dict[int, list[FloatArray]]] = {}
    for name in options.output_names:
        array = outputs.floats(name, rank=2)
        if array.shape[1] not in (1, 4, 2 * _POINTS) or stride_of(len(array), geometry) is None:
            size = f"{geometry.network_width}x{geometry.network_height}"
            raise outputs.refuse(name, array, f"[cells, 1, 4 or 10], for a grid over the network's {size} pixels")
        groups.setdefault(len(array), {}).setdefault(array.shape[1], []).append(array)
    parts = []
    for cells, group in groups.items():
        if [len(group.get(columns, ())) for columns in (1, 4, 2 * _POINTS)] != [2, 1, 1]:
            name = options.output_names[0]
            raise outputs.broken(name, f"and the others are not two [{cells}, 1], a [{cells}, 4] and a [{cells}, 10]")
        likelihood = np.sqrt(np.clip(group[1][0][:, 0], 0.0, 1.0) * np.clip(group[1][1][:, 0], 0.0, 1.0))
        row = best_classes(likelihood[np.newaxis], options).row
        boxes, points = group[4][0][row], group[2 * _POINTS][0][row]
        parts.append(_yunet_faces(likelihood[row], boxes, points, row, stride_of(cells, geometry) or 1, geometry))
    score, xyxy, xy = (np.concatenate(part) for part in zip(*parts, strict=True))
    return _finish(score, xyxy, xy, options, geometry)


def _yunet_faces(
    score: FloatArray, boxes: FloatArray, points: FloatArray, row: IntArray, stride: int, geometry: Geometry
) -> tuple[Array, Array, Array]:
    """Scores (n,), corners (n, 4) and points (n, 5, 2) in network pixels."""
    columns = -(-geometry.network_width // stride)
    cell = np.stack([row % columns, row // columns], axis=1).astype(np.float64)
    centre, half = (cell + boxes[:, :2]) * stride, np.exp(np.clip(boxes[:, 2:], *_LOGARITHMS)) * (stride / 2)
    xy = (cell[:, np.newaxis] + points.reshape(-1, _POINTS, 2)) * stride
    return score, np.concatenate([centre - half, centre + half], axis=1), xy


def parse_centerface(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses maps of a quarter of the network's size: heat (1), scale (2), offset (2), points (10). y is first."""
    names = outputs.pick(options, _HEAT, _SCALE, _OFFSET, _LANDMARKS)
    rows, columns = (-(-side // _CENTERFACE_STRIDE) for side in (geometry.network_height, geometry.network_width))
    maps = []
    for name, channels in zip(names, (1, 2, 2, 2 * _POINTS), strict=True):
        values = outputs.floats(name, rank=3)
        if values.shape != (channels, rows, columns):
            raise outputs.refuse(name, values, f"[{channels}, {rows}, {columns}]")
        maps.append(values.reshape(channels, rows * columns))
    heat, scale, offset, landmarks = maps
    found = best_classes(heat, options)
    row = found.row
    size = np.exp(np.clip(scale[:, row].T.astype(np.float64), *_LOGARITHMS)) * _CENTERFACE_STRIDE
    cell = np.stack([row // columns, row % columns], axis=1)
    corner = (cell + offset[:, row].T + 0.5) * _CENTERFACE_STRIDE - size / 2
    points = landmarks[:, row].T.reshape(-1, _POINTS, 2) * size[:, np.newaxis] + corner[:, np.newaxis]
    yxyx = np.concatenate([corner, corner + size], axis=1)
    return _finish(found.score, yxyx[:, [1, 0, 3, 2]], points[:, :, ::-1], options, geometry)


def _finish(
    score: FloatArray, xyxy: FloatArray, xy: FloatArray, options: LayoutOptions, geometry: Geometry
) -> Detections:
    """xyxy: (n, 4), xy: (n, 5, 2) in network pixels. The models have no score of a point; it is 1."""
    faces = np.zeros(len(score), np.int64)
    detections, chosen = finish_boxes(xyxy, score, faces, options, geometry.to_source)
    keypoints = np.ones((len(chosen), _POINTS, 3), np.float32)
    keypoints[:, :, :2] = geometry.points_to_source(xy[chosen])
    return replace(detections, keypoints=keypoints)


LAYOUTS = (
    Layout(
        "ultraface",
        NetworkType.DETECTOR,
        parse_ultraface,
        "`scores` float `[n, 2]`: background, face; `boxes` float `[n, 4]`: x1, y1, x2, y2 in fractions of the "
        "network's image",
        threshold=0.5,
        iou=0.3,
    ),
    Layout(
        "yunet",
        NetworkType.DETECTOR,
        parse_yunet,
        "for each stride, in any order, float `[cells, 1]` twice (their product is the score's square), `[cells, 4]` "
        "(centre's offset in cells, logarithms of width and height in strides), `[cells, 10]` (five points)",
        threshold=0.5,
        iou=0.3,
    ),
    Layout(
        "centerface",
        NetworkType.DETECTOR,
        parse_centerface,
        "`heatmap` float `[1, h, w]`, `scale` `[2, h, w]`, `offset` `[2, h, w]`, `landmarks` `[10, h, w]`, in this "
        "order if their names are others; h, w: a quarter of the network's; y before x",
        threshold=0.5,
        iou=0.3,
    ),
)
