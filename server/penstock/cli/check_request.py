"""The inference of a model check: through the running gateway or in this process, with known inputs."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from threading import Thread
from typing import TypeVar

import numpy as np
import onnxruntime as ort

from penstock.cli.gateway_client import GatewayClient
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.gateway.batching.merging import merge_rows
from penstock.models.check.compare import classes_in
from penstock.models.check.golden import (
    GoldenError,
    InputPattern,
    SeenClass,
    Shapes,
    ShapeUnknown,
    TensorRecord,
    generate_input,
    pattern_for,
    pixel_range,
)
from penstock.models.check.model_files import ModelFiles
from penstock.protocol.engine import ModelMetadata, ModelState
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.image_answer import ImageResult
from penstock.protocol.inference import InferRequest, Tensor
from penstock.vision.card import card_from_config
from penstock.vision.decode import decode
from penstock.vision.image_tasks import input_tensors
from penstock.vision.preprocess import least_decoded_size, prepare
from penstock.vision.results import parse

CHECK_TIMEOUT_S = 120.0
T = TypeVar("T")


class GatewayCheckEngine:
    """The running gateway: REST, decoders, engine, parser. Loads and unloads nothing. Calls raise InferenceError."""

    name = "gateway"

    def __init__(self, gateway: GatewayClient) -> None:
        self._gateway = gateway

    async def engine_name(self) -> str:
        """The engine behind it, with its version."""
        engine = await _in_thread(self._gateway.engine)
        return f"the gateway, {engine.name} {engine.version}"

    async def model_metadata(self, model_name: str) -> ModelMetadata:
        return await _in_thread(lambda: self._gateway.model_metadata(model_name))

    async def infer(self, request: InferRequest) -> tuple[Tensor, ...]:
        return await _in_thread(lambda: self._gateway.infer(request, CHECK_TIMEOUT_S))

    async def see(self, model_name: str, picture: bytes) -> tuple[SeenClass, ...]:
        """The classes that the model finds in an encoded picture, by descending score."""
        answer = await _in_thread(lambda: self._gateway.infer_image(model_name, picture, "image/jpeg"))
        return _classes_of_result(answer.results[0])


async def _in_thread(call: Callable[[], T]) -> T:
    """Runs in a daemon thread, so that Ctrl-C ends a check at once."""
    answer: Future[T] = Future()

    def run() -> None:
        answer.set_running_or_notify_cancel()
        try:
            answer.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            answer.set_exception(error)

    Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(answer)


class EmbeddedCheckEngine:
    """The embedded engine, with the gateway's decoding, preprocessing and parsing."""

    name = "in-process"

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    async def engine_name(self) -> str:
        """Its name and version."""
        return f"the embedded engine, ONNX Runtime {ort.__version__}"

    async def model_metadata(self, model_name: str) -> ModelMetadata:
        return await self._engine.model_metadata(model_name)

    async def infer(self, request: InferRequest) -> tuple[Tensor, ...]:
        return (await self._engine.infer(request)).outputs

    async def see(self, model_name: str, picture: bytes) -> tuple[SeenClass, ...]:
        """The classes that the model finds in an encoded picture, by descending score."""
        config = await self._engine.model_config(model_name)
        card = card_from_config(config)
        if card is None:
            raise InvalidRequest(f"model {model_name!r} does not say how it sees images")
        spec = card.prepare_spec
        array, geometry = prepare(decode(picture, spec.color, at_least=least_decoded_size(spec)), spec)
        (call,) = merge_rows([array], declared_shape=card.input_shape, max_batch_size=config.max_batch_size)
        inputs = input_tensors(card, np.ascontiguousarray(call.array), [geometry], has_batch_axis=call.has_batch_axis)
        response = await self._engine.infer(InferRequest(model_name, inputs))
        return classes_in(parse(card, response, 0 if call.has_batch_axis else None, geometry))


CheckEngine = GatewayCheckEngine | EmbeddedCheckEngine


def _classes_of_result(result: ImageResult) -> tuple[SeenClass, ...]:
    boxes = tuple(
        SeenClass(item.class_id, item.score, (left, top, right, bottom))
        for item in result.detections or ()
        for left, top, right, bottom in (item.xyxy,)
    )
    return boxes or tuple(SeenClass(item.class_id, item.score) for item in result.classes or ())


