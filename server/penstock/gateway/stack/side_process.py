"""SideProcess: a child process of the stack, such as the console, that is restarted with backoff when it exits."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence

from penstock.engines.triton.supervisor import RestartBackoff
from penstock.logs import get_logger

log = get_logger("stack")
STOP_TIMEOUT_S = 10.0


class SideProcess:
    """Runs a command until it is stopped. If the command exits, the stack keeps running.

    name: for the log. descriptors: open files that it inherits, such as listening sockets.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
        stop_timeout_s: float = STOP_TIMEOUT_S,
    ) -> None:
        self._name, self._command, self._descriptors = name, tuple(command), tuple(descriptors)
        self._environment, self._stop_timeout_s = environment, stop_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """PID of the process; None while it is not running."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def run(self) -> None:
        """Runs until `stop`. Restarts the command whenever it exits."""
        backoff = RestartBackoff()
        while not self._stopping.is_set():
            backoff.live(time.monotonic())
            code = await self._run_once()
            if self._stopping.is_set():
                return
            self.restarts += 1
            pause_s = backoff.next_delay_s(time.monotonic())
            log.error(f"the {self._name} exited; restarting it", code=code, pause_s=round(pause_s, 2))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()

    async def _run_once(self) -> int:
        environment = dict(os.environ) if self._environment is None else dict(self._environment)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                env=environment,
                pass_fds=self._descriptors,
                start_new_session=True,
            )
        except OSError as error:
            log.error(f"the {self._name} cannot be started", reason=error.strerror)
            return -1
        if self._stopping.is_set():  # `stop` was called during the start
            self._process.terminate()
        return await self._process.wait()

    async def stop(self) -> None:
        """Sends SIGTERM; after stop_timeout_s, SIGKILL to the process and its children. `run` then returns."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(self._stop_timeout_s):
                await process.wait()
        except TimeoutError:
            log.error(f"the {self._name} did not stop in time; killed", timeout_s=self._stop_timeout_s)
            self.kill()

    def kill(self) -> None:
        """Kills the process and its children. `run` then returns."""
        self._stopping.set()
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
