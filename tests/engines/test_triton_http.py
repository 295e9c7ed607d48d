"""The HTTP relay: bytes pass untouched both ways, and every way in which a connection can fail has its error."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from penstock.engines.call_options import CallTimeouts
from penstock.engines.triton import http_connection
from penstock.engines.triton.http_client import TritonHttpClient, parse_engine_url
from penstock.engines.triton.http_connection import HttpConnection, request_head
from penstock.protocol.call import HttpAnswer, HttpCall, HttpHeaders
from penstock.protocol.cancellation import AbandonedCall, abandoned_call_of
from penstock.protocol.errors import DeadlineExceeded, EngineFailed, EngineUnavailable, InvalidRequest
from tests.engines.fake_triton import JSON_BODY, FakeTriton, Mode

HEADERS = ((b"content-type", b"application/json"), (b"x-engine", b"fake"))
INFER = HttpCall("POST", b"/v2/models/double/infer", ((b"content-type", b"application/json"),), b"{}")
LOAD = HttpCall("POST", b"/v2/repository/models/double/load", (), b"{}")


@pytest_asyncio.fixture
async def fake() -> AsyncIterator[FakeTriton]:
    async with FakeTriton().running() as triton:
        yield triton


@pytest_asyncio.fixture
async def http(fake: FakeTriton) -> AsyncIterator[TritonHttpClient]:
    client = TritonHttpClient(parse_engine_url(fake.http_url), max_connections=2, timeouts=CallTimeouts())
    yield client
    await client.aclose()


async def test_relay_request_stands_on_the_wire_as_it_came(http: TritonHttpClient, fake: FakeTriton) -> None:
    """Target, header order, doubles and body bytes are the caller's; only the connection's own headers are replaced."""
    call = HttpCall(
        "POST",
        b"/v2/models/a%2Fb//c/../infer?x=%20y&&z#f",
        (
            (b"host", b"gateway"),
            (b"x-first", b"1"),
            (b"connection", b"keep-alive, x-hop"),
            (b"x-hop", b"gone"),
            (b"x-latin", b"caf\xe9"),
            (b"expect", b"100-continue"),
            (b"transfer-encoding", b"chunked"),
            (b"x-first", b"2"),
        ),
        b"\x00\xff raw",
    )

    await http.relay(call, deadline=None)

    host = f"127.0.0.1:{fake.http_port}".encode()
    assert fake.http_requests == [
        b"POST /v2/models/a%2Fb//c/../infer?x=%20y&&z#f HTTP/1.1\r\nhost: " + host + b"\r\nx-first: 1\r\n"
        b"x-latin: caf\xe9\r\nx-first: 2\r\ncontent-length: 6\r\n\r\n\x00\xff raw"
    ]


async def test_relay_get_has_no_length_and_a_post_always_one(http: TritonHttpClient, fake: FakeTriton) -> None:
    """An empty POST says so; a GET says nothing."""
    await http.relay(HttpCall("GET", b"/v2", (), b""), deadline=None)
    await http.relay(HttpCall("POST", b"/v2", (), b""), deadline=None)

    assert b"content-length" not in fake.http_requests[0]
    assert fake.http_requests[1].endswith(b"content-length: 0\r\n\r\n")


async def test_relay_large_body_arrives_whole(http: TritonHttpClient, fake: FakeTriton) -> None:
    """Eight megabytes, byte for byte."""
    body = bytes(range(256)) * (8 << 12)

    await http.relay(HttpCall("POST", b"/v2/models/double/infer", (), body), deadline=None)

    assert fake.http_requests[0].endswith(b"\r\n\r\n" + body)


@pytest.mark.parametrize("target", [b"", b"v2", b"/v2 HTTP/1.1\r\nx: y", b"/a\x00b", b"http://elsewhere/"])
async def test_relay_malformed_target_never_leaves(http: TritonHttpClient, fake: FakeTriton, target: bytes) -> None:
    """What would be another request than it seems is refused."""
    with pytest.raises(InvalidRequest, match="malformed request line"):
        await http.relay(HttpCall("GET", target, (), b""), deadline=None)

    assert fake.http_requests == []


@pytest.mark.parametrize("header", [(b"a", b"b\r\nc: d"), (b"a\n", b"b"), (b"a", b"b\rc")])
async def test_relay_header_with_line_break_never_leaves(http: TritonHttpClient, header: tuple[bytes, bytes]) -> None:
    """No header smuggles another one in."""
    with pytest.raises(InvalidRequest, match="line break"):
        await http.relay(HttpCall("GET", b"/v2", (header,), b""), deadline=None)


@pytest.mark.parametrize(
    ("target", "headers"),
    [(b"/v2?" + b"q" * 8_186, ()), (b"/v2", ((b"cookie", b"c" * 8_190),)), (b"/v2", ((b"n" * 8_190, b"v"),))],
    ids=["target", "value", "name"],
)
async def test_relay_word_longer_than_triton_reads_never_leaves(
    http: TritonHttpClient, fake: FakeTriton, target: bytes, headers: HttpHeaders
) -> None:
    """Triton 2.51 drops the connection at one, which would look like an engine that died; many short ones are fine."""
    many = tuple((b"x-%d" % number, b"v" * 8_189) for number in range(4))
    await http.relay(HttpCall("GET", b"/v2?" + b"q" * 8_185, many, b""), deadline=None)

    with pytest.raises(InvalidRequest, match="8190 bytes"):
        await http.relay(HttpCall("GET", target, headers, b""), deadline=None)

    assert len(fake.http_requests) == 1


@pytest.mark.parametrize("mode", [Mode.NORMAL, Mode.CHUNKED, Mode.UNTIL_CLOSE, Mode.INTERIM])
async def test_relay_answer_arrives_whole_however_it_is_framed(
    http: TritonHttpClient, fake: FakeTriton, mode: Mode
) -> None:
    """Length, chunks, end of connection and interim answers all give the same body, without hop-by-hop headers."""
    fake.mode = mode

    answer = await http.relay(INFER, deadline=None)

    assert (answer.status, answer.body) == (200, JSON_BODY)
    assert tuple(header for header in answer.headers if header[0] != b"content-length") == HEADERS


async def test_relay_engine_error_is_an_answer(http: TritonHttpClient, fake: FakeTriton) -> None:
    """A 500 is passed on as it is."""
    fake.mode = Mode.ERROR

    answer = await http.relay(INFER, deadline=None)

    assert answer == HttpAnswer(500, ((b"content-length", b"16"),), b'{"error":"boom"}')


async def test_relay_head_has_no_body_to_wait_for(http: TritonHttpClient) -> None:
    """The announced length is that of a body that never comes."""
    call = HttpCall("HEAD", b"/v2/health/live", (), b"")

    answers = [await http.relay(call, deadline=time.monotonic() + 1) for _ in range(2)]

    assert [(answer.status, answer.body) for answer in answers] == [(200, b""), (200, b"")]


async def test_relay_connections_are_kept_and_bounded(http: TritonHttpClient, fake: FakeTriton) -> None:
    """One after the other shares one connection; ten at once use no more than the limit."""
    for _ in range(3):
        await http.relay(INFER, deadline=None)
    assert fake.http_connections == 1

    await asyncio.gather(*[http.relay(INFER, deadline=None) for _ in range(10)])

    assert fake.http_connections == 2


async def test_relay_slow_engine_ends_at_the_deadline(http: TritonHttpClient, fake: FakeTriton) -> None:
    """DeadlineExceeded within 50 ms, and the connection with the late answer is not used again."""
    fake.mode = Mode.SLOW
    deadline = time.monotonic() + 0.2

    with pytest.raises(DeadlineExceeded):
        await http.relay(INFER, deadline=deadline)
    assert abs(time.monotonic() - deadline) < 0.05

    fake.mode = Mode.NORMAL
    assert (await http.relay(INFER, deadline=None)).status == 200
    assert fake.http_connections == 2


async def test_relay_waiting_for_a_connection_keeps_the_deadline(http: TritonHttpClient, fake: FakeTriton) -> None:
    """A full pool is no excuse."""
    fake.mode = Mode.SLOW
    holders = [asyncio.create_task(http.relay(INFER, deadline=None)) for _ in range(2)]
    deadline = time.monotonic() + 0.2

    with pytest.raises(DeadlineExceeded):
        await http.relay(INFER, deadline=deadline)

    assert abs(time.monotonic() - deadline) < 0.05
    fake.release.set()
    assert [answer.status for answer in await asyncio.gather(*holders)] == [200, 200]


async def test_relay_past_deadline_never_leaves(http: TritonHttpClient, fake: FakeTriton) -> None:
    """What is late already costs the engine nothing."""
    with pytest.raises(DeadlineExceeded):
        await http.relay(INFER, deadline=time.monotonic() - 1)

    assert fake.http_connections == 0


async def test_relay_without_deadline_ends_at_the_timeout(fake: FakeTriton) -> None:
    """A read waits `read_s`, everything else `call_s`."""
    fake.mode = Mode.SLOW
    calls = (HttpCall("GET", b"/v2", (), b""), CallTimeouts(read_s=0.1)), (INFER, CallTimeouts(call_s=0.1))
    for call, timeouts in calls:
        http = TritonHttpClient(parse_engine_url(fake.http_url), max_connections=2, timeouts=timeouts)
        async with asyncio.timeout(5):
            with pytest.raises(DeadlineExceeded):
                await http.relay(call, deadline=None)


async def test_relay_cancelled_caller_frees_the_connection(http: TritonHttpClient, fake: FakeTriton) -> None:
    """The slots of cancelled calls are given back."""
    fake.mode = Mode.SLOW
    running = [asyncio.create_task(http.relay(INFER, deadline=None)) for _ in range(2)]
    await fake.http_begun.wait()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)

    fake.mode = Mode.NORMAL
    answers = await asyncio.gather(*[http.relay(INFER, deadline=time.monotonic() + 1) for _ in range(2)])

    assert [answer.status for answer in answers] == [200, 200]


async def left_at_the_engine(
    http: TritonHttpClient, fake: FakeTriton, *, deadline: float | None = None
) -> AbandonedCall:
    """A call at an engine that answers on `release`, after its client left or its deadline passed."""
    fake.mode = Mode.SLOW
    running = asyncio.create_task(http.relay(INFER, deadline=deadline))
    await fake.http_begun.wait()
    if deadline is None:
        running.cancel()
    with pytest.raises(asyncio.CancelledError if deadline is None else DeadlineExceeded) as end:
        await running
    call = abandoned_call_of(end.value)
    assert call is not None
    return call


@pytest.mark.parametrize("deadline_s", [None, 0.5])
async def test_relay_call_that_the_engine_finishes_keeps_its_slot_until_it_is_answered(
    fake: FakeTriton, deadline_s: float | None
) -> None:
    """If the client leaves or the deadline passes, the error has the abandoned call, which ends with the answer."""
    http = TritonHttpClient(parse_engine_url(fake.http_url), max_connections=1, timeouts=CallTimeouts(), finishes=True)
    ended = asyncio.Event()
    call = await left_at_the_engine(http, fake, deadline=None if deadline_s is None else time.monotonic() + deadline_s)
    call.when_ended(ended.set)

    next_one = asyncio.create_task(http.relay(INFER, deadline=None))
    with pytest.raises(DeadlineExceeded):  # the only slot is in use
        await http.relay(INFER, deadline=time.monotonic() + 0.05)
    assert not ended.is_set()
    assert len(fake.http_requests) == 1
    fake.release.set()

    async with asyncio.timeout(60):
        await ended.wait()
        assert (await next_one).status == 200
    assert call.is_served
    await http.aclose()


async def test_relay_call_that_the_engine_never_answers_is_held_for_a_while(
    fake: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an engine that loses a call would occupy its client's slot forever."""
    monkeypatch.setattr(http_connection, "MAX_ABANDONED_S", 0.05)
    http = TritonHttpClient(parse_engine_url(fake.http_url), max_connections=1, timeouts=CallTimeouts(), finishes=True)
    ended = asyncio.Event()
    call = await left_at_the_engine(http, fake)
    call.when_ended(ended.set)
    async with asyncio.timeout(60):
        await ended.wait()
    assert not call.is_served
    await http.aclose()


