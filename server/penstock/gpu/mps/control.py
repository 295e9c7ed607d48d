"""Queries an MPS control daemon through NVIDIA's nvidia-cuda-mps-control. Also MPS options and errors."""

import asyncio
import contextlib
import os
import random
import re
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class MpsError(Exception):
    """An MPS operation failed. The text is one sentence for the user: the problem and the fix."""


class MpsRefused(MpsError):
    """The control program returned an error."""


class MpsBusy(MpsError):
    """The daemon was busy with other programs for the whole timeout; its state is unknown."""


class MpsOtherProtocol(MpsError):
    """The daemon speaks another protocol version; a retry cannot help."""


class MpsUnavailable(MpsError):
    """MPS cannot run here: no GPU, no control program, or a setting that this card does not support."""


PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"  # NVIDIA's variable, by which daemon and clients find each other
PRESENCE_TTL_S = 30.0  # each check writes two lines to the daemon's log


def daemon_listens(pipe_directory: Path) -> bool:
    """Whether a process accepts connections on the daemon's control socket; even a stopped one may. Does not block."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.setblocking(False)  # a Unix socket connects at once, fails, or would wait for a full backlog
            probe.connect(str(pipe_directory / "control"))
    except OSError:
        return False
    return True


class DaemonPresence:
    """Whether a daemon listens, checked at most every PRESENCE_TTL_S, so that scrapes may be frequent."""

    def __init__(self, pipe_directory: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._pipe_directory = pipe_directory
        self._clock = clock
        self._looked_at: float | None = None
        self._is_up = False

    def is_up(self) -> bool:
        """Whether it listened at the last check."""
        now = self._clock()
        if self._looked_at is None or now - self._looked_at >= PRESENCE_TTL_S:
            self._looked_at, self._is_up = now, daemon_listens(self._pipe_directory)
        return self._is_up


LOG_DIRECTORY = "CUDA_MPS_LOG_DIRECTORY"
LIMIT_VARIABLES = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
PROTOCOL_VARIABLE = "CUDA_MPS_PROTOCOL_VERSION"  # selects the protocol in drivers that support a third one
OUR_PROTOCOL = "2"
VISIBLE_CARDS = "CUDA_VISIBLE_DEVICES"
MAX_DIRECTORY_BYTES = 88  # a Unix socket's path is limited to 107, and the longest name in there is /control_privileged


@dataclass(frozen=True, slots=True)
class MpsOptions:
    """Options of an MPS daemon. directory: for its pipes and log."""

    directory: Path
    active_thread_percentage: float = 0  # of a card's threads per client, 1 to 100; 0 for no limit
    pinned_memory: str = ""  # memory per client, "4G", or by card "0=4G,1=2G"; empty for no limit
    start_s: float = 20.0
    quit_s: int = 5  # for clients to exit when the daemon quits

    def env_vars(self) -> dict[str, str]:
        """The variables that a process needs before its first CUDA call to become a client."""
        return {PIPE_DIRECTORY: str(self.directory), LOG_DIRECTORY: str(self.directory / "logs")}

    def client_environ(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """A client's environment, without numbers in CUDA_VISIBLE_DEVICES: the daemon has renumbered the cards."""
        environ = {**inherited, **self.env_vars()}
        if environ.get(VISIBLE_CARDS, "").replace(",", "").replace(" ", "").isdecimal():
            del environ[VISIBLE_CARDS]
        return environ

    def daemon_environ(self, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The daemon's full environment, without limits: those are set by commands, which report errors."""
        environ = {**inherited, **self.env_vars(), PROTOCOL_VARIABLE: OUR_PROTOCOL}
        for variable in LIMIT_VARIABLES:
            environ.pop(variable, None)
        return environ


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
    return tuple(int(line) for line in answer.splitlines() if line.strip().isdecimal())


PROGRAM = "nvidia-cuda-mps-control"
ANSWER_TIMEOUT_S = 5.0
BUSY_RETRY_S = 0.01, 0.05  # a command takes 2 ms
_BUSY = "Cannot send command"  # the program's text while the daemon serves another one
_THREADS = "get_default_active_thread_percentage"


class MpsControl:
    """Client of the daemon in one pipe directory. Each command leaves two lines in the daemon's log."""

    def __init__(
        self,
        directory: Path,
        *,
        program: str = PROGRAM,
        environ: Mapping[str, str] | None = None,
        answer_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self.directory = directory
        self.program = program
        inherited = os.environ if environ is None else environ
        self._environ = {**inherited, PIPE_DIRECTORY: str(directory), PROTOCOL_VARIABLE: OUR_PROTOCOL}
        self._answer_s = answer_s

    @property
    def listens(self) -> bool:
        """Whether its socket accepts connections; a hanging daemon does, too. Does not block."""
        return daemon_listens(self.directory)

    async def ask(self, command: str) -> str:
        """The daemon's answer. Raises MpsRefused for an error, MpsBusy if it serves others, MpsError for a timeout."""
        clock = asyncio.get_running_loop().time
        until = clock() + self._answer_s
        while True:
            code, answer = await self._once(command)
            if not code:
                return answer
            if _BUSY not in answer:
                raise MpsRefused(f"the MPS daemon at {self.directory} refuses {command!r}: {answer or code}")
            if clock() >= until:
                raise MpsBusy(
                    f"the MPS daemon at {self.directory} has no time for {command!r} within {self._answer_s:g} s: "
                    "others ask it without a pause"
                )
            await asyncio.sleep(random.uniform(*BUSY_RETRY_S))

    async def _once(self, command: str) -> tuple[int, str]:
        process = await self._started()
        try:
            async with asyncio.timeout(self._answer_s):
                out, _ = await process.communicate(f"{command}\n".encode())
        except TimeoutError:
            raise MpsError(
                f"the MPS daemon at {self.directory} does not answer {command!r} within {self._answer_s:g} s; "
                "it hangs: end it and its servers with kill -9, and start it again"
            ) from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        return process.returncode or 0, out.decode(errors="replace").strip()

    async def _started(self) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                self.program,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=self._environ,
            )
        except OSError as error:
            raise MpsError(
                f"{self.program} cannot be run ({error.strerror}); it comes with NVIDIA's driver, and into a "
                "container with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            ) from error

    async def threads(self) -> float:
        """A client's default percentage of a card's threads; also a health check. Raises MpsError, MpsOtherProtocol."""
        answer = await self.ask(_THREADS)
        try:
            return float(answer.split()[-1]) if answer else float("nan")
        except ValueError:
            raise MpsOtherProtocol(
                f"the MPS daemon at {self.directory} answers {answer.splitlines()[0][:80]!r} to {_THREADS}: it speaks "
                f"another protocol; start it with {PROTOCOL_VARIABLE}={OUR_PROTOCOL}"
            ) from None

    async def status(self, *, with_threads: bool = False) -> DaemonStatus:
        """Status of the daemon, its servers and their clients. If it does not answer: not up, with the reason."""
        if not self.listens:
            return DaemonStatus(is_up=False, reason=f"no MPS daemon listens in {self.directory}")
        try:
            pids = await self._server_pids()
            servers = tuple([await self._server(pid) for pid in pids])
            threads = await self.threads() if with_threads else None
            return DaemonStatus(is_up=True, servers=servers, threads=threads)
        except MpsError as error:
            return DaemonStatus(is_up=False, reason=str(error), is_silent=True)

    async def _server_pids(self) -> tuple[int, ...]:
        """Empty if the daemon refuses the list but answers other commands."""
        try:
            return pids_of(await self.ask("get_server_list"))
        except MpsRefused:
            await self.threads()
            return ()

    async def _server(self, pid: int) -> Server:
        """A server that ends during the queries has no clients."""
        state, clients = "", ""
        try:
            state = await self.ask(f"get_server_status {pid}")
            clients = await self.ask(f"get_client_list {pid}")
        except MpsBusy:
            raise
        except MpsError:
            pass
        return Server(pid, state_of(state), pids_of(clients))


def find_program() -> str:
    """The control program's path, or empty."""
    return shutil.which(PROGRAM) or ""
