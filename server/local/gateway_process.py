"""The parent's hold on its gateway process: started, started again when it dies or asks for it, told to stop."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from server.backends.triton_backoff import RestartBackoff
from server.local.control import ControlLine, EngineNews, GatewayServes
from server.logs import get_logger

log = get_logger("stack")
EXIT_CANNOT_START = 78
GATEWAY_ENVIRONMENT = {
    "GRPC_ENABLE_FORK_SUPPORT": "0",  # decoders are started by exec; grpc's fork handlers only print warnings
    "PYTHONSAFEPATH": "1",  # also for its children: nothing is imported from the working directory
    "GRPC_VERBOSITY": "NONE",  # its lines would break our log's format; errors are raised as exceptions
}
MAX_FAILED_STARTS = 3  # of a gateway that has never served
CORE, FRONT = "core", "front-"  # what a part is told that it is
GATEWAY_PROGRAM = (sys.executable, "-m", "server")


@dataclass(frozen=True, slots=True)
class Part:
    """Which process of the gateway it is. name: for the log. arguments: what it is told besides its settings.

    died: called when it has ended, and before it is started again.
    """

    name: str = "gateway"
    arguments: tuple[str, ...] = ()
    died: Callable[[], None] = lambda: None


WHOLE = Part()


class GatewayProcess:
    """The gateway as a child: started, restarted with growing pauses when it dies, drained by SIGTERM.

    settings_json: what it reads, kept in run_dir, for its user only. part: which one, where there are several.
    """

    def __init__(
        self,
        settings_json: str,
        run_dir: Path,
        on_news: Callable[[object], None],
        *,
        program: Sequence[str] = GATEWAY_PROGRAM,
        part: Part = WHOLE,
    ) -> None:
        self._settings_file = run_dir / "settings.json"
        self._settings_file.touch(mode=0o600)
        self.settle(settings_json)
        self._program = program
        self._part = part
        self._on_news = on_news
        self._process: asyncio.subprocess.Process | None = None
        self._line: ControlLine | None = None
        self._last_news: EngineNews | None = None
        self._stopping = asyncio.Event()
        self._renewal: asyncio.Task[None] | None = None
        self._has_served = False
        self.restarts = 0

    def settle(self, settings_json: str) -> None:
        """What it reads from its next start on, and every other part with that run_dir."""
        self._settings_file.write_text(settings_json)

    def tell(self, news: EngineNews) -> None:
        """The engine's state, now and for every later gateway process."""
        self._last_news = news
        if self._line is not None:
            self._line.send(replace(news, gateway_restarts=self.restarts))

    async def run(self) -> int:
        """Until stopped, or until it cannot start; its exit code."""
        backoff = RestartBackoff()
        while not self._stopping.is_set():
            backoff.live(time.monotonic())
            code, was_told = await self._run_once()
            self._part.died()
            if self._stopping.is_set():
                # It died of the signal itself: it did not listen for it yet, so it had accepted nothing.
                return 0 if code == -signal.SIGTERM else code
            if code == EXIT_CANNOT_START:
                return code
            pause_s = backoff.next_delay_s(time.monotonic())
            if was_told:
                log.info(
                    f"{self._part.name} ended as it was told to; starting it again",
                    code=code,
                    pause_s=round(pause_s, 2),
                )
            elif self._count_death(code, pause_s):
                return EXIT_CANNOT_START
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
        return 0

    def _count_death(self, code: int, pause_s: float) -> bool:
        """Whether it is to be given up, since it has never served."""
        self.restarts += 1
        if not self._has_served and self.restarts == MAX_FAILED_STARTS:
            log.error(f"{self._part.name} cannot start; the lines above say why", code=code, starts=self.restarts)
            return True
        log.error(
            f"{self._part.name} died; starting it again", code=code, pause_s=round(pause_s, 2), restarts=self.restarts
        )
        return False

    async def _run_once(self) -> tuple[int, bool]:
        """Its exit code, and whether `renew` had it end."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *self._program,
                str(self._settings_file),
                str(theirs.fileno()),
                *self._part.arguments,
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env=os.environ | GATEWAY_ENVIRONMENT,
                start_new_session=True,
            )
        if self._stopping.is_set():  # told so while it was being made
            self._process.terminate()
        self._line = await ControlLine.over(ours)
        if self._last_news is not None:
            self._line.send(replace(self._last_news, gateway_restarts=self.restarts))
        reading = asyncio.create_task(self._read(self._line))
        code = await self._process.wait()
        reading.cancel()
        self._line.close()
        self._line = None
        renewal, self._renewal = self._renewal, None
        if renewal is not None:
            await renewal
        return code, renewal is not None

    async def _read(self, line: ControlLine) -> None:
        async for news in line.receive():
            self._has_served |= isinstance(news, GatewayServes)
            self._on_news(news)

    def renew(self, patience_s: float) -> bool:
        """Have it end, as `stop` does, and start it again. Whether that is begun: not where it ends already."""
        process = self._process
        if self._renewal is not None or process is None or process.returncode is not None:
            return False
        self._renewal = asyncio.create_task(self._end(process, patience_s))
        return True

    def cut_off(self) -> None:
        """Kill it at once, with its children, as one that hangs: a death, after which it is started again."""
        if self._process is not None:
            _kill_with_children(self._process)

    async def stop(self, patience_s: float) -> None:
        """SIGTERM, and SIGKILL when the patience is over. `run` then returns."""
        self._stopping.set()
        if self._process is not None:
            await self._end(self._process, patience_s)

    async def _end(self, process: asyncio.subprocess.Process, patience_s: float) -> None:
        if process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(patience_s):
                await process.wait()
        except TimeoutError:
            log.error(f"{self._part.name} did not stop in time; killed", patience_s=patience_s)
            _kill_with_children(process)

    def kill(self) -> None:
        """At once, with its children."""
        self._stopping.set()
        if self._process is not None:
            _kill_with_children(self._process)


def _kill_with_children(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