async def test_relay_call_that_the_engine_has_not_got_is_given_up_at_once(fake: FakeTriton) -> None:
    """The engine cannot work on a call that was not sent completely."""
    http = TritonHttpClient(parse_engine_url(fake.http_url), max_connections=1, timeouts=CallTimeouts(), finishes=True)
    fake.mode = Mode.SLOW
    running = asyncio.create_task(http.relay(replace(INFER, body=bytes(64 << 20)), deadline=None))
    while not fake.http_connections:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError) as end:
        await running
    assert abandoned_call_of(end.value) is None
    await http.aclose()


@pytest.mark.parametrize("mode", [Mode.RESET, Mode.HALF])
async def test_relay_broken_connection_is_unavailable(http: TritonHttpClient, fake: FakeTriton, mode: Mode) -> None:
    """A reset before the answer and an end within it both mean that the engine is gone, and are not tried again."""
    fake.mode = mode

    with pytest.raises(EngineUnavailable, match="connection to the engine broke"):
        await http.relay(INFER, deadline=None)

    assert len(fake.http_requests) == 1


async def test_relay_garbage_is_the_engines_failure(http: TritonHttpClient, fake: FakeTriton) -> None:
    """Bytes that are no HTTP answer are distinguished from a broken connection."""
    fake.mode = Mode.GARBAGE

    with pytest.raises(EngineFailed, match="cannot be read"):
        await http.relay(INFER, deadline=None)


