"""Generation on the real stack: events as the model makes them, and clients or engines that disappear."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.contract.raw_http import ask
from tests.contract.wire_case import get, post
from tests.integration.living import triton_of
from tests.support.stack import RunningStack, start_stack, stop_stack
from tests.support.words_model import write_words

pytestmark = pytest.mark.xdist_group("generate")

TARGET = "/v2/models/words/generate_stream"
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path) -> Iterator[RunningStack]:
    """A stack with the decoupled model, and one that is traced."""
    home = tmp_path_factory.mktemp("home")
    write_words(home / "models")
    stack = start_stack(home, "--models", "words,identity_fp32", "--trace-file", str(home / "traces.json"))
    yield stack
    assert stop_stack(stack) == 0, "".join(stack.log[-30:])


class Events:
    """One stream of events over a raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def next(self) -> Any:
        """The next event's JSON; None at the stream's end."""
        async with asyncio.timeout(TIMEOUT_S):
            size = int(await self._reader.readline(), 16)
            text = await self._reader.readexactly(size + 2)
        return json.loads(text.removeprefix(b"data: ")) if size else None


@asynccontextmanager
async def events(stack: RunningStack, body: object, **headers: str) -> AsyncIterator[Events]:
    """The stream that answers the body, past its head."""
    host, _, port = stack.http_url.removeprefix("http://").rpartition(":")
    text = json.dumps(body).encode()
    lines = [f"POST {TARGET} HTTP/1.1", "Host: localhost", f"Content-Length: {len(text)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + text)
        async with asyncio.timeout(TIMEOUT_S):
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        yield Events(reader, writer)
    finally:
        writer.transport.abort()


def metric(stack: RunningStack, pattern: str) -> float:
    """The sum of the samples that begin so."""
    lines = ask(stack.metrics_url.removesuffix("/metrics"), get("/metrics")).body.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(pattern))


async def test_stream_gives_each_answer_as_the_model_makes_it(running: RunningStack) -> None:
    """With 200 ms between the answers the first is there long before the last; then the connection serves on."""
    async with events(running, {"text_input": "hi", "n": 4, "rest_ms": 200.0}) as stream:
        assert (await stream.next())["text_output"] == "hi 0"
        begun = time.monotonic()
        assert [(await stream.next())["index"] for _ in range(3)] == [1, 2, 3]
        assert time.monotonic() - begun > 0.3
        assert await stream.next() is None


async def test_stream_whose_client_leaves_ends_in_the_model(running: RunningStack) -> None:
    """The model's request is cancelled, nothing stays in flight, and the gateway counts it as cancelled."""
    before = metric(running, "penstock_cancelled_total")
    async with events(running, {"text_input": "leaver", "n": 1000, "rest_ms": 20.0}) as stream:
        await stream.next()
        assert metric(running, "penstock_inflight_requests") == 1
    await asyncio.to_thread(running.wait_for_log, "words: leaver was cancelled")
    async with asyncio.timeout(TIMEOUT_S):
        while metric(running, "penstock_inflight_requests"):
            await asyncio.sleep(0.05)
    assert metric(running, "penstock_cancelled_total") == before + 1
    assert not running.logged("leaver.*Traceback|request failed")


async def test_stream_that_misses_its_deadline_ends_with_an_event(running: RunningStack) -> None:
    """The answers before the deadline are sent; the model's request is cancelled."""
    async with events(
        running, {"text_input": "late", "n": 1000, "rest_ms": 50.0}, x_request_timeout_ms="600"
    ) as stream:
        events_seen = [await stream.next()]
        while "error" not in events_seen[-1]:
            events_seen.append(await stream.next())
        assert events_seen[0]["text_output"] == "late 0"
        assert "deadline" in events_seen[-1]["error"]
        assert await stream.next() is None
    await asyncio.to_thread(running.wait_for_log, "words: late was cancelled")


async def test_streams_side_by_side_do_not_stop_a_tensor(running: RunningStack) -> None:
    """Thirty streams wait for the one instance of the model; the server answers others at once, and all are served."""

    async def one(index: int) -> int:
        async with events(running, {"text_input": str(index), "n": 3, "rest_ms": 5.0}) as stream:
            count = 0
            while await stream.next() is not None:
                count += 1
            return count

    streams = [asyncio.create_task(one(index)) for index in range(30)]
    assert (await asyncio.to_thread(ask, running.http_url, get("/v2/models/words"))).status == 200
    assert await asyncio.gather(*streams) == [3] * 30


def test_generate_that_kills_triton_by_its_depth_stops_here(running: RunningStack) -> None:
    """400, and the engine goes on."""
    engines = len(running.logged(": engine process "))
    body = b'{"text_input":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert ask(running.http_url, post(TARGET, body)).status == 400
    assert ask(running.http_url, post("/v2/logging", body)).status == 400
    assert ask(running.http_url, post("/v2/trace/setting", body)).status == 400
    assert ask(running.http_url, post(TARGET, {"text_input": "hi", "n": 1})).status == 200
    assert len(running.logged(": engine process ")) == engines


def test_settings_write_no_file(running: RunningStack, tmp_path: Path) -> None:
    """Neither traces nor a log can be sent anywhere by a client."""
    for target, name in (("/v2/trace/setting", "trace_file"), ("/v2/logging", "log_file")):
        answer = ask(running.http_url, post(target, {name: str(tmp_path / name)}))
        assert answer.status == 501
        assert b"file location can not be updated through network protocol" in answer.body
    assert list(tmp_path.iterdir()) == []


def test_traces_go_where_the_operator_said_once_a_client_asks(running: RunningStack) -> None:
    """And nowhere before."""
    assert not list(running.home.glob("traces.json*"))
    file = running.home / "traces.json.0"  # a file of its own for each trace, since the frequency is 1
    body = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "log_frequency": "1"}
    assert ask(running.http_url, post("/v2/trace/setting", body)).status == 200
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}
    assert ask(running.http_url, post("/v2/models/identity_fp32/infer", {"inputs": [tensor]})).status == 200
    until = time.monotonic() + TIMEOUT_S
    while not (file.exists() and b'"model_name":"identity_fp32"' in file.read_bytes()):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert ask(running.http_url, post("/v2/trace/setting", {"trace_level": ["OFF"]})).status == 200


async def test_stream_whose_engine_dies_ends_at_once_with_the_reason(running: RunningStack) -> None:
    """An event that says so within seconds, and later requests find the engine that came back."""
    async with events(running, {"text_input": "hi", "n": 1000, "rest_ms": 50.0}) as stream:
        await stream.next()
        triton_of(running).kill()
        died = time.monotonic()
        event = await stream.next()
        while event is not None and "error" not in event:
            event = await stream.next()
        assert event is not None
        assert "the connection to the engine broke" in event["error"]
        assert await stream.next() is None
        assert time.monotonic() - died < 5
    tensor = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
    until = time.monotonic() + 60
    while {
        ask(running.http_url, post(TARGET, {"text_input": "hi", "n": 1})).status,
        ask(running.http_url, post("/v2/models/identity_fp32/infer", tensor)).status,
    } != {200}:
        assert time.monotonic() < until
        await asyncio.sleep(0.2)
