"""The gRPC front on a real port, over a plane that hands everything to a fake engine."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from penstock.engines.model_health import EngineView, KnownModel
from penstock.gateway.auth.authenticator import Authenticator
from penstock.gateway.engine_slots import EngineSlots
from penstock.gateway.grpc.server import GrpcEndpoint, GrpcLimits, GrpcServer, serve
from penstock.gateway.in_flight import InFlightLimiter, InFlightLimits
from penstock.gateway.readiness import Readiness, as_served
from penstock.gateway.shared_memory.regions import NoSharedMemory
from penstock.gateway.tracing import Tracer
from penstock.protocol.call import GrpcAnswer, GrpcCall, GrpcMetadata, InferHead
from penstock.protocol.engine import GrpcStream, ModelConfig, TensorSpec
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.identity import ANONYMOUS, Identity, Verb
from penstock.protocol.inference import Datatype, InferRequest, Tensor, tensor_from_numpy
from penstock.protocol.request_checks import BLOCKED_EXTENSIONS, EncodedCall, ImageInput
from penstock.testing import FakeEngine

SERVICE = "/inference.GRPCInferenceService/"
MODELS = (
    ModelConfig(
        "double", "python", 8, (TensorSpec("x", Datatype.FP32, (-1,)),), (TensorSpec("y", Datatype.FP32, (-1,)),)
    ),
    ModelConfig(
        "texts", "python", 0, (TensorSpec("x", Datatype.BYTES, (1,)),), (TensorSpec("y", Datatype.BYTES, (1,)),)
    ),
)


def double(request: InferRequest) -> Sequence[Tensor]:
    """y = 2x."""
    return [tensor_from_numpy("y", np.asarray(request.inputs[0].to_numpy() * 2))]


def infer_request(model_name: str = "double", size: int = 1) -> service_pb2.ModelInferRequest:
    """One row of zeros, `size` of them."""
    request = service_pb2.ModelInferRequest(model_name=model_name)
    request.inputs.add(name="x", datatype="FP32", shape=[1, size])
    request.raw_input_contents.append(bytes(4 * size))
    return request


def infer_message(model_name: str = "double", size: int = 1) -> bytes:
    """The same, serialised."""
    message: bytes = infer_request(model_name, size).SerializeToString()
    return message


class FakePlane:
    """Hands calls to the engine and records them. error: raised instead. answer: given instead.

    Of streams: scripts: the engine's sides instead of the engine's own, in turn. refused: errors by the model that is
    asked for.
    """

    blocked_extensions = BLOCKED_EXTENSIONS
    tracer: Tracer | None = None

    @asynccontextmanager
    async def shared_memory(self, verb: Verb, caller: Identity, region: str = "") -> AsyncIterator[NoSharedMemory]:
        yield NoSharedMemory()

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.slots = EngineSlots(engine, cast(EngineView, SimpleNamespace(models={})))
        self.relayed: list[tuple[Verb, InferHead, GrpcCall, float | None]] = []
        self.callers: list[Identity] = []
        self.error: Exception | None = None
        self.answer: GrpcAnswer | None = None
        self.unready_reason = ""
        self.image_inputs: dict[str, ImageInput] = {}
        self.more_inputs: tuple[Tensor, ...] = ()
        self.scripts: list[GrpcStream] = []
        self.refused: dict[str, Exception] = {}
        self.unserved: dict[str, str] = {}
        self.unmerged: dict[str, str] = {}
        self.answered: list[str] = []
        self.left_of: list[type[BaseException] | None] = []
        self.admission = InFlightLimiter(InFlightLimits())
        self.entered = asyncio.Event()

    def readiness(self) -> Readiness:
        return Readiness(not self.unready_reason, self.unready_reason)

    def model_label(self, model_name: str) -> str:
        return model_name if model_name in {config.name for config in MODELS} else "unknown"

    async def relay(
        self,
        verb: Verb,
        head: InferHead,
        call: GrpcCall | EncodedCall[GrpcAnswer],
        *,
        caller: Identity = ANONYMOUS,
        deadline: float | None = None,
    ) -> GrpcAnswer:
        if head.classification_outputs:
            await self.refuse_classification_of_bytes(head)
        if isinstance(call, EncodedCall):
            call = await self.with_tensors(call, deadline, caller)
        self.relayed.append((verb, head, call, deadline))
        self.callers.append(caller)
        self.entered.set()
        if self.error is not None:
            raise self.error
        answer = self.answer or await self.engine.send(call, deadline=deadline)
        models = {name: KnownModel(name, False, reason, is_refused=True) for name, reason in self.unserved.items()}
        return as_served(verb, head.model_name, call, answer, models, self.unmerged.get(head.model_name, ""))

    def image_input(self, model_name: str) -> ImageInput | None:
        return self.image_inputs.get(model_name)

    @asynccontextmanager
    async def open_stream(
        self, method: str, metadata: GrpcMetadata, *, caller: Identity = ANONYMOUS, deadline: float | None = None
    ) -> AsyncIterator[GrpcStream]:
        if self.error is not None:
            raise self.error
        stream = (
            self.scripts.pop(0) if self.scripts else await self.engine.open_stream(method, metadata, deadline=deadline)
        )
        try:
            yield stream
        finally:
            stream.cancel()

    @contextmanager
    def stream_slot(self, head: InferHead, caller: Identity, size_bytes: int) -> Iterator[None]:
        if head.model_name in self.refused:
            raise self.refused[head.model_name]
        self.admission.enter(size_bytes)
        self.entered.set()
        try:
            yield
            self.left_of.append(None)
        except BaseException as error:
            self.left_of.append(type(error))
            raise
        finally:
            self.admission.leave(size_bytes)

    def is_apart(self, model_name: str) -> bool:
        return False

    def is_decoupled(self, model_name: str) -> bool | None:
        return model_name == "repeat" if model_name in ("repeat", "double", "texts") else None

    async def find_decoupled(self, model_name: str) -> bool:
        return False

    def stream_answered(self, model_name: str, seconds: float) -> None:
        assert seconds >= 0
        self.answered.append(model_name)

    async def with_tensors(self, asked: EncodedCall[GrpcAnswer], deadline: float | None, caller: Identity) -> GrpcCall:
        """The images become one row of their sizes in bytes, and `more_inputs` follow."""
        sizes = np.array([[len(image) for image in asked.images]], np.float32)
        return asked.with_tensors((tensor_from_numpy("x", sizes), *self.more_inputs))

    async def refuse_classification_of_bytes(self, head: InferHead) -> None:
        config = await self.engine.model_config(head.model_name)
        for spec in config.outputs:
            if spec.name in head.classification_outputs and spec.datatype is Datatype.BYTES:
                raise InvalidRequest(f"output {spec.name!r} is BYTES")


class FakeRecorder:
    """Stores what the server counts."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str, str]] = []
        self.reasons: list[str] = []
        self.left: list[str] = []
        self.gone = asyncio.Event()

    def request_done(self, *, model: str, protocol: str, code: str, seconds: float) -> None:
        assert seconds >= 0
        self.done.append((model, protocol, code))

    def rejected(self, reason: str) -> None:
        self.reasons.append(reason)

    def cancelled(self, protocol: str) -> None:
        self.left.append(protocol)
        self.gone.set()


