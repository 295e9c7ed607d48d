"""Supervises one Triton: starts it, restarts it with backoff, stops it, and removes its remains."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from penstock.engines.run_directory import Reaped, region_prefix
from penstock.engines.triton.endpoints import LOOPBACK, TritonListeners, accepts, answers_live, port_in_use
from penstock.engines.triton.log_parser import Emit
from penstock.engines.triton.process import TritonProcess, start_process
from penstock.engines.triton.runtime import Launch


class EngineState(StrEnum):
    """STARTING: for the first time. RESTARTING: down, or coming back. FAILED and STOPPED are final."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """reason: of the state, one line. restarts: starts after the first. pid: None if it does not run."""

    state: EngineState
    reason: str = ""
    restarts: int = 0
    pid: int | None = None


STABLE_S = 60.0


class RestartBackoff:
    """Exponential backoff from first_s to cap_s, reset after STABLE_S of running. now: monotonic seconds."""

    def __init__(
        self, *, first_s: float = 0.2, cap_s: float = 30.0, uniform: Callable[[], float] = random.random
    ) -> None:
        self._first_s, self._cap_s, self._uniform = first_s, cap_s, uniform
        self._restarts = 0
        self._live_since: float | None = None

    def live(self, now: float) -> None:
        """The process has started to work."""
        self._live_since = now

    def next_delay_s(self, now: float) -> float:
        """The process has ended: seconds to wait before its next start."""
        if self._live_since is not None and now - self._live_since >= STABLE_S:
            self._restarts = 0
        self._live_since = None
        delay_s = min(self._cap_s, self._first_s * 2.0 ** min(self._restarts, 60))
        self._restarts += 1
        return delay_s * (1.0 - 0.2 * self._uniform())


MAX_FAILED_STARTS = 5
_PROBE_INTERVAL_S = 0.05
_SLOW_START_S = 120  # for dozens of PyTorch processes on shared cores; Triton's own limit is 30 s
_PROBE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class TritonOptions:
    """Options of a supervised Triton."""

    engine_id: str  # of the run directory
    repositories: tuple[Path, ...]
    listeners: TritonListeners
    extra_args: tuple[str, ...] = ()  # appended to the command line
    http_threads: int = 8
    exit_timeout_s: int = 30  # Triton's wait for requests in flight at its end
    restart_grace_s: float = 3.0  # the same at a restart
    live_timeout_s: float = 60.0  # maximum duration of a start
    trace_file: Path | None = None  # needed for traces that clients request


def triton_arguments(options: TritonOptions, python_backends: Sequence[str]) -> list[str]:
    """Triton's arguments. It loads no model by itself; regions have the prefix for reap()."""
    prefix = region_prefix(options.engine_id)
    return [
        *(part for path in options.repositories for part in ("--model-repository", str(path))),
        *("--model-control-mode", "explicit"),
        *options.listeners.arguments,
        *("--grpc-http2-max-ping-strikes", "0"),  # allows the gateway's frequent keepalive pings
        *("--http-thread-count", str(options.http_threads)),
        *("--exit-timeout-secs", str(options.exit_timeout_s)),
        *(f"--backend-config={name},shm-region-prefix-name={prefix}" for name in python_backends),
        *((f"--backend-config=torch,stub-timeout-seconds={_SLOW_START_S}",) if "torch" in python_backends else ()),
        *(("--trace-config", f"triton,file={options.trace_file}") if options.trace_file is not None else ()),
        *options.extra_args,
    ]


@dataclass(frozen=True, slots=True)
class _ProcessRun:
    """A run of the process that has ended. is_hopeless: a restart cannot help."""

    reason: str
    was_live: bool = False
    is_hopeless: bool = False


