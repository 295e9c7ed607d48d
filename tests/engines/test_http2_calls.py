"""Unary calls over our own HTTP/2: to real gRPC servers, and to peers that do not keep to it."""

import asyncio
import itertools
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.call_options import CallTimeouts
from penstock.engines.triton import http2_connection as http2_calls
from penstock.engines.triton.grpc_calls import UnaryClient
from penstock.engines.triton.http2_connection import CallBroken, Http2Connection, TooManyAbandoned
from penstock.engines.triton.http2_protocol import (
    Frame,
    FrameFlag,
    FrameKind,
    FrameReader,
    GrpcReply,
    HeaderDecoder,
    Keepalive,
    KeepaliveAction,
    MalformedFrame,
    content_of,
    encode_head,
    field,
    frame,
    metadata_fields,
    opening,
)
from penstock.protocol.cancellation import abandoned_call_of

MIB = 1 << 20
Context = grpc.aio.ServicerContext[bytes, bytes]
Handler = Callable[[bytes, Context], Awaitable[bytes]]


class Methods:
    """What the server answers, by method."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.entered = asyncio.Event()
        self.release = asyncio.Event()

    async def wait(self, _: bytes, __: Context) -> bytes:
        self.entered.set()
        await self.release.wait()
        return b"done"

    async def echo(self, message: bytes, _: Context) -> bytes:
        return message

    async def metadata(self, _: bytes, context: Context) -> bytes:
        received = {key: value for key, value in context.invocation_metadata() or () if key.startswith("x-")}
        await context.send_initial_metadata((("x-first", received["x-text"]),))
        context.set_trailing_metadata((("x-last-bin", received["x-bytes-bin"]),))
        return f"{context.time_remaining() or 0:.0f}".encode()

    async def refuse(self, _: bytes, context: Context) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such thing: 100 % ümlaut\n", (("x-why", "because"),))
        return b""

    async def large(self, message: bytes, _: Context) -> bytes:
        return bytes(int(message))

    async def hang(self, _: bytes, __: Context) -> bytes:
        self.entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return b""


@pytest.fixture
def methods() -> Methods:
    return Methods()


@pytest_asyncio.fixture
async def port(methods: Methods) -> AsyncIterator[int]:
    """A grpc.aio server with the methods."""
    async for number in serving(methods, [("grpc.max_receive_message_length", -1)]):
        yield number


async def serving(methods: Methods, options: list[tuple[str, int]]) -> AsyncIterator[int]:
    server = grpc.aio.server(options=options)
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(getattr(methods, name))
        for name in ("echo", "metadata", "refuse", "large", "hang", "wait")
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    number = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield number
    await server.stop(None)


async def connect(port: int) -> Http2Connection:
    keepalive = Keepalive(10.0, 5.0)
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: Http2Connection(keepalive), "127.0.0.1", port
    )
    await connection.greeted()
    return connection


def head(method: str, more: bytes = b"") -> bytes:
    return encode_head(f"/t.T/{method}".encode(), b"127.0.0.1") + more


async def test_answer_is_the_servers_bytes(port: int) -> None:
    """Empty, small, and larger than any window or frame; many at once on one connection."""
    connection = await connect(port)
    messages = [b"", b"x", bytes(range(256)) * 64, b"\x01" * 3 * MIB, b"\x02" * 700_001]
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*(connection.unary(head("echo"), message) for message in messages * 4))
    assert [answer.message for answer in answers] == messages * 4
    assert {answer.code for answer in answers} == {0}
    connection.close()


async def test_large_answers_to_small_questions_come_whole(port: int) -> None:
    """The window of the connection is opened again and again: 200 MiB in answers of 10."""
    connection = await connect(port)
    async with asyncio.timeout(60):
        for _ in range(5):
            answers = await asyncio.gather(*(connection.unary(head("large"), b"%d" % (10 * MIB)) for _ in range(4)))
            assert {len(answer.message) for answer in answers} == {10 * MIB}
    connection.close()


async def test_metadata_goes_both_ways(port: int) -> None:
    """Text and binary metadata; the initial metadata is dropped; no deadline, of which Triton 2.51 dies."""
    connection = await connect(port)
    more = metadata_fields((("x-text", "a b"), ("x-bytes-bin", b"\x00\xff\x01")))
    answer = await connection.unary(head("metadata", more), b"")
    assert answer.message == b"0"
    assert answer.trailing_metadata == (("x-last-bin", b"\x00\xff\x01"),)
    connection.close()


async def test_refusal_has_code_details_and_metadata(port: int) -> None:
    """As the server said it, whatever characters it has; a method that is not there is UNIMPLEMENTED."""
    connection = await connect(port)
    answer = await connection.unary(head("refuse"), b"")
    assert answer == GrpcReply(5, b"", "no such thing: 100 % ümlaut\n", (("x-why", "because"),))
    assert (await connection.unary(head("nothing"), b"")).code == 12
    connection.close()


async def test_cancelled_call_is_cancelled_at_the_server(port: int, methods: Methods) -> None:
    """And the connection serves on."""
    connection = await connect(port)
    call = asyncio.create_task(connection.unary(head("hang"), b""))
    await methods.entered.wait()
    call.cancel()
    async with asyncio.timeout(60):
        await methods.cancelled.wait()
    assert (await connection.unary(head("echo"), b"on")).message == b"on"
    connection.close()


async def test_call_that_is_given_up_is_left_alone_for_a_moment(
    port: int, methods: Methods, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken back then; where too many were given up at once, no more are begun until it is."""
    monkeypatch.setattr(http2_calls, "MAX_GIVEN_UP", 8)
    monkeypatch.setattr(http2_calls, "GRACE_S", 2.0)  # a busy machine may take a second over these few lines
    connection = await connect(port)
    calls = [asyncio.create_task(connection.unary(head("hang"), b"")) for _ in range(8)]
    await methods.entered.wait()
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    with pytest.raises(TooManyAbandoned, match="8 abandoned calls"):
        await connection.unary(head("echo"), b"")
    assert not methods.cancelled.is_set()
    async with asyncio.timeout(60):
        await methods.cancelled.wait()
    assert (await connection.unary(head("echo"), b"on")).message == b"on"
    connection.close()


