"""Asks an MPS control daemon, through NVIDIA's own program: what is between the two is nobody else's."""

import asyncio
import contextlib
import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path

from server.gpu.mps.errors import MpsBusy, MpsError, MpsOtherProtocol, MpsRefused
from server.gpu.mps.options import OUR_PROTOCOL, PROTOCOL_VARIABLE
from server.gpu.mps.presence import PIPE_DIRECTORY, daemon_listens
from server.gpu.mps.status import DaemonStatus, Server, pids_of, state_of

PROGRAM = "nvidia-cuda-mps-control"
ANSWER_S = 5.0
BUSY_PAUSES_S = 0.01, 0.05  # a question takes 2 ms
_BUSY = "Cannot send command"  # the program's words while the daemon answers another one
_THREADS = "get_default_active_thread_percentage"


class Control:
    """The daemon of one pipe directory. Every question leaves two lines in its log.

    program: NVIDIA's, a path or a name on PATH. environ: what it starts with, ours by default.
    """

    def __init__(
        self,
        directory: Path,
        *,
        program: str = PROGRAM,
        environ: Mapping[str, str] | None = None,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.directory = directory
        self.program = program
        inherited = os.environ if environ is None else environ
        self._environ = {**inherited, PIPE_DIRECTORY: str(directory), PROTOCOL_VARIABLE: OUR_PROTOCOL}
        self._answer_s = answer_s

    @property
    def listens(self) -> bool:
        """Whether somebody takes connections on its socket. Returns at once; a daemon that hangs listens, too."""
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
            await asyncio.sleep(random.uniform(*BUSY_PAUSES_S))

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

    async def status(self, *, asks_threads: bool = False) -> DaemonStatus:
        """What it says of itself, its servers and their clients. One that does not answer is down, with the reason."""
        if not self.listens:
            return DaemonStatus(is_up=False, reason=f"no MPS daemon listens in {self.directory}")
        try:
            pids = await self._server_pids()
            servers = tuple([await self._server(pid) for pid in pids])
            threads = await self.threads() if asks_threads else None
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
