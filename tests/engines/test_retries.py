"""Calls that are sent a second time: which, and how many of them."""

import asyncio

import pytest

from penstock.engines.call_options import CallTimeouts, RetryBudget
from penstock.engines.triton.grpc_calls import UnaryClient
from penstock.engines.triton.http2_connection import CallBroken
from penstock.engines.triton.http2_protocol import Frame, FrameFlag, FrameKind, FrameReader, field, frame
from penstock.engines.triton.http_client import TritonHttpClient, parse_engine_url
from penstock.protocol.call import HttpCall
from penstock.protocol.errors import EngineUnavailable
from tests.engines.fake_triton import FakeTriton, Mode

INFER = HttpCall("POST", b"/v2/models/double/infer", ((b"content-type", b"application/json"),), b"{}")
STEP = HttpCall("POST", b"/v2/models/double/infer", (), b'{"parameters": {"sequence_id": 3}}')


class Refusing(asyncio.Protocol):
    """An HTTP/2 peer that greets and then refuses every call unread, or answers it with code 5."""

    def __init__(self, seen: list[Frame], *, refusals: int) -> None:
        self._seen = seen
        self._refusals = refusals
        self._reader = FrameReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(frame(FrameKind.SETTINGS, 0, 0, b""))

    def data_received(self, data: bytes) -> None:
        data = data.removeprefix(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        for arrived in self._reader.frames(data):
            if arrived.kind == FrameKind.HEADERS:
                self._seen.append(arrived)
                self._transport.write(self._answer(arrived.stream_id))

    def _answer(self, stream_id: int) -> bytes:
        if len(self._seen) <= self._refusals:
            return frame(FrameKind.RST_STREAM, 0, stream_id, (7).to_bytes(4, "big"))
        ends = FrameFlag.END_HEADERS | FrameFlag.END_STREAM
        return frame(FrameKind.HEADERS, ends, stream_id, b"\x88" + field(b"grpc-status", b"5"))


async def outcomes_of_calls(count: int, seen: list[Frame], *, refusals: int, budget: RetryBudget) -> list[object]:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Refusing(seen, refusals=refusals), "127.0.0.1", 0)
    client = UnaryClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", CallTimeouts(), budget=budget)
    try:
        async with asyncio.timeout(60):
            calls = (client.call("/t.T/x", b"", ()) for _ in range(count))
            return list(await asyncio.gather(*calls, return_exceptions=True))
    finally:
        client.close()
        server.close()
        await asyncio.sleep(0)


async def test_engine_that_refuses_every_call_sees_a_tenth_more_and_what_was_saved() -> None:
    """A storm at 100 %: 400 calls, each of which would be sent five times, are some 440 and not 2,000."""
    seen: list[Frame] = []
    outcomes = await outcomes_of_calls(400, seen, refusals=10_000, budget=RetryBudget())
    assert {type(outcome).__mro__[1] for outcome in outcomes} == {CallBroken}
    assert 400 + 32 <= len(seen) <= 400 + 40 + 32 + 20  # the floor: one a second


async def test_calls_refused_once_are_all_answered() -> None:
    """One connection that ends under thirty calls is no storm: all go again."""
    seen: list[Frame] = []
    outcomes = await outcomes_of_calls(30, seen, refusals=30, budget=RetryBudget())
    assert [getattr(outcome, "code", outcome) for outcome in outcomes] == [5] * 30
    assert len(seen) == 60


async def test_step_of_a_sequence_is_never_sent_twice() -> None:
    """It would change the sequence's state twice: 503, and the client decides."""
    async with FakeTriton(Mode.STALE).running() as fake:
        client = TritonHttpClient(parse_engine_url(fake.http_url), max_connections=1, timeouts=CallTimeouts())
        await client.relay(INFER, deadline=None)
        with pytest.raises(EngineUnavailable, match="the connection to the engine broke"):
            await client.relay(STEP, deadline=None)
        assert len(fake.http_requests) == 2
        await client.aclose()


async def test_engine_that_breaks_every_kept_connection_is_not_asked_twice_for_ever() -> None:
    """HTTP's second sendings come out of the same budget; when it is empty the call fails, and says why."""
    budget = RetryBudget(share=0.1, floor_per_s=0.0, burst=4.0)
    async with FakeTriton(Mode.STALE).running() as fake:
        client = TritonHttpClient(
            parse_engine_url(fake.http_url), max_connections=1, timeouts=CallTimeouts(), budget=budget
        )
        failed = 0
        for _ in range(200):
            try:
                await client.relay(INFER, deadline=None)
            except EngineUnavailable:
                failed += 1
        await client.aclose()
        assert len(fake.http_requests) == 200 + budget.taken
        assert budget.taken <= 4 + 20
        assert failed == budget.refused > 50
