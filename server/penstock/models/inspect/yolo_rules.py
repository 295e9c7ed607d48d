"""Rules that recognise YOLO's outputs: rows of anchors, final rows, prototypes, points and turned boxes."""

from penstock.models.inspect.facts import TensorFacts
from penstock.models.inspect.inspection import Question
from penstock.models.inspect.subject import P6, Guess, Subject, anchor_counts

_PROTOTYPES = 32
_COCO = 80
_FEWEST_ROWS = 20


def ultralytics(subject: Subject) -> Guess | None:
    """A file with Ultralytics' `names`, by its task; YOLOv5's and older files have no task, and go by shapes."""
    metadata = subject.metadata
    if metadata.exporter != "Ultralytics" or not metadata.task:
        return None
    classes = len(metadata.names)
    why = f"its metadata is Ultralytics': task {metadata.task!r}, {classes} names"
    rows = _rows(subject)
    if metadata.task == "classify":
        return Guess("classification", (why,), "ultralytics-classify", classes)
    if rows is None:
        return None
    output, columns, is_rows_first = rows
    count = _count(subject, output, is_rows_first=is_rows_first)
    is_final = is_rows_first and (metadata.is_end_to_end or _is_short(subject, count))
    others = {"segment": _PROTOTYPES, "obb": 1, "pose": _points(subject), "detect": 0}.get(metadata.task)
    if others is None:
        return None
    suffix = {"segment": "-seg", "obb": "-obb", "pose": "-pose", "detect": ""}[metadata.task]
    card = _pose_card(subject) if metadata.task == "pose" else {}
    names = (output.name, *(_prototypes(subject) if metadata.task == "segment" else ()))
    if is_final and columns == 6 + others:
        shape = f"{count} rows of {columns} columns are final: box, score, class"
        return Guess("yolo-end2end" + suffix, (why, shape), class_count=classes, outputs=names, card=card)
    if metadata.task == "detect" and columns == 4 + classes and _is_short(subject, count):
        shape = f"{count} rows are no sum of the strides' cells: RT-DETR by Ultralytics, boxes in parts of 1"
        return Guess("rt-detr-ultralytics", (why, shape), class_count=classes)
    if columns == 4 + classes + others:
        shape = f"{columns} columns: 4 of the box, {classes} classes" + (f", {others} more" if others else "")
        return Guess("yolov8" + suffix, (why, shape), class_count=classes, outputs=names, card=card)
    if metadata.task in ("detect", "segment") and columns == 5 + classes + others:
        shape = f"{columns} columns: 4 of the box, objectness, {classes} classes"
        return Guess("yolov5" + suffix, (why, shape), class_count=classes, outputs=names)
    return None


def anchor_rows(subject: Subject) -> Guess | None:
    """One row for each anchor, without a task in the metadata: the number of rows and of columns, and names, decide."""
    found = _rows(subject)
    if found is None:
        return None
    output, columns, is_rows_first = found
    count = _count(subject, output, is_rows_first=is_rows_first)
    one, three = _anchor_counts(subject, 1), _anchor_counts(subject, 3)
    if count > 0 and count not in one and count not in three:
        return None
    if _prototypes(subject) and len(subject.facts.outputs) >= 2:
        return _with_prototypes(subject, output, columns, is_three=count in three)
    if len(subject.facts.outputs) != 1:
        return None
    if count in three and count not in one:
        return _three_anchors(subject, columns, count)
    if not is_rows_first:
        return _columns_first(subject, columns, count)
    return _rows_first(subject, columns, count)


def _three_anchors(subject: Subject, columns: int, count: int) -> Guess | None:
    why = f"{count} rows are three anchors for each cell of the strides"
    if columns == 6 and not subject.metadata.names:
        shape = "6 columns: YOLOv5 with one class, or box, score, class of DeepStream-Yolo; the trial tells by values"
        return Guess("yolov5", (why, shape), class_count=1)
    if columns < 6:
        return None
    return _counted(subject, "yolov5", columns - 5, (why, f"{columns} columns: box, objectness, {columns - 5} classes"))


