"""Checks a recognised layout against the output values of a trial run: confirms, corrects or questions it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from penstock.models.inspect.inspection import Question
from penstock.models.inspect.map_checks import check_ctc, check_range, check_semantic, check_text_map, scores_of
from penstock.models.inspect.trial_outputs import (
    LOGITS,
    Correction,
    OutputCheck,
    TrialOutputs,
    logits_sentence,
    unit_question,
)
from penstock.models.inspect.value_ranges import (
    MAX_LOG_SIZE,
    Columns,
    are_centres,
    are_corners,
    are_integers,
    are_normalized,
    are_probabilities,
    sum_to_one,
)
from penstock.protocol.inference import FloatArray

Check = Callable[[TrialOutputs], OutputCheck]
_MIN_PIXELS = 32.0  # which the corners of some box reach, if they are pixels


def check_outputs(layout: str, outputs: TrialOutputs) -> OutputCheck:
    """Checks the values of the layout's outputs. Layouts without a check pass."""
    for name in outputs.names:
        for array in outputs.arrays[name]:
            if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
                count = int(np.count_nonzero(~np.isfinite(array)))
                return OutputCheck(fault=f"output {name!r} has {count} values that are NaN or infinite on a picture")
    found = CHECKS.get(layout)
    return found(outputs) if found is not None else OutputCheck()


def _boxes_of_anchors(boxes: FloatArray, size: tuple[int, int]) -> tuple[Question, ...]:
    """Whether boxes are centre and size in pixels."""
    if are_normalized(boxes):
        seen = f"the largest value is {np.abs(boxes).max():.3g}: fractions"
        return (unit_question("boxes should be in pixels", seen),)
    if are_corners(boxes, size):
        return (unit_question("boxes should be centre and size", "the third and fourth are corners in every row"),)
    if (boxes[:, 2:] < 0).any():
        return (unit_question("boxes should be centre and size", "some widths or heights are negative"),)
    return ()


def _all_zero(scores: FloatArray) -> str:
    if scores.size and not scores.any():
        return (
            "all scores are 0 on every picture, as in files with boxes and scores in one scale; quantise the "
            "float model again with separate box and score outputs, or exclude both from quantisation"
        )
    return ""


def _yolov8(outputs: TrialOutputs, *, extra: int = 0) -> OutputCheck:
    """extra: columns after the classes."""
    columns = outputs.columns()
    total = columns.rows.shape[1]
    scores = columns.rows[:, 4 : total - extra]
    if fault := _all_zero(scores):
        return OutputCheck(fault=fault)
    questions = _boxes_of_anchors(columns.boxes, outputs.size)
    outside = [index for index in columns.outside_unit_range(4) if index < total - extra]
    evidence = (f"boxes reach {columns.boxes.max():.0f} pixels, scores are at most {scores.max():.2f}",)
    if not outside:
        return OutputCheck(evidence=evidence, questions=questions)
    if not extra and not outputs.has_metadata:
        found = _more_than_classes(columns, outside, total)
        if found is not None:
            return replace(found, questions=(*questions, *found.questions))
    if len(outside) == scores.shape[1] or len(outside) > 1:
        return OutputCheck(Correction(logits_sentence(scores), card=LOGITS), evidence, questions)
    wrong = Question(f"column {outside[0]} has values outside of 0 to 1, so it is not a score", "--layout")
    return OutputCheck(None, evidence, (*questions, wrong))


def _more_than_classes(columns: Columns, outside: list[int], total: int) -> OutputCheck | None:
    """Points or an angle where classes were expected, in a file without metadata."""
    if outside == [total - 1] and total > 5:
        why = f"the last column is from {columns.rows[:, -1].min():.2f} to {columns.rows[:, -1].max():.2f}: an angle"
        return OutputCheck(Correction(why, "yolov8-obb", class_count=total - 5))
    points = columns.rows[:, 5:]
    if total > 8 and 4 not in outside and points.max() > 8 * MAX_LOG_SIZE:
        question = Question(
            f"columns 5 to {total - 1} hold pixels: keypoints of a pose, whose number and values are not in the file",
            "--parameter",
            tuple(f"keypoint-shape={(total - 5) // by};{by}" for by in (3, 2) if (total - 5) % by == 0),
        )
        return OutputCheck(
            Correction("columns after the first score hold pixels: a pose", "yolov8-pose"), (), (question,)
        )
    return None


