"""A gateway whose engine reads memory of the card: the real gRPC server and registry of regions, over a fake engine.

The card is the stand-in's (tests/deepstream_pipeline/gpu/fake_driver), whose memory is this process's: the engine finds
the address in the handle.
"""

import asyncio
import ctypes
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from tritonclient.grpc import service_pb2

from penstock.gateway.grpc.server import GrpcEndpoint, GrpcLimits, GrpcServer, serve
from penstock.gateway.shared_memory.regions import EngineTraits, SharedMemory
from penstock.gateway.shared_memory.registry import RegistryLimits
from penstock.protocol.call import GrpcAnswer, GrpcCall, InferHead
from penstock.protocol.errors import NotSupported
from penstock.protocol.grpc_inference import encode_response
from penstock.protocol.identity import ANONYMOUS, Identity, Verb
from penstock.protocol.inference import Datatype, InferRequest, Tensor
from penstock.testing import FakeEngine
from penstock_video.infer.options import EngineAddress
from tests.deepstream_pipeline.infer.fake_core import CLASSIFIER, CONFIGS, FakeCore, classifier
from tests.grpc.harness import FakePlane, FakeRecorder

BATCHED = replace(classifier("batched", 4), parameters=CLASSIFIER | {"batch_owner": "gateway"})


def answers(request: InferRequest) -> Sequence[Tensor]:
    """As the fake core's models answer."""
    return FakeCore._outputs(request, request.inputs[0].to_numpy())


class CardEngine(FakeEngine):
    """regions: name -> (address, bytes). asked: calls about regions. inferred: region (empty for none) and rows.

    skew_bytes: how far beside the right place it reads.
    """

    def __init__(self) -> None:
        super().__init__([*CONFIGS, BATCHED], answer=answers)
        self.regions: dict[str, tuple[int, int]] = {}
        self.asked: list[str] = []
        self.inferred: list[tuple[str, int]] = []
        self.messages: list[bytes] = []
        self.skew_bytes = 0

    async def send(self, call: GrpcCall, *, deadline: float | None) -> GrpcAnswer:
        method = call.method.rpartition("/")[2]
        if method == "CudaSharedMemoryRegister":
            wish = service_pb2.CudaSharedMemoryRegisterRequest.FromString(call.message)
            self.asked.append(f"register {wish.device_id}")
            self.regions[wish.name] = (int.from_bytes(wish.raw_handle[:8], "little"), wish.byte_size)
            return GrpcAnswer(0)
        if method == "CudaSharedMemoryUnregister":
            name = service_pb2.CudaSharedMemoryUnregisterRequest.FromString(call.message).name
            if name:
                self.asked.append("unregister")
                del self.regions[name]
            return GrpcAnswer(0)
        if method == "SystemSharedMemoryStatus":
            return GrpcAnswer(0)
        return await super().send(call, deadline=deadline)

    async def _serve(self, method: str, message: bytes, deadline: float | None) -> bytes:
        if method != "ModelInfer":
            return await super()._serve(method, message, deadline)
        asked = service_pb2.ModelInferRequest.FromString(message)
        slot = asked.inputs[0]
        region = slot.parameters["shared_memory_region"].string_param if slot.parameters else ""
        self.inferred.append((region, slot.shape[0]))
        self.messages.append(message)
        sent = iter(asked.raw_input_contents)
        tensors = tuple(
            Tensor(one.name, Datatype(one.datatype), tuple(one.shape), memoryview(data))
            for one in asked.inputs
            for data in (self._read(one) if one.parameters else next(sent),)
        )
        return encode_response(await self.infer(InferRequest(asked.model_name, tensors, deadline=deadline)))

    def _read(self, slot: "service_pb2.ModelInferRequest.InferInputTensor") -> bytes:
        address, size_bytes = self.regions[slot.parameters["shared_memory_region"].string_param]
        offset = slot.parameters["shared_memory_offset"].int64_param
        wanted = slot.parameters["shared_memory_byte_size"].int64_param
        assert offset + wanted <= size_bytes
        return ctypes.string_at(address + offset + self.skew_bytes, wanted)


class CardPlane(FakePlane):
    """With regions, as the gateway keeps them. refusal: why none are."""

    def __init__(self, engine: CardEngine) -> None:
        super().__init__(engine)
        self.generation = 1
        self.refusal: str | None = None
        self.memory = SharedMemory(
            engine,
            EngineTraits(is_ours=True, takes_offsets=False),
            limits=RegistryLimits(),
            open_segment=lambda _: (_ for _ in ()).throw(OSError()),
            generation=lambda: self.generation,
            find_gone=lambda _: set(),
        )

    @asynccontextmanager
    async def shared_memory(  # type: ignore[override]
        self, verb: Verb, caller: Identity, region: str = ""
    ) -> AsyncIterator[SharedMemory]:
        if self.refusal is not None:
            raise NotSupported(self.refusal)
        yield self.memory

    async def relay(
        self,
        verb: Verb,
        head: InferHead,
        call: GrpcCall,
        *,
        caller: Identity = ANONYMOUS,
        deadline: float | None = None,
    ) -> GrpcAnswer:
        with self.memory.held(head.regions, caller):
            return await super().relay(verb, head, call, caller=caller, deadline=deadline)


class CardGateway:
    """On a thread of its own, on a free port. `end` stops it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.run(self._open())

    async def _open(self) -> None:
        self.engine = CardEngine()
        self.plane = CardPlane(self.engine)
        self._server: GrpcServer = await serve(
            self.plane,  # type: ignore[arg-type]
            GrpcLimits(),
            GrpcEndpoint(("127.0.0.1:0",)),
            FakeRecorder(),  # type: ignore[arg-type]
        )

    @property
    def place(self) -> EngineAddress:
        return EngineAddress(None, "http://127.0.0.1:9", f"127.0.0.1:{self._server.port}")

    def restart_engine(self) -> None:
        """Another engine came up, which knows no regions; the gateway stays."""
        self.engine.regions.clear()
        self.plane.generation += 1

    def run(self, work: "Coroutine[object, object, object]") -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def end(self) -> None:
        self.run(self._server.stop(0))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()
