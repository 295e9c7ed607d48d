"""Judges a guess by the values of a trial run: what it confirms, changes, or leaves to the user. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from penstock.models.inspect.inspection import Question
from penstock.models.inspect.values import (
    MOST_LOG,
    Columns,
    are_centres,
    are_corners,
    are_parts,
    are_shares,
    are_whole,
    sum_to_one,
)
from penstock.protocol.inference import Array, FloatArray


@dataclass(frozen=True, slots=True)
class Settled:
    """What values settle: another layout, family or card parameters than shapes suggested. why: a sentence."""

    why: str
    layout: str = ""
    family: str = ""
    card: dict[str, str] = field(default_factory=dict)
    class_count: int | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """settled: None if the guess stands. fault: why no picture can have a result, "" if there is none."""

    settled: Settled | None = None
    evidence: tuple[str, ...] = ()
    questions: tuple[Question, ...] = ()
    warnings: tuple[str, ...] = ()
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """Outputs of the trial's pictures. arrays: by name, a list of one array a picture without batch axis.

    anchor_counts: rows that networks of this size have. size: (height, width) of the network's picture. sources: sizes
    of the pictures. card: the proposed parameters. class_count: 0 if it is not known.
    """

    arrays: Mapping[str, list[Array]]
    names: tuple[str, ...]
    anchor_counts: frozenset[int]
    size: tuple[int, int]
    sources: tuple[tuple[int, int], ...]
    card: Mapping[str, str]
    class_count: int = 0
    has_metadata: bool = False

    def floats(self, index: int) -> FloatArray:
        """An output of all pictures, joined along its first axis, float32; flat if the pictures' sizes differ."""
        parts = [np.atleast_1d(one) for one in self.arrays[self.names[index]]]
        is_flat = len({part.shape[1:] for part in parts}) > 1
        return np.concatenate([part.ravel() if is_flat else part for part in parts]).astype(np.float32)

    def columns(self, index: int = 0) -> Columns:
        """An output of rows of anchors, whichever axis they are."""
        parts = []
        for array in self.arrays[self.names[index]]:
            rows = array if array.ndim == 2 else array.reshape(-1, array.shape[-1])
            first, last = rows.shape
            is_rows_last = (last in self.anchor_counts, first in self.anchor_counts) == (True, False)
            is_longer = (last in self.anchor_counts) == (first in self.anchor_counts) and last > first
            parts.append(rows.T if is_rows_last or is_longer else rows)
        return Columns(np.concatenate(parts).astype(np.float32))


Judge = Callable[[Sample], Judgement]
_LOGITS = {"apply-sigmoid": "1"}


def judge(layout: str, sample: Sample) -> Judgement:
    """The judgement on the layout's outputs."""
    for name in sample.names:
        for array in sample.arrays[name]:
            if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
                count = int(np.count_nonzero(~np.isfinite(array)))
                return Judgement(fault=f"output {name!r} has {count} values that are NaN or infinite on a picture")
    found = JUDGES.get(layout)
    return found(sample) if found is not None else Judgement()


def _unit_question(what: str, seen: str) -> Question:
    return Question(f"{what}, but {seen}; no layout of that name decodes them", "--layout")


def _boxes_of_anchors(boxes: FloatArray, size: tuple[int, int]) -> tuple[Question, ...]:
    """Whether boxes are centre and size in pixels."""
    if are_parts(boxes):
        seen = f"the largest value is {np.abs(boxes).max():.3g}: parts of 1"
        return (_unit_question("boxes should be in pixels", seen),)
    if are_corners(boxes, size):
        return (_unit_question("boxes should be centre and size", "the third and fourth are corners in every row"),)
    if (boxes[:, 2:] < 0).any():
        return (_unit_question("boxes should be centre and size", "some sizes are below 0"),)
    return ()


def _all_zero(scores: FloatArray) -> str:
    if scores.size and not scores.any():
        return (
            "all scores are 0 on every picture: a file that was quantised with boxes and scores in one scale is so; "
            "quantise the float model again with the box and score outputs apart, or leave them out"
        )
    return ""


def _yolov8(sample: Sample, *, extra: int = 0) -> Judgement:
    """extra: columns after the classes."""
    columns = sample.columns()
    total = columns.rows.shape[1]
    scores = columns.rows[:, 4 : total - extra]
    if fault := _all_zero(scores):
        return Judgement(fault=fault)
    questions = _boxes_of_anchors(columns.boxes, sample.size)
    outside = [index for index in columns.outside_shares(4) if index < total - extra]
    evidence = (f"boxes reach {columns.boxes.max():.0f} pixels, scores are at most {scores.max():.2f}",)
    if not outside:
        return Judgement(evidence=evidence, questions=questions)
    if not extra and not sample.has_metadata:
        found = _more_than_classes(columns, outside, total)
        if found is not None:
            return replace(found, questions=(*questions, *found.questions))
    if len(outside) == scores.shape[1] or len(outside) > 1:
        return Judgement(Settled(_logits_sentence(scores), card=_LOGITS), evidence, questions)
    wrong = Question(f"column {outside[0]} holds values outside of 0 to 1, which no score has", "--layout")
    return Judgement(None, evidence, (*questions, wrong))


