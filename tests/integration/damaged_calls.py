"""Valid calls whose bytes are damaged on their way to the running stack: HTTP, HTTP/2 frames, and gRPC messages.

Each returns how many cases ended in which way, and raises AssertionError for an unexpected
server error, a traceback in a response, or a connection that does not end.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import grpc
import h2.config
import h2.connection
import h2.events
import h2.exceptions
import numpy as np
from tritonclient.grpc import service_pb2

from tests.support.damage import Run, damaged
from tests.support.stack import RunningStack

SERVICE = "/inference.GRPCInferenceService/"
IDLE_S = 0.5
FRAMES_IDLE_S = 0.15  # gRPC keeps its connections open after an answer
END_S = 20.0
WORKERS = 16
# Expected for damaged headers: unknown compression or transfer encoding, and a deadline that has passed.
ASKED_FOR = {501, 504}
# gRPC itself says INTERNAL or UNAVAILABLE of frames and headers that are none, in its own words; these are not its own.
NOT_ITS_OWN = re.compile(r"internal error|engine|Traceback")
FAILED = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE}
PREFACE_BYTES = 24

Case = Callable[[bytes], Awaitable[str]]


def http_seeds() -> list[bytes]:
    """Requests on a connection of their own, most of which the engine sees when nothing is damaged."""
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2.5]}
    infer = json.dumps({"id": "1", "inputs": [tensor], "outputs": [{"name": "y"}]}).encode()
    binary = {"name": "x", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    head = json.dumps({"inputs": [binary], "parameters": {"binary_data_output": True}}).encode()
    path = "/v2/models/identity_fp32/infer"
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (infer[:9], infer[9:])) + b"0\r\n\r\n"
    length = f"Inference-Header-Content-Length: {len(head)}"
    return [
        request("POST", path, infer, "Content-Type: application/json", "x-request-timeout-ms: 5000"),
        request("POST", path, head + np.ones(2, np.float32).tobytes(), length),
        request("POST", path, None, "Transfer-Encoding: chunked") + chunks,
        request("POST", "/v2/models/identity_fp32/versions/1/generate", b'{"x": [1, 2]}'),
        request("POST", "/v2/models/people/image", b"\xff\xd8\xff\xe0" + bytes(40), "Content-Type: image/jpeg"),
        request("POST", "/v2/repository/index", b'{"ready": true}'),
        request("GET", "/v2/models/identity_fp32/versions/1/config", None),
        request("GET", "/v2/health/ready", None, close=False) + request("GET", "/v2", None),
        request("POST", path, infer, close=False) + request("POST", path, infer),
    ]


def request(method: str, path: str, body: bytes | None, *headers: str, close: bool = True) -> bytes:
    """The request's bytes. body: None if there is none, or if the headers contain its framing."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    lines += ["Connection: close"] if close else []
    lines += [] if body is None else [f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


def message_seeds() -> dict[str, bytes]:
    """A serialised message for each unary method that asks and changes nothing."""
    infer = service_pb2.ModelInferRequest(model_name="identity_fp32", id="1")
    infer.inputs.add(name="x", datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend([1, 2])
    infer.parameters["timeout"].int64_param = 5_000_000
    infer.outputs.add(name="y").parameters["classification"].int64_param = 1
    named = service_pb2.ModelReadyRequest(name="identity_fp32", version="1").SerializeToString()
    words = service_pb2.ModelInferRequest(model_name="identity_bytes")
    words.inputs.add(name="x", datatype="BYTES", shape=[1, 2])
    words.raw_input_contents.append(b"\x01\0\0\0a\x02\0\0\0bc")
    return {
        "ModelInfer": infer.SerializeToString(),
        "ModelInfer words": words.SerializeToString(),
        "ModelReady": named,
        "ModelMetadata": named,
        "ModelConfig": named,
        "ModelStatistics": named,
        "RepositoryIndex": service_pb2.RepositoryIndexRequest(ready=True).SerializeToString(),
    }


def frames_seed(method: str, message: bytes) -> bytes:
    """A whole gRPC call as an HTTP/2 client sends it: preface, settings, headers, one message."""
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    connection.initiate_connection()
    headers = [(":method", "POST"), (":scheme", "http"), (":path", SERVICE + method), (":authority", "a")]
    headers += [("te", "trailers"), ("content-type", "application/grpc"), ("grpc-timeout", "5S")]
    connection.send_headers(1, headers)
    connection.send_data(1, b"\0" + len(message).to_bytes(4, "big") + message, end_stream=True)
    sent: bytes = connection.data_to_send()
    return sent


async def damage_http(stack: RunningStack, run: Run) -> Counter[str]:
    """Raw requests."""
    parts = urlsplit(stack.http_url)
    seeds = http_seeds()

    async def case(data: bytes) -> str:
        answer = await exchanged(parts.hostname or "", parts.port or 0, data)
        statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]
        bad = [status for status in statuses if status >= 500 and status not in ASKED_FOR]
        assert not bad, answer[:600]
        assert b"Traceback" not in answer, answer[:600]
        return " ".join(map(str, statuses)) or "none"

    return await many(run, case, lambda: damaged(run.chance.choice(seeds), run.chance))


async def damage_frames(stack: RunningStack, run: Run) -> Counter[str]:
    """HTTP/2 frames; the preface stays, since without it nothing is looked at."""
    host, _, port = stack.grpc_address.rpartition(":")
    seeds = [frames_seed(name.split()[0], message) for name, message in message_seeds().items()]

    async def case(data: bytes) -> str:
        return said_by_frames(await exchanged(host, int(port), data, idle_s=FRAMES_IDLE_S))

    def damage() -> bytes:
        seed = run.chance.choice(seeds)
        return seed[:PREFACE_BYTES] + damaged(seed[PREFACE_BYTES:], run.chance)

    return await many(run, case, damage)


async def damage_messages(stack: RunningStack, run: Run) -> Counter[str]:
    """Whole gRPC messages with damaged content: the framing is right, so that the gateway and the engine read them."""
    seeds = message_seeds()
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        calls = {name: channel.unary_unary(SERVICE + name.split()[0]) for name in seeds}

        async def case(data: bytes) -> str:
            name, _, message = data.partition(b"\0")
            try:
                await calls[name.decode()](message, timeout=END_S)
            except grpc.aio.AioRpcError as error:
                code, details = error.code(), error.details() or ""
                assert code not in FAILED, (code, details[:600], data)
                assert "Traceback" not in details, details[:600]
                assert code is not grpc.StatusCode.DEADLINE_EXCEEDED or b"timeout" in data, data
                return code.name
            return "OK"

        def damage() -> bytes:
            name = run.chance.choice(list(seeds))
            return name.encode() + b"\0" + damaged(seeds[name], run.chance)

        return await many(run, case, damage)


async def many(run: Run, case: Case, damage: Callable[[], bytes]) -> Counter[str]:
    """The run's cases, some at a time; outcomes counted."""
    outcomes: Counter[str] = Counter()

    async def work() -> None:
        while run.done < run.cases:
            run.step()
            data = damage()
            try:
                outcomes[await case(data)] += 1
            except AssertionError as error:
                raise AssertionError(f"{run}: {data!r}: {error}") from error

    async with asyncio.TaskGroup() as group:
        for _ in range(WORKERS):
            group.create_task(work())
    return outcomes


async def exchanged(host: str, port: int, data: bytes, *, idle_s: float = IDLE_S) -> bytes:
    """The response's bytes. An idle server gets EOF and must then close the connection."""
    async with asyncio.timeout(END_S):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(data)
            answer = await _until_silence(reader, idle_s)
            if writer.can_write_eof():
                writer.write_eof()
            return answer + await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


async def _until_silence(reader: asyncio.StreamReader, idle_s: float) -> bytes:
    received = b""
    try:
        while True:
            async with asyncio.timeout(idle_s):
                piece = await reader.read(1 << 16)
            if not piece:
                return received
            received += piece
    except TimeoutError:
        return received


def said_by_frames(answer: bytes) -> str:
    """The gRPC status in an HTTP/2 server's bytes; "closed" where there is none."""
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding=None))
    connection.initiate_connection()
    connection.send_headers(1, [(":method", "POST"), (":scheme", "http"), (":path", "/"), (":authority", "a")])
    try:
        events = connection.receive_data(answer)
    except h2.exceptions.ProtocolError:
        return "closed"
    for event in events:
        if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
            assert int(headers.get(":status", "200")) < 500, headers
            if "grpc-status" in headers:
                status, text = int(headers["grpc-status"]), headers.get("grpc-message", "")
                has_failed = status in {code.value[0] for code in FAILED}
                assert not (has_failed and NOT_ITS_OWN.search(text)), headers
                return f"status {status}"
    return "closed"
