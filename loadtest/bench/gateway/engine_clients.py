"""Our HTTP code against the libraries that could replace it: the two clients of an engine, and the HTTP listener.

    python -m loadtest.bench.gateway.engine_clients --json engine-clients.json

grpc: `TritonGrpcClient` over our HTTP/2 connection, and over grpc.aio. http: `TritonHttpClient`, and aiohttp.
listener: `HttpListener`, and plain uvicorn with httptools, which has no limits; both serve the same small ASGI app.

Over Unix sockets. A call has a body of 600 bytes, 150 kB or 600 kB and a deadline; the answer is short. The peer is a
process of its own and its CPU does not count: of a client this process is measured, of a listener the listener's.
A pair is one stretch of each, in random order. Ratios above 1 are in favour of our code (rate: ours by the library's;
CPU time per request: the library's by ours). Rates are of the whole machine and noisy where others work on it;
CPU times much less.
"""

import argparse
import asyncio
import logging
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc
import grpc.aio
import psutil
import uvicorn
import uvloop
import yarl
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loadtest.bench.closed_loop import Call
from loadtest.bench.gateway.before_after import Comparison, Stretch, call_stretch, compare
from loadtest.bench.null_server import NullConnection
from loadtest.bench.report import format_table, present
from loadtest.bench.wire import CHANNEL_OPTIONS, MODEL_INFER, BadAnswer
from penstock.engines.call_options import CallTimeouts
from penstock.engines.triton import grpc_client
from penstock.engines.triton.grpc_client import TritonGrpcClient
from penstock.engines.triton.http_client import TritonHttpClient, parse_engine_url
from penstock.gateway.rest.listener import HttpListener
from penstock.protocol.call import CONNECTION_HEADERS, HOP_BY_HOP, GrpcCall, HttpAnswer, HttpCall, end_to_end
from penstock_load.witness.process_cpu import CpuMeter

GROUPS = ("grpc", "http", "listener")
SIZES = (600, 150_000, 600_000)
CONCURRENCY = (1, 8, 32)
WARM_UP_S, TIMEOUT_S, MAX_CONNECTIONS = 0.3, 30.0, 64
HEAD = ("request", "library", "ours", "ratio, 95 %")
HEADERS = (
    (b"host", b"127.0.0.1:8000"),
    (b"accept", b"*/*"),
    (b"content-type", b"application/octet-stream"),
    (b"inference-header-content-length", b"180"),
    (b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
)


@dataclass(frozen=True, slots=True)
class BenchArm:
    """One implementation. call: gets the body. cpu_s: CPU seconds of the measured process so far."""

    call: Callable[[bytes], Call]
    cpu_s: Callable[[], float]


class AiohttpClient:
    """The `relay` of `TritonHttpClient` over aiohttp, as far as aiohttp passes bytes unchanged."""

    def __init__(self, socket_path: str) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(socket_path, limit=MAX_CONNECTIONS),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def relay(self, call: HttpCall, *, deadline: float | None) -> HttpAnswer:
        url = yarl.URL("http://localhost" + call.target.decode("latin-1"), encoded=True)
        sent = end_to_end(call.headers, CONNECTION_HEADERS)
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in sent]
        async with (
            asyncio.timeout(None if deadline is None else deadline - time.monotonic()),
            self._session.request(call.method, url, data=call.body, headers=headers, allow_redirects=False) as answer,
        ):
            body = await answer.read()
            return HttpAnswer(answer.status, end_to_end(answer.raw_headers, HOP_BY_HOP), body)

    async def aclose(self) -> None:
        await self._session.close()


def grpc_calls(client: TritonGrpcClient) -> Callable[[bytes], Call]:
    """Calls of ModelInfer with a body."""

    def with_body(body: bytes) -> Call:
        request = GrpcCall(MODEL_INFER, body)

        async def call(_: int) -> None:
            answer = await client.relay(request, deadline=time.monotonic() + TIMEOUT_S)
            if answer.code:
                raise BadAnswer(f"ModelInfer answered {answer.code}: {answer.details}")

        return call

    return with_body


def http_calls(client: TritonHttpClient | AiohttpClient) -> Callable[[bytes], Call]:
    """POSTs with a body."""

    def with_body(body: bytes) -> Call:
        request = HttpCall("POST", b"/v2/models/street/infer", HEADERS, body)

        async def call(_: int) -> None:
            answer = await client.relay(request, deadline=time.monotonic() + TIMEOUT_S)
            if answer.status != 200:
                raise BadAnswer(f"the peer answered {answer.status}: {answer.body[:300]!r}")

        return call

    return with_body


