"""Addresses of our Triton: its arguments, free ports, and whether it answers there."""

import asyncio
import contextlib
import random
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.engines.triton.http_client import parse_engine_url
from penstock.network import family_of, listen_hosts

LOOPBACK = "127.0.0.1"
HTTP_SOCKET, GRPC_SOCKET, METRICS_SOCKET = "triton-http.sock", "triton-grpc.sock", "triton-metrics.sock"
_SOCKET_GRPC_PORT = 8001  # Triton appends its gRPC port to the socket's path, too


@dataclass(frozen=True, slots=True)
class TritonListeners:
    """Triton's listeners: Unix sockets in `folder`, or loopback ports, which all local users can reach.

    Triton has no authentication, so `folder` must have mode 0700.
    """

    folder: Path
    http_port: int | None = None
    grpc_port: int | None = None
    metrics_port: int | None = None

    @property
    def ports(self) -> dict[str, int]:
        """The open ports by service."""
        named = {"Triton's HTTP": self.http_port, "its gRPC": self.grpc_port, "its metrics": self.metrics_port}
        return {name: port for name, port in named.items() if port is not None}

    @property
    def http_url(self) -> str:
        return _url(self.http_port, self.folder / HTTP_SOCKET)

    @property
    def grpc_address(self) -> str:
        """A gRPC target: host:port, or unix:PATH."""
        return f"unix:{self._grpc_socket}" if self.grpc_port is None else f"{LOOPBACK}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """The metrics service; its page is /metrics."""
        return _url(self.metrics_port, self.folder / METRICS_SOCKET)

    @property
    def arguments(self) -> list[str]:
        """The listeners' part of Triton's command line."""
        grpc_socket = self.folder / GRPC_SOCKET
        return [
            *_arguments("http", self.http_port, self.folder / HTTP_SOCKET),
            *_arguments("grpc", self.grpc_port, grpc_socket),
            *(("--grpc-port", str(_SOCKET_GRPC_PORT)) if self.grpc_port is None else ()),
            *_arguments("metrics", self.metrics_port, self.folder / METRICS_SOCKET),
        ]

    @property
    def _grpc_socket(self) -> Path:
        return self.folder / f"{GRPC_SOCKET}:{_SOCKET_GRPC_PORT}"

    def remove_sockets(self) -> None:
        """Removes the sockets of a Triton that has ended; the next one cannot bind while they exist."""
        for path in (self.folder / HTTP_SOCKET, self._grpc_socket, self.folder / METRICS_SOCKET):
            path.unlink(missing_ok=True)

    @property
    def inherited_descriptors(self) -> tuple[int, ...]:
        """Descriptors that Triton must inherit for `folder` to be valid there: see socket_folder.reachable."""
        parts = self.folder.parts
        return (int(parts[4]),) if parts[:4] == ("/", "proc", "self", "fd") else ()


def _arguments(service: str, port: int | None, socket: Path) -> tuple[str, ...]:
    if port is None:
        return (f"--{service}-address", f"unix:{socket}")
    return (f"--{service}-address", LOOPBACK, f"--{service}-port", str(port))


def _url(port: int | None, socket: Path) -> str:
    return f"unix://{socket}" if port is None else f"http://{LOOPBACK}:{port}"


LOWEST_PORT = 10_000
DEFAULT_FIRST_EPHEMERAL = 32_768
PORT_TRIES = 64


def pick_free_ports(host: str, count: int) -> tuple[int, ...]:
    """Unused ports below the ephemeral range, each given once while this process lives."""
    candidates = random.SystemRandom().sample(range(LOWEST_PORT, _first_ephemeral_port()), PORT_TRIES)
    with contextlib.ExitStack() as held:
        picked: list[int] = []
        for port in candidates:
            if len(picked) == count:
                break
            with contextlib.suppress(OSError):
                for each in listen_hosts(host):
                    held.enter_context(socket.create_server((each, port), family=family_of(each)))
                _claim(port)
                picked.append(port)
    if len(picked) < count:
        raise OSError(f"{count} free ports on {host} cannot be had")
    return tuple(picked)


def _claim(port: int) -> None:
    """Raises OSError if another process of ours has the port. The claim, an abstract socket, ends with this process."""
    if sys.platform != "linux":
        return
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as claim:
        claim.bind(f"\0penstock-port-{port}")
        claim.detach()


def _first_ephemeral_port() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return DEFAULT_FIRST_EPHEMERAL
    return first if first >= LOWEST_PORT + PORT_TRIES else DEFAULT_FIRST_EPHEMERAL


def port_in_use(host: str, ports: Mapping[str, int]) -> str:
    """The first of these ports (purpose → port) that cannot be bound, as one line; empty if all can."""
    for purpose, port in ports.items():
        try:
            _try_to_bind(host, port)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            return f"port {port} on {host}, wanted for {purpose}: {why}; free it or choose another port"
    return ""


def _try_to_bind(host: str, port: int) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        attempt.bind(address)


async def answers_live(url: str, timeout_s: float, *, question: str = "live") -> bool:
    """Whether `GET /v2/health/<question>` at that http:// or unix:// address returns 200. question: live or ready."""
    host = parse_engine_url(url).authority.decode()
    request = f"GET /v2/health/{question} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            reader, writer = await _connect(url)
            try:
                writer.write(request.encode("ascii"))
                return (await reader.readline()).split(b" ")[1:2] == [b"200"]
            finally:
                writer.close()
    return False


async def accepts(url: str, timeout_s: float) -> bool:
    """Whether a server accepts connections at that http:// or unix:// address."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            _, writer = await _connect(url)
            writer.close()
            return True
    return False


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises OSError."""
    origin = parse_engine_url(url)
    if origin.socket_path:
        return await asyncio.open_unix_connection(origin.socket_path)
    return await asyncio.open_connection(origin.host, origin.port)