async def test_relay_second_answer_ends_the_connection(http: TritonHttpClient, fake: FakeTriton) -> None:
    """An answer too many is never taken for the next question's."""
    fake.mode = Mode.TWICE

    for _ in range(2):
        assert (await http.relay(INFER, deadline=None)).body == JSON_BODY

    assert fake.http_connections == 2


async def test_relay_stale_connection_repeats_what_may_be_repeated(http: TritonHttpClient, fake: FakeTriton) -> None:
    """An inference whose kept-alive connection turns out closed goes again, once, over a new one; a load does not."""
    fake.mode = Mode.STALE
    await http.relay(INFER, deadline=None)

    assert (await http.relay(INFER, deadline=None)).status == 200
    assert len(fake.http_requests) == 3

    with pytest.raises(EngineUnavailable):
        await http.relay(LOAD, deadline=None)
    assert len(fake.http_requests) == 4


async def test_relay_without_a_listener_is_unavailable_at_once() -> None:
    """A refused connection is an answer, not a wait."""
    patient = CallTimeouts(connect_s=60.0)
    http = TritonHttpClient(parse_engine_url("http://127.0.0.1:9"), max_connections=1, timeouts=patient)
    started = time.monotonic()

    with pytest.raises(EngineUnavailable, match=r"cannot connect to the engine at 127\.0\.0\.1:9"):
        await http.relay(INFER, deadline=None)

    assert time.monotonic() - started < 10


