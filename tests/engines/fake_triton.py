"""A fake Triton that speaks real HTTP and gRPC on ephemeral ports, and misbehaves on demand.

In the test's own loop (`FakeTriton`), or as a child process to be killed or stopped (`python -m
tests.engines.fake_triton MODE`, which prints its ports as JSON).
"""

import asyncio
import json
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

CHECKOUT = Path(__file__).resolve().parents[2]
SERVICE = "inference.GRPCInferenceService"
JSON_BODY = b'{"outputs": []}'
HEADERS = b"Content-Type: application/json\r\nX-Engine: fake\r\n"


class Mode(StrEnum):
    """gRPC: what becomes of ModelInfer. HTTP: what becomes of any request. Modes of the other port mean NORMAL."""

    NORMAL = "normal"
    SLOW = "slow"  # both: answers when `release` is set
    ERROR = "error"  # both: INTERNAL with a traceback; 500
    GARBAGE = "garbage"  # both: bytes that are no answer
    RESET = "reset"  # HTTP: the connection is reset before an answer
    WRONG_SHAPE = "wrong_shape"
    EMPTY = "empty"  # gRPC: an output of the right shape without a byte, as numpy 2 makes Triton's python backend do
    NO_CONTENT = "no_content"
    OTHER_OUTPUT = "other_output"
    UNKNOWN_DATATYPE = "unknown_datatype"
    NAN = "nan"
    QUEUE_FULL = "queue_full"
    LATE_IN_QUEUE = "late_in_queue"
    LOADING = "loading"
    GAVE_UP = "gave_up"
    ENDING = "ending"  # both: it took SIGTERM, and its models go before it does
    OUT_OF_MEMORY = "out_of_memory"
    CUDA_FAULT = "cuda_fault"  # both: as a model whose CUDA context is broken
    HALF = "half"  # HTTP: half of the announced body, then the end
    CHUNKED = "chunked"
    UNTIL_CLOSE = "until_close"
    INTERIM = "interim"  # HTTP: 100 Continue, then the answer
    TWICE = "twice"  # HTTP: a second, unrequested answer
    STALE = "stale"  # HTTP: closes a connection at its second request


