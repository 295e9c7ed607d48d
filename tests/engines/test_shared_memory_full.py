"""A full /dev/shm: how the gateway detects it, and which errors clients get."""

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from penstock.engines import segments
from penstock.engines.failures import SHARED_MEMORY_FULL, redact_region_keys
from penstock.engines.triton.client import TritonEngine
from penstock.engines.triton.grpc_calls import TritonGrpcStream
from penstock.engines.triton.grpc_client import error_of
from penstock.engines.watch import EngineWatch
from penstock.gateway import composition as engines
from penstock.gateway.composition import compose_memory
from penstock.gateway.settings import Settings
from penstock.protocol.call import GrpcAnswer, GrpcCall, HttpAnswer, HttpCall
from penstock.protocol.errors import OutOfMemory
from penstock.testing import FakeEngine
from tests.gateway.test_watch import QUICK, ScriptedEngine
from tests.support.waiting import until

KEY = "penstock_f0d1e39d3d2b_386b6f1f-2f46-42f2-84cb-c69f88173dd8"
ERRORS = [
    f"Failed to increase the shared memory pool size for key '{KEY}' to 1048576 bytes. If you are running Triton "
    "inside docker, use '--shm-size' flag. Error: No space left on device",
    f"Unable to initialize shared memory key '{KEY}' to requested size (1048576 bytes). Error: No space left",
    f"Failed to create new mapped region for the grown shared memory region '{KEY}'. Error: no memory",
]


@pytest.mark.parametrize(
    ("blocks", "free", "is_short"), [(100_000, 16, True), (100_000, 255, True), (100_000, 256, False), (0, 0, False)]
)
def test_shared_memory_below_one_region_is_a_shortage(
    monkeypatch: pytest.MonkeyPatch, blocks: int, free: int, is_short: bool
) -> None:
    """The message says how much is free and how much is needed; a file system without a limit is never short."""
    room = SimpleNamespace(f_blocks=blocks, f_bavail=free, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    why = segments.shared_memory_shortage()
    assert bool(why) == is_short
    if is_short:
        assert f"{free * 4} KiB of 390 MiB are free, and 1024 KiB are needed" in why


async def test_gateway_is_not_ready_while_shared_memory_is_nearly_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULTS 91: the engine is down at the next check, with the reason, and up when there is room."""
    why = ""
    monkeypatch.setattr(engines, "shared_memory_shortage", lambda: why)  # read at each check
    watch = EngineWatch(ScriptedEngine(), QUICK)
    compose_memory(Settings(engine="triton"), FakeEngine(()), watch)
    running = asyncio.create_task(watch.run())
    async with asyncio.timeout(30):
        await watch.first_ready.wait()
        why = "nearly full"
        await until(lambda: not watch.is_up)
        assert watch.reason == "nearly full"
        why = ""
        await until(lambda: watch.is_up)
    running.cancel()


@pytest.mark.parametrize("engine", ["embedded", "http://elsewhere.example:8000"])
def test_shared_memory_of_another_engine_is_not_watched(engine: str) -> None:
    """The embedded engine needs none, and that of another machine cannot be checked."""
    watch = EngineWatch(ScriptedEngine(), QUICK)
    plain = watch.hindrance
    compose_memory(Settings(engine=engine), FakeEngine(()), watch)
    assert watch.hindrance is plain


class Answering:
    """Replaces the connections of a TritonBackend."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    async def relay(self, _: object, *, deadline: float | None) -> Any:
        return self._answer


@pytest.mark.parametrize("error", ERRORS)
async def test_relayed_error_about_full_shared_memory_is_a_503_without_the_key(error: str) -> None:
    """This holds over HTTP, over gRPC, and for calls of the gateway itself."""
    backend = TritonEngine.__new__(TritonEngine)
    backend._http = Answering(HttpAnswer(500, (), f'{{"error":"{error}"}}'.encode()))  # type: ignore[assignment]
    backend._grpc = Answering(GrpcAnswer(13, b"", error))  # type: ignore[assignment]
    with pytest.raises(OutOfMemory) as over_http:
        await backend.send(HttpCall("POST", b"/v2/models/m/infer", (), b""), deadline=None)
    with pytest.raises(OutOfMemory) as over_grpc:
        await backend.send(GrpcCall("/inference.GRPCInferenceService/ModelInfer", b""), deadline=None)
    own = error_of(grpc.StatusCode.INTERNAL, error)
    assert isinstance(own, OutOfMemory)
    assert {over_http.value.message, over_grpc.value.message, own.message} == {SHARED_MEMORY_FULL}


class Reading:
    """A call with this one message."""

    def __init__(self, message: bytes) -> None:
        self._message = message

    async def read(self) -> bytes:
        return self._message

    def add_done_callback(self, _: object) -> None:
        """The call does not end."""


@pytest.mark.parametrize("error", ERRORS)
async def test_streamed_error_about_full_shared_memory_has_no_key(error: str) -> None:
    """This holds for responses of ModelStreamInfer and chunks of generate_stream."""
    message = service_pb2.ModelStreamInferResponse(error_message=f"in m: {error}")
    stream = TritonGrpcStream(Reading(message.SerializeToString()), lambda *_: GrpcAnswer(0, b""), set())  # type: ignore[arg-type]
    answer = service_pb2.ModelStreamInferResponse.FromString(await stream.receive() or b"")
    piece = redact_region_keys(f'data: {{"error":"{error}"}}\n\n'.encode())
    assert answer.error_message == SHARED_MEMORY_FULL
    assert piece == f'data: {{"error":"{SHARED_MEMORY_FULL}"}}\n\n'.encode()


async def test_other_answers_pass_unchanged() -> None:
    """Tensors and other errors are not changed by a byte."""
    message = service_pb2.ModelStreamInferResponse(error_message="shared memory region 'a' is unknown")
    stream = TritonGrpcStream(Reading(message.SerializeToString()), lambda *_: GrpcAnswer(0, b""), set())  # type: ignore[arg-type]
    assert await stream.receive() == message.SerializeToString()
    assert redact_region_keys(b"a shared memory region") == b"a shared memory region"
