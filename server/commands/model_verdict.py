"""One model's check: its files, an answer to a known input, and what that answer is compared with."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from server.backends.onnx_reference import Reference, run_reference
from server.catalogue.golden import PICTURE_FILE, GoldenError, PictureRecord, SeenClass, TensorRecord
from server.catalogue.golden_compare import (
    Comparison,
    compare_outputs,
    expected_of_record,
    expected_of_tensor,
    tolerance_for,
)
from server.catalogue.golden_files import ModelFiles, read_model_files
from server.catalogue.golden_pattern import ShapeUnknown
from server.catalogue.golden_picture import compare_picture
from server.catalogue.installed import InstalledModel
from server.commands.check_question import Answered, CannotRun, NotJudged, Surroundings, ask, way_to
from server.commands.check_ways import ThroughGateway
from server.commands.model_rows import in_short
from server.core.errors import InferenceError, ModelNotReady
from server.core.tensor import Tensor
from server.vision.asked import TRIAL_PICTURE

GOLDEN, ONNX_RUNTIME = "golden.json", "ONNX Runtime"


class Verdict(StrEnum):
    """NOT_JUDGED: nothing says whether its answers are right, or it answers elsewhere only."""

    OK = "ok"
    DIFFERS = "differs"
    CANNOT_RUN = "cannot run"
    NOT_JUDGED = "not judged"

    @property
    def is_failure(self) -> bool:
        return self in (Verdict.DIFFERS, Verdict.CANNOT_RUN)


class OutputRow(msgspec.Struct, frozen=True):
    """One output against one reference. problem: empty where it is the same.

    difference, allowed, index, expected, got: of the worst element, absent where none is told.
    """

    reference: str
    output: str
    problem: str
    difference: float | None = None
    allowed: float | None = None
    index: tuple[int, ...] = ()
    expected: str = ""
    got: str = ""

    @property
    def share(self) -> float:
        """Of what is allowed; 0 where no difference is told."""
        if not self.difference:
            return 0.0
        return self.difference / self.allowed if self.allowed else math.inf


class CheckRow(msgspec.Struct, frozen=True):
    """What was found of a model.

    ran: gateway, in-process, or empty where it did not. compared_with: golden.json, golden.jpg, ONNX Runtime.
    reasons: why the verdict is not `ok`. notes: what else is worth knowing.
    """

    name: str
    repository: str
    verdict: Verdict
    ran: str
    compared_with: tuple[str, ...]
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    outputs: tuple[OutputRow, ...]
    took_s: float


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to check. sha256: the catalogue's, None where it is not the catalogue's. is_named: asked for by name."""

    model: InstalledModel
    sha256: str | None
    is_named: bool


@dataclass(slots=True)
class _Findings:
    """What comes together while a model is checked."""

    ran: str = ""
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    outputs: list[OutputRow] = field(default_factory=list)
    compared_with: list[str] = field(default_factory=list)

    def compare(self, reference: str, comparisons: Sequence[Comparison]) -> None:
        self.compared_with.append(reference)
        for item in comparisons:
            self.outputs.append(_row(reference, item))
            if item.problem:
                self.reasons.append(f"output {item.output!r} {item.problem} (by {reference})")


async def check_model(subject: Subject, around: Surroundings) -> CheckRow:
    """The row of one model; whatever is wrong with it stands in the row."""
    started = time.monotonic()
    findings = _Findings()
    verdict = await _verdict(subject, around, findings)
    return CheckRow(
        subject.model.name,
        str(subject.model.repository),
        verdict,
        findings.ran,
        tuple(findings.compared_with),
        tuple(in_short(reason) for reason in findings.reasons),
        tuple(findings.notes),
        tuple(findings.outputs),
        round(time.monotonic() - started, 3),
    )


async def _verdict(subject: Subject, around: Surroundings, findings: _Findings) -> Verdict:
    """Who asks for a model by name and gets no answer has failed; who asks for all has not."""
    try:
        await _check(subject, around, findings)
    except (CannotRun, GoldenError, InferenceError) as error:
        findings.reasons.append(str(error))
        is_elsewhere = isinstance(error, ShapeUnknown) and not subject.is_named
        return Verdict.NOT_JUDGED if is_elsewhere and len(findings.reasons) == 1 else Verdict.CANNOT_RUN
    except NotJudged as error:
        is_failure = bool(findings.reasons)
        findings.reasons.append(str(error))
        if is_failure:
            return Verdict.DIFFERS
        return Verdict.CANNOT_RUN if subject.is_named and not findings.ran else Verdict.NOT_JUDGED
    return Verdict.DIFFERS if findings.reasons else Verdict.OK


