"""The load of this machine's GPUs, as its own process last said."""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence

import msgspec

from loadtest.witness.gpu import GpuLine

PROGRAM = (sys.executable, "-P", "-m", "loadtest.witness.gpu")
STALE_S = 3.0  # a driver that has not answered for so long says nothing of now
FIRST_LINE_S = 15.0  # NVML's first call after boot initialises every card
STOP_S = 2.0


class GpuReader:
    """Holds the process that asks NVML. Where there is no card it ends at once and `share` stays None."""

    def __init__(self, program: Sequence[str] = PROGRAM, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._program = program
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._has_spoken = asyncio.Event()
        self._said = (float("-inf"), GpuLine())
        self.why = ""

    async def start(self) -> None:
        """Starts it and waits for its first word, 15 s at most; afterwards `why` says if it can read nothing."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._program,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
        except OSError as error:
            self.why = f"{self._program[0]} cannot be started: {error}"
            return
        self._reading = asyncio.create_task(self._read(self._process))
        try:
            async with asyncio.timeout(FIRST_LINE_S):
                await self._has_spoken.wait()
        except TimeoutError:
            self.why = f"NVML said nothing for {FIRST_LINE_S:g} s"

    def share(self) -> float | None:
        """Of the last second, how much the busiest card ran kernels; None where nobody said so lately."""
        line = self._fresh()
        return None if line is None else line.busiest

    def sm_activity(self) -> float | None:
        """How much of the card with most work had work; None where nobody said so lately, or no card tells."""
        line = self._fresh()
        return None if line is None else line.sm_activity

    def _fresh(self) -> GpuLine | None:
        when, line = self._said
        return line if self._clock() - when <= STALE_S else None

    async def stop(self) -> None:
        """Ends the process, by force where it hangs."""
        if self._process is None or self._reading is None:
            return
        if self._process.stdin:
            self._process.stdin.close()
        if not await self._has_ended(self._process):
            self._process.kill()
            await self._has_ended(self._process)  # not even a kill ends one that hangs in the kernel
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    @staticmethod
    async def _has_ended(process: asyncio.subprocess.Process) -> bool:
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            return False
        return True

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for text in process.stdout:
            try:
                line = msgspec.json.decode(text, type=GpuLine)
            except msgspec.MsgspecError:
                continue
            self.why = line.why
            if not line.why:
                self._said = (self._clock(), line)
            self._has_spoken.set()
        if not self._has_spoken.is_set():
            self.why = "the process that asks NVML ended without a word"
            self._has_spoken.set()
