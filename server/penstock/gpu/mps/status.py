"""Parses the answers of an MPS control daemon: servers and clients."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class ServerState(StrEnum):
    """State from `get_server_status`; UNKNOWN with drivers before 470. FAULT rejects clients until all have exited."""

    INITIALIZING = "initializing"
    ACTIVE = "active"
    FAULT = "fault"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Server:
    """One nvidia-cuda-mps-server. clients: process ids in our namespace; a pid appears once per context."""

    pid: int
    state: ServerState = ServerState.ACTIVE
    clients: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DaemonStatus:
    """Status of the control daemon. reason: why it is not up."""

    is_up: bool
    reason: str = ""
    is_silent: bool = False  # accepts connections without answering
    servers: tuple[Server, ...] = ()
    threads: float | None = None  # default percentage of a client

    @property
    def clients(self) -> frozenset[int]:
        """Process ids of all servers' clients."""
        return frozenset(pid for server in self.servers for pid in server.clients)


def state_of(answer: str) -> ServerState:
    """The state in the answer."""
    words = set(re.findall(r"[a-z]+", answer.lower()))
    states = (ServerState.FAULT, ServerState.INITIALIZING, ServerState.ACTIVE)
    return next((state for state in states if state.value in words), ServerState.UNKNOWN)


def pids_of(answer: str) -> tuple[int, ...]:
    """The process ids of an answer with one per line."""
    return tuple(int(line) for line in _stripped(answer.splitlines()) if line.isdecimal())


def _stripped(lines: Iterable[str]) -> Iterable[str]:
    return (line.strip() for line in lines)