@asynccontextmanager
async def arms_of(group: str, folder: Path) -> AsyncIterator[tuple[BenchArm, BenchArm]]:
    """The library's and ours."""
    async with AsyncExitStack() as stack:
        if group == "grpc":
            stack.enter_context(peer_process("engine", folder))
            grpc_client.MAX_HTTP2_MESSAGE_BYTES = sys.maxsize
            address = f"unix:{folder}/grpc"
            own, library = (TritonGrpcClient(address, is_tls=False, timeouts=CallTimeouts()) for _ in range(2))
            library._unary = None
            for each in (own, library):
                stack.push_async_callback(each.aclose)
            yield BenchArm(grpc_calls(library), time.process_time), BenchArm(grpc_calls(own), time.process_time)
        elif group == "http":
            stack.enter_context(peer_process("engine", folder))
            aiohttp_client = AiohttpClient(f"{folder}/http")
            stack.push_async_callback(aiohttp_client.aclose)
            own_calls = http_calls(_http_client(stack, folder / "http"))
            yield BenchArm(http_calls(aiohttp_client), time.process_time), BenchArm(own_calls, time.process_time)
        else:
            arms = []
            for name in ("uvicorn", "ours"):
                process = stack.enter_context(peer_process(name, folder))
                meter = CpuMeter(psutil.Process(process.pid))
                arms.append(BenchArm(http_calls(_http_client(stack, folder / name)), meter.read_s))
            yield arms[0], arms[1]


def _http_client(stack: AsyncExitStack, socket_path: Path) -> TritonHttpClient:
    origin = parse_engine_url(f"unix://{socket_path}")
    client = TritonHttpClient(origin, max_connections=MAX_CONNECTIONS, timeouts=CallTimeouts(), finishes=True)
    stack.push_async_callback(client.aclose)
    return client


async def run(options: argparse.Namespace) -> list[Comparison]:
    """All pairs, case after case. Raises BadAnswer."""
    results: list[Comparison] = []
    for group in options.only:
        with tempfile.TemporaryDirectory() as folder:
            async with arms_of(group, Path(folder)) as arms:
                for size_bytes in options.sizes:
                    for concurrency in options.concurrency:
                        pairs = await _pairs(arms, bytes(size_bytes), concurrency, options)
                        results += compare(f"{group}, {size_bytes} B, {concurrency} at once", *pairs)
                        print(".", end="", file=sys.stderr, flush=True)
    return results


async def _pairs(
    arms: Sequence[BenchArm], body: bytes, concurrency: int, options: argparse.Namespace
) -> tuple[list[Stretch], list[Stretch]]:
    for arm in arms:
        await call_stretch(arm.call(body), arm.cpu_s, concurrency, WARM_UP_S)
    pairs: tuple[list[Stretch], list[Stretch]] = ([], [])
    for _ in range(options.pairs):
        for index in random.sample((0, 1), 2):
            arm = arms[index]
            pairs[index].append(await call_stretch(arm.call(body), arm.cpu_s, concurrency, options.seconds))
    return pairs


# the peer's process


@contextmanager
def peer_process(kind: str, folder: Path) -> "Iterator[subprocess.Popen[str]]":
    """Runs `serve` in a process of its own, which ends with its stdin."""
    command = [sys.executable, "-m", "loadtest.bench.gateway.engine_clients", "--serve", kind, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise BadAnswer(f"the peer process ended with {process.wait()}")
        yield process
        process.terminate()


async def serve(kind: str, folder: Path) -> None:
    """Listens in the folder until stdin ends: an engine's two ports, our listener, or uvicorn's."""
    logging.disable()
    path = folder / kind
    if kind == "engine":
        kept: object = await _serve_engine(folder)
    elif kind == "ours":
        listener = HttpListener(_listened_app, path)
        listener.start()
        kept = listener
    else:
        config = uvicorn.Config(
            _listened_app, uds=str(path), http="httptools", loop="none", ws="none", lifespan="off", log_config=None,
            access_log=False, server_header=False, date_header=False, proxy_headers=False,
        )  # fmt: skip
        kept = asyncio.create_task(uvicorn.Server(config).serve())
    while kind != "engine" and not path.exists():  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    print("serving", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    del kept


async def _serve_engine(folder: Path) -> tuple[asyncio.Server, grpc.aio.Server]:
    http = await asyncio.get_running_loop().create_unix_server(NullConnection, str(folder / "http"))
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    _, service, method = MODEL_INFER.split("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(_answer_grpc)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"unix:{folder}/grpc")
    await server.start()
    return http, server


async def _answer_grpc(_: bytes, __: object) -> bytes:
    return bytes(1000)


async def _listened_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads a body, and answers with its size."""
    body = await Request(scope, receive).body()
    await Response(b'{"size":%d}' % len(body), media_type="application/json")(scope, receive, send)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench.gateway.engine_clients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCY)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of each stretch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    parser.add_argument("--serve", nargs=2, metavar=("KIND", "FOLDER"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    """0 when everything was measured."""
    options = parse_arguments()
    if options.serve:
        uvloop.run(serve(options.serve[0], Path(options.serve[1])))
        return 0
    try:
        results = uvloop.run(run(options))
    except (BadAnswer, ValueError) as error:
        print(f"engine_clients: {error}", file=sys.stderr)
        return 1
    note = f"{options.pairs} pairs of 2 × {options.seconds} s; in the file, before is the library's and after is ours"
    present(results, note, format_table(HEAD, [result.row for result in results]), options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
