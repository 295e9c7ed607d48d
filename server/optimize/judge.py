"""INT8 against float on pictures that neither calibration nor choice has seen."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from server.core.result import Detections, VisionResult
from server.optimize.answers import Session, agreement, answer, detections_of
from server.optimize.errors import OptimizeError
from server.optimize.progress import Progress
from server.optimize.report import Judgement
from server.optimize.samples import Sample, read_samples
from server.optimize.source import SourceModel
from server.vision.accuracy import Truth, average_precision

IOU = 0.5
LEAST_SCORE = 0.05  # for COCO's curve to be whole, boxes count that the card would drop


def judge(
    source: SourceModel,
    sessions: Sequence[Session],
    held_out: Sequence[Path],
    truth: Mapping[str, Truth],
    progress: Progress,
) -> list[Judgement]:
    """One judgement a session after the first, which is the float model's. truth: by file name; may be empty.

    Each picture is read once and goes through every session. Raises OptimizeError where the truth is not the model's.
    """
    progress.step("judging", len(held_out))
    known = [truth.get(path.name) for path in held_out]
    watched = _with_threshold(source, LEAST_SCORE) if any(known) else source
    found: list[list[VisionResult]] = [[] for _ in sessions]
    for sample in read_samples(held_out, source):
        _look(watched, sessions, sample, found)
        progress.advance()
    precisions = [_precision(source, known, results) for results in found]
    served = [[_as_served(source, result) for result in results] for results in found]
    return [
        Judgement(agreement(served[0], results), len(known) - known.count(None), precisions[0], precision)
        for results, precision in zip(served[1:], precisions[1:], strict=True)
    ]


def _with_threshold(source: SourceModel, score: float) -> SourceModel:
    options = source.card.parser_options
    lower = min(score, options.pre_cluster_threshold)
    return replace(source, card=replace(source.card, parser_options=replace(options, pre_cluster_threshold=lower)))


def _as_served(source: SourceModel, result: VisionResult) -> VisionResult:
    """Without what the card drops: a box of a low score never suppresses one of a higher."""
    if not isinstance(result, Detections):
        return result
    is_kept = result.score > source.card.parser_options.pre_cluster_threshold
    return Detections(result.xyxy[is_kept], result.score[is_kept], result.class_id[is_kept])


def _look(source: SourceModel, sessions: Sequence[Session], sample: Sample, found: list[list[VisionResult]]) -> None:
    for session, results in zip(sessions, found, strict=True):
        results += answer(session, source, [sample])


def _precision(source: SourceModel, known: Sequence[Truth | None], results: Sequence[VisionResult]) -> float | None:
    """mAP at IoU 0.5 over the pictures whose truth is known; None without any, and for classifiers."""
    boxes = detections_of(results)
    pairs = [(truth, box) for truth, box in zip(known, boxes, strict=True) if truth is not None] if boxes else []
    if not pairs:
        return None
    labels = len(source.card.labels) or 1 + max(int(truth.class_id.max(initial=0)) for truth, _ in pairs)
    try:
        precision = average_precision(
            [truth for truth, _ in pairs], [box for _, box in pairs], iou=IOU, class_count=labels
        )
    except ValueError as error:
        raise OptimizeError(f"annotations.json does not fit model {source.name!r}: {error}") from error
    return precision.mean