async def _check(subject: Subject, around: Surroundings, findings: _Findings) -> None:
    if subject.model.problem:
        raise CannotRun(subject.model.problem)
    files = read_model_files(subject.model)
    findings.reasons += files.misfits(subject.sha256)
    picture = files.picture()
    async with way_to(files, around, findings.notes) as way:
        answered = await ask(way, files, around.shapes, is_named=subject.is_named)
        findings.ran = way.name
        record = files.golden.picture if files.golden is not None else None
        seen = await way.see(files.folder.name, picture) if picture is not None and record is not None else ()
        if record is None and files.card is not None:  # requests to /image pass through more than the tensors do
            await way.see(files.folder.name, TRIAL_PICTURE)
    if record is not None:
        _judge_picture(record, seen, findings)
    if answered is not None:
        _judge_tensors(answered, files, findings)
    if not findings.compared_with:
        raise NotJudged(f"it answers, but nothing says whether rightly: {_way_out(files)}")


def _judge_picture(record: PictureRecord, seen: tuple[SeenClass, ...], findings: _Findings) -> None:
    findings.compared_with.append(PICTURE_FILE)
    if problem := compare_picture(record, seen):
        findings.reasons.append(f"{PICTURE_FILE}: {problem}")


def _judge_tensors(answered: Answered, files: ModelFiles, findings: _Findings) -> None:
    if answered.record is not None:
        _judge_by_record(answered.record, answered, findings)
    if files.is_onnx:
        _judge_by_reference(answered, files, findings)


def _judge_by_record(record: TensorRecord, answered: Answered, findings: _Findings) -> None:
    try:
        expected = [expected_of_record(output) for output in record.outputs]
    except ValueError as error:
        raise GoldenError(f"{GOLDEN}: {error}: remove it and record it anew with --record") from error
    findings.compare(GOLDEN, compare_outputs(expected, answered.outputs))


def _judge_by_reference(answered: Answered, files: ModelFiles, findings: _Findings) -> None:
    """Against the file itself. What only the engine can feed to the graph is noted, not held against the model."""
    try:
        reference = run_reference(files.file, files.config_json, answered.inputs)
    except ModelNotReady as error:
        findings.reasons.append(f"the engine answers, but the file on disk is not what it has loaded: {error}")
        return
    except InferenceError as error:
        is_elsewhere = findings.ran == ThroughGateway.name
        way_out = f"; if it was replaced, `penstock models load {files.folder.name}` takes the new one"
        findings.notes.append(
            f"not compared with {ONNX_RUNTIME} on the file: {error.message}{way_out if is_elsewhere else ''}"
        )
        return
    plain = _against(reference.plain, reference, answered)
    if reference.is_quantised and any(item.problem for item in plain):
        optimised = _against(reference.optimised, reference, answered)
        if not any(item.problem for item in optimised):
            first = next(f"{item.output!r} {item.problem}" for item in plain if item.problem)
            findings.notes.append(
                f"8-bit steps fall as in the graph that {ONNX_RUNTIME} optimises; in the plain one {first}"
            )
            plain = optimised
    findings.compare(ONNX_RUNTIME, plain)


def _against(outputs: Sequence[Tensor], reference: Reference, answered: Answered) -> list[Comparison]:
    """The answer against one of the reference's two, by what the two may differ."""
    tolerances = map(tolerance_for, reference.plain, reference.optimised)
    expected = [
        expected_of_tensor(answered.shaped(output), tolerance)
        for output, tolerance in zip(outputs, tolerances, strict=True)
        if output.name in answered.declared
    ]
    return compare_outputs(expected, answered.outputs)


def _way_out(files: ModelFiles) -> str:
    return f"record today's answers with `penstock models check {files.folder.name} --record`"


def _row(reference: str, item: Comparison) -> OutputRow:
    worst = item.worst
    if worst is None:
        return OutputRow(reference, item.output, item.problem)
    return OutputRow(
        reference,
        item.output,
        item.problem,
        worst.difference,
        worst.allowed,
        worst.index,
        worst.expected,
        worst.got,
    )