def _yolov8_pose(outputs: TrialOutputs) -> OutputCheck:
    count, _, values = outputs.card.get("keypoint-shape", "0;3").partition(";")
    return _yolov8(outputs, extra=int(count) * int(values or 3))


def _yolox(outputs: TrialOutputs) -> OutputCheck:
    columns = outputs.columns()
    rows, total = columns.rows, columns.rows.shape[1]
    if total == 6 and are_integers(rows[:, 5]) and not outputs.has_metadata:
        return _deepstream_columns(columns)
    if fault := _all_zero(rows[:, 4:]):
        return OutputCheck(fault=fault)
    widest = float(columns.boxes[:, 2:].max())
    logits = _objectness_logits(columns)
    if widest <= MAX_LOG_SIZE and not are_normalized(columns.boxes):
        seen = f"widths and heights are from {columns.boxes[:, 2:].min():.1f} to {widest:.1f}: logarithms"
        return OutputCheck(logits, (seen,))
    questions = _boxes_of_anchors(columns.boxes, outputs.size)
    if np.allclose(rows[:, 4], 1.0):
        why = f"the fifth column is 1 everywhere, and widths reach {widest:.0f} pixels: YOLOv6"
        return OutputCheck(Correction(why, "yolov5", "ultralytics"), (), questions)
    why = (
        f"widths reach {widest:.0f} pixels, so boxes are decoded: the layout is yolov5, the preprocessing that of YOLOX"
    )
    card = logits.card if logits is not None else {}
    return OutputCheck(Correction(why, "yolov5", "yolox", card, is_certain=True), (), questions)


def _yolov5(outputs: TrialOutputs, *, extra: int = 0) -> OutputCheck:
    columns = outputs.columns()
    columns = Columns(columns.rows[:, : columns.rows.shape[1] - extra])
    if columns.rows.shape[1] == 6 and are_integers(columns.rows[:, 5]) and not outputs.has_metadata:
        return _deepstream_columns(columns)
    if fault := _all_zero(columns.rows[:, 4:]):
        return OutputCheck(fault=fault)
    seen = f"boxes reach {columns.boxes.max():.0f} pixels, scores are at most {columns.rows[:, 4].max():.2f}"
    outside = columns.outside_unit_range(4)
    if outside and 4 not in outside:
        points = f"column {outside[0]} reaches {columns.rows[:, outside[0]].max():.4g}: points (as in YOLOv5-face)"
        return OutputCheck(None, (seen,), (unit_question("scores should be 0 to 1, as objectness is", points),))
    return OutputCheck(_objectness_logits(columns), (seen,), _boxes_of_anchors(columns.boxes, outputs.size))


def _objectness_logits(columns: Columns) -> Correction | None:
    scores = columns.rows[:, 4:]
    if not columns.outside_unit_range(4):
        return None
    return Correction(logits_sentence(scores), card=LOGITS)


def _deepstream_columns(columns: Columns) -> OutputCheck:
    why = "column 6 has integers only: box, score, class, as DeepStream-Yolo exports them"
    layout = "deepstream-yolo-cxcywh" if are_centres(columns.boxes) else "deepstream-yolo"
    return OutputCheck(Correction(why, layout, "ultralytics", class_count=0))


def _final_questions(boxes: FloatArray, *, is_normalized: bool) -> tuple[Question, ...]:
    """Whether boxes are corners, in pixels or in fractions of the network's image."""
    boxes = boxes[np.abs(boxes).max(axis=1) > 0] if len(boxes) else boxes
    found = []
    if len(boxes) and are_normalized(boxes) != is_normalized:
        reach = float(np.abs(boxes).max())
        unit, other = ("fractions", "pixels") if is_normalized else ("pixels", "fractions")
        other = "offsets from anchors that are not in the file" if is_normalized and reach < _MIN_PIXELS else other
        found.append(unit_question(f"boxes should be in {unit}", f"values reach {reach:.4g}: {other}"))
    if are_centres(boxes):
        found.append(
            unit_question("boxes should be corners", "in many, the third value is below the first: centre and size")
        )
    return tuple(found)


