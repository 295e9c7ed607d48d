"""The response of POST /v1/inspect, from the JSON of `penstock models inspect`."""

from collections.abc import Iterable

import msgspec

from penstock.gateway.model_command import MAX_TEXT, CommandResult, ModelCommand
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.model_addition import InspectedModel, InspectedTensor, ModelQuestion

MAX_LABELS, MAX_TENSORS, MAX_SENTENCES = 2000, 64, 100
_MAX_SENTENCE, _MAX_NAME = 1000, 200


class _Facts(msgspec.Struct):
    size_bytes: int
    sha256: str
    producer: str
    opset: int
    file_format: str
    is_quantised: bool
    node_count: int
    inputs: tuple[InspectedTensor, ...]
    outputs: tuple[InspectedTensor, ...]


class _Question(msgspec.Struct):
    ambiguous: str
    flag: str
    choices: tuple[str, ...] = ()
    is_blocking: bool = True


class _Recognition(msgspec.Struct):
    layout: str
    parameters: dict[str, str]
    labels: tuple[str, ...]
    input_size: tuple[int, int] | None  # (height, width)
    evidence: tuple[str, ...]
    assumptions: tuple[str, ...]
    questions: tuple[_Question, ...]
    warnings: tuple[str, ...]


class _Trial(msgspec.Struct):
    pictures: tuple[str, ...]
    evidence: tuple[str, ...]
    warnings: tuple[str, ...]
    failure: str
    results: tuple[str, ...]


class _Inspection(msgspec.Struct):
    facts: _Facts
    recognition: _Recognition
    trial: _Trial
    verdict: str
    reason: str


class _Problem(msgspec.Struct):
    problem: str


def inspection_of(command: ModelCommand, result: CommandResult) -> InspectedModel:
    """The command's findings, bounded, without a token. Raises InvalidRequest if the file could not be read."""
    try:
        found = msgspec.json.decode(result.reply, type=_Inspection)
    except msgspec.DecodeError:
        try:
            text = msgspec.json.decode(result.reply, type=_Problem).problem
        except msgspec.DecodeError:
            text = command.failure(result)
        raise InvalidRequest(f"the file cannot be used: {command.for_client(text)}"[:MAX_TEXT]) from None
    facts, recognition, trial = found.facts, found.recognition, found.trial
    height, width = recognition.input_size or (None, None)

    def sentences(texts: Iterable[str]) -> tuple[str, ...]:
        return tuple(command.for_client(text)[:_MAX_SENTENCE] for text in texts)[:MAX_SENTENCES]

    return InspectedModel(
        upload="",
        expires_s=0.0,
        verdict=found.verdict,
        reason=command.for_client(found.reason)[:_MAX_SENTENCE],
        size_bytes=facts.size_bytes,
        sha256=facts.sha256,
        file_format=facts.file_format,
        producer=facts.producer[:_MAX_NAME],
        opset=facts.opset,
        node_count=facts.node_count,
        is_quantised=facts.is_quantised,
        inputs=_tensors(facts.inputs),
        outputs=_tensors(facts.outputs),
        layout=recognition.layout,
        width=width,
        height=height,
        label_count=len(recognition.labels),
        labels=tuple(label[:_MAX_NAME] for label in recognition.labels[:MAX_LABELS]),
        card={key: text[:_MAX_SENTENCE] for key, text in recognition.parameters.items() if key != "labels"},
        evidence=sentences((*recognition.evidence, *trial.evidence)),
        assumptions=sentences(recognition.assumptions),
        questions=tuple(
            _question(each, *sentences([each.ambiguous])) for each in recognition.questions[:MAX_SENTENCES]
        ),
        warnings=sentences((*recognition.warnings, *trial.warnings)),
        trial=sentences(f"{name}: {seen}" for name, seen in zip(trial.pictures, trial.results, strict=False)),
        trial_failure=command.for_client(trial.failure)[:_MAX_SENTENCE],
    )


def _question(question: _Question, ambiguous: str) -> ModelQuestion:
    parameter = question.flag.removeprefix("--").replace("-", "_")
    return ModelQuestion(parameter, question.choices[:MAX_SENTENCES], ambiguous, question.is_blocking)


def _tensors(tensors: tuple[InspectedTensor, ...]) -> tuple[InspectedTensor, ...]:
    return tuple(msgspec.structs.replace(each, name=each.name[:_MAX_NAME]) for each in tensors[:MAX_TENSORS])