async def test_relay_base_path_stands_before_every_target(fake: FakeTriton) -> None:
    """An engine behind a path prefix is reached."""
    http = TritonHttpClient(parse_engine_url(f"{fake.http_url}/triton/"), max_connections=1, timeouts=CallTimeouts())

    await http.relay(HttpCall("GET", b"/v2", (), b""), deadline=None)
    await http.aclose()

    assert fake.http_requests[0].startswith(b"GET /triton/v2 HTTP/1.1\r\n")


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux has this option")
async def test_relay_connection_finds_out_that_its_peer_vanished(fake: FakeTriton) -> None:
    """The kernel probes a silent peer after 10 s, gives it up 10 s later, and waits 15 s for what it must confirm."""
    _, connection = await asyncio.get_running_loop().create_connection(HttpConnection, "127.0.0.1", fake.http_port)
    try:
        assert connection._transport is not None
        connected = connection._transport.get_extra_info("socket")
        assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        assert [connected.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [10, 5, 2, 15_000]
    finally:
        connection.close()


async def test_exchange_given_up_as_its_answer_comes_drops_the_connection(fake: FakeTriton) -> None:
    """No caller would take the answer or return the connection: it would stay open for ever."""
    _, connection = await asyncio.get_running_loop().create_connection(HttpConnection, "127.0.0.1", fake.http_port)
    head = request_head(HttpCall("GET", b"/v2", (), b""), b"x")
    exchange = asyncio.create_task(connection.exchange(head, b""))
    await asyncio.sleep(0)
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    exchange.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exchange
    assert not connection.is_open