@dataclass
class Front:
    """A running front and a channel to it."""

    plane: FakePlane
    recorder: FakeRecorder
    server: GrpcServer
    channel: grpc.aio.Channel

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    @property
    def engine(self) -> FakeEngine:
        return self.plane.engine

    async def call(
        self,
        method: str,
        message: bytes = b"",
        *,
        timeout: float | None = 10.0,
        metadata: tuple[tuple[str, str | bytes], ...] = (),
        compression: grpc.Compression | None = None,
    ) -> bytes:
        """The answer's bytes. Raises AioRpcError."""
        asking = self.channel.unary_unary(SERVICE + method, None, None)
        answer: bytes = await asking(message, timeout=timeout, metadata=metadata, compression=compression)  # type: ignore[arg-type]
        return answer


@asynccontextmanager
async def serving(limits: GrpcLimits | None = None, door: Authenticator | None = None) -> AsyncIterator[Front]:
    """The front on an ephemeral port, stopped at the end."""
    plane, recorder = FakePlane(FakeEngine(MODELS, answer=double)), FakeRecorder()
    server = await serve(plane, limits or GrpcLimits(), GrpcEndpoint(("127.0.0.1:0",)), recorder, door=door)  # type: ignore[arg-type]
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options)
    try:
        yield Front(plane, recorder, server, channel)
    finally:
        await channel.close(None)
        await server.stop(0)
