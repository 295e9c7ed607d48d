"""To a gateway by its ports: KServe's gRPC, every byte sent but for what lies in memory that was shared."""

import asyncio
import time
from collections.abc import Collection
from dataclasses import replace

import grpc
from tritonclient.grpc import service_pb2

from deepstream_pipeline.infer.place import EnginePlace
from server.backends.config_pbtxt import config_from_proto
from server.backends.triton import TritonBackend
from server.backends.triton_grpc import SERVICE, error_of
from server.backends.triton_messages import decode_response, encode_request, parsed
from server.core.errors import BackendUnavailable, DeadlineExceeded, InferenceError, Overloaded, PermissionDenied
from server.core.infer import InferRequest, InferResponse
from server.core.model import UNMERGED, ModelConfig
from server.core.relay import GrpcAnswer, GrpcCall, GrpcMetadata
from server.core.slab import Slab

CONNECTIONS = 64
LOOK_UP_S, LOOK_DOWN_S = 1.0, 0.2  # between two looks whether it is ready
PATIENCE_S = 3.0  # for an answer to what is no inference
LATE_S = 0.25  # beyond the deadline, which the gateway keeps itself
API_KEY = "x-api-key"
RETRY_AFTER = "retry-after"
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


class RemoteLine:
    """See Line. Make it inside the running loop."""

    def __init__(self, place: EnginePlace, *, regions: Collection[str] = ()) -> None:
        """regions: names of memory that is shared by `share`. Raises InvalidRequest for an address that is none."""
        self._place = place
        self._regions = regions
        self._metadata: GrpcMetadata = ((API_KEY, place.api_key),) if place.api_key else ()
        self._backend = TritonBackend(
            http_url=place.http_url, grpc_address=place.grpc_address, max_connections=CONNECTIONS
        )
        self._is_up = False
        self._reason = f"the gateway at {place.grpc_address} has not answered yet"
        self._first_up = asyncio.Event()
        self._wake = asyncio.Event()

    @property
    def is_up(self) -> bool:
        return self._is_up

    @property
    def reason(self) -> str:
        return self._reason

    @property
    def slab(self) -> Slab | None:
        return None

    async def run(self) -> None:
        while True:
            self._wake.clear()
            await self._look()
            try:
                async with asyncio.timeout(LOOK_UP_S if self._is_up else LOOK_DOWN_S):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def until_up(self) -> None:
        await self._first_up.wait()

    async def config(self, model_name: str, version: str) -> ModelConfig:
        question = service_pb2.ModelConfigRequest(name=model_name, version=version)
        message = await self._ask("ModelConfig", question.SerializeToString())
        config = config_from_proto(parsed(service_pb2.ModelConfigResponse, message).config)
        return replace(config, unmerged=config.parameters.get(UNMERGED, ""))

    async def infer(self, request: InferRequest) -> InferResponse:
        """See Line. The gateway is told the deadline, and refuses what cannot meet it."""
        if not self._is_up:
            raise BackendUnavailable(self._reason)
        started = time.monotonic()
        deadline = request.deadline
        if deadline is not None:
            if deadline <= started:
                raise DeadlineExceeded("the deadline had passed before the rows could be sent; allow more time")
            request = replace(request, parameters={"timeout": max(int((deadline - started) * 1e6), 1)})
        call = GrpcCall(f"{SERVICE}ModelInfer", encode_request(request, self._regions), self._metadata)
        try:
            answer = await self._backend.grpc(call, deadline=None if deadline is None else deadline + LATE_S)
        except BackendUnavailable:
            self._wake.set()
            raise
        return decode_response(self._message(answer), request, time.monotonic() - started)

    async def share(self, name: str, handle: bytes, device_index: int, size_bytes: int) -> None:
        """The engine opens memory of that card by its handle (CUDA IPC), and knows it by that name."""
        message = service_pb2.CudaSharedMemoryRegisterRequest(
            name=name, raw_handle=handle, device_id=device_index, byte_size=size_bytes
        )
        await self._ask("CudaSharedMemoryRegister", message.SerializeToString())

    async def unshare(self, name: str) -> None:
        """It has let go of it when this returns."""
        message = service_pb2.CudaSharedMemoryUnregisterRequest(name=name)
        await self._ask("CudaSharedMemoryUnregister", message.SerializeToString())

    async def aclose(self) -> None:
        await self._backend.aclose()

    async def _look(self) -> None:
        try:
            message = await self._ask("ServerReady", b"")
            is_ready = bool(parsed(service_pb2.ServerReadyResponse, message).ready)
        except InferenceError as error:
            self._is_up, self._reason = False, error.message
            return
        self._is_up = is_ready
        self._reason = "" if is_ready else f"the gateway at {self._place.grpc_address} is not ready"
        if is_ready:
            self._first_up.set()

    async def _ask(self, method: str, message: bytes) -> bytes:
        call = GrpcCall(SERVICE + method, message, self._metadata)
        return self._message(await self._backend.grpc(call, deadline=time.monotonic() + PATIENCE_S))

    def _message(self, answer: GrpcAnswer) -> bytes:
        """Raises what the gateway's status stands for: one that comes with retry-after is its own refusal."""
        if answer.code == 0:
            return answer.message
        code = _CODES.get(answer.code, grpc.StatusCode.UNKNOWN)
        if code in _REFUSED:
            raise PermissionDenied(f"the gateway at {self._place.grpc_address} does not let us in: {answer.details}")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise DeadlineExceeded(answer.details)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED or any(key == RETRY_AFTER for key, _ in answer.trailing_metadata):
            raise Overloaded(answer.details)
        raise error_of(code, answer.details)
