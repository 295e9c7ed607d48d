"""MPS control daemons: OwnDaemon is a child process, ForeignDaemon is managed by others."""

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.gpu.mps.control import (
    MAX_DIRECTORY_BYTES,
    DaemonStatus,
    MpsControl,
    MpsError,
    MpsOptions,
    MpsOtherProtocol,
)
from penstock.gpu.mps.limits import memory_by_card

PLAN_FILE = "models"  # a line about each model of the stack, for `penstock mps status`
STALE_FILES = ("control", "control_lock", "control_privileged", "log", "nvidia-cuda-mps-control.pid")
FOREIGN_START_TIMEOUT_S = 30.0
_POLL_S = 0.05
_TERM_S = 2.0
_FAULT_SIGNS = ("fault", "exception", "fatal", "error", "exit", "fail")
_ECHO = ("cmd:", "accepting connection", "user did not send")  # log lines of our own commands

Emit = Callable[..., None]


class Daemon(Protocol):
    """A daemon for the supervisor. is_ours: it is started, restarted and stopped here."""

    is_ours: bool
    options: MpsOptions

    async def start(self) -> None:
        """Starts it, or waits until clients may start. Raises MpsError."""

    async def stop(self) -> None:
        """Ends it with its servers, if it is ours."""

    async def status(self) -> DaemonStatus:
        """The current status."""


@dataclass(frozen=True, slots=True)
class DaemonProcess:
    """How the daemon's process is started."""

    program: str
    bond: tuple[str, ...] = ()  # wrapper command that ends it when this process ends
    environ: Mapping[str, str] | None = None  # has the mark by which `clear` finds leftovers
    clear: Callable[[int | None], object] = lambda _: None  # in a thread, before start and after end
    card_count: int = 1  # cards of a limit that names none


class OwnDaemon:
    """A daemon as child process, in the foreground. trouble: called for each line of its log that may be a fault."""

    is_ours = True

    def __init__(
        self, options: MpsOptions, hold: DaemonProcess, *, emit: Emit, trouble: Callable[[], None] = lambda: None
    ) -> None:
        self.options = options
        self.control = MpsControl(options.directory, program=hold.program, environ=hold.environ)
        self.trouble = trouble
        self._hold = hold
        self._emit = emit
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """None if it does not run."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Removes leftovers, starts it, waits until it answers, sets the limits. Raises MpsError; then nothing runs."""
        if self.control.listens:
            raise MpsError(f"an MPS daemon runs in {self.options.directory} already; end it, or name another folder")
        try:
            await asyncio.to_thread(self._hold.clear, None)
            prepare_directory(self.options.directory)
            await self._launch()
            await _until_it_answers(self.control, self.options.start_s, has_ended=lambda: self.pid is None)
            await _set_limits(self.control, self.options, self._hold.card_count)
        except BaseException:
            await self._terminate()
            raise
        self._emit(logging.INFO, "MPS is ready", directory=str(self.options.directory), pid=self.pid or 0)

    async def stop(self) -> None:
        """Sends quit, which gives clients quit_s, then ends it and its servers. No effect if it has ended."""
        if self.pid is not None:
            with contextlib.suppress(MpsError):
                await MpsControl(
                    self.options.directory,
                    program=self._hold.program,
                    environ=self._hold.environ,
                    answer_s=self.options.quit_s + 1.0,
                ).ask(f"quit -t {self.options.quit_s}")
        await self._terminate()

    async def status(self) -> DaemonStatus:
        """Not up if its process has ended, even if its files remain."""
        if self.pid is None:
            how = f" with code {self._process.returncode}" if self._process is not None else ""
            return DaemonStatus(is_up=False, reason=f"the MPS daemon has ended{how}")
        return await self.control.status()

    async def _launch(self) -> None:
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(*self._hold.bond, self._hold.program, "-f"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=self.options.daemon_environ(self._hold.environ or {}),
                start_new_session=True,
            )
        except OSError as error:
            raise MpsError(f"{self._hold.program} cannot be run: {error.strerror}") from error
        self._reading = asyncio.create_task(self._read(self._process))

    async def _terminate(self) -> None:
        process, self._process = self._process, None  # both at once: stop() may come while a restart waits below
        reading, self._reading = self._reading, None
        if process is not None:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TERM_S):
                        await process.wait()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        await asyncio.to_thread(self._hold.clear, process.pid if process is not None else None)
        if process is not None:
            with contextlib.suppress(TimeoutError):  # a process that hangs in the driver survives even SIGKILL
                async with asyncio.timeout(_TERM_S):
                    await process.wait()
        if reading is not None:
            await asyncio.wait({reading}, timeout=_TERM_S)
            reading.cancel()
        with contextlib.suppress(OSError):
            remove_stale_files(self.options.directory)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Copies its log into ours; reports faults and its end at once."""
        if process.stdout is None:
            return
        while line := await process.stdout.readline():
            text = line.decode(errors="replace").strip()
            lowered = text.lower()
            if not text or any(echo in lowered for echo in _ECHO):
                continue
            is_trouble = any(sign in lowered for sign in _FAULT_SIGNS)
            self._emit(logging.WARNING if is_trouble else logging.DEBUG, "MPS says", line=text)
            if is_trouble:
                self.trouble()
        self.trouble()


class ForeignDaemon:
    """A daemon that others manage, such as a sidecar or a service of the node. Only monitored."""

    is_ours = False

    def __init__(self, options: MpsOptions, *, program: str, wait_s: float = FOREIGN_START_TIMEOUT_S) -> None:
        self.options = options
        self.control = MpsControl(options.directory, program=program)
        self._wait_s = wait_s

    async def start(self) -> None:
        """Waits until it answers, because a sidecar may start later. Raises MpsError."""
        for _ in range(max(1, round(self._wait_s / _POLL_S))):
            if self.control.listens:
                break
            await asyncio.sleep(_POLL_S)
        else:
            raise MpsError(
                f"no MPS daemon listens in {self.options.directory} after {self._wait_s:g} s; start it, name its "
                "folder as CUDA_MPS_PIPE_DIRECTORY, or unset that for one of our own"
            )
        await self.control.threads()

    async def stop(self) -> None:
        """No effect: it is managed by others."""

    async def status(self) -> DaemonStatus:
        """The current status."""
        return await self.control.status()


def remove_stale_files(directory: Path) -> None:
    """Removes the files of an ended daemon, each that it can. Raises OSError, the last one."""
    failure = None
    for name in STALE_FILES:
        try:
            (directory / name).unlink(missing_ok=True)
        except OSError as error:
            failure = error
    if failure is not None:
        raise failure


def prepare_directory(directory: Path) -> None:
    """Creates the folder and removes files of a killed daemon. Raises MpsError."""
    if len(str(directory).encode()) > MAX_DIRECTORY_BYTES:
        raise MpsError(f"{directory} is too long a path for MPS's sockets; name a shorter one")
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        (directory / "logs").mkdir(exist_ok=True, mode=0o700)
        remove_stale_files(directory)
    except OSError as error:
        raise MpsError(
            f"{directory} cannot be made ready for an MPS daemon: {error}; name another, or one that is yours"
        ) from error


def limit_commands(options: MpsOptions, card_count: int) -> Sequence[str]:
    """Commands that set the clients' limits in a new daemon; they apply to servers started afterwards."""
    commands = []
    if options.active_thread_percentage:
        commands.append(f"set_default_active_thread_percentage {options.active_thread_percentage:g}")
    for card, size in sorted(memory_by_card(options.pinned_memory, card_count).items()):
        commands.append(f"set_default_device_pinned_mem_limit {card} {size}")
    return commands


