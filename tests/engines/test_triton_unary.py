"""Who makes the one connection for unary calls, and who waits for it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.engines.call_options import CallTimeouts
from penstock.engines.triton.grpc_calls import UnaryClient
from penstock.engines.triton.http2_protocol import FrameFlag, FrameKind, GrpcReply, field, frame


class Late(asyncio.Protocol):
    """Greets after some time, and ends each call with code 5."""

    def __init__(self, after_s: float, gone: asyncio.Event) -> None:
        self._after_s = after_s
        self._gone = gone

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        greeting = frame(FrameKind.SETTINGS, 0, 0, b"")
        self._greeting = asyncio.get_running_loop().call_later(self._after_s, transport.write, greeting)

    def data_received(self, data: bytes) -> None:
        at = data.find(bytes((FrameKind.HEADERS, FrameFlag.END_HEADERS)))
        if at >= 0:
            stream_id = int.from_bytes(data[at + 2 : at + 6], "big")
            self._transport.write(
                frame(
                    FrameKind.HEADERS,
                    FrameFlag.END_HEADERS | FrameFlag.END_STREAM,
                    stream_id,
                    b"\x88" + field(b"grpc-status", b"5"),
                )
            )

    def connection_lost(self, _: Exception | None) -> None:
        self._greeting.cancel()
        self._gone.set()


@asynccontextmanager
async def client_of_late_peer(after_s: float, timeouts: CallTimeouts) -> AsyncIterator[UnaryClient]:
    gone = asyncio.Event()
    server = await asyncio.get_running_loop().create_server(lambda: Late(after_s, gone), "127.0.0.1", 0)
    client = UnaryClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", timeouts)
    yield client
    client.close()
    await gone.wait()
    server.close()


async def test_calls_with_less_time_than_a_connection_takes_do_not_keep_it_from_being_made() -> None:
    """The first caller may give up: the next one uses its connection."""
    answer: GrpcReply | None = None
    async with client_of_late_peer(0.4, CallTimeouts(connect_s=20.0)) as client:
        for _ in range(100):
            try:
                async with asyncio.timeout(0.1):
                    answer = await client.call("/t.T/x", b"", ())
                break
            except TimeoutError:
                continue
    assert answer is not None
    assert answer.code == 5


async def test_calls_to_a_silent_peer_wait_for_one_connection_together() -> None:
    """Not one after the other: all of them know at the end of the first attempt."""
    async with client_of_late_peer(3600.0, CallTimeouts(connect_s=1.0)) as client, asyncio.timeout(15):
        calls = (client.call("/t.T/x", b"", ()) for _ in range(50))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert {str(outcome) for outcome in outcomes} == {"no answer within 1 s"}
