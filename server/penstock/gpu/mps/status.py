"""The servers and clients of an MPS control daemon, parsed from its answers."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class ServerState(StrEnum):
    """As `get_server_status` names it. unknown: drivers before 470 do not say.

    fault: a client's fatal fault has ended every client on that card; the server takes no new one (CUDA's error 807)
    until all of them have gone, then starts over: initializing, active.
    """

    INITIALIZING = "initializing"
    ACTIVE = "active"
    FAULT = "fault"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Server:
    """One nvidia-cuda-mps-server. clients: process ids, as this process sees them; one twice has two contexts."""

    pid: int
    state: ServerState = ServerState.ACTIVE
    clients: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DaemonStatus:
    """is_up: the control daemon answers. reason: why not. threads: the default percentage of a client.

    is_silent: it takes connections and does not answer.
    """

    is_up: bool
    reason: str = ""
    is_silent: bool = False
    servers: tuple[Server, ...] = ()
    threads: float | None = None

    @property
    def clients(self) -> frozenset[int]:
        """The processes that are clients of any of its servers."""
        return frozenset(pid for server in self.servers for pid in server.clients)


def state_of(answer: str) -> ServerState:
    """The state that the answer names."""
    words = set(re.findall(r"[a-z]+", answer.lower()))
    states = (ServerState.FAULT, ServerState.INITIALIZING, ServerState.ACTIVE)
    return next((state for state in states if state.value in words), ServerState.UNKNOWN)


def pids_of(answer: str) -> tuple[int, ...]:
    """The process ids of an answer that has one a line."""
    return tuple(int(line) for line in _stripped(answer.splitlines()) if line.isdecimal())


def _stripped(lines: Iterable[str]) -> Iterable[str]:
    return (line.strip() for line in lines)
