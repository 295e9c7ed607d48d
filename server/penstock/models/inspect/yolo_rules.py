"""Rules that recognise YOLO's outputs: rows of anchors, final rows, prototypes, keypoints and oriented boxes."""

from dataclasses import replace
from itertools import pairwise

from penstock.models.inspect.facts import TensorFacts
from penstock.models.inspect.inspection import Question
from penstock.models.inspect.model_signature import P6, LayoutMatch, ModelSignature, anchor_counts

_PROTOTYPES = 32
_COCO = 80
_MIN_ROWS = 20
_MAX_COLUMNS = 1300  # LVIS has 1203 classes


def ultralytics(model: ModelSignature) -> LayoutMatch | None:
    """A file with Ultralytics' metadata, by its task. Older files have no task: anchor_rows recognises them."""
    metadata = model.metadata
    if metadata.exporter != "Ultralytics" or not metadata.task:
        return None
    classes = len(metadata.names)
    why = f"its metadata is Ultralytics': task {metadata.task!r}, {classes} names"
    rows = _rows(model)
    if metadata.task == "classify":
        return LayoutMatch("classification", (why,), "ultralytics-classify", classes)
    if rows is None:
        return None
    output, columns, is_rows_first = rows
    count = _count(model, output, is_rows_first=is_rows_first)
    is_final = is_rows_first and (metadata.is_end_to_end or _is_short(model, count))
    others = {"segment": _PROTOTYPES, "obb": 1, "pose": _points(model), "detect": 0}.get(metadata.task)
    if others is None:
        return None
    suffix = {"segment": "-seg", "obb": "-obb", "pose": "-pose", "detect": ""}[metadata.task]
    card = _pose_card(model) if metadata.task == "pose" else {}
    names = (output.name, *(_prototypes(model) if metadata.task == "segment" else ()))
    if is_final and columns == 6 + others:
        shape = f"{count} rows of {columns} columns are final: box, score, class"
        return LayoutMatch("yolo-end2end" + suffix, (why, shape), class_count=classes, outputs=names, card=card)
    if metadata.task == "detect" and columns == 4 + classes and _is_short(model, count):
        shape = f"{count} rows are not one per grid cell: RT-DETR by Ultralytics, normalized boxes"
        return LayoutMatch("rt-detr-ultralytics", (why, shape), class_count=classes)
    if columns == 4 + classes + others:
        shape = f"{columns} columns: 4 of the box, {classes} classes" + (f", {others} more" if others else "")
        return LayoutMatch("yolov8" + suffix, (why, shape), class_count=classes, outputs=names, card=card)
    if metadata.task in ("detect", "segment") and columns == 5 + classes + others:
        shape = f"{columns} columns: 4 of the box, objectness, {classes} classes"
        return LayoutMatch("yolov5" + suffix, (why, shape), class_count=classes, outputs=names)
    return None


def anchor_rows(model: ModelSignature) -> LayoutMatch | None:
    """One row per anchor, without a task in the metadata: recognised by rows, columns and names."""
    found = _rows(model)
    if found is None:
        return None
    output, columns, is_rows_first = found
    count = _count(model, output, is_rows_first=is_rows_first)
    one, three = _anchor_counts(model, 1), _anchor_counts(model, 3)
    if count > 0 and count not in one and count not in three:
        return None
    if _prototypes(model) and len(model.facts.outputs) >= 2:
        return _with_prototypes(model, output, columns, is_three=count in three)
    others = [tensor for tensor in model.facts.outputs if tensor is not output]
    if not all(_is_raw_head(model, tensor) for tensor in others):
        return None
    if count in three and count not in one:
        match = _three_anchors(model, columns, count)
    elif not is_rows_first:
        match = _columns_first(model, columns, count)
    else:
        match = _rows_first(model, columns, count)
    if match is None or not others:
        return match
    why = f"only {output.name!r} is read: the others are the maps of the strides from which it is made"
    return replace(match, outputs=(output.name,), why=(*match.why, why))