class TritonSupervisor:
    """Call `run()` as a task on the main thread's loop (see `launch`), and all other members on the same loop."""

    def __init__(
        self,
        launch: Launch,
        options: TritonOptions,
        *,
        emit: Emit,  # gets Triton's log
        on_status: Callable[[EngineStatus], None],  # called at each change; must not block
        backoff: RestartBackoff | None = None,
        before_start: Callable[[], Awaitable[None]] | None = None,  # awaited before each start
    ) -> None:
        self._before_start = before_start
        self._launch = launch
        self._options = options
        self._emit = emit
        self._on_status = on_status
        self._backoff = backoff if backoff is not None else RestartBackoff()
        self._status = EngineStatus(EngineState.STARTING)
        self._restarts = 0
        self._was_ever_live = False
        self._requested = asyncio.Event()
        self._restart_reason = ""
        self._restart_grace_s = options.restart_grace_s
        self._stop_grace_s: float | None = None
        self._is_begun = False
        self._over = asyncio.Event()

    @property
    def status(self) -> EngineStatus:
        return self._status

    async def run(self) -> None:
        """Supervises until stop() is called or Triton cannot be started. When cancelled, kills Triton and cleans up."""
        self._is_begun = True
        try:
            await self._supervise()
        except asyncio.CancelledError:
            self._publish(EngineState.STOPPED, "cancelled")
            raise
        finally:
            self._over.set()

    def restart(self, reason: str, *, is_lost: bool = False) -> bool:
        """Ends Triton and starts it after the backoff; False if it is not running. is_lost: kill it at once."""
        if self._status.state is not EngineState.RUNNING or self._requested.is_set():
            return False
        self._restart_reason = reason
        self._restart_grace_s = 0.0 if is_lost else self._options.restart_grace_s
        self._requested.set()
        return True

    async def stop(self, grace_s: float) -> None:
        """Ends Triton for good: SIGTERM, then SIGKILL after grace_s. Returns after the clean-up."""
        self._stop_grace_s = grace_s
        self._requested.set()
        if self._is_begun:
            await self._over.wait()
        else:
            self._publish(EngineState.STOPPED, "stopped")

    async def _supervise(self) -> None:
        failed_starts = 0
        while self._stop_grace_s is None:
            await self._until_it_may_start()
            if self._stop_grace_s is not None:
                break
            run = await self._live_once()
            if self._stop_grace_s is not None:
                break
            failed_starts = 0 if run.was_live else failed_starts + 1
            if not self._was_ever_live and (run.is_hopeless or failed_starts >= MAX_FAILED_STARTS):
                lead = "" if run.is_hopeless else f"{failed_starts} starts failed; the last: "
                self._publish(EngineState.FAILED, lead + run.reason)
                return
            await self._pause(run)
        self._publish(EngineState.STOPPED, "stopped")

    async def _until_it_may_start(self) -> None:
        """Returns early when a stop is requested."""
        if self._before_start is None:
            return
        allowed, asked = asyncio.ensure_future(self._before_start()), asyncio.create_task(self._requested.wait())
        try:
            await asyncio.wait({allowed, asked}, return_when=asyncio.FIRST_COMPLETED)
            if allowed.done():
                allowed.result()
        finally:
            allowed.cancel()
            asked.cancel()

    async def _pause(self, run: _ProcessRun) -> None:
        self._requested.clear()
        self._restart_reason = ""
        self._restart_grace_s = self._options.restart_grace_s
        delay_s = self._backoff.next_delay_s(time.monotonic())
        self._emit(logging.WARNING, "Triton is down", reason=run.reason, next_start_s=f"{delay_s:.2f}")
        self._publish(EngineState.RESTARTING, run.reason)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._requested.wait()
        if self._stop_grace_s is None:
            self._restarts += 1

    async def _live_once(self) -> _ProcessRun:
        unusable = _unusable(self._options)
        if unusable:
            return _ProcessRun(unusable, is_hopeless=True)
        arguments = triton_arguments(self._options, self._launch.python_backends)
        listeners = self._options.listeners
        try:
            listeners.remove_sockets()
            child = await start_process(
                self._launch, arguments, self._options.engine_id, self._emit, inherited=listeners.inherited_descriptors
            )
        except OSError as error:
            return _ProcessRun(f"Triton's process cannot be made: {error}")
        state = EngineState.RESTARTING if self._restarts else EngineState.STARTING
        self._publish(state, self._status.reason, child.pid)
        try:
            reason_ended, was_live = await self._follow(child)
        finally:
            self._report(await child.clean_up())
        return _ProcessRun(reason_ended or child.exit_reason(), was_live)

    async def _follow(self, child: TritonProcess) -> tuple[str, bool]:
        """Why we ended it (empty if it ended by itself), and whether it was ever live."""
        not_live_for = await self._until_live(child)
        if not_live_for or self._is_disturbed(child):
            await self._end(child, not_live_for)
            return not_live_for, False
        self._was_ever_live = True
        self._backoff.live(time.monotonic())
        self._publish(EngineState.RUNNING, "", child.pid)
        await self._disturbance(child, None)
        await self._end(child, self._restart_reason)
        return self._restart_reason, True

    async def _until_live(self, child: TritonProcess) -> str:
        """Why to give up; empty if it is live or has ended, or a stop or restart was requested."""
        options = self._options
        until = time.monotonic() + options.live_timeout_s
        while not self._is_disturbed(child):
            if await _is_live(options.listeners):
                return ""
            if time.monotonic() >= until:
                where = options.listeners.http_url
                return f"Triton did not answer on {where} within {options.live_timeout_s:g} s of its start"
            await self._disturbance(child, _PROBE_INTERVAL_S)
        return ""

    def _is_disturbed(self, child: TritonProcess) -> bool:
        return child.has_exited or self._requested.is_set()

    async def _disturbance(self, child: TritonProcess, timeout_s: float | None) -> None:
        asked = asyncio.create_task(self._requested.wait())
        try:
            await asyncio.wait({child.exit, asked}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()

    async def _end(self, child: TritonProcess, reason: str) -> None:
        """Terminates it and waits for its grace period; `clean_up` kills the rest."""
        if child.has_exited:
            return
        is_terminated = False
        if self._stop_grace_s is None:
            self._publish(EngineState.RESTARTING, reason)
            self._requested.clear()
            if self._restart_grace_s:
                is_terminated = True
                child.terminate()
                await self._disturbance(child, self._restart_grace_s)
        if self._stop_grace_s is not None:  # requested before, or meanwhile
            if not is_terminated:
                child.terminate()
            await asyncio.wait({child.exit}, timeout=self._stop_grace_s)

    def _publish(self, state: EngineState, reason: str, pid: int | None = None) -> None:
        status = EngineStatus(state, reason, self._restarts, pid)
        if status != self._status:
            self._status = status
            self._on_status(status)

    def _report(self, left: Reaped) -> None:
        if left.killed or left.regions:
            processes, regions = len(left.killed), len(left.regions)
            self._emit(logging.INFO, "reaped what Triton left behind", processes=processes, regions=regions)
        if left.survivors:
            self._emit(logging.ERROR, "processes of Triton do not die", pids=",".join(map(str, left.survivors)))


def _unusable(options: TritonOptions) -> str:
    for repository in options.repositories:
        if not repository.is_dir():
            return f"the model repository {repository} is not a folder; make it or name another"
    return port_in_use(LOOPBACK, options.listeners.ports)


async def _is_live(listeners: TritonListeners) -> bool:
    """Whether all three services listen. Triton's metrics service starts last."""
    return await answers_live(listeners.http_url, _PROBE_TIMEOUT_S) and await accepts(
        listeners.metrics_url, _PROBE_TIMEOUT_S
    )
