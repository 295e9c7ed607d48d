"""What the gateway knows of its cards: the process that asks NVML, held and started again, and what it said last."""

import asyncio
import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from server.gpu.telemetry.health import CardHealth
from server.gpu.telemetry.line import CardLoad, Line
from server.gpu.telemetry.sampler import FIRST_LINE_S, PROGRAM, STOP_S, NoTelemetry, mean_loads
from server.logs import get_logger

log = get_logger("gpu")
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TelemetryOptions:
    """dcgm_url: of a dcgm-exporter to be read instead of GPM, empty for none. Figures are means over window_s.

    silent_s: without a word, the process hangs in the driver and is replaced. again_s: before the next one is started
    where cards were seen, absent_s where none were.
    """

    dcgm_url: str = ""
    interval_s: float = 1.0
    window_s: float = 10.0
    silent_s: float = 15.0
    first_s: float = FIRST_LINE_S
    again_s: float = 5.0
    absent_s: float = 60.0


class TelemetryReader:
    """Run `run()` as one task; every other member may be called from the same event loop at any time."""

    def __init__(
        self,
        options: TelemetryOptions,
        health: CardHealth,
        *,
        program: Sequence[str] = PROGRAM,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        dcgm = ("--dcgm", options.dcgm_url) if options.dcgm_url else ()
        self._command = (*program, "--interval", str(options.interval_s), *dcgm)
        self._clock = clock
        self._lines: deque[Line] = deque(maxlen=max(2, int(options.window_s / options.interval_s) + 2))
        self._told: dict[int, str] = {}
        self._why = ""
        self.health = health

    def loads(self) -> tuple[CardLoad, ...]:
        """Each card's means over the last ten seconds; empty where nobody said anything in them."""
        now = self._clock()
        try:
            return mean_loads(tuple(self._lines), now - self._options.window_s, now)
        except NoTelemetry:
            return ()

    async def run(self) -> None:
        """For ever. Ends by cancellation only."""
        while True:
            await self._hear()
            await asyncio.sleep(self._options.again_s if self.health.cards else self._options.absent_s)

    async def _hear(self) -> None:
        """One process, from its start to its end."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=MAX_LINE_BYTES,
            )
        except OSError as error:
            self._tell_why(f"{sys.executable} cannot be started: {error}")
            return
        try:
            await self._follow(process)
        finally:
            await _end(process)
        await process.wait()  # one that hangs in the kernel: another beside it would hang there, too

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        patience_s = self._options.first_s
        while True:
            try:
                async with asyncio.timeout(patience_s):
                    text = await process.stdout.readline()
            except TimeoutError:
                self._tell_why(f"NVML has not answered for {patience_s:g} s: the driver hangs")
                return
            if not text:
                return
            with contextlib.suppress(msgspec.MsgspecError):
                self._take(msgspec.json.decode(text, type=Line))
            patience_s = self._options.silent_s

    def _take(self, line: Line) -> None:
        self.health.observe(line)
        self._tell(line)
        if line.cards:
            self._lines.append(line)

    def _tell(self, line: Line) -> None:
        """The log: what cards there are, once; what became of them, when it changes."""
        for xid in line.xids:
            log.warning("the driver reports an error of a card", gpu=xid.gpu, xid=xid.number)
        for index, reason in self.health.cards.items():
            before = self._told.get(index)
            if reason and reason != before:
                log.error("GPU is lost", gpu=index, reason=reason)
            elif before:
                log.info("GPU is back", gpu=index)
            self._told[index] = reason
        first = next(iter(line.cards), None)
        self._tell_why(line.why or (first.why_no_activity if first is not None else ""))

    def _tell_why(self, why: str) -> None:
        if why and why != self._why:
            log.info("no GPU activity to show", reason=why)
        self._why = why


async def _end(process: asyncio.subprocess.Process) -> None:
    """Its input closed, then by force; not even that ends one that hangs in the kernel: it is not waited for long."""
    if process.stdin is not None:
        process.stdin.close()
    for is_forced in (False, True):
        if is_forced:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            continue
        return
