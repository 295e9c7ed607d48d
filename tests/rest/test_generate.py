"""POST …/generate and …/generate_stream over the fake plane: events as they come, and how a stream can end."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.gateway.rest.listener import HttpListener
from penstock.network import bind
from penstock.protocol.call import HttpAnswer, HttpCall, HttpHeaders, HttpStream, InferHead
from penstock.protocol.errors import EngineUnavailable
from penstock.protocol.identity import ANONYMOUS, Identity, Verb
from tests.rest.harness import JSON, Client, FakePlane, Front, request_bytes

STREAM, GENERATE = "/v2/models/ident/generate_stream", "/v2/models/ident/generate"
EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"transfer-encoding", b"chunked"))
ASK = b'{"text_input":"hi","id":"7","parameters":{"a":1}}'
EVENT = b'data: {"text_output":"hi"}\n\n'


class StreamingPlane(FakePlane):
    """Streams its pieces. holds: after the first one, until released; broken: raised after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.status, self.headers, self.pieces = 200, EVENTS, [EVENT, EVENT]
        self.broken: Exception | None = None
        self.given = 0
        self.closed = asyncio.Event()

    @asynccontextmanager
    async def stream(
        self, head: InferHead, call: HttpCall, *, caller: Identity = ANONYMOUS, deadline: float | None = None
    ) -> AsyncIterator[HttpStream]:
        self.relayed.append((Verb.INFER, head, call, deadline))
        if self.error is not None:
            raise self.error
        chunks = self._chunks()
        try:
            yield HttpStream(self.status, self.headers, chunks)
        finally:
            await chunks.aclose()
            self.closed.set()

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        for piece in self.pieces:
            if self.holds and self.given == 1:
                await self.released.wait()
            self.given += 1
            yield piece
        if self.broken is not None:
            raise self.broken


@pytest.fixture
def plane() -> StreamingPlane:
    return StreamingPlane()


@pytest.fixture
def front(plane: StreamingPlane) -> Front:
    return Front(plane)


async def test_stream_passes_the_call_and_its_events_untouched(front: Front, plane: StreamingPlane) -> None:
    """What was asked reaches the plane as it came; status, headers and bytes come back as they are."""
    reply = await front.ask("POST", STREAM, ASK, ((b"x-request-timeout-ms", b"5000"),))
    assert (reply.status, reply.body) == (200, EVENT + EVENT)
    assert reply.headers == {"content-type": "text/event-stream; charset=utf-8"}
    verb, head, call, deadline = plane.relayed[0]
    assert (verb, head, call.body) == (Verb.INFER, InferHead("ident", "", "7"), ASK)
    assert deadline is not None
    assert front.recorder.done == [("ident", "http", "200")]


async def test_stream_event_arrives_while_the_engine_works_on_the_next(front: Front, plane: StreamingPlane) -> None:
    """Nothing is held back until the answer is whole."""
    plane.holds = True
    async with front.served() as port, Client.connected(port) as client:
        await client.send(request_bytes("POST", STREAM, ASK))
        assert b"transfer-encoding: chunked" in (await client.reader.readuntil(b"\r\n\r\n")).lower()
        size = int(await client.reader.readline(), 16)
        assert await client.reader.readexactly(size) == EVENT
        assert plane.given == 1
        plane.released.set()
        assert (await client.reader.readuntil(b"0\r\n\r\n")).count(EVENT) == 1


async def test_stream_whose_client_leaves_is_closed_at_once(front: Front, plane: StreamingPlane) -> None:
    """Though the engine is silent: its work ends, and the request counts as cancelled, not as answered."""
    plane.holds = True
    async with front.served() as port:
        async with Client.connected(port) as client:
            await client.send(request_bytes("POST", STREAM, ASK))
            await client.reader.readuntil(EVENT)
        await plane.closed.wait()
        while not front.recorder.cancelled_count:
            await asyncio.sleep(0)
    assert front.recorder.cancelled_count == 1
    assert front.recorder.done == []


async def test_stream_of_a_slow_reader_takes_no_more_from_the_engine(front: Front, plane: StreamingPlane) -> None:
    """What the client does not read, the engine is not asked for."""
    plane.pieces = [b"x" * 65_536] * 2000
    async with front.served() as port, Client.connected(port) as client:
        await client.send(request_bytes("POST", STREAM, ASK))
        before = -1
        while plane.given != before:
            before = plane.given
            await asyncio.sleep(0.2)
        assert 0 < before < 1000
    await plane.closed.wait()


