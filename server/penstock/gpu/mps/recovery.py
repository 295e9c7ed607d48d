"""Decides how to recover MPS when its daemon, its server or a client fails. No I/O, no clock.

A fatal fault of one client ends all clients of that GPU, and the server accepts no new client (CUDA error 807) until
all have exited. Without a daemon, new processes silently share the GPU by time slicing. So clients start only while
`may_start`, and all are restarted together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.gpu.mps.control import DaemonStatus, Server, ServerState

ATTACH_S = 20.0  # without a new client; dozens of processes that start together take a minute
FAULT_TIMEOUT_S = 10.0  # for a server without clients to leave the fault state
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.2, 10.0  # between starts of a daemon that keeps ending
SILENCE_TIMEOUT_S = 15.0  # of a daemon that accepts connections without answering: the machine may be overloaded
MAX_RENEWALS = 3  # of clients that do not attach, in a row


@dataclass(frozen=True, slots=True)
class EngineObservation:
    """The engine's processes."""

    pid: int | None = None  # its main process
    is_running: bool = False
    ours: frozenset[int] = frozenset()  # all its processes
    holding: frozenset[int] = frozenset()  # those with a compute context on the card
    serves: bool = False  # requests succeed


@dataclass(frozen=True, slots=True)
class Observation:
    """One observation of daemon and engine."""

    daemon: DaemonStatus
    engine: EngineObservation = EngineObservation()
    has_our_ids: bool = True  # the daemon's client ids are in our pid namespace

    @property
    def clients(self) -> frozenset[int]:
        """The daemon's clients. If it has other process ids, as many of the processes that hold the card."""
        if self.has_our_ids:
            return self.daemon.clients
        return frozenset(sorted(self.engine.holding)[: len(self.daemon.clients)])


@dataclass(frozen=True, slots=True)
class EndClients:
    """End the engine and all its processes; it starts again when clients may."""

    reason: str
    is_lost: bool  # their results are lost, so they get no grace period


