"""The ways by which a check reaches an engine: through the running gateway, or in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import numpy as np

from server.backends.embedded.engine import EmbeddedEngine
from server.backends.rest_tensors import RestTensors
from server.batching.merge import merge
from server.catalogue.golden import SeenClass
from server.catalogue.golden_picture import seen_in
from server.commands.gateway import Gateway, GatewayError, ImageResult
from server.core.errors import BackendFailed, InvalidRequest
from server.core.infer import InferRequest, InferResponse
from server.core.model import ModelMetadata
from server.core.tensor import tensor_from_numpy
from server.vision.card import card_from_config
from server.vision.decode import decode
from server.vision.postprocess import parse
from server.vision.preprocess import least_decoded_size, prepare


class Way(Protocol):
    """An engine that has the model loaded. Raises of the InferenceError tree only."""

    @property
    def name(self) -> str:
        """What a person calls it."""
        ...

    async def engine_name(self) -> str:
        """What stands behind it, with its version."""
        ...

    async def model_metadata(self, model_name: str) -> ModelMetadata: ...

    async def infer(self, request: InferRequest) -> InferResponse: ...

    async def see(self, model_name: str, picture: bytes) -> tuple[SeenClass, ...]:
        """What the model sees in an encoded picture, strongest first."""
        ...


class ThroughGateway:
    """Everything that a client's request passes: REST, decoders, engine, parser."""

    name = "gateway"

    def __init__(self, gateway: Gateway, tensors: RestTensors) -> None:
        self._gateway = gateway
        self._tensors = tensors

    async def engine_name(self) -> str:
        return f"the gateway, {await self._tensors.server_name()}"

    async def model_metadata(self, model_name: str) -> ModelMetadata:
        return await self._tensors.model_metadata(model_name)

    async def infer(self, request: InferRequest) -> InferResponse:
        return await self._tensors.infer(request)

    async def see(self, model_name: str, picture: bytes) -> tuple[SeenClass, ...]:
        try:
            answer = await asyncio.to_thread(self._gateway.infer_image, model_name, picture, "image/jpeg")
        except GatewayError as error:
            raise BackendFailed(str(error)) from error
        return _seen(answer.results[0])


class InProcess:
    """The embedded engine, and decoding, preparing and parsing as the gateway does them."""

    name = "in-process"

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    async def engine_name(self) -> str:
        return f"the embedded engine, ONNX Runtime {version('onnxruntime')}"

    async def model_metadata(self, model_name: str) -> ModelMetadata:
        return await self._engine.model_metadata(model_name)

    async def infer(self, request: InferRequest) -> InferResponse:
        return await self._engine.infer(request)

    async def see(self, model_name: str, picture: bytes) -> tuple[SeenClass, ...]:
        config = await self._engine.model_config(model_name)
        card = card_from_config(config)
        if card is None:
            raise InvalidRequest(f"model {model_name!r} does not say how it sees images")
        spec = card.prepare_spec
        array, geometry = prepare(decode(picture, spec.color, at_least=least_decoded_size(spec)), spec)
        (call,) = merge([array], declared_shape=config.inputs[0].shape, max_batch_size=config.max_batch_size)
        tensor = tensor_from_numpy(card.input_name, np.ascontiguousarray(call.array))
        response = await self._engine.infer(InferRequest(model_name, (tensor,)))
        return seen_in(parse(card, response, 0 if call.has_batch_axis else None, geometry))


@asynccontextmanager
async def through_gateway(gateway: Gateway) -> AsyncIterator[Way]:
    """The gateway that runs there; its models are as they are."""
    identity = tuple((name.encode(), value.encode()) for name, value in gateway.identity.items())
    tensors = RestTensors(gateway.url, headers=identity)
    try:
        yield ThroughGateway(gateway, tensors)
    finally:
        await tensors.aclose()


@asynccontextmanager
async def in_process(repository: Path, model_name: str) -> AsyncIterator[Way]:
    """An engine of its own with this one model, which is gone afterwards. Raises ModelNotReady where it cannot load."""
    engine = EmbeddedEngine((repository,))
    try:
        await engine.load(model_name)
        yield InProcess(engine)
    finally:
        await engine.aclose()


def _seen(result: ImageResult) -> tuple[SeenClass, ...]:
    boxes = tuple(SeenClass(item.class_id, item.score, item.xyxy) for item in result.detections or ())
    return boxes or tuple(SeenClass(item.class_id, item.score) for item in result.classes or ())