def _centre_questions(boxes: FloatArray) -> tuple[Question, ...]:
    """Whether boxes of queries are centre and size in fractions of the network's image."""
    if len(boxes) and not are_normalized(boxes) and boxes.any():
        seen = f"values reach {np.abs(boxes).max():.4g}: pixels"
        return (unit_question("boxes should be in fractions of the picture", seen),)
    if are_corners(boxes, (1, 1)):
        return (unit_question("boxes should be centre and size", "the third and fourth are corners in every row"),)
    return ()


def _end_to_end(outputs: TrialOutputs, *, has_corners: bool = True) -> OutputCheck:
    rows = outputs.floats(0).reshape(-1, outputs.arrays[outputs.names[0]][0].shape[-1])
    if not are_probabilities(rows[:, 4]) and are_probabilities(rows[:, 5]):
        question = Question("the sixth column has the scores, not the fifth: class and score are swapped", "--layout")
        return OutputCheck(questions=(question,))
    if (
        rows.shape[1] == 6
        and are_normalized(rows[:, :4])
        and are_probabilities(rows[:, 4:])
        and not are_integers(rows[:, 5])
    ):
        why = "boxes are fractions and the last column has no class ids: RT-DETR by Ultralytics with two classes"
        return OutputCheck(Correction(why, "rt-detr-ultralytics", "rt-detr", class_count=2))
    if not are_probabilities(rows[:, 4]) or not are_integers(rows[:, 5]):
        question = Question(
            "the fifth column has values outside of 0 to 1, or the sixth has values that are not class ids", "--layout"
        )
        return OutputCheck(questions=(question,))
    scored = rows[rows[:, 4] > 0.01]
    questions = _final_questions(scored[:, :4], is_normalized=False) if has_corners else ()
    seen = f"scores from {rows[:, 4].min():.3f} to {rows[:, 4].max():.2f}, class ids up to {rows[:, 5].max():.0f}"
    return OutputCheck(evidence=(seen,), questions=questions)


def _yolo_nas(outputs: TrialOutputs) -> OutputCheck:
    boxes, scores = outputs.floats(0).reshape(-1, 4), outputs.floats(1)
    if fault := _all_zero(scores):
        return OutputCheck(fault=fault)
    return replace(scores_of(outputs, 1), questions=_final_questions(boxes, is_normalized=False))


def _seven_columns(outputs: TrialOutputs, *, is_class_last: bool) -> OutputCheck:
    """YOLOv7's rows have the class before the score, SuperGradients' after it."""
    rows = outputs.floats(0).reshape(-1, 7)
    names = ("yolo-nas-flat", "yolov7-nms") if is_class_last else ("yolov7-nms", "yolo-nas-flat")
    open_fact = "whether the class is before the score (YOLOv7) or after it (SuperGradients' flat format)"
    if not len(rows):
        question = Question(f"no rows for the pictures, so it is open {open_fact}", "--layout", names, False)
        return OutputCheck(questions=(question,))
    fits = [are_integers(rows[:, 5 + last]) and are_probabilities(rows[:, 6 - last]) for last in (0, 1)]
    if fits[is_class_last] and not fits[not is_class_last]:
        return OutputCheck(None, (), _final_questions(rows[:, 1:5], is_normalized=False))
    if fits[not is_class_last] and not fits[is_class_last]:
        column, other = (5, 6) if is_class_last else (6, 5)
        why = f"column {column} has integers only and column {other} scores: a row is {names[1]}'s"
        return OutputCheck(Correction(why, names[1], "ultralytics"))
    return OutputCheck(questions=(Question(f"the values do not show {open_fact}", "--layout", names),))


