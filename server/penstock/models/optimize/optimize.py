"""Optimizes a float model: chooses a quantisation recipe, evaluates and times it, writes model folder and report."""

import hashlib
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.quantization.calibrate import TensorsData

from penstock.engines.ort_serving.session import ORT_ERRORS, ort_error_text
from penstock.models.optimize.agreement import IOU, Session, detections_of, measure_agreement, run_samples
from penstock.models.optimize.profile import SpeedComparison, compare_speed, cpu_name, int8_instructions, read_fusion
from penstock.models.optimize.quantize import (
    Feed,
    Ranges,
    behind_the_last_weights,
    for_onnxruntime,
    measure_ranges,
    prepare_graph,
)
from penstock.models.optimize.report import Evaluation, OptimizationReport, Trial, write_folder
from penstock.models.optimize.source import (
    OptimizeError,
    Progress,
    Sample,
    SourceModel,
    Split,
    engine_options,
    open_model,
    read_samples,
    split_pictures,
)
from penstock.protocol.inference import Array
from penstock.protocol.vision_results import Detections, VisionResult
from penstock.vision.accuracy import Truth, average_precision
from penstock.vision.layouts.layout import is_selected

WORTH_LEAVING_FLOAT = 0.01  # minimum gain in agreement, because float nodes cost speed


@dataclass(frozen=True, slots=True)
class QuantizedModel:
    """The chosen recipe, the quantized model and all trials; no trials for random weights."""

    chosen: Trial
    trials: tuple[Trial, ...]
    model: onnx.ModelProto


def quantize(
    source: SourceModel, float_session: ort.InferenceSession, samples: Sequence[Sample], progress: Progress
) -> QuantizedModel:
    """Calibrates on the samples and chooses the recipe with the best agreement on them. Raises OptimizeError."""
    with tempfile.TemporaryDirectory(prefix="penstock-optimize.") as folder:
        prepared = Path(folder) / "prepared.onnx"
        prepare_graph(source.path, prepared)
        feeds = [sample.feed for sample in samples]
        if source.has_random_weights:
            chosen, trials = Trial(Ranges.MINMAX, (), None), tuple[Trial]()
            measured = {Ranges.MINMAX: _measured(prepared, feeds, Ranges.MINMAX, progress)}
        else:
            measured = {ranges: _measured(prepared, feeds, ranges, progress) for ranges in Ranges}
            trials = _TrialRunner(source, float_session, samples, prepared, measured).run(progress)
            chosen = choose(trials)
        ranges = measured[chosen.ranges]
        return QuantizedModel(chosen, trials, for_onnxruntime(prepared, ranges, chosen.left_float))


def choose(trials: Sequence[Trial]) -> Trial:
    """The best trial without float nodes, unless float nodes gain more than WORTH_LEAVING_FLOAT."""

    def worth(trial: Trial) -> float:
        return (trial.agreement or 0.0) - (WORTH_LEAVING_FLOAT if trial.left_float else 0.0)

    return max(trials, key=worth)  # of equals the first


def _measured(prepared: Path, feeds: Sequence[Feed], ranges: Ranges, progress: Progress) -> TensorsData:
    progress.step(f"measuring ranges ({ranges})", len(feeds))
    return measure_ranges(prepared, feeds, ranges, progress.advance)


class _TrialRunner:
    """Tries all kinds of ranges without float nodes; then the best with the tail, and the last weights, left float."""

    def __init__(
        self,
        source: SourceModel,
        float_session: ort.InferenceSession,
        samples: Sequence[Sample],
        prepared: Path,
        measured: dict[Ranges, TensorsData],
    ) -> None:
        self._source, self._samples, self._prepared, self._measured = source, samples, prepared, measured
        self._reference = run_samples(float_session, source, samples)

    def run(self, progress: Progress) -> tuple[Trial, ...]:
        tail, last = behind_the_last_weights(onnx.load(self._prepared).graph)
        progress.step("trying recipes", len(self._measured) + 2)
        trials = []
        for ranges in self._measured:
            trials.append(self._try(ranges, ()))
            progress.advance()
        best = choose(trials).ranges
        for left_float in (tail, tail | last):
            if left_float:
                trials.append(self._try(best, left_float))
            progress.advance()
        return tuple(trials)

    def _try(self, ranges: Ranges, left_float: Collection[str]) -> Trial:
        model = for_onnxruntime(self._prepared, self._measured[ranges], left_float)
        file = self._prepared.with_name("trial.onnx")
        onnx.save(model, file)
        session = open_model(file, engine_options(self._source))
        found = run_samples(session, self._source, self._samples)
        return Trial(ranges, tuple(sorted(left_float)), measure_agreement(self._reference, found).share)


LEAST_SCORE = 0.05  # for COCO's full curve, includes boxes that the card would drop


def evaluate(
    source: SourceModel,
    sessions: Sequence[Session],
    held_out: Sequence[Path],
    truth: Mapping[str, Truth],
    progress: Progress,
) -> list[Evaluation]:
    """One evaluation per session after the first, the float model's. truth: by file name. Raises OptimizeError."""
    progress.step("judging", len(held_out))
    known = [truth.get(path.name) for path in held_out]
    watched = _with_threshold(source, LEAST_SCORE)
    found: list[list[VisionResult]] = [[] for _ in sessions]
    for sample in read_samples(held_out, source):
        _run_batches(watched, sessions, sample, found)
        progress.advance()
    precisions = [_precision(source, known, results) for results in found]
    served = [[_as_served(source, result) for result in results] for results in found]
    return [
        Evaluation(
            measure_agreement(served[0], served[number]),
            len(known) - known.count(None),
            precisions[0],
            precisions[number],
            _precision_by_float(served[0], found[number]),
        )
        for number in range(1, len(sessions))
    ]


