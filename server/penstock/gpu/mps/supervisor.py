"""Runs MPS beside one engine: starts the daemon, monitors both, and executes the decisions of RecoveryPolicy."""

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.gpu.mps.control import MpsError
from penstock.gpu.mps.daemon import Daemon, OwnDaemon
from penstock.gpu.mps.recovery import (
    Action,
    EndClients,
    EngineObservation,
    LogEvent,
    Observation,
    RecoveryPolicy,
    Refuse,
    StartDaemon,
)
from penstock.logs import get_logger

PROC = Path("/proc")
_COMPUTES = re.compile(r"/dev/nvidia-uvm(?:\Z| \(deleted\))")  # opened only by CUDA; NVML opens the cards' files


def processes_with_mark(mark: str, proc: Path = PROC) -> frozenset[int]:
    """Processes with this `NAME=value` in their environment, as far as it is readable."""
    wanted = mark.encode()
    return frozenset(
        pid for pid in map(int, filter(str.isdecimal, os.listdir(proc))) if wanted in _environ(proc, pid).split(b"\0")
    )


def processes_using_gpu(pids: frozenset[int], proc: Path = PROC) -> frozenset[int]:
    """Those of the processes for which CUDA has opened a card."""
    return frozenset(pid for pid in pids if any(_COMPUTES.match(target) for target in _open_files(proc, pid)))


def any_exists(pids: frozenset[int], proc: Path = PROC) -> bool:
    """Whether any of them exists in our pid namespace; true for an empty set."""
    return not pids or any((proc / str(pid)).exists() for pid in pids)


def _environ(proc: Path, pid: int) -> bytes:
    try:
        return (proc / str(pid) / "environ").read_bytes()
    except OSError:
        return b""


def _open_files(proc: Path, pid: int) -> Iterator[str]:
    try:
        names = os.listdir(proc / str(pid) / "fd")
    except OSError:
        return
    for name in names:
        try:
            yield os.readlink(proc / str(pid) / "fd" / name)
        except OSError:  # closed meanwhile
            continue


log = get_logger("mps")
OWN_POLL_S = 1.0
FOREIGN_POLL_S = 5.0  # each check leaves lines in its owner's log
RECOVERY_POLL_S = 0.1
SHORTEST_PAUSE_S = 0.02
CALL_PAUSE_S = 1.0  # minimum between checks triggered by the daemon's log


@dataclass(frozen=True, slots=True)
class MpsState:
    """State for the metrics. clients: attached processes of the engine. beside: those that compute without MPS."""

    is_up: bool = False
    clients: int = 0
    beside: int = 0
    restarts: int = 0
    recovery_s: float = 0.0  # of the last one; 0 before the first


@dataclass(frozen=True, slots=True)
class EngineHandle:
    """Operations on the engine."""

    observe: Callable[[bool], Awaitable[EngineObservation]]  # the argument: whether `serves` is needed
    end: Callable[[str, bool], object]  # end all its processes; they start again when clients may
    refuse: Callable[[str], None]  # end the stack
    publish: Callable[[MpsState], None]  # called on each change


class MpsSupervisor:
    """Call `start`, then `run` it as a task. The engine awaits `until_clients_may_start`."""

    def __init__(self, daemon: Daemon, engine: EngineHandle, *, must_attach: bool) -> None:
        self._daemon = daemon
        self._engine = engine
        self._recovery = RecoveryPolicy(owns_daemon=daemon.is_ours, must_attach=must_attach)
        self._wake = asyncio.Event()
        self._observed = asyncio.Condition()
        self._called_at = 0.0
        self._observations = 0
        self._is_observing = False
        self._last = MpsState()
        if isinstance(daemon, OwnDaemon):
            daemon.trouble = self._observe_soon

    def _observe_soon(self) -> None:
        """Rate-limited, because our own checks leave lines in the log that triggers the next check."""
        now = time.monotonic()
        if now - self._called_at >= CALL_PAUSE_S:
            self._called_at = now
            self._wake.set()

    async def start(self) -> None:
        """Returns when the daemon accepts clients. Raises MpsError."""
        await self._daemon.start()
        self._recovery.may_start = True

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._observe()
            pause_s = OWN_POLL_S if self._daemon.is_ours else FOREIGN_POLL_S
            if self._recovery.is_recovering:
                pause_s = RECOVERY_POLL_S
            try:
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(SHORTEST_PAUSE_S)
            self._wake.clear()

    async def until_clients_may_start(self) -> None:
        """Returns after a new check that found daemon and server ready."""
        begun = self._observations + (2 if self._is_observing else 1)
        self._wake.set()
        async with self._observed:
            await self._observed.wait_for(lambda: self._observations >= begun and self._recovery.may_start)

    async def _observe(self) -> None:
        self._is_observing = True
        engine = await self._engine.observe(self._recovery.is_recovering)
        daemon = await self._daemon.status()
        observation = Observation(daemon, engine, has_our_ids=any_exists(daemon.clients))
        for action in self._recovery.decide(time.monotonic(), observation):
            await self._do(action)
        self._publish(is_up=observation.daemon.is_up)
        async with self._observed:
            self._observations, self._is_observing = self._observations + 1, False
            self._observed.notify_all()

    async def _do(self, action: Action) -> None:
        match action:
            case EndClients(reason, is_lost):
                log.error("MPS: every client is restarted", reason=reason)
                self._engine.end(reason, is_lost)
            case StartDaemon(reason):
                log.error("MPS: its daemon is started anew", reason=reason)
                await self._renew_daemon()
            case Refuse(reason):
                self._engine.refuse(reason)
            case LogEvent(event, fields, is_warning):
                (log.warning if is_warning else log.info)(str(event), **fields)

    async def _renew_daemon(self) -> None:
        try:
            await self._daemon.stop()
            await self._daemon.start()
        except MpsError as error:
            log.error("MPS: its daemon does not start", reason=str(error))
        self._wake.set()

    def _publish(self, *, is_up: bool) -> None:
        course = self._recovery
        message = MpsState(is_up, len(course.attached), len(course.beside), course.restarts, course.recovery_s)
        if message != self._last:
            self._last = message
            self._engine.publish(message)
