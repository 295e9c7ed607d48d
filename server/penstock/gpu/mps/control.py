"""Queries an MPS control daemon through NVIDIA's nvidia-cuda-mps-control, and detects whether one listens.

Also the options that a daemon is started with, the environment of its clients, and the errors of this package.
"""

import asyncio
import contextlib
import os
import random
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.gpu.mps.status import DaemonStatus, Server, pids_of, state_of


class MpsError(Exception):
    """MPS does not do what is asked of it. Its text is one sentence for the user: what is wrong, what to do."""


class MpsRefused(MpsError):
    """The control program answered, and said no."""


class MpsBusy(MpsError):
    """The daemon answers others, and none of our questions within the time: nothing is known of it."""


class MpsOtherProtocol(MpsError):
    """The daemon answers, and not as we know it: asking again is in vain."""


class MpsUnavailable(MpsError):
    """MPS cannot be had here: no GPU, no control program, or a setting that this card cannot keep."""


PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"  # NVIDIA's variable, by which the daemon and its clients find each other
PRESENCE_TTL_S = 30.0  # each look writes two lines into the daemon's log


def daemon_listens(pipe_directory: Path) -> bool:
    """Whether a process accepts connections on the daemon's control socket. Does not block.

    A dead daemon leaves its files behind, and connecting is refused. One that is stopped, as by SIGSTOP, listens until
    its queue of connections is full.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.setblocking(False)  # a Unix socket connects at once, or is refused, or would wait for a full queue
            probe.connect(str(pipe_directory / "control"))
    except OSError:
        return False
    return True


class DaemonPresence:
    """What was seen of the daemon, at most 30 s ago: a scrape may ask as often as it likes."""

    def __init__(self, pipe_directory: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._pipe_directory = pipe_directory
        self._clock = clock
        self._looked_at: float | None = None
        self._is_up = False

    def is_up(self) -> bool:
        """Whether it listened when it was last looked for."""
        now = self._clock()
        if self._looked_at is None or now - self._looked_at >= PRESENCE_TTL_S:
            self._looked_at, self._is_up = now, daemon_listens(self._pipe_directory)
        return self._is_up


LOG_DIRECTORY = "CUDA_MPS_LOG_DIRECTORY"
LIMIT_VARIABLES = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
PROTOCOL_VARIABLE = "CUDA_MPS_PROTOCOL_VERSION"  # of drivers that know a third one, with other commands, on request
OUR_PROTOCOL = "2"
VISIBLE_CARDS = "CUDA_VISIBLE_DEVICES"
MAX_DIRECTORY_BYTES = 88  # bytes; a Unix socket's path has 107, and the longest one in there is /control_privileged


@dataclass(frozen=True, slots=True)
class MpsOptions:
    """directory: for the daemon's pipes and its log.

    active_thread_percentage: of a card's threads for a client, 1 to 100; 0 for no limit. pinned_memory: of a card's
    memory for a client, "4G", or by card "0=4G,1=2G"; empty for no limit. quit_s: time that clients have to end when
    the daemon quits.
    """

    directory: Path
    active_thread_percentage: float = 0
    pinned_memory: str = ""
    start_s: float = 20.0
    quit_s: int = 5

    def env_vars(self) -> dict[str, str]:
        """What a process needs in its environment, before its first word with CUDA, to become a client."""
        return {PIPE_DIRECTORY: str(self.directory), LOG_DIRECTORY: str(self.directory / "logs")}

    def client_environ(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """A client's whole environment. inherited: that of the daemon.

        Cards that the daemon is shown by their numbers have new ones for its clients, from 0 on: who filters once more
        loses some.
        """
        environ = {**inherited, **self.env_vars()}
        if environ.get(VISIBLE_CARDS, "").replace(",", "").replace(" ", "").isdecimal():
            del environ[VISIBLE_CARDS]
        return environ

    def daemon_environ(self, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The daemon's whole environment, without limits: those are sent as commands, which report wrong values."""
        environ = {**inherited, **self.env_vars(), PROTOCOL_VARIABLE: OUR_PROTOCOL}
        for variable in LIMIT_VARIABLES:
            environ.pop(variable, None)
        return environ


PROGRAM = "nvidia-cuda-mps-control"
ANSWER_TIMEOUT_S = 5.0
BUSY_RETRY_S = 0.01, 0.05  # a question takes 2 ms
_BUSY = "Cannot send command"  # the program's words while the daemon answers another one
_THREADS = "get_default_active_thread_percentage"


class MpsControl:
    """The daemon of one pipe directory. Every question leaves two lines in its log.

    program: NVIDIA's, a path or a name on PATH. environ: what it starts with, ours by default.
    """

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
        """Whether a process accepts connections on its socket. Does not block; a daemon that hangs accepts, too."""
        return daemon_listens(self.directory)

    async def ask(self, command: str) -> str:
        """The daemon's answer. Raises MpsError where there is none within the time, MpsRefused where it says no.

        It answers one program at a time and turns others away: that is no answer, and it is asked again. Raises MpsBusy
        where it never has time.
        """
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
        """The program's exit code and what it prints."""
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
        """A client's default share of a card's threads, percent. Raises MpsError, MpsOtherProtocol.

        It is the daemon's sign of life, and tells which protocol it speaks.
        """
        answer = await self.ask(_THREADS)
        try:
            return float(answer.split()[-1]) if answer else float("nan")
        except ValueError:
            raise MpsOtherProtocol(
                f"the MPS daemon at {self.directory} answers {answer.splitlines()[0][:80]!r} to {_THREADS}: it speaks "
                f"another protocol; start it with {PROTOCOL_VARIABLE}={OUR_PROTOCOL}"
            ) from None

    async def status(self, *, with_threads: bool = False) -> DaemonStatus:
        """What it says of itself, its servers and their clients. One that does not answer is down, with the reason."""
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
        """A daemon that refuses the list, and answers else, has no server."""
        try:
            return pids_of(await self.ask("get_server_list"))
        except MpsRefused:
            await self.threads()
            return ()

    async def _server(self, pid: int) -> Server:
        """One that ends between the questions has no clients."""
        state, clients = "", ""
        try:
            state = await self.ask(f"get_server_status {pid}")
            clients = await self.ask(f"get_client_list {pid}")
        except MpsBusy:
            raise
        except MpsError:
            pass
        return Server(pid, state_of(state), pids_of(clients))


def find_program(search_path: str | None = None) -> str:
    """The control program's path; empty where it is not on the search path (None: this process's PATH)."""
    return shutil.which(PROGRAM, path=search_path) or ""
