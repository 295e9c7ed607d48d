"""Clients of the engine: KServe gRPC to a gateway, or the core's Unix socket and shared memory on this host; the wait
for a model, and log messages about outages."""

import asyncio
import contextlib
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import grpc
import structlog
from tritonclient.grpc import service_pb2

from penstock.engines.config_pbtxt import config_from_proto
from penstock.engines.triton.client import TritonEngine
from penstock.engines.triton.grpc_client import SERVICE, error_of
from penstock.gateway.batching.options import UNTRIED
from penstock.gateway.workers.client import CORE_SILENT, CoreClient
from penstock.gateway.workers.connection import ClientHello
from penstock.gateway.workers.core_relay import CORE_GONE
from penstock.gateway.workers.running_stacks import reachable_folder, stack_at
from penstock.gateway.workers.slab_sharing import MAX_CLIENT_CALLS, ClientSlab
from penstock.protocol.call import GrpcAnswer, GrpcCall, GrpcMetadata
from penstock.protocol.engine import UNMERGED, ModelConfig
from penstock.protocol.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    InferenceError,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    ModelRefused,
    Overloaded,
    PermissionDenied,
)
from penstock.protocol.grpc_messages import decode_response, encode_request, parsed
from penstock.protocol.inference import InferRequest, InferResponse
from penstock.protocol.shared_memory import Slab
from penstock_video.errors import InferFailed, ModelUnusable
from penstock_video.infer.calls import REFUSED, EngineClient
from penstock_video.infer.network import Network, network_from
from penstock_video.infer.options import EngineAddress

CONNECTIONS = 64
LOOK_UP_S, LOOK_DOWN_S = 1.0, 0.2  # between two readiness checks
CALL_TIMEOUT_S = 3.0  # for responses other than inferences
LATE_S = 0.25  # after the deadline, which the gateway enforces
API_KEY = "x-api-key"
RETRY_AFTER = "retry-after"
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