def _more_than_classes(columns: Columns, outside: list[int], total: int) -> Judgement | None:
    """Points or an angle where classes were expected, in a file without metadata."""
    if outside == [total - 1] and total > 5:
        why = f"the last column is from {columns.rows[:, -1].min():.2f} to {columns.rows[:, -1].max():.2f}: an angle"
        return Judgement(Settled(why, "yolov8-obb", class_count=total - 5))
    points = columns.rows[:, 5:]
    if total > 8 and 4 not in outside and points.max() > 8 * MOST_LOG:
        question = Question(
            f"columns 5 to {total - 1} hold pixels: points of a pose, whose number and values are not in the file",
            "--parameter",
            tuple(f"keypoint-shape={(total - 5) // by};{by}" for by in (3, 2) if (total - 5) % by == 0),
        )
        return Judgement(Settled("columns after the first score hold pixels: a pose", "yolov8-pose"), (), (question,))
    return None


def _yolov8_pose(sample: Sample) -> Judgement:
    count, _, values = sample.card.get("keypoint-shape", "0;3").partition(";")
    return _yolov8(sample, extra=int(count) * int(values or 3))


def _obb(sample: Sample) -> Judgement:
    return _yolov8(sample, extra=1)


def _segments(sample: Sample) -> Judgement:
    return _yolov8(sample, extra=32)


def _yolox(sample: Sample) -> Judgement:
    columns = sample.columns()
    rows, total = columns.rows, columns.rows.shape[1]
    if total == 6 and are_whole(rows[:, 5]) and not sample.has_metadata:
        return _deepstream_columns(columns)
    if fault := _all_zero(rows[:, 4:]):
        return Judgement(fault=fault)
    widest = float(columns.boxes[:, 2:].max())
    logits = _objectness_logits(columns)
    if widest <= MOST_LOG and not are_parts(columns.boxes):
        seen = f"widths and heights are from {columns.boxes[:, 2:].min():.1f} to {widest:.1f}: logarithms"
        return Judgement(logits, (seen,))
    questions = _boxes_of_anchors(columns.boxes, sample.size)
    if np.allclose(rows[:, 4], 1.0):
        why = f"the fifth column is 1 everywhere, and widths reach {widest:.0f} pixels: YOLOv6"
        return Judgement(Settled(why, "yolov5", "ultralytics"), (), questions)
    why = f"widths reach {widest:.0f} pixels, so they are decoded: decoded as YOLOv5's, pictures as YOLOX's"
    card = logits.card if logits is not None else {}
    return Judgement(Settled(why, "yolov5", "yolox", card), (), questions)


def _yolov5_segments(sample: Sample) -> Judgement:
    return _yolov5(sample, extra=32)


def _yolov5(sample: Sample, *, extra: int = 0) -> Judgement:
    columns = sample.columns()
    columns = Columns(columns.rows[:, : columns.rows.shape[1] - extra])
    if columns.rows.shape[1] == 6 and are_whole(columns.rows[:, 5]) and not sample.has_metadata:
        return _deepstream_columns(columns)
    if fault := _all_zero(columns.rows[:, 4:]):
        return Judgement(fault=fault)
    seen = f"boxes reach {columns.boxes.max():.0f} pixels, scores are at most {columns.rows[:, 4].max():.2f}"
    return Judgement(_objectness_logits(columns), (seen,), _boxes_of_anchors(columns.boxes, sample.size))


def _objectness_logits(columns: Columns) -> Settled | None:
    scores = columns.rows[:, 4:]
    if not columns.outside_shares(4):
        return None
    return Settled(
        f"scores are logits, from {scores.min():.1f} to {scores.max():.1f}: a sigmoid is applied", card=_LOGITS
    )


def _logits_sentence(scores: FloatArray) -> str:
    return f"scores are logits, from {scores.min():.1f} to {scores.max():.1f}: a sigmoid is applied"


def _deepstream_columns(columns: Columns) -> Judgement:
    why = "column 6 holds whole numbers only: box, score, class, as DeepStream-Yolo's exporters write them"
    settled = Settled(why, "deepstream-yolo", "ultralytics", class_count=0)
    return Judgement(settled, (), _final_questions(columns.boxes, is_parts=False))


