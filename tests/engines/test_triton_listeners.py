"""Where the stack's Triton listens: on Unix sockets by default, on a loopback port if one is given."""

import asyncio
import socket
import time
from pathlib import Path

import pytest

from penstock.engines.triton.client import TritonEngine
from penstock.engines.triton.endpoints import TritonListeners
from penstock.protocol.call import GrpcCall, HttpCall
from penstock.protocol.errors import EngineUnavailable

LIVE = "/inference.GRPCInferenceService/ServerLive"


@pytest.mark.parametrize(
    ("ports", "arguments", "addresses"),
    [
        (
            {},
            "--http-address unix:/run/p/triton-http.sock --grpc-address unix:/run/p/triton-grpc.sock --grpc-port 8001 "
            "--metrics-address unix:/run/p/triton-metrics.sock",
            (
                "unix:///run/p/triton-http.sock",
                "unix:/run/p/triton-grpc.sock:8001",
                "unix:///run/p/triton-metrics.sock",
            ),
        ),
        (
            {"http_port": 9000, "grpc_port": 9001, "metrics_port": 9002},
            "--http-address 127.0.0.1 --http-port 9000 --grpc-address 127.0.0.1 --grpc-port 9001 "
            "--metrics-address 127.0.0.1 --metrics-port 9002",
            ("http://127.0.0.1:9000", "127.0.0.1:9001", "http://127.0.0.1:9002"),
        ),
        (
            {"grpc_port": 9001},
            "--http-address unix:/run/p/triton-http.sock --grpc-address 127.0.0.1 --grpc-port 9001 "
            "--metrics-address unix:/run/p/triton-metrics.sock",
            ("unix:///run/p/triton-http.sock", "127.0.0.1:9001", "unix:///run/p/triton-metrics.sock"),
        ),
    ],
)
def test_listener_arguments_and_client_addresses_agree(
    ports: dict[str, int], arguments: str, addresses: tuple[str, str, str]
) -> None:
    """Each of the three services has a Unix socket unless it is given a port."""
    listeners = TritonListeners(Path("/run/p"), **ports)
    assert " ".join(listeners.arguments) == arguments
    assert (listeners.http_url, listeners.grpc_address, listeners.metrics_url) == addresses
    assert list(listeners.ports.values()) == list(ports.values())


def test_sockets_of_an_ended_triton_are_removed(tmp_path: Path) -> None:
    """Triton does not bind to a path that exists; other files stay."""
    listeners = TritonListeners(tmp_path)
    other = tmp_path / "core-http.sock"
    for path in (listeners.http_url, listeners.metrics_url, f"unix://{listeners.grpc_address.removeprefix('unix:')}"):
        with socket.socket(socket.AF_UNIX) as ended:
            ended.bind(path.removeprefix("unix://"))
    other.touch()
    listeners.remove_sockets()
    listeners.remove_sockets()  # without socket files
    assert list(tmp_path.iterdir()) == [other]


async def test_error_about_an_unreachable_socket_names_no_path(tmp_path: Path) -> None:
    """Clients see the message: it says that the engine cannot be reached, without a path."""
    listeners = TritonListeners(tmp_path)
    deadline = time.monotonic() + 20.0
    async with TritonEngine(
        http_url=listeners.http_url,
        grpc_address=listeners.grpc_address,
        metrics_url=listeners.metrics_url,
        max_connections=1,
    ) as engine:
        small, large = GrpcCall(LIVE, b""), GrpcCall(LIVE, bytes(1 << 20))
        stream = await engine.open_stream("/inference.GRPCInferenceService/ModelStreamInfer", (), deadline=deadline)
        for call in (
            engine.send(HttpCall("GET", b"/v2", (), b""), deadline=deadline),
            engine.send(small, deadline=deadline),
            engine.send(large, deadline=deadline),
            stream.end(),
        ):
            with pytest.raises(EngineUnavailable, match="at its Unix socket") as error:
                await call
            assert str(tmp_path) not in str(error.value)
        assert await engine.metrics() == b""


async def test_metrics_page_of_a_socket_is_the_one_at_metrics(tmp_path: Path) -> None:
    """A unix:// address has no path for the page: Triton serves it at /metrics."""
    listeners = TritonListeners(tmp_path)
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nnv_x\n")
        writer.close()

    server = await asyncio.start_unix_server(serve, listeners.metrics_url.removeprefix("unix://"))
    async with server:
        engine = TritonEngine(
            http_url=listeners.http_url,
            grpc_address=listeners.grpc_address,
            metrics_url=listeners.metrics_url,
            max_connections=1,
        )
        async with engine:
            assert await engine.metrics() == b"nv_x\n"
    assert asked == [b"GET /metrics HTTP/1.1\r\n"]