async def test_answer_to_a_call_that_was_left_ends_it(
    port: int, methods: Methods, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client left just before; the answer ends the abandoned call."""
    monkeypatch.setattr(http2_calls, "GRACE_S", 60.0)
    connection, ended = await connect(port), asyncio.Event()
    call = asyncio.create_task(connection.unary(head("wait"), b""))
    await methods.entered.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError) as end:
        await call
    left = abandoned_call_of(end.value)
    assert left is not None
    left.when_ended(ended.set)
    await asyncio.sleep(0)
    assert not ended.is_set()
    methods.release.set()
    async with asyncio.timeout(60):
        await ended.wait()
    assert left.is_served
    connection.close()


async def test_more_calls_than_the_server_takes_at_once_wait_their_turn() -> None:
    """A server with a limit of streams answers all of them."""
    async for port in serving(Methods(), [("grpc.max_concurrent_streams", 3)]):
        client = UnaryClient(f"127.0.0.1:{port}", CallTimeouts())
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*(client.call("/t.T/echo", b"%d" % n, ()) for n in range(100)))
        assert [answer.message for answer in answers] == [b"%d" % n for n in range(100)]
        client.close()


async def test_call_breaks_when_the_server_goes(methods: Methods) -> None:
    """At once, and the connection takes no more."""
    async for port in serving(methods, []):
        connection = await connect(port)
        call = asyncio.create_task(connection.unary(head("hang"), b""))
        await methods.entered.wait()
    async with asyncio.timeout(60):
        answer = await asyncio.gather(call, return_exceptions=True)
    assert isinstance(answer[0], CallBroken) or (isinstance(answer[0], GrpcReply) and answer[0].code == 14)
    assert not connection.is_open
    with pytest.raises(CallBroken):
        await connection.unary(head("echo"), b"")


def test_silent_peer_is_asked_twice_at_most_and_given_up_without_an_answer() -> None:
    """Silence counts from the call's beginning; any word ends it; an unanswered ping ends the connection."""
    keepalive = Keepalive(10.0, 5.0)
    keepalive.sent(100.0, is_first=True)
    assert [keepalive.due(now) for now in (109.0, 110.0, 111.0)] == [
        KeepaliveAction.NOTHING,
        KeepaliveAction.PING,
        KeepaliveAction.NOTHING,
    ]
    keepalive.received(112.0)
    assert [keepalive.due(now) for now in (121.0, 122.0)] == [KeepaliveAction.NOTHING, KeepaliveAction.PING]
    keepalive.received(123.0)
    assert keepalive.due(200.0) is KeepaliveAction.NOTHING
    keepalive.sent(201.0, is_first=True)
    assert [keepalive.due(now) for now in (210.0, 211.0)] == [KeepaliveAction.NOTHING, KeepaliveAction.PING]
    keepalive.sent(212.0, is_first=False)
    assert [keepalive.due(now) for now in (215.9, 216.0)] == [KeepaliveAction.NOTHING, KeepaliveAction.GIVE_UP]


# a peer that misbehaves


class Peer(asyncio.Protocol):
    """Sends its bytes when the first call has come."""

    def __init__(self, says: bytes, *, hangs_up: bool = False) -> None:
        self._says, self._hangs_up = says, hangs_up
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(frame(FrameKind.SETTINGS, 0, 0, b""))

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) > len(opening()) + 18:  # and a reply to the settings
            self._transport.write(self._says)
            self._says = b""
            if self._hangs_up:
                self._transport.close()