def _final_questions(boxes: FloatArray, *, is_parts: bool) -> tuple[Question, ...]:
    """Whether boxes are corners, in pixels or in parts of 1."""
    boxes = boxes[np.abs(boxes).max(axis=1) > 0] if len(boxes) else boxes
    found = []
    if len(boxes) and are_parts(boxes) != is_parts:
        unit, other = ("parts of 1", "pixels") if is_parts else ("pixels", "parts of 1")
        found.append(_unit_question(f"boxes should be in {unit}", f"values reach {np.abs(boxes).max():.4g}: {other}"))
    if are_centres(boxes):
        found.append(_unit_question("boxes should be corners", "many have a third below the first: centre and size"))
    return tuple(found)


def _centre_questions(boxes: FloatArray) -> tuple[Question, ...]:
    """Whether boxes of queries are centre and size in parts of 1."""
    if len(boxes) and not are_parts(boxes) and boxes.any():
        seen = f"values reach {np.abs(boxes).max():.4g}: pixels"
        return (_unit_question("boxes should be in parts of 1", seen),)
    if are_corners(boxes, (1, 1)):
        return (_unit_question("boxes should be centre and size", "the third and fourth are corners in every row"),)
    return ()


def _end_to_end(sample: Sample, *, has_corners: bool = True) -> Judgement:
    rows = sample.floats(0).reshape(-1, sample.arrays[sample.names[0]][0].shape[-1])
    if not are_shares(rows[:, 4]) and are_shares(rows[:, 5]):
        question = Question("the fifth column is no score, but the sixth is: class and score are swapped", "--layout")
        return Judgement(questions=(question,))
    if rows.shape[1] == 6 and are_parts(rows[:, :4]) and are_shares(rows[:, 4:]) and not are_whole(rows[:, 5]):
        why = "boxes are parts of 1 and the last column is no class: two classes of RT-DETR by Ultralytics"
        return Judgement(Settled(why, "rt-detr-ultralytics", "rt-detr", class_count=2))
    if not are_shares(rows[:, 4]) or not are_whole(rows[:, 5]):
        question = Question("the fifth column is no score of 0 to 1, or the sixth no whole class", "--layout")
        return Judgement(questions=(question,))
    scored = rows[rows[:, 4] > 0.01]
    questions = _final_questions(scored[:, :4], is_parts=False) if has_corners else ()
    seen = f"scores from {rows[:, 4].min():.3f} to {rows[:, 4].max():.2f}, whole classes up to {rows[:, 5].max():.0f}"
    return Judgement(evidence=(seen,), questions=questions)


def _turned_rows(sample: Sample) -> Judgement:
    return _end_to_end(sample, has_corners=False)


def _deepstream(sample: Sample) -> Judgement:
    return replace(_deepstream_columns(sample.columns()), settled=None)


def _detr(sample: Sample) -> Judgement:
    boxes = next((index for index, name in enumerate(sample.names) if sample.arrays[name][0].shape[-1] == 4), 1)
    return Judgement(questions=_centre_questions(sample.floats(boxes)))


def _rt_detr_ultralytics(sample: Sample) -> Judgement:
    rows = sample.floats(0).reshape(-1, sample.arrays[sample.names[0]][0].shape[-1])
    questions = _centre_questions(rows[:, :4])
    if not are_shares(rows[:, 4:]):
        questions += (_unit_question("scores should be 0 to 1", "some are logits"),)
    return Judgement(evidence=(f"scores are at most {rows[:, 4:].max():.2f}",), questions=questions)


def _named_boxes(sample: Sample, *, is_parts: bool) -> Judgement:
    """Outputs with boxes of 4 (or 5, with the score) and scores."""
    boxes = next((sample.floats(i) for i, _ in enumerate(sample.names) if _last(sample, i) in (4, 5)), None)
    if boxes is None or not len(boxes):
        return Judgement(evidence=("no boxes on the pictures",))
    questions = _final_questions(boxes.reshape(-1, boxes.shape[-1])[:, :4], is_parts=is_parts)
    lists = [sample.floats(index) for index in range(len(sample.names)) if _last(sample, index) == 0]
    for values in lists:
        if len(values) >= len(boxes) and not are_shares(values) and not are_whole(values):
            seen = f"they are from {values.min():.1f} to {values.max():.1f}: logits"
            questions += (_unit_question("scores should be 0 to 1", seen),)
    return Judgement(questions=questions)


def _last(sample: Sample, index: int) -> int:
    shape = sample.arrays[sample.names[index]][0].shape
    return shape[-1] if len(shape) > 1 else 0


def _pixels(sample: Sample) -> Judgement:
    return _named_boxes(sample, is_parts=False)


def _tensorflow(sample: Sample) -> Judgement:
    return _named_boxes(sample, is_parts=True)