def _deepstream(outputs: TrialOutputs, *, are_boxes_centres: bool) -> OutputCheck:
    """Earlier exports have centre and size. Only the values differ."""
    is_single = len(outputs.names) == 1
    boxes = outputs.columns().boxes if is_single else outputs.floats(0).reshape(-1, 4)
    scores = outputs.columns().rows[:, 4] if is_single else outputs.floats(1)
    if fault := _all_zero(scores):
        return OutputCheck(fault=fault)
    questions: tuple[Question, ...] = ()
    if are_normalized(boxes):
        seen = f"values reach {np.abs(boxes).max():.4g}: fractions"
        questions += (unit_question("boxes should be in pixels", seen),)
    if not are_probabilities(scores):
        seen = f"they are from {scores.min():.1f} to {scores.max():.1f}"
        questions += (unit_question("scores should be 0 to 1", seen),)
    if are_centres(boxes) == are_boxes_centres:
        return OutputCheck(evidence=(f"scores are at most {scores.max():.2f}",), questions=questions)
    layout = "deepstream-yolo" if are_boxes_centres else "deepstream-yolo-cxcywh"
    seen = "never" if are_boxes_centres else "in many rows"
    why = f"the third value of a box is {seen} below the first: {'corners' if are_boxes_centres else 'centre and size'}"
    return OutputCheck(Correction(why, layout), (), (*questions, Question(why, "--layout", (layout,))))


def _detr(outputs: TrialOutputs) -> OutputCheck:
    boxes = next((index for index, name in enumerate(outputs.names) if outputs.arrays[name][0].shape[-1] == 4), 1)
    return OutputCheck(questions=_centre_questions(outputs.floats(boxes)))


def _rt_detr_ultralytics(outputs: TrialOutputs) -> OutputCheck:
    rows = outputs.floats(0).reshape(-1, outputs.arrays[outputs.names[0]][0].shape[-1])
    questions = _centre_questions(rows[:, :4])
    if not are_probabilities(rows[:, 4:]):
        questions += (unit_question("scores should be 0 to 1", "some are logits"),)
    return OutputCheck(evidence=(f"scores are at most {rows[:, 4:].max():.2f}",), questions=questions)


def _named_boxes(outputs: TrialOutputs, *, is_normalized: bool) -> OutputCheck:
    """Outputs with boxes of 4 (or 5, with the score) and scores."""
    boxes = next((outputs.floats(i) for i, _ in enumerate(outputs.names) if _last(outputs, i) in (4, 5)), None)
    if boxes is None or not len(boxes):
        return OutputCheck(evidence=("no boxes on the pictures",))
    questions = _final_questions(boxes.reshape(-1, boxes.shape[-1])[:, :4], is_normalized=is_normalized)
    lists = [outputs.floats(index) for index in range(len(outputs.names)) if _last(outputs, index) == 0]
    for values in lists:
        if len(values) >= len(boxes) and not are_probabilities(values) and not are_integers(values):
            seen = f"they are from {values.min():.1f} to {values.max():.1f}: logits"
            questions += (unit_question("scores should be 0 to 1", seen),)
    return OutputCheck(questions=questions)


def _last(outputs: TrialOutputs, index: int) -> int:
    shape = outputs.arrays[outputs.names[index]][0].shape
    return shape[-1] if len(shape) > 1 else 0


def _rt_detr(outputs: TrialOutputs) -> OutputCheck:
    """Boxes are pixels of the picture: one that is not square shows width and height that were swapped."""
    found = _named_boxes(outputs, is_normalized=False)
    for index, name in enumerate(outputs.names):
        if _last(outputs, index) != 4:
            continue
        for boxes, (height, width) in zip(outputs.arrays[name], outputs.sources, strict=True):
            reach = boxes.reshape(-1, 4)[:, 2:].max(axis=0, initial=0.0)
            if width != height and reach[0] <= 1.1 * height and reach[1] > 0.9 * width and width > 1.2 * height:
                seen = f"boxes reach {reach[0]:.0f} x {reach[1]:.0f} of a picture of {width} x {height}"
                question = Question(f"the size input seems to take (height, width): {seen}", "--layout")
                return replace(found, questions=(*found.questions, question))
    return found