def server_program(program: str) -> str:
    """The server's program beside the daemon's, or on PATH; empty if missing, and then no client can be served."""
    beside = Path(program).with_name("nvidia-cuda-mps-server")
    return str(beside) if beside.is_file() else shutil.which("nvidia-cuda-mps-server") or ""


_STOP_TIMEOUT_S = 5.0


async def start_background(options: MpsOptions, program: str, environ: Mapping[str, str], card_count: int) -> None:
    """Starts it, waits until it answers and sets the limits. Raises MpsError and leaves nothing running."""
    control = MpsControl(options.directory, program=program, environ=environ)
    if control.listens:
        raise MpsError(f"an MPS daemon runs in {options.directory} already; penstock mps status shows it")
    prepare_directory(options.directory)
    (options.directory / PLAN_FILE).unlink(missing_ok=True)  # of a stack that was killed
    start_log = options.directory / "logs" / "start.log"  # a pipe would stay open as long as the daemon lives
    with start_log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(program, "-d"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env=options.daemon_environ(environ),
            start_new_session=True,
        )
        code = await _exit_code(process, options.start_s)
    if code is None:
        raise MpsError(f"{program} -d does not return within {options.start_s:g} s: the driver hangs, see dmesg")
    if code:
        raise MpsError(f"{program} -d failed: {start_log.read_text(errors='replace').strip() or code}")
    await _until_it_answers(control, options.start_s)
    try:
        await _set_limits(control, options, card_count)
    except MpsError:
        await stop_background(control, quit_s=0)
        raise


async def _exit_code(process: asyncio.subprocess.Process, max_wait_s: float) -> int | None:
    """Its exit code, or None if it had to be killed. A process that hangs in the driver may survive."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max_wait_s):
            return await process.wait()
    process.kill()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.wait()
    return None


async def stop_background(control: MpsControl, *, quit_s: int) -> None:
    """Sends quit and waits until it has ended. quit_s: for its clients. Raises MpsError."""
    patient = MpsControl(control.directory, program=control.program, answer_s=quit_s + _STOP_TIMEOUT_S)
    await patient.ask(f"quit -t {quit_s}")
    until = time.monotonic() + _STOP_TIMEOUT_S
    while control.listens:
        if time.monotonic() >= until:
            raise MpsError(f"the MPS daemon in {control.directory} got `quit` but still listens; kill it")
        await asyncio.sleep(_POLL_S)
    with contextlib.suppress(OSError):
        remove_stale_files(control.directory)


async def _until_it_answers(
    control: MpsControl, start_s: float, *, has_ended: Callable[[], bool] = lambda: False
) -> None:
    until = time.monotonic() + start_s
    while time.monotonic() < until:
        if has_ended():
            raise MpsError(f"{control.program} ended at once; its lines above say why")
        if control.listens:
            try:
                await control.threads()
                return
            except MpsOtherProtocol:
                raise
            except MpsError:  # it listens before it answers
                pass
        await asyncio.sleep(_POLL_S)
    await control.threads()
    raise MpsError(f"{control.program} does not listen within {start_s:g} s of its start; its logs say why")


async def _set_limits(control: MpsControl, options: MpsOptions, card_count: int) -> None:
    for command in limit_commands(options, card_count):
        await control.ask(command)