def _rt_detr(sample: Sample) -> Judgement:
    """Boxes are pixels of the picture: one that is not square shows width and height that were swapped."""
    found = _named_boxes(sample, is_parts=False)
    for index, name in enumerate(sample.names):
        if _last(sample, index) != 4:
            continue
        for boxes, (height, width) in zip(sample.arrays[name], sample.sources, strict=True):
            reach = boxes.reshape(-1, 4)[:, 2:].max(axis=0, initial=0.0)
            if width != height and reach[0] <= 1.1 * height and reach[1] > 0.9 * width and width > 1.2 * height:
                seen = f"boxes reach {reach[0]:.0f} x {reach[1]:.0f} of a picture of {width} x {height}"
                question = Question(f"the size's input is (height, width) here: {seen}", "--layout")
                return replace(found, questions=(*found.questions, question))
    return found


def _ultraface(sample: Sample) -> Judgement:
    scores, boxes = sample.floats(0), sample.floats(1)
    questions = _final_questions(boxes, is_parts=True)
    if not sum_to_one(scores):
        questions += (_unit_question("scores should be 0 to 1 with a sum of 1", "they are not: a softmax is missing"),)
    return Judgement(evidence=(f"face scores are at most {scores[:, 1].max():.2f}",), questions=questions)


def _classification(sample: Sample) -> Judgement:
    rows = sample.floats(0).reshape(len(sample.sources), -1)
    declared = "softmax" if "apply-softmax" in sample.card else "sigmoid" if "apply-sigmoid" in sample.card else ""
    if sum_to_one(rows):
        why = "values are 0 to 1 and sum to 1: probabilities, no softmax is applied"
        return Judgement(Settled(why, card={"apply-softmax": ""}) if declared else None, (why,))
    if are_shares(rows) and declared != "softmax":
        return Judgement(evidence=("values are 0 to 1, and do not sum to 1: independent classes",))
    if are_shares(rows):
        why = "values are 0 to 1, and do not sum to 1: independent classes after a sigmoid"
        question = Question(why + ", or logits that happen to be so", "--layout", is_blocking=False)
        return Judgement(Settled(why, card={"apply-softmax": ""}), (), (question,))
    if declared:
        return Judgement(evidence=(f"values are from {rows.min():.1f} to {rows.max():.1f}: logits, for a {declared}",))
    why = f"values are from {rows.min():.1f} to {rows.max():.1f}: logits, a softmax is applied"
    return Judgement(Settled(why, card={"apply-softmax": "1"}))


def _scores_of(sample: Sample, index: int) -> Judgement:
    scores = sample.floats(index)
    if are_shares(scores):
        return Judgement(evidence=(f"values are from {scores.min():.2f} to {scores.max():.2f}: probabilities",))
    return Judgement(Settled(_logits_sentence(scores), card=_LOGITS))


def _text_places(sample: Sample) -> Judgement:
    return _scores_of(sample, 0)


def _semantic(sample: Sample) -> Judgement:
    values = sample.floats(0)
    if sample.class_count == 1:
        return _scores_of(sample, 0)
    return Judgement(evidence=(f"values are from {values.min():.3g} to {values.max():.3g}",))


def _range(sample: Sample) -> Judgement:
    values = sample.floats(0)
    if values.size and values.min() == values.max():
        return Judgement(warnings=(f"all values of {sample.names[0]!r} are {values.flat[0]:.3g} on the pictures",))
    return Judgement(evidence=(f"values are from {values.min():.3g} to {values.max():.3g}",))


def _nanodet(sample: Sample) -> Judgement:
    scores = [index for index in range(len(sample.names)) if _last(sample, index) != 32]
    if all(are_shares(sample.floats(index)) for index in scores):
        return Judgement(evidence=("scores are 0 to 1",))
    return Judgement(questions=(_unit_question("scores should be 0 to 1", "some are logits"),))


JUDGES: Mapping[str, Judge] = {
    "yolov8": _yolov8,
    "yolov8-seg": _segments,
    "yolov8-pose": _yolov8_pose,
    "yolov8-obb": _obb,
    "yolov5": _yolov5,
    "yolov5-seg": _yolov5_segments,
    "yolox": _yolox,
    "deepstream-yolo": _deepstream,
    **dict.fromkeys(("yolo-end2end", "yolo-end2end-seg", "yolo-end2end-pose"), _end_to_end),
    "yolo-end2end-obb": _turned_rows,
    **dict.fromkeys(("detr", "rf-detr", "rf-detr-seg"), _detr),
    "rt-detr-ultralytics": _rt_detr_ultralytics,
    "rt-detr": _rt_detr,
    **dict.fromkeys(("torchvision", "mmdeploy"), _pixels),
    "tf-detection": _tensorflow,
    "ultraface": _ultraface,
    "classification": _classification,
    "db": _text_places,
    "semantic": _semantic,
    **dict.fromkeys(("depth", "embedding"), _range),
    **dict.fromkeys(("nanodet", "picodet"), _nanodet),
}