@dataclass(frozen=True, slots=True)
class StartDaemon:
    """End the daemon's remains and start a new one."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """End the stack with this reason."""

    reason: str


class RecoveryEvent(StrEnum):
    """Log message of an event."""

    ATTACHED = "processes compute under MPS"
    CLIENT_ENDED = "an MPS client ended; the others go on"
    DAEMON_AWAITED = "the MPS daemon is gone; what runs goes on, nothing new starts until it is back"
    BESIDE = "processes compute beside MPS"
    RECOVERED = "MPS recovered: every client was restarted and requests are served"


@dataclass(frozen=True, slots=True)
class LogEvent:
    """An event for the log."""

    event: RecoveryEvent
    fields: Mapping[str, float | str] = field(default_factory=dict)
    is_warning: bool = False


Action = EndClients | StartDaemon | Refuse | LogEvent


class RecoveryPolicy:
    """State of one MPS. owns_daemon: it may be restarted here. must_attach: computing without MPS is refused."""

    def __init__(self, *, owns_daemon: bool, must_attach: bool) -> None:
        self._owns_daemon = owns_daemon
        self._must_attach = must_attach
        self.may_start = False
        self.restarts = 0  # of all clients, because of MPS
        self.recovery_s = 0.0  # duration of the last one; 0 before the first
        self.attached: frozenset[int] = frozenset()
        self.beside: frozenset[int] = frozenset()
        self._ended_engine: int | None = None  # it is being ended, so its state is ignored
        self._lost_at: float | None = None
        self._faulty_since: float | None = None
        self._silent_since: float | None = None
        self._holding_since: dict[int, float] = {}
        self._servers: frozenset[int] = frozenset()  # those with clients of ours
        self._was_proven = False
        self._is_awaited = False
        self._most_attached = 0
        self._has_reported_unattached = False
        self._renewals = 0
        self._starts = 0
        self._next_start = 0.0

    @property
    def is_recovering(self) -> bool:
        """Whether clients were lost and the engine has not recovered."""
        return self._lost_at is not None

    def decide(self, now: float, observation: Observation) -> list[Action]:
        """The actions to take now, in this order. now: monotonic seconds."""
        if self._ended_engine is not None and observation.engine.pid != self._ended_engine:
            self._ended_engine = None
        if not observation.daemon.is_up:
            return self._without_daemon(now, observation)
        self._silent_since = None
        faulty = [server for server in observation.daemon.servers if server.state is ServerState.FAULT]
        if faulty:
            return self._in_fault(now, observation, faulty[0])
        self._faulty_since = None
        actions = self._daemon_is_back(now, observation) if self._is_awaited else []
        self.may_start = True
        self._starts = 0 if observation.engine.serves or not self.is_recovering else self._starts
        if self._ended_engine is None and not actions:
            actions = self._attachments(now, observation)
        return actions + self._end_of_recovery(now, observation)

    def _without_daemon(self, now: float, observation: Observation) -> list[Action]:
        self.may_start = False
        self._silent_since = now if self._silent_since is None else self._silent_since
        if observation.daemon.is_silent and now - self._silent_since < SILENCE_TIMEOUT_S:
            return []
        if not self._owns_daemon:
            if self._is_awaited:
                return []
            self._is_awaited = True
            return [LogEvent(RecoveryEvent.DAEMON_AWAITED, {"reason": observation.daemon.reason}, is_warning=True)]
        actions = self._end_clients(now, observation, observation.daemon.reason, is_lost=True)
        if now >= self._next_start:
            pause_s = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0**self._starts)
            self._starts, self._next_start = self._starts + 1, now + pause_s
            actions.append(StartDaemon(observation.daemon.reason))
        return actions

    def _daemon_is_back(self, now: float, observation: Observation) -> list[Action]:
        """Running clients belong to the old daemon's server, and two servers would share the card by time slicing."""
        self._is_awaited = False
        if observation.engine.holding <= observation.clients:
            return []
        return self._end_clients(now, observation, "the MPS daemon is back, and its clients attach anew", is_lost=False)

    def _in_fault(self, now: float, observation: Observation, server: Server) -> list[Action]:
        self.may_start = False
        since = self._faulty_since = now if self._faulty_since is None else self._faulty_since
        reason = f"MPS server {server.pid} is in FAULT: a fatal fault of one client ended all on its GPU"
        actions = self._end_clients(now, observation, reason, is_lost=True)
        if self._owns_daemon and now - since >= FAULT_TIMEOUT_S and not observation.clients & observation.engine.ours:
            self._faulty_since = None
            actions.append(StartDaemon(f"MPS server {server.pid} stays in FAULT without clients"))
        return actions

    def _end_clients(self, now: float, observation: Observation, reason: str, *, is_lost: bool) -> list[Action]:
        """Once per life of the engine. A starting engine has no models, and so no clients."""
        if self._ended_engine is not None or not observation.engine.is_running:
            return []
        self._ended_engine = observation.engine.pid
        self._lost_at = now if self._lost_at is None else self._lost_at
        self.restarts += 1
        self.attached = self.beside = self._servers = frozenset()
        self._holding_since.clear()
        return [EndClients(reason, is_lost)]

    def _attachments(self, now: float, observation: Observation) -> list[Action]:
        engine, clients = observation.engine, observation.clients
        stranded = (self.attached & engine.ours) - clients
        if stranded and not self._servers & {server.pid for server in observation.daemon.servers}:
            return self._end_clients(
                now, observation, "the MPS server has ended, and its clients with it", is_lost=True
            )
        before, self.attached = self.attached, engine.ours & clients
        self._servers = frozenset(server.pid for server in observation.daemon.servers if server.clients)
        self._was_proven |= bool(self.attached)
        self.beside = self._long_beside(now, engine, clients)
        if self.beside:
            return self._not_attached(now, observation)
        self._has_reported_unattached = False
        if self.attached and not self._holding_since:
            self._renewals = 0
        return self._attachment_events(before)

    def _long_beside(self, now: float, engine: EngineObservation, clients: frozenset[int]) -> frozenset[int]:
        """Processes with a card but without MPS for ATTACH_S. The main process counts only if no other is attached."""
        loose = engine.holding - clients
        if self.attached:
            loose -= {engine.pid}
        has_new = len(self.attached) > self._most_attached
        self._most_attached = len(self.attached)
        before = {} if has_new else self._holding_since
        self._holding_since = {pid: before.get(pid, now) for pid in loose}
        return frozenset(pid for pid, since in self._holding_since.items() if now - since >= ATTACH_S)

    def _not_attached(self, now: float, observation: Observation) -> list[Action]:
        numbers = ", ".join(map(str, sorted(self.beside)))
        reason = (
            f"process {numbers} computes beside MPS, by turns with all others; is the daemon of our user, and does it "
            "see the same GPUs?"
        )
        # CUDA falls back for all processes or for none: one unattached process may only have queried its cards.
        is_fallback = not self.attached and self.beside != {observation.engine.pid}
        if self._was_proven and self._renewals < MAX_RENEWALS and is_fallback:
            self._renewals += 1
            return self._end_clients(now, observation, reason, is_lost=False)
        if self._must_attach and is_fallback:
            return [Refuse(reason)]
        if self._has_reported_unattached:
            return []
        self._has_reported_unattached = True
        return [LogEvent(RecoveryEvent.BESIDE, {"pids": numbers}, is_warning=True)]

    def _attachment_events(self, before: frozenset[int]) -> list[Action]:
        gone, new = before - self.attached, self.attached - before
        actions: list[Action] = []
        if gone:
            pids = ",".join(map(str, sorted(gone)))
            actions.append(
                LogEvent(RecoveryEvent.CLIENT_ENDED, {"pids": pids, "clients": len(self.attached)}, is_warning=True)
            )
        if new:
            actions.append(LogEvent(RecoveryEvent.ATTACHED, {"clients": len(self.attached)}))
        return actions

    def _end_of_recovery(self, now: float, observation: Observation) -> list[Action]:
        if self._lost_at is None or self._ended_engine is not None or not observation.engine.serves:
            return []
        self.recovery_s, self._lost_at = now - self._lost_at, None
        return [
            LogEvent(RecoveryEvent.RECOVERED, {"seconds": round(self.recovery_s, 3), "clients": len(self.attached)})
        ]
