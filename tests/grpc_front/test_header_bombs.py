"""Calls whose metadata HPACK's table makes large: a few bytes on the wire, megabytes when they are read."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import grpc
import psutil
import pytest

from server.grpc import sturdy
from server.local.gateway_process import GATEWAY_ENVIRONMENT
from tests.grpc_front.harness import SERVICE, Front, infer_message

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RST_STREAM, SETTINGS, END_HEADERS = 1, 3, 4, 4
FIELD_BYTES, FIELDS, CALLS, CONNECTIONS = 3900, 4000, 60, 4
MIB = 1 << 20
ROOT = Path(__file__).parents[2]


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
    """One connection's bytes: calls that each name a field of 3.9 kB four thousand times, a byte each time."""
    head = b"\x83\x86" + field(b":path", f"{SERVICE}ModelInfer".encode()) + field(b":authority", b"a")
    head += field(b"te", b"trailers") + field(b"content-type", b"application/grpc")
    first = frame(HEADERS, END_HEADERS, 1, head + field(b"x-fill", b"a" * FIELD_BYTES, is_indexed=True))
    others = [frame(HEADERS, END_HEADERS, 2 * n + 3, head + b"\xbe" * FIELDS) for n in range(CALLS)]
    return HELLO + frame(SETTINGS, 0, 0) + first + b"".join(others)


async def ended_calls(front: Front, data: bytes) -> None:
    """Send a connection's bytes and wait until its calls with too much metadata have ended."""
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
    """Up to 64 KiB by HTTP/2's count; then RESOURCE_EXHAUSTED, and the connection's next calls are served."""
    for size_bytes in (1000, 60_000, 70_000, 1000):
        metadata = (("x-fill", "a" * size_bytes),)
        if size_bytes < sturdy.MAX_METADATA_BYTES:
            await front.call("ModelInfer", infer_message(), metadata=metadata)
            continue
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await front.call("ModelInfer", infer_message(), metadata=metadata)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(front.plane.relayed) == 3


BOMBED_FRONT = """
import asyncio
from server.logs import LogFormat, configure_logs
from tests.grpc_front.harness import serving
from tests.grpc_front.test_header_bombs import bombs, ended_calls

async def main():
    async with serving() as front:
        await ended_calls(front, bombs())

configure_logs(LogFormat.JSON)
asyncio.run(main())
"""


def test_refused_metadata_writes_nothing_but_json_to_a_json_log() -> None:
    """Neither gRPC's core nor grpcio writes lines of its own to standard error, which holds the log."""
    command = (sys.executable, "-c", BOMBED_FRONT)
    ended = subprocess.run(
        command, env=os.environ | GATEWAY_ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    for line in ended.stderr.splitlines():
        json.loads(line)