def _columns_first(subject: Subject, columns: int, count: int) -> Guess | None:
    why = f"the columns are the first axis, as YOLOv8 and later have it; {count} rows are one for each cell"
    classes = columns - 4
    points = subject.metadata.keypoint_shape or ((17, 3) if columns == 56 else None)
    if points and columns == 5 + points[0] * points[1] and len(subject.names) != classes:
        shape = f"{columns} columns: box, one class, {points[0]} points of {points[1]} values; the trial checks it"
        card = {"keypoint-shape": f"{points[0]};{points[1]}"}
        return Guess("yolov8-pose", (why, shape), class_count=1, card=card, labels=("person",))
    if len(subject.names) == columns - 5 and subject.names:
        shape = f"{columns} columns: 4 of the box, {columns - 5} classes by {subject.names_origin}, an angle"
        return Guess("yolov8-obb", (why, shape), class_count=columns - 5)
    return _counted(subject, "yolov8", classes, (why, f"{columns} columns: 4 of the box, {classes} classes"))


def _rows_first(subject: Subject, columns: int, count: int) -> Guess | None:
    """YOLOX, YOLOv6, YOLOv8 transposed, DeepStream-Yolo or NanoDet-Plus."""
    why = f"{count} rows are one for each cell of the strides"
    names = len(subject.names)
    if (
        not subject.metadata.names
        and not subject.hints.labels
        and names not in (columns - 4, columns - 5, columns - 32)
    ):
        names = 0  # a file beside the model that is another model's
    if columns == 6 and names in (0, 1):
        name = subject.facts.outputs[0].name
        shape = f"6 columns of {name!r}: YOLOX with one class, or box, score, class; the trial tells by values"
        return Guess("yolox", (why, shape), class_count=1)
    if _is_plus(subject, columns, count, names):
        shape = f"{columns} columns: {columns - 32} classes and 32 of four sides' distributions"
        return Guess("nanodet-plus", (why, shape), class_count=columns - 32)
    if columns - 4 == (names or _COCO):
        shape = f"{columns} columns: 4 of the box, {columns - 4} classes; no objectness, so YOLOv8 transposed"
        return _counted(subject, "yolov8", columns - 4, (why, shape))
    if columns - 5 == (names or _COCO):
        shape = f"{columns} columns: 4 of the box, objectness, {columns - 5} classes, as YOLOX has them"
        return _counted(subject, "yolox", columns - 5, (why, shape))
    if names or columns < 6:
        return None
    question = Question(
        f"{columns} columns are {columns - 5} classes with objectness (YOLOX, YOLOv6) or {columns - 4} without (YOLOv8 "
        "transposed); the file does not say how many classes there are",
        "--labels",
        (f"a file of {columns - 5} names", f"a file of {columns - 4} names"),
    )
    questions = () if subject.hints.layout else (question,)
    layout = subject.hints.layout if subject.hints.layout in ("yolov8", "yolov5", "yolox") else "yolox"
    classes = columns - 4 if layout == "yolov8" else columns - 5
    return Guess(layout, (why,), class_count=classes, questions=questions)


def _is_plus(subject: Subject, columns: int, count: int, names: int) -> bool:
    """NanoDet-Plus has strides 8 to 64, and 32 columns of distributions."""
    sums = {subject.anchors(P6, is_rounded_up=True), subject.anchors(is_rounded_up=True)}
    return count in sums and columns > 32 and (columns - 32 == names if names else columns - 32 == _COCO)


def _with_prototypes(subject: Subject, output: TensorFacts, columns: int, *, is_three: bool) -> Guess | None:
    names = (output.name, *_prototypes(subject))
    base = 5 if is_three else 4
    classes = columns - base - _PROTOTYPES
    if classes < 1:
        return None
    why = (
        f"{columns} columns: {base} and {classes} classes and {_PROTOTYPES} coefficients of the prototypes {names[1]!r}"
    )
    return _counted(subject, "yolov5-seg" if is_three else "yolov8-seg", classes, (why,), outputs=names)


