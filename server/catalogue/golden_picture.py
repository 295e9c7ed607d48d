"""What was seen in a picture against what is seen in it now. Pure."""

import numpy as np

from server.catalogue.golden import PictureRecord, PictureTolerance, SeenClass
from server.core.result import Detections, VisionResult

# Pixels are the same everywhere, one decoder and one resize; what is left is an engine's arithmetic. FastestDet's
# scores move by 0.0003 when every factor is rounded to TF32, by 0.027 when red and blue are exchanged.
SCORE_SLACK, LEAST_IOU = 0.01, 0.9


def record_of_seen(seen: tuple[SeenClass, ...], *, sha256: str, threshold: float) -> PictureRecord:
    """What golden.json keeps of a picture. threshold: the score under which a detector answers nothing."""
    if all(item.xyxy is not None for item in seen):
        return PictureRecord(sha256, seen, PictureTolerance(SCORE_SLACK, LEAST_IOU, threshold))
    last = seen[-1].score if len(seen) > 1 else 0.0  # of the likeliest classes, the last may change its place
    return PictureRecord(sha256, seen, PictureTolerance(SCORE_SLACK, LEAST_IOU, last))


def seen_in(result: VisionResult) -> tuple[SeenClass, ...]:
    """The result, one row an object or class, strongest first; boxes to a tenth of a pixel."""
    boxes = np.round(result.xyxy.astype(np.float64), 1).tolist() if isinstance(result, Detections) else None
    scores = np.round(result.score.astype(np.float64), 4).tolist()
    return tuple(
        SeenClass(int(class_id), score, None if boxes is None else tuple(boxes[row]))
        for row, (class_id, score) in enumerate(zip(result.class_id.tolist(), scores, strict=True))
    )


def compare_picture(record: PictureRecord, got: tuple[SeenClass, ...]) -> str:
    """What differs, in a sentence; empty where nothing does.

    Each one that was seen must be seen again: of the same class, its box as near and its score as close as the
    tolerance says. What is as near to the threshold as a score may differ may be there or not.
    """
    left = list(got)
    for wanted in record.seen:
        match = _best(wanted, left)
        if match is None or _overlap(wanted, match) < record.tolerance.iou:
            if not _is_borderline(wanted, record.tolerance):
                return f"{_told(wanted)} is not seen any more{_instead(match)}"
            continue
        left.remove(match)
        if abs(match.score - wanted.score) > record.tolerance.score:
            return f"{_told(wanted)} has score {match.score:.3f} now, {record.tolerance.score:g} apart is allowed"
    surplus = next((item for item in left if not _is_borderline(item, record.tolerance)), None)
    return f"{_told(surplus)} is seen now, and was not when golden.json was recorded" if surplus else ""


def _best(wanted: SeenClass, among: list[SeenClass]) -> SeenClass | None:
    same = [item for item in among if item.class_id == wanted.class_id]
    return max(same, key=lambda item: _overlap(wanted, item), default=None)


def _overlap(one: SeenClass, other: SeenClass) -> float:
    """Intersection over union; 1 for two classes of the whole picture, 0 where only one has a box."""
    if one.xyxy is None or other.xyxy is None:
        return 1.0 if one.xyxy is other.xyxy else 0.0
    width, height = (min(one.xyxy[i + 2], other.xyxy[i + 2]) - max(one.xyxy[i], other.xyxy[i]) for i in (0, 1))
    shared = max(width, 0.0) * max(height, 0.0)
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one.xyxy, other.xyxy))
    return shared / (areas - shared) if areas > shared else 0.0


def _is_borderline(item: SeenClass, tolerance: PictureTolerance) -> bool:
    return item.score - tolerance.threshold <= tolerance.score


def _told(item: SeenClass) -> str:
    where = f" at {[round(side) for side in item.xyxy]}" if item.xyxy is not None else ""
    return f"class {item.class_id}{where}, score {item.score:.3f},"


def _instead(nearest: SeenClass | None) -> str:
    if nearest is None or nearest.xyxy is None:
        return ""
    return f" (the nearest of its class is at {[round(side) for side in nearest.xyxy]})"