def _ultraface(outputs: TrialOutputs) -> OutputCheck:
    scores, boxes = outputs.floats(0), outputs.floats(1)
    questions = _final_questions(boxes, is_normalized=True)
    if not sum_to_one(scores):
        questions += (unit_question("scores should be 0 to 1 with a sum of 1", "they are not: a softmax is missing"),)
    return OutputCheck(evidence=(f"face scores are at most {scores[:, 1].max():.2f}",), questions=questions)


def _classification(outputs: TrialOutputs) -> OutputCheck:
    rows = outputs.floats(0).reshape(len(outputs.sources), -1)
    declared = "softmax" if "apply-softmax" in outputs.card else "sigmoid" if "apply-sigmoid" in outputs.card else ""
    if sum_to_one(rows):
        why = "values are 0 to 1 and sum to 1: probabilities, no softmax is applied"
        return OutputCheck(Correction(why, card={"apply-softmax": ""}) if declared else None, (why,))
    if are_probabilities(rows) and declared != "softmax":
        return OutputCheck(evidence=("values are 0 to 1, and do not sum to 1: independent classes",))
    if are_probabilities(rows):
        why = "values are 0 to 1, and do not sum to 1: independent classes after a sigmoid"
        question = Question(why + ", or logits in that range", "--layout", is_blocking=False)
        return OutputCheck(Correction(why, card={"apply-softmax": ""}), (), (question,))
    if declared:
        return OutputCheck(
            evidence=(f"values are from {rows.min():.1f} to {rows.max():.1f}: logits, for a {declared}",)
        )
    why = f"values are from {rows.min():.1f} to {rows.max():.1f}: logits, a softmax is applied"
    return OutputCheck(Correction(why, card={"apply-softmax": "1"}))


def _nanodet(outputs: TrialOutputs) -> OutputCheck:
    scores = [index for index in range(len(outputs.names)) if _last(outputs, index) != 32]
    if all(are_probabilities(outputs.floats(index)) for index in scores):
        return OutputCheck(evidence=("scores are 0 to 1",))
    return OutputCheck(questions=(unit_question("scores should be 0 to 1", "some are logits"),))


CHECKS: Mapping[str, Check] = {
    "yolov8": _yolov8,
    "yolov8-seg": partial(_yolov8, extra=32),
    "yolov8-pose": _yolov8_pose,
    "yolov8-obb": partial(_yolov8, extra=1),
    "yolov5": _yolov5,
    "yolov5-seg": partial(_yolov5, extra=32),
    "yolox": _yolox,
    "deepstream-yolo": partial(_deepstream, are_boxes_centres=False),
    "deepstream-yolo-cxcywh": partial(_deepstream, are_boxes_centres=True),
    "yolo-nas": _yolo_nas,
    "yolov7-nms": partial(_seven_columns, is_class_last=False),
    "yolo-nas-flat": partial(_seven_columns, is_class_last=True),
    **dict.fromkeys(("yolo-end2end", "yolo-end2end-seg", "yolo-end2end-pose"), _end_to_end),
    "yolo-end2end-obb": partial(_end_to_end, has_corners=False),
    **dict.fromkeys(("detr", "rf-detr", "rf-detr-seg"), _detr),
    "rt-detr-ultralytics": _rt_detr_ultralytics,
    "rt-detr": _rt_detr,
    **dict.fromkeys(("torchvision", "mmdeploy"), partial(_named_boxes, is_normalized=False)),
    "tf-detection": partial(_named_boxes, is_normalized=True),
    "ultraface": _ultraface,
    "classification": _classification,
    "db": check_text_map,
    "ctc": check_ctc,
    "semantic": check_semantic,
    "semantic-multilabel": partial(scores_of, index=0),
    **dict.fromkeys(("depth", "embedding"), check_range),
    **dict.fromkeys(("nanodet", "picodet"), _nanodet),
}
