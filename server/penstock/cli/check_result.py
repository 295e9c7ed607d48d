"""The result of a model check: files, outputs compared with golden.json or a reference; and the recording of
golden.json.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

import msgspec

from penstock.cli.check_request import (
    CheckContext,
    CheckEngine,
    CheckResponse,
    GatewayCheckEngine,
    ModelCannotRun,
    NotCheckable,
    engine_for,
    infer_outputs,
    patterns_for,
    run_check_inference,
)
from penstock.cli.model_list import in_short
from penstock.models.catalogue import InstalledModel
from penstock.models.check.compare import (
    OutputRow,
    compare_outputs,
    compare_picture,
    expected_of_record,
    expected_of_tensor,
    is_deterministic,
    picture_record,
    record_of_tensor,
    tolerance_for,
)
from penstock.models.check.golden import (
    GOLDEN_FILE,
    PICTURE_FILE,
    Golden,
    GoldenError,
    OutputRecord,
    PictureRecord,
    SeenClass,
    ShapeUnknown,
    TensorRecord,
    generate_input,
    write_golden,
)
from penstock.models.check.model_files import ModelFiles, read_model_files
from penstock.models.onnx_reference import RECORDED_WITH, Reference, run_reference
from penstock.protocol.errors import InferenceError, ModelNotReady
from penstock.protocol.inference import Tensor
from penstock.vision.results import CANARY_PICTURE

GOLDEN, ONNX_RUNTIME = "golden.json", "ONNX Runtime"


class CheckVerdict(StrEnum):
    """NOT_JUDGED: nothing says whether its answers are right, or it answers elsewhere only."""

    OK = "ok"
    DIFFERS = "differs"
    CANNOT_RUN = "cannot run"
    NOT_JUDGED = "not judged"

    @property
    def is_failure(self) -> bool:
        return self in (CheckVerdict.DIFFERS, CheckVerdict.CANNOT_RUN)


class CheckRow(msgspec.Struct):
    """The result of one model's check; filled while the check runs.

    ran: gateway, in-process, or empty where it did not. compared_with: golden.json, golden.jpg, ONNX Runtime.
    reasons: why the verdict is not `ok`. notes: what else is worth knowing.
    """

    name: str
    repository: str
    verdict: CheckVerdict = CheckVerdict.NOT_JUDGED
    ran: str = ""
    compared_with: list[str] = []
    reasons: list[str] = []
    notes: list[str] = []
    outputs: list[OutputRow] = []
    took_s: float = 0.0

    def compare(self, reference: str, rows: Sequence[OutputRow]) -> None:
        """Adds the rows of one reference, and a reason for each difference."""
        self.compared_with.append(reference)
        self.outputs += rows
        self.reasons += [f"output {row.output!r} {row.problem} (by {reference})" for row in rows if row.problem]


@dataclass(frozen=True, slots=True)
class CheckTarget:
    """A model to check. sha256: from the catalogue, or None for other models. is_named: the user gave its name."""

    model: InstalledModel
    sha256: str | None
    is_named: bool


async def check_model(subject: CheckTarget, context: CheckContext) -> CheckRow:
    """The row of one model, with its faults."""
    started = time.monotonic()
    row = CheckRow(subject.model.name, str(subject.model.repository))
    row.verdict = await _verdict(subject, context, row)
    row.reasons = [in_short(reason) for reason in row.reasons]
    row.took_s = round(time.monotonic() - started, 3)
    return row


async def _verdict(subject: CheckTarget, context: CheckContext, row: CheckRow) -> CheckVerdict:
    """A model that cannot be checked has failed if the user named it, and has no verdict in a check of all models."""
    try:
        await _check(subject, context, row)
    except (ModelCannotRun, GoldenError, InferenceError) as error:
        row.reasons.append(str(error))
        is_elsewhere = isinstance(error, ShapeUnknown) and not subject.is_named
        return CheckVerdict.NOT_JUDGED if is_elsewhere and len(row.reasons) == 1 else CheckVerdict.CANNOT_RUN
    except NotCheckable as error:
        is_failure = bool(row.reasons)
        row.reasons.append(str(error))
        if is_failure:
            return CheckVerdict.DIFFERS
        return CheckVerdict.CANNOT_RUN if subject.is_named and not row.ran else CheckVerdict.NOT_JUDGED
    return CheckVerdict.DIFFERS if row.reasons else CheckVerdict.OK


async def _check(subject: CheckTarget, context: CheckContext, row: CheckRow) -> None:
    if subject.model.problem:
        raise ModelCannotRun(subject.model.problem)
    files = read_model_files(subject.model)
    row.reasons += files.misfits(subject.sha256)
    picture = files.picture()
    async with engine_for(files, context, row.notes) as engine:
        response = await run_check_inference(engine, files, context.shapes, is_named=subject.is_named)
        row.ran = engine.name
        record = files.golden.picture if files.golden is not None else None
        found = await engine.see(files.folder.name, picture) if picture is not None and record is not None else ()
        if record is None and files.card is not None:  # requests to /image pass through more than the tensors do
            await engine.see(files.folder.name, CANARY_PICTURE)
    if record is not None:
        _compare_picture(record, found, row)
    if response is not None:
        _compare_tensors(response, files, row)
    if not row.compared_with:
        raise NotCheckable(f"it answers, but nothing says whether rightly: {_advice(files)}")


def _compare_picture(record: PictureRecord, found: tuple[SeenClass, ...], row: CheckRow) -> None:
    row.compared_with.append(PICTURE_FILE)
    if problem := compare_picture(record, found):
        row.reasons.append(f"{PICTURE_FILE}: {problem}")


def _compare_tensors(response: CheckResponse, files: ModelFiles, row: CheckRow) -> None:
    if response.record is not None:
        _compare_with_record(response.record, response, row)
    if files.is_onnx:
        _compare_with_reference(response, files, row)


def _compare_with_record(record: TensorRecord, response: CheckResponse, row: CheckRow) -> None:
    try:
        expected = [expected_of_record(output) for output in record.outputs]
    except ValueError as error:
        raise GoldenError(f"{GOLDEN}: {error}: remove it and record it anew with --record") from error
    row.compare(GOLDEN, compare_outputs(expected, response.outputs, GOLDEN))


def _compare_with_reference(response: CheckResponse, files: ModelFiles, row: CheckRow) -> None:
    """Compares with ONNX Runtime on the file. A graph that only the engine can run is noted and is no fault."""
    try:
        reference = run_reference(files.file, files.config_json, response.inputs)
    except ModelNotReady as error:
        row.reasons.append(f"the engine answers, but the file on disk is not what it has loaded: {error}")
        return
    except InferenceError as error:
        is_elsewhere = row.ran == GatewayCheckEngine.name
        remedy = f"; if it was replaced, `penstock models load {files.folder.name}` takes the new one"
        row.notes.append(
            f"not compared with {ONNX_RUNTIME} on the file: {error.message}{remedy if is_elsewhere else ''}"
        )
        return
    plain = _compare_outputs(reference.plain, reference, response, is_reduced=files.is_reduced)
    if reference.is_quantised and any(item.problem for item in plain):
        optimised = _compare_outputs(reference.optimised, reference, response, is_reduced=files.is_reduced)
        if not any(item.problem for item in optimised):
            first = next(f"{item.output!r} {item.problem}" for item in plain if item.problem)
            row.notes.append(
                f"8-bit steps fall as in the graph that {ONNX_RUNTIME} optimises; in the plain one {first}"
            )
            plain = optimised
    row.compare(ONNX_RUNTIME, plain)


def _compare_outputs(
    outputs: Sequence[Tensor], reference: Reference, response: CheckResponse, *, is_reduced: bool
) -> list[OutputRow]:
    """Compares the answer with one of the two reference answers, within the allowed difference."""
    tolerances = map(partial(tolerance_for, is_reduced=is_reduced), reference.plain, reference.optimised)
    expected = [
        expected_of_tensor(response.shaped(output), tolerance)
        for output, tolerance in zip(outputs, tolerances, strict=True)
        if output.name in response.declared
    ]
    return compare_outputs(expected, response.outputs, ONNX_RUNTIME)


def _advice(files: ModelFiles) -> str:
    return f"record today's answers with `penstock models check {files.folder.name} --record`"


class NondeterministicOutput(GoldenError):
    """The model's answers to the same inputs differ, as those of 8-bit networks can."""