def _is_raw_head(model: ModelSignature, output: TensorFacts) -> bool:
    """Whether an output is the map of one stride, which older exporters write beside the rows: (h, w) in any order."""
    shape = model.shape_per_image(output)
    if model.size is None or len(shape) not in (3, 4):
        return False
    grids = {(model.size[0] // stride, model.size[1] // stride) for stride in P6}
    return not grids.isdisjoint(pairwise(shape))


def _three_anchors(model: ModelSignature, columns: int, count: int) -> LayoutMatch | None:
    why = f"{count} rows are three anchors per grid cell"
    if columns == 6 and not model.metadata.names:
        shape = "6 columns: YOLOv5 with one class, or box, score, class of DeepStream-Yolo; the trial run decides"
        return LayoutMatch("yolov5", (why, shape), class_count=1)
    if columns < 6:
        return None
    return _counted(model, "yolov5", columns - 5, (why, f"{columns} columns: box, objectness, {columns - 5} classes"))


def _columns_first(model: ModelSignature, columns: int, count: int) -> LayoutMatch | None:
    why = f"the columns are the first axis, as in YOLOv8 and later; {count} rows are one per grid cell"
    classes = columns - 4
    points = model.metadata.keypoint_shape or ((17, 3) if columns == 56 else None)
    if points and columns == 5 + points[0] * points[1] and len(model.names) != classes:
        shape = f"{columns} columns: box, one class, {points[0]} points of {points[1]} values; the trial checks it"
        card = {"keypoint-shape": f"{points[0]};{points[1]}"}
        return LayoutMatch("yolov8-pose", (why, shape), class_count=1, card=card, labels=("person",))
    if len(model.names) == columns - 5 and model.names:
        shape = f"{columns} columns: 4 of the box, {columns - 5} classes as in {model.names_origin}, an angle"
        return LayoutMatch("yolov8-obb", (why, shape), class_count=columns - 5)
    return _counted(model, "yolov8", classes, (why, f"{columns} columns: 4 of the box, {classes} classes"))


def _rows_first(model: ModelSignature, columns: int, count: int) -> LayoutMatch | None:
    """YOLOX, YOLOv6, YOLOv8 transposed, DeepStream-Yolo or NanoDet-Plus."""
    why = f"{count} rows are one per grid cell"
    names = len(model.names)
    if not model.metadata.names and not model.hints.labels and names not in (columns - 4, columns - 5, columns - 32):
        names = 0  # a file beside the model that is another model's
    if columns == 6 and names in (0, 1):
        name = model.facts.outputs[0].name
        shape = (
            f"6 columns of {name!r}: YOLOX with one class, or box, score, class; the trial run decides by the values"
        )
        return LayoutMatch("yolox", (why, shape), class_count=1)
    if _is_plus(model, columns, count, names):
        shape = f"{columns} columns: {columns - 32} classes and 32 of four sides' distributions"
        return LayoutMatch("nanodet-plus", (why, shape), class_count=columns - 32)
    if columns - 4 == (names or _COCO):
        shape = f"{columns} columns: 4 of the box, {columns - 4} classes; no objectness, so YOLOv8 transposed"
        return _counted(model, "yolov8", columns - 4, (why, shape))
    if columns - 5 == (names or _COCO):
        shape = f"{columns} columns: 4 of the box, objectness, {columns - 5} classes, as in YOLOX"
        return _counted(model, "yolox", columns - 5, (why, shape))
    if names or columns < 6:
        return None
    question = Question(
        f"{columns} columns are {columns - 5} classes with objectness (YOLOX, YOLOv6) or {columns - 4} without (YOLOv8 "
        "transposed); the file does not say how many classes there are",
        "--labels",
        (f"a file of {columns - 5} names", f"a file of {columns - 4} names"),
    )
    questions = () if model.hints.layout else (question,)
    layout = model.hints.layout if model.hints.layout in ("yolov8", "yolov5", "yolox") else "yolox"
    classes = columns - 4 if layout == "yolov8" else columns - 5
    return LayoutMatch(layout, (why,), class_count=classes, questions=questions)


def _is_plus(model: ModelSignature, columns: int, count: int, names: int) -> bool:
    """NanoDet-Plus has strides 8 to 64, and 32 columns of distributions."""
    sums = {model.cell_count(P6, is_rounded_up=True), model.cell_count(is_rounded_up=True)}
    return count in sums and columns > 32 and (columns - 32 == names if names else columns - 32 == _COCO)


def _with_prototypes(model: ModelSignature, output: TensorFacts, columns: int, *, is_three: bool) -> LayoutMatch | None:
    names = (output.name, *_prototypes(model))
    base = 5 if is_three else 4
    classes = columns - base - _PROTOTYPES
    if classes < 1:
        return None
    why = (
        f"{columns} columns: {base} and {classes} classes and {_PROTOTYPES} coefficients of the prototypes {names[1]!r}"
    )
    return _counted(model, "yolov5-seg" if is_three else "yolov8-seg", classes, (why,), outputs=names)


def final_rows(model: ModelSignature) -> LayoutMatch | None:
    """Rows that need no NMS: [B, K, 6], or [B, K, 6 + m] with mask coefficients."""
    found = _rows(model)
    if found is None:
        return None
    output, columns, is_rows_first = found
    count = _count(model, output, is_rows_first=is_rows_first)
    if not is_rows_first or not _is_short(model, count):
        return None
    names = len(model.names)
    if columns == 6 and len(model.facts.outputs) == 1:
        shape = f"{count} rows of 6 columns are not one per grid cell: final rows of box, score, class"
        return LayoutMatch("yolo-end2end", (shape,))
    if columns == 6 + _PROTOTYPES and _prototypes(model):
        shape = f"{count} final rows with {_PROTOTYPES} coefficients of prototypes"
        return LayoutMatch("yolo-end2end-seg", (shape,), outputs=(output.name, *_prototypes(model)))
    if names and columns == 4 + names and len(model.facts.outputs) == 1:
        shape = f"{count} rows of 4 of the box and {names} classes are not one per grid cell"
        return LayoutMatch("rt-detr-ultralytics", (shape,), class_count=names)
    return None


def rows_of_all_pictures(model: ModelSignature) -> LayoutMatch | None:
    """YOLOv7 with NMS for ONNX Runtime, or YOLO-NAS in the flat format: [M, 7], where M is not the batch."""
    outputs = model.facts.outputs
    if len(outputs) != 1 or len(outputs[0].shape) != 2 or outputs[0].shape[1] != 7:
        return None
    if model.follows_batch(outputs[0]) or outputs[0].shape[0] > 0:
        return None
    why = "[M, 7] with free M that is not the batch: the image, a box, its class and score, after NMS in the graph"
    layout = "yolo-nas-flat" if outputs[0].name.endswith("flat_predictions") else "yolov7-nms"
    return LayoutMatch(layout, (why,), rows_follow_batch=False)


def without_grid(model: ModelSignature) -> LayoutMatch | None:
    """YOLOv5 or YOLOv7 exported without the grid: three maps, whose anchors are not in the file."""
    maps = [model.shape_per_image(tensor) for tensor in model.facts.outputs]
    if len(maps) == 3 and all(len(shape) == 4 and shape[0] == 3 and shape[3] > 5 for shape in maps):
        question = Question(
            "three outputs [B, 3, h, w, 5 + classes] need the anchors that the network was trained with, which are not "
            "in the file; export it with its grid (YOLOv5: without --train; YOLOv7: with --grid), for one output",
            "--layout",
        )
        return LayoutMatch(
            "yolov5", ("three maps of three anchors each",), class_count=maps[0][3] - 5, questions=(question,)
        )
    return None


def _counted(
    model: ModelSignature, layout: str, classes: int, why: tuple[str, ...], outputs: tuple[str, ...] = ()
) -> LayoutMatch | None:
    if model.metadata.names and len(model.metadata.names) != classes and not model.hints.labels:
        return None
    return LayoutMatch(layout, why, class_count=classes, outputs=outputs)


def _rows(model: ModelSignature) -> tuple[TensorFacts, int, bool] | None:
    """The output with rows and columns, its number of columns, and whether the rows are the first axis."""
    for output in model.facts.outputs:
        shape = model.shape_per_image(output)
        if len(shape) != 2 or output.datatype is None or "FP" not in output.datatype:
            continue
        known = _anchor_counts(model, 1) | _anchor_counts(model, 3)
        first, last = shape
        if last == -1 or (last in known and first not in known):
            return (output, first, False) if 0 < first <= _MAX_COLUMNS else None
        if first == -1 or (first in known and last not in known) or first >= last:
            return output, last, True
        return output, first, False
    return None


def _count(model: ModelSignature, output: TensorFacts, *, is_rows_first: bool) -> int:
    return model.shape_per_image(output)[0 if is_rows_first else 1]


def _anchor_counts(model: ModelSignature, each: int) -> frozenset[int]:
    return anchor_counts(model.size, each) if model.size is not None else frozenset()


def _is_short(model: ModelSignature, count: int) -> bool:
    """Whether the rows are queries or final detections: fewer than one per grid cell."""
    is_sum = count in _anchor_counts(model, 1) | _anchor_counts(model, 3)
    return _MIN_ROWS <= count <= 1000 and not is_sum


def _prototypes(model: ModelSignature) -> tuple[str, ...]:
    found = [tensor.name for tensor in model.facts.outputs if model.shape_per_image(tensor)[:1] == (_PROTOTYPES,)]
    return tuple(name for name in found if len(model.shape_per_image(model.facts.output(name) or model.image)) == 3)[:1]


def _points(model: ModelSignature) -> int:
    shape = model.metadata.keypoint_shape
    return shape[0] * shape[1] if shape else 0


def _pose_card(model: ModelSignature) -> dict[str, str]:
    shape = model.metadata.keypoint_shape
    return {"keypoint-shape": f"{shape[0]};{shape[1]}"} if shape else {}