async def reply_of_peer(says: bytes, *, hangs_up: bool = True) -> GrpcReply:
    server = await asyncio.get_running_loop().create_server(lambda: Peer(says, hangs_up=hangs_up), "127.0.0.1", 0)
    connection = await connect(server.sockets[0].getsockname()[1])
    try:
        async with asyncio.timeout(60):
            return await connection.unary(head("x"), b"")
    finally:
        connection.close()
        server.close()


STATUS = b"\x88"  # :status 200
OK = field(b"grpc-status", b"0")
ENDS = FrameFlag.END_HEADERS | FrameFlag.END_STREAM


@pytest.mark.parametrize(
    ("says", "code", "details"),
    [
        (frame(FrameKind.HEADERS, ENDS, 1, STATUS + field(b"grpc-status", b"14")), 14, ""),
        (frame(FrameKind.HEADERS, ENDS, 1, STATUS), 2, "the answer is not gRPC's (HTTP status 200)"),
        (frame(FrameKind.HEADERS, ENDS, 1, STATUS + OK), 13, "the answer is not one gRPC message (0 bytes)"),
        (frame(FrameKind.RST_STREAM, 0, 1, struct.pack(">I", 2)), 13, "Received RST_STREAM with error code 2"),
        (frame(FrameKind.RST_STREAM, 0, 1, struct.pack(">I", 8)), 1, "Received RST_STREAM with error code 8"),
        (
            frame(FrameKind.HEADERS, 4, 1, STATUS) + frame(FrameKind.DATA, 0, 1, b"\x01\0\0\0\x01x")
            + frame(FrameKind.HEADERS, ENDS, 1, OK), 13, "the answer is not one gRPC message (6 bytes)",
        ),
        (
            frame(FrameKind.HEADERS, 1, 1, STATUS)
            + frame(FrameKind.CONTINUATION, 4, 1, field(b"grpc-status", b"7")), 7, "",
        ),
        (frame(FrameKind.HEADERS, ENDS, 1, STATUS + field(b"x-\xe9", b"1") + field(b"grpc-status", b"5")), 5, ""),
        (
            frame(FrameKind.HEADERS, 4, 1, b"\x08\x03103")
            + frame(FrameKind.HEADERS, ENDS, 1, field(b"grpc-status", b"9")), 9, "",
        ),
    ],
    ids=["refused", "no status", "no message", "reset", "cancelled", "compressed", "name", "pieces", "informational"],
)  # fmt: skip
async def test_answer_of_a_strange_peer_is_a_status(says: bytes, code: int, details: str) -> None:
    """Refusals in every form, resets, answers that are no message, blocks in pieces, informational heads."""
    answer = await reply_of_peer(says)
    assert (answer.code, answer.details) == (code, details)


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (b"", "closed by the engine"),
        (frame(FrameKind.GOAWAY, 0, 0, bytes(8)), "the engine ends the connection"),
        (frame(FrameKind.RST_STREAM, 0, 1, struct.pack(">I", 7)), "refused the call unread"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "cannot be read"),
        (frame(FrameKind.HEADERS, ENDS, 1, b"\xff\xff\xff"), "cannot be read"),
        (frame(FrameKind.HEADERS, 0, 1, STATUS) + frame(FrameKind.DATA, 0, 1, b""), "broken off"),
        (frame(FrameKind.CONTINUATION, 0, 1, STATUS), "without its beginning"),
        (frame(FrameKind.DATA, FrameFlag.PADDED, 1, b"\x09x"), "more padding"),
        (frame(FrameKind.SETTINGS, 0, 0, b"abc"), "settings of 3 bytes"),
        (frame(FrameKind.HEADERS, ENDS, 1, STATUS + field(b"grpc-status", b"9" * 5000)), "cannot be read"),
    ],
    ids=[
        "gone",
        "goodbye",
        "unread",
        "HTTP/1",
        "no block",
        "broken off",
        "no beginning",
        "padding",
        "settings",
        "code",
    ],
)
async def test_call_to_a_broken_peer_breaks_with_the_reason(says: bytes, why: str) -> None:
    """Nothing hangs."""
    with pytest.raises(CallBroken, match=why):
        await reply_of_peer(says)


