"""The addresses that a Triton of ours listens on, as its arguments and as addresses for our clients."""

from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"
HTTP_SOCKET, GRPC_SOCKET, METRICS_SOCKET = "triton-http.sock", "triton-grpc.sock", "triton-metrics.sock"
_SOCKET_GRPC_PORT = 8001  # Triton appends its gRPC port to the socket's path, too


@dataclass(frozen=True, slots=True)
class TritonListeners:
    """Each of Triton's three services listens on a Unix socket in `folder`, or on loopback if it has a port.

    Triton checks no API key. `folder` must have mode 0700, so that other users cannot connect to the sockets; every
    local user can connect to a port.
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
        """Remove the socket files of a Triton that has ended: the next one cannot bind while they exist."""
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
