"""Agreement of two engines' results on the same pictures, without I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.models.optimize.agreement import embedding_agreement, segmentation_agreement
from penstock.protocol.inference import FloatArray, IntArray
from penstock.protocol.vision_results import (
    Classes,
    DepthMap,
    Detections,
    Embedding,
    SegmentationMap,
    TextLines,
    VisionResult,
)
from penstock.vision.layouts.suppression import overlaps

TIE = 1e-3  # difference of two scores of the reference below which another engine may prefer the other
BORDER = 0.02  # distance from the score threshold within which a box may be missing or new
SAME_OBJECT = 0.5  # least IoU of two boxes that are compared
LEAST_TOP1, LEAST_IOU, LEAST_LIKENESS = 0.999, 0.98, 0.999
MOST_UNMATCHED = 0.002  # share of the boxes; NMS can choose the other of two boxes with nearly the same score


class Rivals(NamedTuple):
    """Boxes that NMS dropped for another box of one picture whose score is less than TIE higher.

    box: (n,) int64, index of that other box. xyxy: (n, 4), of the dropped ones. They overlap it by less than LEAST_IOU.
    """

    box: IntArray
    xyxy: FloatArray


NO_RIVALS = Rivals(np.zeros(0, np.int64), np.zeros((0, 4), np.float32))


@dataclass(frozen=True, slots=True)
class AnswerAgreement:
    """One engine's results by those of the reference.

    compared: pictures whose top class was compared; same: those with the same one; ties: pictures that were left out.
    overlaps: IoU of each pair of boxes of one class. boxes: of the reference. unmatched: boxes of one engine alone;
    borderline: those among them whose score is within BORDER of the threshold, which are not counted as unmatched.
    switched: boxes that are left out because the other engine's NMS chose a rival, which it has with LEAST_IOU.
    likeness: for other results, 1 for the same: cosine, IoU of masks, share of equal lines, 1 - relative difference.
    """

    pictures: int
    compared: int = 0
    same: int = 0
    ties: int = 0
    overlaps: tuple[float, ...] = ()
    boxes: int = 0
    unmatched: int = 0
    borderline: int = 0
    switched: int = 0
    likeness: tuple[float, ...] = ()

    @property
    def top1(self) -> float:
        """Share of the compared pictures with the same top class; 1 without any."""
        return self.same / self.compared if self.compared else 1.0

    @property
    def unmatched_share(self) -> float:
        """Of the reference's boxes."""
        return self.unmatched / max(self.boxes, 1)

    @property
    def box_share(self) -> float:
        """Share of the boxes of both engines that have a partner with LEAST_IOU; 1 without a box."""
        compared = len(self.overlaps) + self.unmatched
        return sum(value >= LEAST_IOU for value in self.overlaps) / compared if compared else 1.0

    def overlap(self, percentile: float) -> float:
        """That percentile of the IoU; 1 without a box."""
        return float(np.percentile(self.overlaps, percentile)) if self.overlaps else 1.0

    @property
    def disagreement(self) -> str:
        """Why the results are not good enough to be served in the reference's place; empty if they are."""
        if self.top1 < LEAST_TOP1:
            return f"the top class is the same for {self.top1:.2%} of the pictures, {LEAST_TOP1:.1%} is needed"
        if self.overlap(1) < LEAST_IOU:
            return f"boxes overlap {self.overlap(1):.3f} (1st percentile), {LEAST_IOU:g} is needed"
        if self.unmatched_share > MOST_UNMATCHED:
            return f"{self.unmatched} of {self.boxes} boxes are missing or new"
        if self.likeness and min(self.likeness) < LEAST_LIKENESS:
            return f"the results have a similarity of {min(self.likeness):.4f}, {LEAST_LIKENESS:g} is needed"
        return ""

    def __str__(self) -> str:
        """How well they agree, in a few words."""
        if self.compared or self.ties:
            left_out = f" ({self.ties} ties left out)" if self.ties else ""
            return f"the same top class for {self.same} of {self.compared} pictures{left_out}"
        if self.boxes or self.overlaps:
            left_out = f" ({self.switched} left out: NMS chose a box of the same score)" if self.switched else ""
            return f"{len(self.overlaps)} boxes overlap at least {self.overlap(0):.3f}{left_out}"
        if self.likeness:
            return f"results with a similarity of at least {min(self.likeness):.4f}"
        return "no result to compare"


