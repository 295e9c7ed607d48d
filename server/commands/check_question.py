"""The question that a check asks a model: by which way, with which inputs."""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

from server.catalogue.golden import GoldenError, InputPattern, TensorRecord
from server.catalogue.golden_files import ModelFiles
from server.catalogue.golden_pattern import Shapes, ShapeUnknown, made_input, pattern_for, pixel_range
from server.commands.check_ways import Way, in_process, through_gateway
from server.commands.gateway import Gateway, IndexRow
from server.core.infer import InferRequest
from server.core.model import ModelMetadata
from server.core.tensor import Tensor

INFER_PATIENCE_S = 120.0
_UNLOADED = "unloaded"  # Triton's reason for a model that somebody took out of service


class NotJudged(Exception):
    """The check ends without a judgement, for this reason."""


class CannotRun(Exception):
    """The model does not answer where it should, for this reason."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """index: what the gateway has; None where none can be asked. shapes: given for inputs whose dimensions vary.

    is_chosen: whether a person named this gateway, so that nothing else is checked in its place.
    """

    gateway: Gateway
    index: Sequence[IndexRow] | None
    shapes: Shapes
    is_chosen: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """A model's answer to made inputs.

    declared: the shapes of the outputs that it promises. record: golden.json's, where the inputs are golden.json's.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    declared: Mapping[str, tuple[int, ...]]
    record: TensorRecord | None

    def shaped(self, reference: Tensor) -> Tensor:
        """The graph's own output; a scalar in the shape that the engine's config gives it."""
        came = next((tensor for tensor in self.outputs if tensor.name == reference.name), None)
        if came is None or came.element_count != reference.element_count or reference.shape:
            return reference
        return replace(reference, shape=came.shape)


def way_to(files: ModelFiles, around: Surroundings, notes: list[str]) -> AbstractAsyncContextManager[Way]:
    """The gateway where it serves the model; this process where it does not and can run it, and nobody named a gateway.

    Raises CannotRun where the gateway tried and failed, NotJudged where nothing here can run it.
    """
    name, url = files.folder.name, around.gateway.url
    if files.config.is_decoupled or files.config.has_sequence_batching:
        raise NotJudged("it keeps state or answers in a stream: one request and its answer say nothing of it")
    rows = [row for row in around.index or () if row.name == name]
    if any(row.state == "READY" for row in rows):
        return through_gateway(around.gateway)
    failure = next((row.reason for row in rows if row.reason and row.reason != _UNLOADED), "")
    if failure and not (files.obstacle and files.obstacle in failure):
        raise CannotRun(f"{url} cannot serve it: {failure}")
    is_answered = around.index is not None
    if files.obstacle:
        where = f"it is not loaded at {url}" if is_answered else f"no gateway is asked at {url}"
        raise NotJudged(f"{where}, and {files.obstacle}")
    if around.is_chosen:
        raise NotJudged(f"it is not loaded at {url}: load it there, or leave out --url to check it in this process")
    if is_answered:
        notes.append(f"it is not loaded at {url}: checked in this process")
    return in_process(files.folder.parent, name)


async def ask(way: Way, files: ModelFiles, shapes: Shapes, *, is_named: bool) -> Answered | None:
    """The answer to golden.json's inputs, or to inputs made for the model.

    is_named: the shapes are meant for this model, and one of them must be of an input that it has. None where
    golden.json has a picture, and no tensors that could be made or judged. Raises of the InferenceError tree, and
    ShapeUnknown and GoldenError for inputs that cannot be made.
    """
    metadata = await way.model_metadata(files.folder.name)
    inputs_there = {spec.name for spec in metadata.inputs}
    if is_named and shapes and not shapes.keys() & inputs_there:
        raise GoldenError(f"--shape names {', '.join(shapes)}; its inputs are {', '.join(sorted(inputs_there))}")
    record = files.golden.tensors if files.golden is not None else None
    if record is not None and shapes.keys() & {pattern.name for pattern in record.inputs}:
        record = None
    has_picture = files.golden is not None and files.golden.picture is not None
    if record is None and has_picture and not files.is_onnx and not shapes:
        return None
    try:
        patterns = record.inputs if record is not None else patterns_for(metadata, files, shapes)
    except ShapeUnknown:
        if has_picture:
            return None
        raise
    inputs = tuple(made_input(pattern) for pattern in patterns)
    outputs = await answer_to(way, files, inputs)
    return Answered(inputs, outputs, {spec.name: spec.shape for spec in metadata.outputs}, record)


async def answer_to(way: Way, files: ModelFiles, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The outputs of the version whose file was read."""
    deadline = time.monotonic() + INFER_PATIENCE_S
    request = InferRequest(files.folder.name, inputs, model_version=files.version, deadline=deadline)
    return (await way.infer(request)).outputs


def patterns_for(metadata: ModelMetadata, files: ModelFiles, shapes: Shapes) -> tuple[InputPattern, ...]:
    """A pattern an input; an image's goes over the numbers that its pixels become. Raises ShapeUnknown, GoldenError."""
    if files.card is not None and files.card.is_relayed:
        how = "have what it sees in golden.jpg recorded (--record)"
        if files.picture() is None:
            how = f"lay one beside config.pbtxt as golden.jpg, then {how}"
        raise ShapeUnknown(f"input {files.card.input_name!r} takes encoded pictures, and none are made here: {how}")
    value_range = pixel_range(files.card.prepare_spec) if files.card is not None else None
    return tuple(pattern_for(spec, shapes, value_range) for spec in metadata.inputs)