def final_rows(subject: Subject) -> Guess | None:
    """Rows that need no suppression: [B, K, 6], and with masks, points or an angle."""
    found = _rows(subject)
    if found is None:
        return None
    output, columns, is_rows_first = found
    count = _count(subject, output, is_rows_first=is_rows_first)
    if not is_rows_first or not _is_short(subject, count):
        return None
    names = len(subject.names)
    if columns == 6 and len(subject.facts.outputs) == 1:
        shape = f"{count} rows of 6 columns are no sum of the strides' cells: final rows of box, score, class"
        return Guess("yolo-end2end", (shape,))
    if columns == 6 + _PROTOTYPES and _prototypes(subject):
        shape = f"{count} final rows with {_PROTOTYPES} coefficients of prototypes"
        return Guess("yolo-end2end-seg", (shape,), outputs=(output.name, *_prototypes(subject)))
    if names and columns == 4 + names and len(subject.facts.outputs) == 1:
        shape = f"{count} rows of 4 of the box and {names} classes are no sum of the strides' cells"
        return Guess("rt-detr-ultralytics", (shape,), class_count=names)
    return None


def rows_of_all_pictures(subject: Subject) -> Guess | None:
    """YOLOv7 with its suppression for ONNX Runtime: [M, 7], where M is not the batch."""
    outputs = subject.facts.outputs
    if len(outputs) != 1 or len(outputs[0].shape) != 2 or outputs[0].shape[1] != 7:
        return None
    if subject.follows_batch(outputs[0]) or outputs[0].shape[0] > 0:
        return None
    why = "[M, 7] with free M that is not the batch: image, box, class, score, after a suppression in the graph"
    return Guess("yolov7-nms", (why,), rows_follow_batch=False)


def without_grid(subject: Subject) -> Guess | None:
    """YOLOv5 or YOLOv7 without their last step: three maps, whose anchors are not in the file."""
    maps = [subject.one(tensor) for tensor in subject.facts.outputs]
    if len(maps) == 3 and all(len(shape) == 4 and shape[0] == 3 and shape[3] > 5 for shape in maps):
        question = Question(
            "three outputs [B, 3, h, w, 5 + classes] need the anchors that the network was trained with, which are not "
            "in the file; export it with its grid (YOLOv5: without --train; YOLOv7: with --grid), for one output",
            "--layout",
        )
        return Guess("yolov5", ("three maps of three anchors each",), class_count=maps[0][3] - 5, questions=(question,))
    return None


def _counted(
    subject: Subject, layout: str, classes: int, why: tuple[str, ...], outputs: tuple[str, ...] = ()
) -> Guess | None:
    if subject.metadata.names and len(subject.metadata.names) != classes and not subject.hints.labels:
        return None
    return Guess(layout, why, class_count=classes, outputs=outputs)


def _rows(subject: Subject) -> tuple[TensorFacts, int, bool] | None:
    """The output with rows and columns, its number of columns, and whether the rows are the first axis."""
    for output in subject.facts.outputs:
        shape = subject.one(output)
        if len(shape) != 2 or output.datatype is None or "FP" not in output.datatype:
            continue
        known = _anchor_counts(subject, 1) | _anchor_counts(subject, 3)
        first, last = shape
        if last == -1 or (last in known and first not in known):
            return (output, first, False) if first > 0 else None
        if first == -1 or (first in known and last not in known) or first >= last:
            return output, last, True
        return output, first, False
    return None


def _count(subject: Subject, output: TensorFacts, *, is_rows_first: bool) -> int:
    return subject.one(output)[0 if is_rows_first else 1]


def _anchor_counts(subject: Subject, each: int) -> frozenset[int]:
    return anchor_counts(subject.size, each) if subject.size is not None else frozenset()


def _is_short(subject: Subject, count: int) -> bool:
    """Whether so many rows are queries or final rows, and not one for each cell."""
    is_sum = count in _anchor_counts(subject, 1) | _anchor_counts(subject, 3)
    return _FEWEST_ROWS <= count <= 1000 and not is_sum


def _prototypes(subject: Subject) -> tuple[str, ...]:
    found = [tensor.name for tensor in subject.facts.outputs if subject.one(tensor)[:1] == (_PROTOTYPES,)]
    return tuple(name for name in found if len(subject.one(subject.facts.output(name) or subject.image)) == 3)[:1]


def _points(subject: Subject) -> int:
    shape = subject.metadata.keypoint_shape
    return shape[0] * shape[1] if shape else 0


def _pose_card(subject: Subject) -> dict[str, str]:
    shape = subject.metadata.keypoint_shape
    return {"keypoint-shape": f"{shape[0]};{shape[1]}"} if shape else {}