class GatewayClient:
    """See EngineClient. Create it inside the running loop."""

    def __init__(self, place: EngineAddress, *, regions: Collection[str] = ()) -> None:
        """regions: names of memory shared by `share`. Raises InvalidRequest for an invalid address."""
        self._place = place
        self._regions = regions
        self._metadata: GrpcMetadata = ((API_KEY, place.api_key),) if place.api_key else ()
        self._backend = TritonEngine(
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
        """See EngineClient. Sends the deadline; the gateway rejects requests that cannot meet it."""
        if not self._is_up:
            raise EngineUnavailable(self._reason)
        started = time.monotonic()
        deadline = request.deadline
        if deadline is not None:
            if deadline <= started:
                raise DeadlineExceeded("the deadline had passed before the rows could be sent; allow more time")
            request = replace(request, parameters={"timeout": max(int((deadline - started) * 1e6), 1)})
        call = GrpcCall(f"{SERVICE}ModelInfer", encode_request(request, self._regions), self._metadata)
        try:
            answer = await self._backend.send(call, deadline=None if deadline is None else deadline + LATE_S)
        except EngineUnavailable:
            self._wake.set()
            raise
        return decode_response(self._message(answer), request, time.monotonic() - started)

    async def share(self, name: str, handle: bytes, device_index: int, size_bytes: int) -> None:
        """Registers GPU memory at the engine by its CUDA IPC handle, under this name."""
        message = service_pb2.CudaSharedMemoryRegisterRequest(
            name=name, raw_handle=handle, device_id=device_index, byte_size=size_bytes
        )
        await self._ask("CudaSharedMemoryRegister", message.SerializeToString())

    async def unshare(self, name: str) -> None:
        """Unregisters it; the engine has released it when this returns."""
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
        return self._message(await self._backend.send(call, deadline=time.monotonic() + CALL_TIMEOUT_S))

    def _message(self, answer: GrpcAnswer) -> bytes:
        """Raises the error for the gateway's status; one with retry-after is a refusal."""
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


CLIENT_NAME = "video"
LOOK_S = 0.25
UP_LOOK_S = 0.02
_REASONS = {CORE_GONE: "it was stopped, or starts again", CORE_SILENT: "it does not answer"}  # operators start stacks


class LocalStackClient:
    """See EngineClient. Reconnects to a stack that was restarted at the same port, in its new run directory."""

    def __init__(self, run_dir: Path, http_url: str) -> None:
        self._run_dir = run_dir
        self._http_url = http_url
        self._slab = ClientSlab(asyncio.get_running_loop().call_later)
        self._link = self._new_link()
        self._asking: set[asyncio.Task[object]] = set()
        self._cut_for: dict[asyncio.Task[object], str] = {}

    @property
    def is_up(self) -> bool:
        return self._link.is_up

    @property
    def reason(self) -> str:
        return _REASONS.get(self._link.reason, self._link.reason)

    @property
    def slab(self) -> Slab:
        return self._slab

    async def run(self) -> None:
        while True:
            joining = asyncio.create_task(self._link.run())
            try:
                self._run_dir = await self._until_moved()
            finally:
                joining.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await joining
            self._link = self._new_link()

    async def until_up(self) -> None:
        while not self.is_up:  # noqa: ASYNC110 - the link that comes up may be another than the one of now
            await asyncio.sleep(UP_LOOK_S)

    async def config(self, model_name: str, version: str) -> ModelConfig:
        """The configuration of the served version; a named version is sent with each row."""
        return await self._link.find(model_name)

    async def infer(self, request: InferRequest) -> InferResponse:
        """See EngineClient. Fails if the engine goes silent."""
        if not self._link.is_up:
            raise EngineUnavailable(f"the engine is not ready: {self.reason}")
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("inferences are asked by tasks")
        self._asking.add(task)
        try:
            return await self._link.infer(request, client=CLIENT_NAME)
        except asyncio.CancelledError:
            reason = self._cut_for.pop(task, None)
            if reason is None or task.uncancel() > 0:
                raise
            raise EngineUnavailable(f"the engine fell silent over this request: {reason}") from None
        finally:
            self._asking.discard(task)
            self._cut_for.pop(task, None)

    async def aclose(self) -> None:
        """Does nothing: the link ends with run."""

    def _new_link(self) -> CoreClient:
        link = CoreClient(
            reachable_folder(self._run_dir), ClientHello(CLIENT_NAME), max_asks=MAX_CLIENT_CALLS, slab=self._slab
        )
        link.when_silent(self._cut)
        return link

    async def _until_moved(self) -> Path:
        """The run directory of the stack that replaced this one."""
        while True:
            await asyncio.sleep(LOOK_S)
            if not self.is_up and (moved := await asyncio.to_thread(_moved, self._run_dir, self._http_url)) is not None:
                return moved

    def _cut(self, reason: str) -> None:
        for task in self._asking:
            self._cut_for[task] = reason
            task.cancel()


def _moved(run_dir: Path, http_url: str) -> Path | None:
    """The new run directory of the stack at this address; None if it did not move."""
    if run_dir.is_dir():
        return None
    stack = stack_at(http_url)
    return stack.run_dir if stack is not None and stack.run_dir != run_dir else None


RETRY_S = 0.2
_PASSING = (EngineUnavailable, ModelNotReady, *REFUSED)  # of a model that may soon be ready


async def find_network(line: EngineClient, name: str, version: str, timeout_s: float) -> Network:
    """See Engine.network. Waits until the model's trial is done."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            network = network_from(await line.config(name, version), version)
            if network.unmerged != UNTRIED or time.monotonic() + RETRY_S >= until:
                return network
        except ModelRefused as error:
            raise ModelUnusable(error.message) from error
        except ModelNotFound as error:
            raise ModelUnusable(
                f"the engine has no model {name!r} ({error.message}); `penstock models list` shows what it has, and "
                "`penstock models pull` fetches more"
            ) from error
        except InvalidRequest as error:
            raise ModelUnusable(f"model {name!r} cannot be used: {error.message}") from error
        except _PASSING as error:
            if time.monotonic() + RETRY_S >= until:
                raise InferFailed(f"model {name!r} is not ready within {timeout_s:g} s: {error.message}") from error
        except InferenceError as error:
            raise InferFailed(f"model {name!r}: {error.message}") from error
        await asyncio.sleep(RETRY_S)


GONE = "the engine is gone: until it is back, files wait (a minute a frame at most) and what cameras bring is dropped"
BACK = "the engine is back"

log = structlog.get_logger(component="video")


class Watchable(Protocol):
    """One connection to the engine, or all of them. reason: why it is not up."""

    @property
    def is_up(self) -> bool: ...

    @property
    def reason(self) -> str: ...


async def log_outages(line: Watchable, engine: str) -> None:
    """Polls and logs outages until cancelled; start it after the first response. engine: its title for the log."""
    while True:
        await _until(line, is_up=False)
        gone_at = time.monotonic()
        await asyncio.sleep(LOOK_S)
        if line.is_up:
            continue
        log.warning(GONE, engine=engine, reason=line.reason)
        await _until(line, is_up=True)
        log.warning(BACK, engine=engine, away_s=round(time.monotonic() - gone_at, 1))


async def _until(line: Watchable, *, is_up: bool) -> None:
    while line.is_up is not is_up:  # noqa: ASYNC110 - lines have no event to wait for
        await asyncio.sleep(LOOK_S)