def compare_answers(
    reference: Sequence[VisionResult], other: Sequence[VisionResult], *, threshold: float, rivals: Sequence[Rivals] = ()
) -> AnswerAgreement:
    """Compares picture by picture. threshold: least score of a box. Raises ValueError for results of different kinds.

    Classes: with at least the two best of each picture, else no tie is seen. rivals: of the reference, by picture.
    """
    near = rivals or [NO_RIVALS] * len(reference)
    pairs = list(zip(reference, other, near, strict=True))
    found = [_of_picture(one, two, threshold, close) for one, two, close in pairs]
    return AnswerAgreement(
        pictures=len(pairs),
        compared=sum(one.compared for one in found),
        same=sum(one.same for one in found),
        ties=sum(one.ties for one in found),
        overlaps=tuple(value for one in found for value in one.overlaps),
        boxes=sum(one.boxes for one in found),
        unmatched=sum(one.unmatched for one in found),
        borderline=sum(one.borderline for one in found),
        switched=sum(one.switched for one in found),
        likeness=tuple(value for one in found for value in one.likeness),
    )


def rivals_of(chosen: Detections, candidates: Detections, *, iou: float) -> Rivals:
    """chosen: after NMS with that IoU. candidates: before it, of the same picture and thresholds."""
    near = overlaps(chosen.xyxy, candidates.xyxy)
    is_dropped = (near > iou) & (near < LEAST_IOU) & (chosen.class_id[:, np.newaxis] == candidates.class_id[np.newaxis])
    box, rival = np.nonzero(is_dropped & (chosen.score[:, np.newaxis] - candidates.score[np.newaxis] < TIE))
    return Rivals(box, candidates.xyxy[rival])


def _of_picture(one: VisionResult, two: VisionResult, threshold: float, rivals: Rivals) -> AnswerAgreement:
    if isinstance(one, Detections) and isinstance(two, Detections):
        return _boxes(one, two, threshold, rivals)
    if isinstance(one, Classes) and isinstance(two, Classes):
        return _classes(one, two)
    return AnswerAgreement(1, likeness=(_likeness(one, two),))


def _classes(one: Classes, two: Classes) -> AnswerAgreement:
    if len(one.score) > 1 and one.score[0] - one.score[1] < TIE:
        return AnswerAgreement(1, ties=1)
    return AnswerAgreement(1, compared=1, same=int(one.class_id[:1].tolist() == two.class_id[:1].tolist()))


def _boxes(one: Detections, two: Detections, threshold: float, rivals: Rivals) -> AnswerAgreement:
    """Pairs boxes of one class one to one, the largest overlap first; of a box or of one of its rivals."""
    own = overlaps(one.xyxy, two.xyxy)
    own[one.class_id[:, np.newaxis] != two.class_id[np.newaxis]] = 0.0
    by_rival = overlaps(rivals.xyxy, two.xyxy)
    by_rival[(by_rival < LEAST_IOU) | (one.class_id[rivals.box][:, np.newaxis] != two.class_id[np.newaxis])] = 0.0
    left = own.copy()
    np.maximum.at(left, rivals.box, by_rival)
    found: list[float] = []
    switched, alone, new = 0, np.ones(len(one.score), np.bool_), np.ones(len(two.score), np.bool_)
    while left.size and left.max() >= SAME_OBJECT:
        row, column = np.unravel_index(int(left.argmax()), left.shape)
        if own[row, column] < LEAST_IOU <= left[row, column]:
            switched += 1
        else:
            found.append(float(own[row, column]))
        left[row], left[:, column] = 0.0, 0.0
        alone[row], new[column] = False, False
    scores = np.concatenate([one.score[alone], two.score[new]])
    borderline = int(np.count_nonzero(scores <= threshold + BORDER))
    return AnswerAgreement(
        1,
        overlaps=tuple(found),
        boxes=len(one.score),
        unmatched=len(scores) - borderline,
        borderline=borderline,
        switched=switched,
    )


def _likeness(one: VisionResult, two: VisionResult) -> float:
    if isinstance(one, Embedding) and isinstance(two, Embedding):
        return embedding_agreement([one], [two]).least_cosine
    if isinstance(one, SegmentationMap) and isinstance(two, SegmentationMap):
        return segmentation_agreement([one], [two]).mean_iou
    if isinstance(one, TextLines) and isinstance(two, TextLines):
        texts = [line.text for line in one.lines], [line.text for line in two.lines]
        return float(texts[0] == texts[1])
    if isinstance(one, DepthMap) and isinstance(two, DepthMap):
        apart = np.abs(one.values.astype(np.float64) - two.values).mean()
        return 1.0 - float(apart) / max(float(np.ptp(one.values)), 1e-9)
    raise ValueError(f"a result of type {type(two).__name__} cannot be compared with one of type {type(one).__name__}")