async def record_golden(model: InstalledModel, context: CheckContext) -> Path:
    """The golden.json that was written: of an ONNX model by plain ONNX Runtime, of others by the engine that serves
    them, asked twice; and what is seen in golden.jpg where that lies in the folder.

    Raises GoldenError where there is one already, and whatever asking the model raises.
    """
    files = read_model_files(model)
    if files.golden is not None:
        raise GoldenError(f"{files.folder / GOLDEN_FILE} is there already: remove it to record it anew")
    if files.card is None and files.picture() is not None:
        raise GoldenError(f"{files.folder / PICTURE_FILE} is there, but {model.name} does not say how it sees images")
    async with engine_for(files, context, []) as engine:
        recorders = [] if files.is_onnx else [await engine.engine_name()]
        picture = await _record_picture(engine, files)
        try:
            tensors = await _record_tensors(engine, files, context)
        except (ShapeUnknown, NondeterministicOutput) as error:
            if picture is None:
                raise GoldenError(f"{error}{_picture_hint(files)}") from error
            tensors = None
        if picture is not None and files.is_onnx:
            recorders.append(f"{PICTURE_FILE} by {await engine.engine_name()}")
    if files.is_onnx and tensors is not None:
        recorders.insert(0, RECORDED_WITH)
    return write_golden(files.folder, Golden("; ".join(recorders), files.file_name, files.sha256, tensors, picture))


