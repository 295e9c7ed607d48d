"""Calls whose metadata HPACK's table makes large: a few bytes on the wire, megabytes when parsed."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio

from penstock.gateway.grpc import aio_server as sturdy
from penstock.gateway.workers.gateway_process import GATEWAY_ENVIRONMENT
from penstock.protocol.call import GrpcAnswer
from penstock.protocol.identity import Role
from tests.auth.listeners import door
from tests.grpc.harness import SERVICE, Front, infer_message, serving

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RST_STREAM, SETTINGS, END_HEADERS = 1, 3, 4, 4
FIELD_BYTES, FIELDS, CALLS, CONNECTIONS = 3900, 4000, 60, 4
MIB = 1 << 20
ROOT = Path(__file__).parents[2]


@pytest_asyncio.fixture(params=["open", "with keys"])
async def front(request: pytest.FixtureRequest) -> AsyncIterator[Front]:
    """The front over a fake engine, without and with keys; with keys, calls pass an interceptor first."""
    async with serving(door=door(Role.INFER) if request.param == "with keys" else None) as running:
        yield running


def is_limited() -> bool:
    """Whether the limit applies to metadata that is read now."""
    return bool(sturdy.cygrpc._Metadatum is not sturdy._metadata_limit._entry)


def frame(kind: int, flags: int, stream: int, data: bytes = b"") -> bytes:
    return len(data).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + data


def field(name: bytes, value: bytes, *, is_indexed: bool = False) -> bytes:
    """A header field as HPACK encodes it without Huffman. is_indexed: it enters the dynamic table."""

    def text(one: bytes) -> bytes:
        if len(one) < 127:
            return bytes((len(one),)) + one
        high, low = divmod(len(one) - 127, 128)
        return bytes((127, low + 128, high)) + one

    return (b"\x40" if is_indexed else b"\0") + text(name) + text(value)


def bombs() -> bytes:
    """One connection's bytes: each call refers to a field of 3.9 kB four thousand times, by one byte each."""
    head = b"\x83\x86" + field(b":path", f"{SERVICE}ModelInfer".encode()) + field(b":authority", b"a")
    head += field(b"te", b"trailers") + field(b"content-type", b"application/grpc")
    first = frame(HEADERS, END_HEADERS, 1, head + field(b"x-fill", b"a" * FIELD_BYTES, is_indexed=True))
    others = [frame(HEADERS, END_HEADERS, 2 * n + 3, head + b"\xbe" * FIELDS) for n in range(CALLS)]
    return HELLO + frame(SETTINGS, 0, 0) + first + b"".join(others)


async def ended_calls(front: Front, data: bytes) -> None:
    """Sends a connection's bytes and waits until its calls with too much metadata have ended."""
    reader, writer = await asyncio.open_connection("127.0.0.1", front.server.port)
    writer.write(data)
    ended: set[int] = set()
    async with asyncio.timeout(30):
        while len(ended) < CALLS:
            header = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(header[:3], "big"))
            if header[3] in (HEADERS, RST_STREAM):
                ended.add(int.from_bytes(header[5:], "big"))
    writer.close()


async def test_header_bombs_cost_little_memory_and_delay_no_other_call(front: Front) -> None:
    """240 calls of 16 MB of metadata each: other calls are answered meanwhile, memory grows by less than 100 MiB."""
    await front.call("ModelInfer", infer_message())
    process, loop = psutil.Process(), asyncio.get_running_loop()
    before, slowest_s, largest = process.memory_info().rss, 0.0, 0
    floods = [asyncio.create_task(ended_calls(front, bombs())) for _ in range(CONNECTIONS)]
    while not all(flood.done() for flood in floods):
        started = loop.time()
        await front.call("ModelInfer", infer_message(), timeout=30)
        slowest_s, largest = max(slowest_s, loop.time() - started), max(largest, process.memory_info().rss)
    await asyncio.gather(*floods)
    assert largest - before < 100 * MIB
    assert slowest_s < 2.0


async def test_metadata_within_the_limit_is_delivered_and_beyond_it_refused(front: Front) -> None:
    """The limit is 64 KiB as HTTP/2 counts; over it RESOURCE_EXHAUSTED, and the next calls are served."""
    for size_bytes in (1000, 60_000, 70_000, 1000):
        metadata = (("x-fill", "a" * size_bytes),)
        if size_bytes < sturdy.MAX_METADATA_BYTES:
            await front.call("ModelInfer", infer_message(), metadata=metadata)
            continue
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await front.call("ModelInfer", infer_message(), metadata=metadata)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(front.plane.relayed) == 3


async def test_limit_ends_before_the_call_is_served(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise later reads of metadata, also of the engine's answers, would count against the call's limit."""
    while_served: list[bool] = []
    relay = front.plane.relay

    async def noted(*args: Any, **kwargs: Any) -> GrpcAnswer:
        while_served.append(is_limited())
        return await relay(*args, **kwargs)

    monkeypatch.setattr(front.plane, "relay", noted)
    await front.call("ModelInfer", infer_message())
    assert while_served == [False]


async def test_limit_ends_with_a_call_of_an_unserved_name(front: Front) -> None:
    """Metadata of such a call is read, too."""
    with pytest.raises(grpc.aio.AioRpcError):
        await front.call("Nothing", infer_message())
    assert not is_limited()


async def test_limit_ends_before_the_other_interceptors() -> None:
    """Other interceptors may wait, for example for a key set, while metadata of other calls is read."""
    while_waiting: list[bool] = []
    details: Any = object()

    async def others(_: grpc.HandlerCallDetails) -> Any:
        while_waiting.append(is_limited())

    sturdy._metadata_limit.begin()
    await sturdy._metadata_limit.intercept_service(others, details)
    assert while_waiting == [False]


async def test_limit_ends_with_a_call_whose_metadata_cannot_be_read() -> None:
    """Metadata that is not valid UTF-8 ends grpcio's work on the call with an error."""

    async def work() -> None:
        b"\xff".decode()

    with pytest.raises(UnicodeDecodeError):
        await sturdy._RunningCall(work()).served()
    assert not is_limited()


BOMBED_FRONT = """
import asyncio
from penstock.logs import LogFormat, configure_logs
from tests.grpc.harness import serving
from tests.grpc.test_header_bombs import bombs, ended_calls

async def main():
    async with serving() as front:
        await ended_calls(front, bombs())

configure_logs(LogFormat.JSON)
asyncio.run(main())
"""


def test_refused_metadata_writes_nothing_but_json_to_a_json_log() -> None:
    """gRPC's core and grpcio write no lines to standard error, which is the log."""
    command = (sys.executable, "-c", BOMBED_FRONT)
    ended = subprocess.run(
        command, env=os.environ | GATEWAY_ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    for line in ended.stderr.splitlines():
        json.loads(line)