def _with_threshold(source: SourceModel, score: float) -> SourceModel:
    options = source.card.layout_options
    lower = replace(options, pre_cluster_threshold=min(score, options.lowest_threshold()), class_thresholds=())
    return replace(source, card=replace(source.card, layout_options=lower))


def _as_served(source: SourceModel, result: VisionResult) -> VisionResult:
    """Applies the card's threshold. Dropped boxes never suppress boxes of a higher score."""
    if not isinstance(result, Detections):
        return result
    is_confident = is_selected(result.score, result.class_id, source.card.layout_options)
    return Detections(result.xyxy[is_confident], result.score[is_confident], result.class_id[is_confident])


def _run_batches(
    source: SourceModel, sessions: Sequence[Session], sample: Sample, found: list[list[VisionResult]]
) -> None:
    for session, results in zip(sessions, found, strict=True):
        results += run_samples(session, source, [sample])


def _precision(source: SourceModel, known: Sequence[Truth | None], results: Sequence[VisionResult]) -> float | None:
    """mAP at IoU 0.5 over the pictures with ground truth; None without any, and for classifiers."""
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


def _precision_by_float(served: Sequence[VisionResult], found: Sequence[VisionResult]) -> float | None:
    """mAP at IoU 0.5, with the boxes that the float model serves as ground truth; None if it serves none."""
    truth = [Truth(boxes.xyxy, boxes.class_id) for boxes in detections_of(served)]
    boxes = detections_of(found)
    if not any(len(one.class_id) for one in truth):
        return None
    ids = [*(one.class_id for one in truth), *(one.class_id for one in boxes)]
    count = 1 + max(int(one.max(initial=0)) for one in ids)
    return average_precision(truth, boxes, iou=IOU, class_count=count).mean


def optimize(
    source: SourceModel, pictures: Sequence[Path], truth: Mapping[str, Truth], staged: Path, progress: Progress
) -> OptimizationReport:
    """Writes the model NAME-int8 to the empty folder `staged`. truth: by file name. Raises OptimizeError, OSError."""
    try:
        return _optimize(source, pictures, truth, staged, progress)
    except ORT_ERRORS as error:
        raise OptimizeError(
            f"model {source.name!r} does not run as its config.pbtxt says ({ort_error_text(error)}): "
            f"`penstock models check {source.name}` tells more"
        ) from error


def _optimize(
    source: SourceModel, pictures: Sequence[Path], truth: Mapping[str, Truth], staged: Path, progress: Progress
) -> OptimizationReport:
    progress.step("reading pictures", len(pictures))
    split = split_pictures(pictures, source, progress.advance)
    samples = list(read_samples(split.calibrating, source))
    float_session = open_model(source.path, engine_options(source))
    quantised = quantize(source, float_session, samples, progress)
    file = _save(quantised, staged)
    int8_session = open_model(file, engine_options(source))
    judgement = _judgement(source, (float_session, int8_session), split, truth, progress)
    comparisons = _comparisons(source, float_session, int8_session, samples, progress)
    progress.step("reading what was fused", 0)
    report = OptimizationReport(
        name=f"{source.name}-int8",
        optimized_from=source.name,
        source_sha256=_sha256(source.path),
        int8_sha256=_sha256(file),
        source_bytes=source.path.stat().st_size,
        int8_bytes=file.stat().st_size,
        calibrating=len(split.calibrating),
        held_out=len(split.held_out),
        unreadable=split.unreadable,
        chosen=quantised.chosen,
        trials=quantised.trials,
        judgement=judgement,
        comparisons=comparisons,
        threads=engine_options(source).intra_op_num_threads,
        int8_instructions=int8_instructions(),
        cpu=cpu_name(),
        fusion=read_fusion(source, file),
    )
    write_folder(source, report, staged)
    return report


def _save(quantised: QuantizedModel, staged: Path) -> Path:
    version = staged / "1"
    version.mkdir()
    file = version / "model.onnx"
    onnx.save(quantised.model, file)
    return file


def _judgement(
    source: SourceModel,
    sessions: Sequence[ort.InferenceSession],
    split: Split,
    truth: Mapping[str, Truth],
    progress: Progress,
) -> Evaluation | None:
    if source.has_random_weights:
        return None
    (judgement,) = evaluate(source, sessions, split.held_out, truth, progress)
    return judgement


def _comparisons(
    source: SourceModel,
    float_session: ort.InferenceSession,
    int8_session: ort.InferenceSession,
    samples: Sequence[Sample],
    progress: Progress,
) -> tuple[SpeedComparison, ...]:
    progress.step("measuring speed", len(source.batch_sizes))
    found = []
    for batch_size in source.batch_sizes:
        feed = _batch(samples, batch_size)
        found.append(
            compare_speed(
                batch_size,
                lambda feed=feed: float_session.run(None, feed),  # type: ignore[misc]
                lambda feed=feed: int8_session.run(None, feed),  # type: ignore[misc]
            )
        )
        progress.advance()
    return tuple(found)


def _batch(samples: Sequence[Sample], batch_size: int) -> dict[str, Array]:
    if batch_size == 1:
        return samples[0].feed
    feeds = [samples[number % len(samples)].feed for number in range(batch_size)]
    return {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