async def test_stream_that_breaks_ends_with_an_event_that_says_why(front: Front, plane: StreamingPlane) -> None:
    """The status is out already: the reason comes in Triton's form, and is counted."""
    plane.broken = EngineUnavailable("the connection to the engine broke: closed by the engine")
    reply = await front.ask("POST", STREAM, ASK)
    assert reply.status == 200
    assert (
        reply.body == EVENT + EVENT + b'data: {"error":"the connection to the engine broke: closed by the engine"}\n\n'
    )
    assert front.recorder.reasons == ["engine_down"]


async def test_stream_that_the_end_of_a_drain_cuts_gets_an_error_event(front: Front, plane: StreamingPlane) -> None:
    """What came is there, then the reason, then the stream's proper end."""
    plane.holds = True
    listener = HttpListener(front.app, bind("127.0.0.1", 0, flag="--http-port"))
    listener.start()
    async with Client.connected(listener.port) as client:
        await client.send(request_bytes("POST", STREAM, ASK))
        await client.reader.readuntil(EVENT)
        assert not await listener.stop(0.1)
        rest = await client.reader.read()
    assert b'data: {"error":"this gateway stopped before the answer ended; send to another one"}\n\n' in rest
    assert rest.endswith(b"0\r\n\r\n")


async def test_stream_refused_before_it_began_is_an_error_like_any_other(front: Front, plane: StreamingPlane) -> None:
    """503 with Retry-After, in JSON."""
    plane.error = EngineUnavailable("the engine is not ready: it starts")
    reply = await front.ask("POST", STREAM, ASK)
    assert (reply.status, reply.headers["retry-after"] in ("1", "2")) == (503, True)
    assert json.loads(reply.body) == {"error": "the engine is not ready: it starts"}


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (404, b'{"error":"Request for unknown model: \'ident\' is not found"}', 404),
        (500, b'{"error":"Unable to parse JSON bytes array: attempt to access JSON non-string as string"}', 400),
        (500, b'{"error":"Expected JSON object for keyword: \'parameters\': x"}', 400),
        (500, b'{"error":"parameter key \'a\' was not found in the JSON"}', 400),
        (500, b'{"error":"the model broke"}', 500),
    ],
)
@pytest.mark.parametrize("target", [STREAM, GENERATE])
async def test_generate_relays_the_engines_refusal(
    front: Front, plane: StreamingPlane, target: str, status: int, text: bytes, expected: int
) -> None:
    """As it is, but for JSON that Triton could not read, which it calls its own failure."""
    headers: HttpHeaders = (*JSON, (b"content-length", b"%d" % len(text)))
    plane.status, plane.headers, plane.pieces = status, headers, [text]
    plane.answer = HttpAnswer(status, JSON, text)
    reply = await front.ask("POST", target, ASK)
    assert (reply.status, reply.body) == (expected, text)
    assert reply.headers == {"content-type": "application/json", "content-length": str(len(text))}


async def test_generate_is_relayed_as_an_inference(front: Front, plane: StreamingPlane) -> None:
    """With the version of the path, the id of the body, and the answer whole."""
    reply = await front.ask("POST", "/v2/models/ident/versions/2/generate", ASK)
    assert (reply.status, reply.body) == (200, b'{"ok":true}')
    assert plane.relayed[0][:2] == (Verb.INFER, InferHead("ident", "2", "7"))
    assert front.recorder.done == [("ident", "http", "200")]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "malformed JSON"),
        (b"{", "malformed JSON"),
        (b"[]", "Expected `object`"),
        (b'{"a":1,"a":2}', "stands twice"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested 100001 deep"),
        (b'{"id":5}', "id: Expected `str`"),
    ],
)
@pytest.mark.parametrize("target", [STREAM, GENERATE])
async def test_generate_with_a_body_that_cannot_be_never_reaches_the_engine(
    front: Front, plane: StreamingPlane, target: str, body: bytes, said: str
) -> None:
    """400; a hundred thousand nested arrays would end Triton 2.51."""
    reply = await front.ask("POST", target, body)
    assert reply.status == 400
    assert said in json.loads(reply.body)["error"]
    assert plane.relayed == []


async def test_generate_compressed_is_refused_in_tritons_words(front: Front, plane: StreamingPlane) -> None:
    """Triton takes no content coding here."""
    reply = await front.ask("POST", STREAM, ASK, ((b"content-encoding", b"gzip"),))
    assert (reply.status, json.loads(reply.body)["error"]) == (
        400,
        "Unsupported content-encoding, only 'identity' is supported.",
    )
    assert plane.relayed == []
