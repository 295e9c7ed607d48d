"""The whole way, from a float model and pictures to an INT8 folder and a report."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from server.backends.ort_serving.session import ORT_ERRORS, ort_sentence
from server.core.tensor import Array
from server.optimize.cpu import cpu_name, int8_instructions
from server.optimize.errors import OptimizeError
from server.optimize.folder import write_folder
from server.optimize.fusion import read_fusion
from server.optimize.judge import judge
from server.optimize.progress import Progress
from server.optimize.recipes import Quantised, quantise
from server.optimize.report import Judgement, Report
from server.optimize.samples import Sample, Split, read_samples, split_pictures
from server.optimize.source import SourceModel, engine_options, open_model
from server.optimize.timing import Comparison, compare
from server.vision.accuracy import Truth


def optimise(
    source: SourceModel,
    pictures: Sequence[Path],
    truth: Mapping[str, Truth],
    staged: Path,
    progress: Progress,
) -> Report:
    """Fills the empty folder `staged` with the model NAME-int8. truth: by file name; empty where there is none.

    Raises OptimizeError, and OSError where the disk refuses; what is in staged then is of no use.
    """
    try:
        return _optimise(source, pictures, truth, staged, progress)
    except ORT_ERRORS as error:
        raise OptimizeError(
            f"model {source.name!r} does not run as its config.pbtxt says ({ort_sentence(error)}): "
            f"`penstock models check {source.name}` tells more"
        ) from error


def _optimise(
    source: SourceModel,
    pictures: Sequence[Path],
    truth: Mapping[str, Truth],
    staged: Path,
    progress: Progress,
) -> Report:
    progress.step("reading pictures", len(pictures))
    split = split_pictures(pictures, source, progress.advance)
    samples = list(read_samples(split.calibrating, source))
    float_session = open_model(source.path, engine_options(source))
    quantised = quantise(source, float_session, samples, progress)
    file = _save(quantised, staged)
    int8_session = open_model(file, engine_options(source))
    judgement = _judgement(source, (float_session, int8_session), split, truth, progress)
    comparisons = _comparisons(source, float_session, int8_session, samples, progress)
    progress.step("reading what was fused", 0)
    report = Report(
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


def _save(quantised: Quantised, staged: Path) -> Path:
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
) -> Judgement | None:
    """INT8 against float; None on random weights."""
    if source.has_random_weights:
        return None
    (judgement,) = judge(source, sessions, split.held_out, truth, progress)
    return judgement


def _comparisons(
    source: SourceModel,
    float_session: ort.InferenceSession,
    int8_session: ort.InferenceSession,
    samples: Sequence[Sample],
    progress: Progress,
) -> tuple[Comparison, ...]:
    progress.step("measuring speed", len(source.batch_sizes))
    found = []
    for batch_size in source.batch_sizes:
        array = _batch(samples, batch_size)
        feed = {source.card.input_name: array}
        found.append(
            compare(
                batch_size,
                lambda feed=feed: float_session.run(None, feed),  # type: ignore[misc]
                lambda feed=feed: int8_session.run(None, feed),  # type: ignore[misc]
            )
        )
        progress.advance()
    return tuple(found)


def _batch(samples: Sequence[Sample], batch_size: int) -> Array:
    """As many pictures as that in one array; the same ones again where there are fewer."""
    if batch_size == 1:
        return samples[0].array
    rows = [samples[number % len(samples)].array for number in range(batch_size)]
    return np.concatenate(rows)


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
