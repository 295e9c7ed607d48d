"""The line between the stack's parent process and its gateway: one JSON object a line over a socketpair.

Down: the engine's state. Up: that the gateway serves (with its ports), and the plea to restart a sick engine.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

SICK_GRACE_S = 5.0  # what running requests get of a gateway that ends with a sick engine in its own process
MAX_LINE_BYTES = 4 << 20  # GatewayReady names every model that cannot be served, with its reason


@dataclass(frozen=True, slots=True)
class EngineNews:
    """Parent → gateway. is_running: whether the engine's process answered its parent's probe.

    mps_…: of the MPS beside it, where there is one: its processes that are clients, and that compute without it; how
    often all were restarted because of it, and how long the last time took until requests were served again.
    own_engines: by model that hung before, the run directory of the engine process that serves it; empty while the
    process starts. model_generations: how often a model's processes were replaced while the engine ran.
    """

    is_running: bool
    reason: str
    restarts: int
    gateway_restarts: int = 0
    front_restarts: int = 0
    mps_clients: int = 0
    mps_beside: int = 0
    mps_restarts: int = 0
    mps_recovery_s: float = 0.0
    own_engines: dict[str, str] = field(default_factory=dict)
    model_generations: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def readers(news: "Callable[[], EngineNews]", *, has_mps: bool) -> dict[str, Callable[[], float]]:
        """By metric: what the parent tells of its processes, and of the MPS beside the engine, where there is one."""
        found: dict[str, Callable[[], float]] = {
            "engine_restarts_total": lambda: news().restarts,
            "front_restarts_total": lambda: news().front_restarts,
            "gateway_restarts_total": lambda: news().gateway_restarts,
        }
        if has_mps:
            found |= {
                "mps_clients": lambda: news().mps_clients,
                "mps_unattached_processes": lambda: news().mps_beside,
                "mps_restarts_total": lambda: news().mps_restarts,
                "mps_recovery_seconds": lambda: news().mps_recovery_s,
            }
        return found


@dataclass(frozen=True, slots=True)
class GatewayServes:
    """Gateway → parent: the listeners are open, on these ports."""

    http_port: int
    grpc_port: int
    metrics_port: int


@dataclass(frozen=True, slots=True)
class GatewayReady:
    """Gateway → parent: these models serve requests; unavailable: the others, each with the reason.

    engine: its name and version, for display. not_ready: why health checks fail nevertheless; empty if they pass.
    """

    engine: str
    models: list[str]
    unavailable: dict[str, str]
    not_ready: str = ""


@dataclass(frozen=True, slots=True)
class FrontReady:
    """Front → parent: it has heard of the core that the engine is up."""

    index: int


@dataclass(frozen=True, slots=True)
class RestartEngine:
    """Gateway → parent: the engine lives but cannot work."""

    reason: str


@dataclass(frozen=True, slots=True)
class RestartModel:
    """Gateway → parent: restart this model, which hangs or fails; the engine itself works.

    generation: of the processes to restart; see EngineNews.
    """

    model: str
    reason: str
    generation: int = 0
    has_own_engine: bool = False  # whether to start a new engine process for it


News = EngineNews | GatewayServes | GatewayReady | FrontReady | RestartEngine | RestartModel
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (EngineNews, GatewayServes, GatewayReady, FrontReady, RestartEngine, RestartModel)
}


class ControlLine:
    """One end. Reading ends when the other end closes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> "ControlLine":
        """Takes the socket over."""
        end.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=end, limit=MAX_LINE_BYTES))

    def send(self, news: News) -> None:
        """Never blocks; a closed line drops it, since nobody is left to care."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps({"kind": type(news).__name__, **asdict(news)}).encode() + b"\n")

    async def receive(self) -> AsyncIterator[News]:
        try:
            async for line in self._reader:
                fields = json.loads(line)
                yield _KINDS[fields.pop("kind")](**fields)
        except ConnectionError:
            return

    def close(self) -> None:
        self._writer.close()
