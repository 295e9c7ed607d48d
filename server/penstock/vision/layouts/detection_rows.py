"""Detectors that output one row per box: corners, score and class. Most run NMS in the graph."""

import numpy as np

from penstock.protocol.inference import FloatArray, IntArray
from penstock.protocol.vision_results import Detections
from penstock.vision.layouts.layout import FINAL_BOX_OPTIONS, Layout, LayoutOptions, Outputs, corners_of, finish_boxes
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import NetworkType

# Names of the same four outputs by TensorRT's EfficientNMS plugin, other exporters of it, mmyolo and SuperGradients.
_COUNTS = ("num_dets", "num_detections", "num_predictions")
_BOXES = ("det_boxes", "detection_boxes", "boxes", "bboxes", "pred_boxes")
_SCORES = ("det_scores", "detection_scores", "scores", "pred_scores")
_CLASSES = ("det_classes", "detection_classes", "labels", "classes", "pred_classes")

_SIX_COLUMNS = "x0, y0, x1, y1, score, class"
_SEVEN_COLUMNS = "image, x0, y0, x1, y1, class, score"
_FLAT_COLUMNS = "image, x0, y0, x1, y1, score, class"


def parse_end2end(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses (n, 6): xyxy in network pixels, score, class; final. Raises EngineFailed."""
    rows = _rows(outputs, options, _SIX_COLUMNS)
    class_id = _class_ids(outputs, options.output_names[0], rows[:, 4], rows[:, 5], options)
    return _finish(rows[:, :4], rows[:, 4], class_id, options, geometry)


def parse_deepstream_yolo(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses (n, 6), or boxes (n, 4), scores (n, 1), classes (n, 1): xyxy in network pixels. Raises EngineFailed.

    Source: utils/export_yoloV8.py of github.com/marcoslucianops/DeepStream-Yolo at 2ccf529, and export_yolonas.py at
    b451b03 for three outputs. There, nvinfer runs NMS.
    """
    boxes, score, class_id = _deepstream_rows(outputs, options)
    return _finish(boxes, score, class_id, options, geometry, needs_suppression=True)


def parse_deepstream_yolo_cxcywh(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """As parse_deepstream_yolo, with centre, width and height of boxes. Raises EngineFailed.

    Source: utils/export_yoloV8.py of github.com/marcoslucianops/DeepStream-Yolo at 000bcd6.
    """
    boxes, score, class_id = _deepstream_rows(outputs, options)
    return _finish(corners_of(boxes), score, class_id, options, geometry, needs_suppression=True)


def _deepstream_rows(outputs: Outputs, options: LayoutOptions) -> tuple[FloatArray, FloatArray, IntArray]:
    """Boxes (n, 4), scores (n,) and classes (n,) over the lowest threshold."""
    if len(options.output_names) == 1:
        rows, class_id = rows_over_threshold(outputs, options.output_names[0], options, 6, _SIX_COLUMNS)
        return rows[:, :4], rows[:, 4], class_id
    box_name, score_name, class_name = outputs.pick(options, ("boxes",), ("scores",), ("classes",))
    boxes, score = outputs.floats(box_name, rank=2), outputs.floats(score_name, rank=1)
    if boxes.shape != (len(score), 4):
        raise outputs.refuse(box_name, boxes, f"[{len(score)}, 4] (a box per score of {score_name!r})")
    numbers = outputs.class_ids(class_name)
    if numbers.shape != score.shape:
        raise outputs.refuse(class_name, numbers, f"[{len(score)}] (a class per box)")
    is_likely = score > options.lowest_threshold()
    boxes, score, numbers = boxes[is_likely], score[is_likely], numbers[is_likely]
    return boxes, score, _class_ids(outputs, class_name, score, numbers, options)


def parse_yolov7_nms(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses (n, 7): image, xyxy in network pixels, class, score; final. The image is 0. Raises EngineFailed."""
    rows = _rows(outputs, options, _SEVEN_COLUMNS)
    return _finish_seven(outputs, options, geometry, rows[:, [0, 1, 2, 3, 4, 6, 5]])


def parse_yolo_nas_flat(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses (n, 7): image, xyxy in network pixels, score, class; final. The image is 0. Raises EngineFailed.

    Source: documentation/source/models_export.md of github.com/Deci-AI/super-gradients at 2095ed5.
    """
    return _finish_seven(outputs, options, geometry, _rows(outputs, options, _FLAT_COLUMNS))


def _finish_seven(outputs: Outputs, options: LayoutOptions, geometry: Geometry, rows: FloatArray) -> Detections:
    """rows: (n, 7), image, xyxy, score, class."""
    rows = rows[rows[:, 0] == 0]
    class_id = _class_ids(outputs, options.output_names[0], rows[:, 5], rows[:, 6], options)
    return _finish(rows[:, 1:5], rows[:, 5], class_id, options, geometry)


def parse_mmdeploy(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses dets (n, 5): xyxy in network pixels, score; labels (n,): class; final. Raises EngineFailed."""
    dets, labels = outputs.pick(options, ("dets",), ("labels",))
    rows, class_id = outputs.floats(dets, rank=2), outputs.class_ids(labels)
    if rows.shape != (len(rows), 5):
        raise outputs.refuse(dets, rows, "[n, 5] (x0, y0, x1, y1, score)")
    if class_id.shape != (len(rows),):
        raise outputs.refuse(labels, class_id, f"[{len(rows)}] (a class per row of {dets!r})")
    class_id = _class_ids(outputs, labels, rows[:, 4], class_id, options)
    return _finish(rows[:, :4], rows[:, 4], class_id, options, geometry)


def parse_efficient_nms(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses the outputs of TensorRT's EfficientNMS plugin: count (), xyxy (n, 4), score (n,), class (n,); final.

    Only the first `count` rows are valid. Raises EngineFailed.
    """
    counts, boxes, scores, classes = outputs.pick(options, _COUNTS, _BOXES, _SCORES, _CLASSES)
    count = outputs.count(counts)
    xyxy, score = outputs.floats(boxes, rank=2, first=count), outputs.floats(scores, rank=1, first=count)
    class_id = outputs.class_ids(classes, first=count)
    if xyxy.shape != (count, 4):
        raise outputs.refuse(boxes, xyxy, f"[{count}, 4] ({count} boxes by {counts!r})")
    if score.shape != (count,):
        raise outputs.refuse(scores, score, f"[{count}] (a score per box)")
    if class_id.shape != (count,):
        raise outputs.refuse(classes, class_id, f"[{count}] (a class per box)")
    return _finish(xyxy, score, _class_ids(outputs, classes, score, class_id, options), options, geometry)


def _rows(outputs: Outputs, options: LayoutOptions, meaning: str) -> FloatArray:
    """The first output, (n, columns). meaning: of the columns."""
    name, columns = options.output_names[0], len(meaning.split(", "))
    rows = outputs.floats(name, rank=2)
    if rows.shape[1] != columns:
        raise outputs.refuse(name, rows, f"[n, {columns}] ({meaning})")
    return rows


def rows_over_threshold(
    outputs: Outputs, name: str, options: LayoutOptions, columns: int, meaning: str
) -> tuple[FloatArray, IntArray]:
    """Rows (n, columns) of an output whose score, column 4, is over the lowest threshold; classes (n,), of column 5.

    meaning: of the columns. Raises EngineFailed.
    """
    rows = outputs.floats(name, rank=2)
    if rows.shape[1] != columns:
        raise outputs.refuse(name, rows, f"[n, {columns}] ({meaning})")
    rows = rows[rows[:, 4] > options.lowest_threshold()]
    return rows, _class_ids(outputs, name, rows[:, 4], rows[:, 5], options)


def _class_ids(
    outputs: Outputs, name: str, score: FloatArray, numbers: FloatArray | IntArray, options: LayoutOptions
) -> IntArray:
    """Class ids of numbers (n,), which may be floats. Padding rows may have any number."""
    class_id = outputs.whole_numbers(name, np.where(score > options.lowest_threshold(), numbers, 0))
    if class_id.min(initial=0) < 0:
        raise outputs.broken(name, f"holds {class_id.min()}; classes are counted from 0")
    return class_id


def _finish(
    xyxy: FloatArray,
    score: FloatArray,
    class_id: IntArray,
    options: LayoutOptions,
    geometry: Geometry,
    *,
    needs_suppression: bool = False,
) -> Detections:
    return finish_boxes(xyxy, score, class_id, options, geometry.to_source, needs_suppression=needs_suppression)[0]


_PIXELS = "in pixels of the network's input"
_FINAL = "no NMS"
LAYOUTS = (
    Layout(
        "yolo-end2end",
        NetworkType.DETECTOR,
        parse_end2end,
        f"the first output, float `[n, 6]`: x0, y0, x1, y1 {_PIXELS}, score, class; {_FINAL}. YOLOv10, YOLO26, and "
        "other models that Ultralytics exports with `nms=True`",
        uses=FINAL_BOX_OPTIONS,
    ),
    Layout(
        "deepstream-yolo",
        NetworkType.DETECTOR,
        parse_deepstream_yolo,
        f"one output, float `[n, 6]`: x0, y0, x1, y1 {_PIXELS}, score, class, as "
        "[DeepStream-Yolo](https://github.com/marcoslucianops/DeepStream-Yolo) exports models since November 2024; or "
        "three, `boxes` `[n, 4]`, `scores` and `classes` `[n, 1]`, as it exported YOLO-NAS, DAMO-YOLO and PP-YOLOE",
    ),
    Layout(
        "deepstream-yolo-cxcywh",
        NetworkType.DETECTOR,
        parse_deepstream_yolo_cxcywh,
        "as `deepstream-yolo`, with centre x, y, width and height, as DeepStream-Yolo exported YOLOv5 to YOLOv9 before "
        "November 2024",
    ),
    Layout(
        "yolov7-nms",
        NetworkType.DETECTOR,
        parse_yolov7_nms,
        f"the first output, float `[n, 7]`: image, x0, y0, x1, y1 {_PIXELS}, class, score; {_FINAL}. The rows "
        "are not a batch: `max_batch_size` must be 0. YOLOv7 exported with `--end2end --max-wh`",
        uses=FINAL_BOX_OPTIONS,
        is_one_picture=True,
    ),
    Layout(
        "yolo-nas-flat",
        NetworkType.DETECTOR,
        parse_yolo_nas_flat,
        f"the first output, float `[n, 7]`: image, x0, y0, x1, y1 {_PIXELS}, score, class; {_FINAL}. The rows "
        "are not a batch: `max_batch_size` must be 0. YOLO-NAS exported in SuperGradients' flat format",
        uses=FINAL_BOX_OPTIONS,
        is_one_picture=True,
    ),
    Layout(
        "mmdeploy",
        NetworkType.DETECTOR,
        parse_mmdeploy,
        f"`dets` float `[n, 5]`: x0, y0, x1, y1 {_PIXELS}, score; `labels` integers `[n]`: class; {_FINAL}. Other "
        "names: in this order",
        uses=FINAL_BOX_OPTIONS,
    ),
    Layout(
        "efficient-nms",
        NetworkType.DETECTOR,
        parse_efficient_nms,
        f"`num_dets` integer, `det_boxes` float `[n, 4]`: x0, y0, x1, y1 {_PIXELS}, `det_scores` float `[n]`, "
        f"`det_classes` integers `[n]`; {_FINAL}. Also `num_detections`, `detection_boxes`, …, or `num_dets`, `boxes`, "
        "`scores`, `labels`, or `num_predictions`, `pred_boxes`, …; other names: in this order",
        uses=FINAL_BOX_OPTIONS,
    ),
)