@given(data=st.binary(max_size=400), cuts=st.lists(st.integers(0, 400), max_size=6))
def test_reader_takes_any_bytes_in_any_pieces(data: bytes, cuts: list[int]) -> None:
    """The same frames, or the same complaint, however the bytes arrive; nothing else is raised."""

    def read(pieces: list[bytes]) -> tuple[list[Frame], bool]:
        reader, found = FrameReader(), list[Frame]()
        try:
            for piece in pieces:
                found += reader.frames(piece)
        except MalformedFrame:
            return [], True
        return found, False

    edges = sorted({0, *(cut for cut in cuts if cut < len(data)), len(data)})
    whole = read([data])
    assert read([data[a:b] for a, b in itertools.pairwise(edges)])[1] == whole[1]
    for found in whole[0]:
        try:
            assert len(content_of(found)) <= len(found.payload)
            HeaderDecoder().fields(found.payload)
        except MalformedFrame:
            continue


@given(name=st.binary(min_size=1, max_size=300), value=st.binary(max_size=40_000))
def test_fields_are_read_as_they_were_written(name: bytes, value: bytes) -> None:
    """Any bytes, any length."""
    assert HeaderDecoder().fields(field(name, value)) == ((name, value),)


async def test_peer_that_is_no_http2_server_is_known_at_the_greeting() -> None:
    """Before a call is sent to it."""
    server = await asyncio.get_running_loop().create_server(Deaf, "127.0.0.1", 0)
    with pytest.raises(CallBroken, match="cannot be read"):
        async with asyncio.timeout(60):
            await connect(server.sockets[0].getsockname()[1])
    server.close()


class Deaf(asyncio.Protocol):
    """An HTTP/1 server."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        transport.close()