_UNLOADED = "unloaded"  # Triton's reason for a model that was unloaded by request


class NotCheckable(Exception):
    """The check has no verdict. str() is the reason."""


class ModelCannotRun(Exception):
    """The model should answer and does not. str() is the reason."""


@dataclass(frozen=True, slots=True)
class CheckContext:
    """index: the gateway's models; None if no gateway answers. shapes: of inputs whose dimensions vary.

    is_chosen: whether a person named this gateway, so that nothing else is checked in its place.
    """

    gateway: GatewayClient
    index: Sequence[ModelState] | None
    shapes: Shapes
    is_chosen: bool = False


@dataclass(frozen=True, slots=True)
class CheckResponse:
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


@asynccontextmanager
async def engine_for(files: ModelFiles, around: CheckContext, notes: list[str]) -> AsyncIterator[CheckEngine]:
    """The gateway if it serves the model; else an engine in this process, unless the user named a gateway.

    Raises ModelNotReady if that cannot load the model, ModelCannotRun if the gateway failed to load it, NotCheckable if
    no engine here can run it.
    """
    name, url = files.folder.name, around.gateway.url
    if files.config.is_decoupled or files.config.has_sequence_batching:
        raise NotCheckable("it keeps state or answers in a stream: one request and its answer say nothing of it")
    rows = [row for row in around.index or () if row.name == name]
    if any(row.state == "READY" for row in rows):
        yield GatewayCheckEngine(around.gateway)
        return
    failure = next((row.reason for row in rows if row.reason and row.reason != _UNLOADED), "")
    if failure and not (files.why_not_servable and files.why_not_servable in failure):
        raise ModelCannotRun(f"{url} cannot serve it: {failure}")
    is_answered = around.index is not None
    if files.why_not_servable:
        where = f"it is not loaded at {url}" if is_answered else f"no gateway is asked at {url}"
        raise NotCheckable(f"{where}, and {files.why_not_servable}")
    if around.is_chosen:
        raise NotCheckable(f"it is not loaded at {url}: load it there, or leave out --url to check it in this process")
    if is_answered:
        notes.append(f"it is not loaded at {url}: checked in this process")
    engine = EmbeddedEngine((files.folder.parent,))
    try:
        await engine.load(name)
        yield EmbeddedCheckEngine(engine)
    finally:
        await engine.aclose()


async def run_check_inference(
    engine: CheckEngine, files: ModelFiles, shapes: Shapes, *, is_named: bool
) -> CheckResponse | None:
    """The response to golden.json's inputs or to generated ones; None if only golden.json's picture can be checked.

    is_named: the user named this model, so one of the shapes must be of one of its inputs. Raises InferenceError or
    InferenceError, and ShapeUnknown or GoldenError for inputs that cannot be generated.
    """
    metadata = await engine.model_metadata(files.folder.name)
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
    inputs = tuple(generate_input(pattern) for pattern in patterns)
    outputs = await infer_outputs(engine, files, inputs)
    return CheckResponse(inputs, outputs, {spec.name: spec.shape for spec in metadata.outputs}, record)


async def infer_outputs(engine: CheckEngine, files: ModelFiles, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The outputs of the version whose file was read."""
    deadline = time.monotonic() + CHECK_TIMEOUT_S
    request = InferRequest(files.folder.name, inputs, model_version=files.version, deadline=deadline)
    return await engine.infer(request)


def patterns_for(metadata: ModelMetadata, files: ModelFiles, shapes: Shapes) -> tuple[InputPattern, ...]:
    """A pattern an input; an image's goes over the numbers that its pixels become. Raises ShapeUnknown, GoldenError."""
    if files.card is not None and files.card.is_relayed:
        how = "have what it sees in golden.jpg recorded (--record)"
        if files.picture() is None:
            how = f"lay one beside config.pbtxt as golden.jpg, then {how}"
        raise ShapeUnknown(f"input {files.card.input_name!r} takes encoded pictures, and none are made here: {how}")
    value_range = pixel_range(files.card.prepare_spec) if files.card is not None else None
    return tuple(pattern_for(spec, shapes, value_range) for spec in metadata.inputs)