NO_VERSIONS = "Request for unknown model: 'double' has no available versions"
CUDA_FAULT = "RuntimeError: CUDA error: an illegal memory access was encountered"
GRPC_STATUS = {
    Mode.CUDA_FAULT: (grpc.StatusCode.INTERNAL, CUDA_FAULT),
    Mode.ERROR: (
        grpc.StatusCode.INTERNAL,
        "Failed to process the request(s) for model 'double_0', message: ValueError: boom"
        "\n\nAt:\n  /m/model.py(2): execute\n",
    ),
    Mode.QUEUE_FULL: (grpc.StatusCode.UNAVAILABLE, "[request id: 1] Exceeds maximum queue size"),
    Mode.LATE_IN_QUEUE: (grpc.StatusCode.UNAVAILABLE, "Request timeout expired"),
    Mode.LOADING: (grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'double' version 1 is not at ready state"),
    Mode.ENDING: (grpc.StatusCode.NOT_FOUND, NO_VERSIONS),
    Mode.OUT_OF_MEMORY: (
        grpc.StatusCode.INTERNAL,
        "onnx runtime error 6: Non-zero status code returned while running Mul node. Name:'Mul_8702' Status Message: "
        "/workspace/onnxruntime/onnxruntime/core/framework/bfc_arena.cc:368 Failed to allocate memory for requested "
        "buffer of size 2830172160",
    ),
    Mode.GAVE_UP: (grpc.StatusCode.CANCELLED, "the engine gave up"),
}


class FakeTriton:
    """Model `double` (FP32 x → y = 2x) is there; `broken` fails to load; others are unknown."""

    def __init__(self, mode: Mode = Mode.NORMAL, *, grpc_port: int = 0, has_streams: bool = False) -> None:
        self.mode = mode
        self.has_streams = has_streams
        self.release = asyncio.Event()
        self.http_requests: list[bytes] = []
        self.http_connections = 0
        self.grpc_metadata: list[tuple[str, str | bytes]] = []
        self.grpc_methods: list[str] = []
        self.grpc_begun = asyncio.Event()
        self.http_begun = asyncio.Event()
        self.grpc_cancelled = asyncio.Event()
        self.stream_ended = asyncio.Event()  # by half-close, all answered
        self.stream_time_s: float | None = None  # until the deadline that the stream came with
        self.max_rows: int | None = None  # gRPC: more of them are too much for its memory
        self.rows: list[int] = []  # of each ModelInfer, in order
        self.contents: list[bytes] = []  # of its first input, in the same order
        self.http_port = 0
        self.grpc_port = grpc_port

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator["FakeTriton"]:
        """Serves inside the `async with`."""
        grpc_server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)])
        methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            name: self._handler(name) for name in ("ServerLive", "RepositoryIndex", *_ANSWERS, "ModelInfer")
        }
        if self.has_streams:
            methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._stream)
        grpc_server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        self.grpc_port = grpc_server.add_insecure_port(f"127.0.0.1:{self.grpc_port}")
        await grpc_server.start()
        http_server = await asyncio.start_server(self._serve_http, "127.0.0.1", 0)
        self.http_port = http_server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            self.release.set()
            http_server.close()
            await grpc_server.stop(0)

    # gRPC

    def _handler(self, name: str) -> "grpc.RpcMethodHandler[bytes, bytes]":
        async def serve(message: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
            self.grpc_methods.append(name)
            self.grpc_metadata = [(key, value) for key, value in context.invocation_metadata() or ()]
            if name == "ModelInfer":
                return await self._infer(message, context)
            if name == "ServerLive":
                if self.mode is Mode.SLOW:
                    await self.release.wait()
                return service_pb2.ServerLiveResponse(live=True).SerializeToString()
            if name == "RepositoryIndex":
                return _index()
            return await _ANSWERS[name](message, context)

        return grpc.unary_unary_rpc_method_handler(serve)

    async def _infer(self, message: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
        request = service_pb2.ModelInferRequest.FromString(message)
        if request.model_name != "double":
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.model_name}' is not found"
            )
        self.grpc_begun.set()
        for tensor in request.inputs:
            if region := tensor.parameters["shared_memory_region"].string_param:
                words = f"Unable to find shared memory region: '{region}'"
                await context.abort(grpc.StatusCode.NOT_FOUND, words)
        if self.mode is Mode.SLOW:
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.grpc_cancelled.set()
                raise
        rows = request.inputs[0].shape[0]
        self.rows.append(rows)
        self.contents += request.raw_input_contents[:1]
        is_too_much = self.max_rows is not None and rows > self.max_rows
        mode = Mode.OUT_OF_MEMORY if is_too_much else self.mode
        if mode in GRPC_STATUS:
            code, details = GRPC_STATUS[mode]
            await context.abort(code, details, (("engine-key", "engine-value"),))
        context.set_trailing_metadata((("engine-key", "engine-value"),))
        return self._answer(request)

    async def _stream(self, _: object, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        """Each request is answered as ModelInfer answers it, in its turn."""
        self.grpc_metadata = [(key, value) for key, value in context.invocation_metadata() or ()]
        self.stream_time_s = context.time_remaining()
        await context.send_initial_metadata(())
        while isinstance(message := await context.read(), bytes):  # type: ignore[attr-defined]  # not in the stubs
            answer = service_pb2.ModelStreamInferResponse()
            answer.infer_response.ParseFromString(await self._infer(message, context))
            await context.write(answer.SerializeToString())  # type: ignore[attr-defined]  # not in the stubs
        self.stream_ended.set()

    def _answer(self, request: service_pb2.ModelInferRequest) -> bytes:
        if self.mode is Mode.GARBAGE:
            return b"\xff\xff\xff\xff"
        tensor = np.frombuffer(request.raw_input_contents[0], np.float32) * 2
        if self.mode is Mode.NAN:
            tensor = np.full_like(tensor, np.nan)
        answer = service_pb2.ModelInferResponse(model_name="double", model_version="1", id=request.id)
        name = "z" if self.mode is Mode.OTHER_OUTPUT else "y"
        datatype = "FP128" if self.mode is Mode.UNKNOWN_DATATYPE else "FP32"
        shape = [7, 7] if self.mode is Mode.WRONG_SHAPE else request.inputs[0].shape
        answer.outputs.add(name=name, datatype=datatype, shape=shape)
        if self.mode is not Mode.NO_CONTENT:
            answer.raw_output_contents.append(b"" if self.mode is Mode.EMPTY else tensor.tobytes())
        for key, value in request.parameters.items():
            answer.parameters[key].CopyFrom(value)
        return answer.SerializeToString()

    # HTTP

    async def _serve_http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.http_connections += 1
        served = 0
        try:
            while (request := await _read_request(reader)) is not None:
                served += 1
                self.http_requests.append(request)
                self.http_begun.set()
                if not await self._answer_http(request, writer, served):
                    break
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def _answer_http(self, request: bytes, writer: asyncio.StreamWriter, served: int) -> bool:
        """Whether the connection stays."""
        mode = self.mode
        if mode is Mode.SLOW:
            await self.release.wait()
        if mode is Mode.STALE and served > 1:
            return False
        if mode is Mode.RESET:
            _reset(writer)
            return False
        writer.write(_http_answer(mode, is_head=request.startswith(b"HEAD")))
        await writer.drain()
        return mode not in (Mode.HALF, Mode.UNTIL_CLOSE)


def _http_answer(mode: Mode, *, is_head: bool) -> bytes:
    whole = b"HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n" % (HEADERS, len(JSON_BODY))
    body = b"" if is_head else JSON_BODY
    if mode is Mode.ERROR:
        return b'HTTP/1.1 500 Internal Server Error\r\nContent-Length: 16\r\n\r\n{"error":"boom"}'
    if mode is Mode.CUDA_FAULT:
        error = json.dumps({"error": CUDA_FAULT}).encode()
        return b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: %d\r\n\r\n%s" % (len(error), error)
    if mode is Mode.ENDING:
        return b'HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n{"error":"%s"}' % (
            len(NO_VERSIONS) + 12,
            NO_VERSIONS.encode(),
        )
    if mode is Mode.GARBAGE:
        return b"\x00\x01garbage\r\n\r\n"
    if mode is Mode.HALF:
        return whole + body[:5]
    if mode is Mode.CHUNKED:
        return b"HTTP/1.1 200 OK\r\n%sTransfer-Encoding: chunked\r\n\r\n5\r\n%s\r\na\r\n%s\r\n0\r\n\r\n" % (
            HEADERS,
            body[:5],
            body[5:],
        )
    if mode is Mode.UNTIL_CLOSE:
        return b"HTTP/1.1 200 OK\r\n%sConnection: close\r\n\r\n%s" % (HEADERS, body)
    if mode is Mode.INTERIM:
        return b"HTTP/1.1 100 Continue\r\n\r\n" + whole + body
    return whole + body + (whole + body if mode is Mode.TWICE else b"")


async def _read_request(reader: asyncio.StreamReader) -> bytes | None:
    """One request as it stood on the wire; None at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return head + await reader.readexactly(int(value))
    return head


def _reset(writer: asyncio.StreamWriter) -> None:
    connected = writer.get_extra_info("socket")
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _index() -> bytes:
    index = service_pb2.RepositoryIndexResponse()
    index.models.add(name="double", version="1", state="READY")
    index.models.add(name="broken", version="1", state="UNAVAILABLE", reason="Internal: boom\n\nAt:\n  /m(1): x\n")
    index.models.add(name="unloaded")
    return index.SerializeToString()


async def _model_ready(message: bytes, _: object) -> bytes:
    request = service_pb2.ModelReadyRequest.FromString(message)
    return service_pb2.ModelReadyResponse(ready=request.name == "double").SerializeToString()


async def _model_metadata(message: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
    request = service_pb2.ModelMetadataRequest.FromString(message)
    if request.name != "double":
        await context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.name}' is not found")
    answer = service_pb2.ModelMetadataResponse(name="double", versions=["1"], platform="python")
    answer.inputs.add(name="x", datatype="FP32", shape=[-1, -1])
    answer.outputs.add(name="y", datatype="FP32", shape=[-1, -1])
    return answer.SerializeToString()


async def _model_config(message: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
    await _model_metadata(message, context)
    answer = service_pb2.ModelConfigResponse()
    answer.config.name = "double"
    answer.config.backend = "python"
    answer.config.max_batch_size = 8
    answer.config.input.add(name="x", data_type="TYPE_FP32", dims=[-1])
    answer.config.output.add(name="y", data_type="TYPE_FP32", dims=[-1])
    answer.config.parameters["network-type"].string_value = "0"
    return answer.SerializeToString()


async def _load(message: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
    name = service_pb2.RepositoryModelLoadRequest.FromString(message).model_name
    if name == "double":
        return b""
    if name == "broken":
        text = (
            "load failed for model 'broken': version 1 is at UNAVAILABLE state: Internal: RuntimeError: no weights\n"
            "second line\n\nAt:\n  /m/model.py(3): initialize\n;\n"
        )
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
    await context.abort(grpc.StatusCode.INTERNAL, f"failed to load '{name}', failed to poll from model repository")
    return b""


async def _unload(_: bytes, __: object) -> bytes:
    return b""


_ANSWERS = {
    "ModelReady": _model_ready,
    "ModelMetadata": _model_metadata,
    "ModelConfig": _model_config,
    "RepositoryModelLoad": _load,
    "RepositoryModelUnload": _unload,
}


@asynccontextmanager
async def child_triton(mode: Mode) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, str]]:
    """A fake in a process of its own, its HTTP and its gRPC address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.engines.fake_triton", mode.value, stdout=asyncio.subprocess.PIPE, cwd=CHECKOUT
    )
    assert process.stdout is not None
    ports = json.loads(await process.stdout.readline())
    try:
        yield process, f"http://127.0.0.1:{ports['http']}", f"127.0.0.1:{ports['grpc']}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _main(mode: Mode) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with FakeTriton(mode, has_streams=True).running() as fake:
        sys.stdout.write(json.dumps({"http": fake.http_port, "grpc": fake.grpc_port}) + "\n")
        sys.stdout.flush()
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(_main(Mode(sys.argv[1])))