async def _record_tensors(engine: CheckEngine, files: ModelFiles, context: CheckContext) -> TensorRecord:
    metadata = await engine.model_metadata(files.folder.name)
    patterns = patterns_for(metadata, files, context.shapes)
    inputs = tuple(generate_input(pattern) for pattern in patterns)
    once, again = await _infer_twice(engine, files, inputs)
    served = {spec.name for spec in metadata.outputs}
    records = (_record_output(one, again, is_reduced=files.is_reduced) for one in once if one.name in served)
    return TensorRecord(patterns, tuple(records))


async def _infer_twice(
    engine: CheckEngine, files: ModelFiles, inputs: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    if files.is_onnx:
        reference = run_reference(files.file, files.config_json, inputs)
        return reference.plain, reference.optimised
    return await infer_outputs(engine, files, inputs), await infer_outputs(engine, files, inputs)


def _record_output(one: Tensor, again: tuple[Tensor, ...], *, is_reduced: bool) -> OutputRecord:
    """Raises NondeterministicOutput if the two answers are so far apart that no tolerance tells right from wrong."""
    other = next((tensor for tensor in again if tensor.name == one.name), None)
    if other is not None and not is_deterministic(one, other):
        raise NondeterministicOutput(
            f"two ways on this machine to output {one.name!r} are too far apart to judge others by"
        )
    return record_of_tensor(one, tolerance_for(one, other, is_reduced=is_reduced))


async def _record_picture(engine: CheckEngine, files: ModelFiles) -> PictureRecord | None:
    picture = files.picture()
    if picture is None or files.card is None:
        return None
    return picture_record(
        await engine.see(files.folder.name, picture),
        sha256=hashlib.sha256(picture).hexdigest(),
        threshold=files.card.layout_options.pre_cluster_threshold,
    )


def _picture_hint(files: ModelFiles) -> str:
    return f"; a {PICTURE_FILE} in {files.folder} would do as well" if files.card is not None else ""
