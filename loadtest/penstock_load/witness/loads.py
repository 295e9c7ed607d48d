"""CPU, memory and GPU load of the machines, sampled once a second."""

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import NamedTuple, Protocol, Self
from urllib.parse import urlsplit

import aiohttp
import msgspec
import psutil

from penstock_load.clients.client import Endpoint
from penstock_load.results import Load
from penstock_load.witness.gpu import GpuLine
from penstock_load.witness.process_cpu import (
    CpuMeter,
    NotListening,
    Usage,
    is_this_machine,
    meter_of_server,
    meter_of_starter,
)
from penstock_load.witness.readers import MetricsError, default_metrics_url, fetch_page

CPU, MEMORY = "process_cpu_seconds_total", "process_resident_memory_bytes"


class UsageReader(Protocol):
    """Reads CPU seconds so far and resident memory."""

    async def read(self) -> Usage | None:
        """None if it is unknown just now."""
        ...


class ProcessUsage:
    """Of processes on this machine, found again by their port when the server was started again."""

    def __init__(self, meter: CpuMeter, find: Callable[[], CpuMeter]) -> None:
        self._meter = meter
        self._find = find

    async def read(self) -> Usage | None:
        """In a thread: it looks at every process of the machine, some milliseconds."""
        return await asyncio.to_thread(self._read)

    def _read(self) -> Usage | None:
        try:
            return self._meter.read()
        except psutil.Error:
            pass
        try:
            self._meter = self._find()
            return self._meter.read()
        except (NotListening, psutil.Error):
            return None


class PageUsage:
    """Of one process, by its metrics page."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, timeout_s: float) -> None:
        self._session = session
        self._url = url
        self._timeout_s = timeout_s

    async def read(self) -> Usage | None:
        """None if the page has no such counter."""
        try:
            page = await fetch_page(self._session, self._url, timeout_s=self._timeout_s)
        except MetricsError:
            return None
        cpu, memory = page.select(CPU, {}), page.select(MEMORY, {})
        return Usage(sum(cpu.values()), sum(memory.values())) if cpu else None


async def find_usage(
    session: aiohttp.ClientSession, endpoint: Endpoint, *, metrics_url: str, timeout_s: float, server_pid: int = 0
) -> tuple[UsageReader | None, str]:
    """The reader, or None with a sentence that gives the reason. server_pid: as of open_loads."""
    parts = urlsplit(endpoint.http_url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    find = partial(meter_of_starter, server_pid) if server_pid else partial(meter_of_server, host, port)
    try:
        meter = await asyncio.to_thread(find)
    except (NotListening, psutil.Error) as error:
        page = PageUsage(session, metrics_url or default_metrics_url(endpoint.http_url), timeout_s=timeout_s)
        return (page, "") if await page.read() else (None, f"no CPU of the server: {error}, and it does not say {CPU}")
    return ProcessUsage(meter, find), ""


PROGRAM = (sys.executable, "-P", "-m", "penstock_load.witness.gpu")
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
        """Of the last second, how much the busiest card ran kernels; None without a recent reading."""
        line = self._fresh()
        return None if line is None else line.busiest

    def sm_activity(self) -> float | None:
        """Share of SMs with work on the busiest card; None without a recent reading, or if no card reports it."""
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


INTERVAL_S = 1.0
MAX_SAMPLES = 24 * 3600  # samples: a day's
TIMEOUT_S = 5.0
MIB = 1 << 20


class Readers(NamedTuple):
    """The readers; None if unavailable. session: theirs, closed with them. notes: a sentence for each reason."""

    usage: UsageReader | None = None
    gpus: GpuReader | None = None
    session: aiohttp.ClientSession | None = None
    notes: tuple[str, ...] = ()


class LoadSample(NamedTuple):
    """What was read at one moment. busy_s, all_s: seconds of all of this machine's cores together."""

    at_s: float
    usage: Usage | None
    busy_s: float
    all_s: float
    gpu: float | None
    gpu_sm: float | None = None


def load_between(earlier: LoadSample, later: LoadSample) -> Load:
    """What two readings come to, said of the moment in the middle between them.

    A CPU time that fell (the server was started again) is unknown, not negative.
    """
    seconds = later.at_s - earlier.at_s
    all_s = later.all_s - earlier.all_s
    server_cpu = None
    if earlier.usage and later.usage and later.usage.cpu_s >= earlier.usage.cpu_s and seconds > 0:
        server_cpu = (later.usage.cpu_s - earlier.usage.cpu_s) / seconds
    return Load(
        at_s=(earlier.at_s + later.at_s) / 2,
        server_cpu=server_cpu,
        machine_cpu=min(1.0, max(0.0, (later.busy_s - earlier.busy_s) / all_s)) if all_s > 0 else None,
        gpu=later.gpu,
        gpu_sm=later.gpu_sm,
        rss_mib=later.usage.rss_bytes / MIB if later.usage and later.usage.rss_bytes else None,
    )


class Loads:
    """Samples as long as its block lasts. machine_cpu is this machine's, wherever the server is.

    began_s: the run's start on `clock`; every time is since then. notes: a sentence for each thing that is unreadable.
    """

    def __init__(
        self,
        readers: Readers,
        *,
        began_s: float = 0.0,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.notes = readers.notes
        self._readers = readers
        self._began_s = began_s
        self._interval_s = interval_s
        self._clock = clock
        self._samples: deque[Load] = deque(maxlen=MAX_SAMPLES)
        self._sampling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._sampling = asyncio.create_task(self._sample())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sampling:
            self._sampling.cancel()
            await asyncio.gather(self._sampling, return_exceptions=True)
        if self._readers.gpus:
            await self._readers.gpus.stop()
        if self._readers.session:
            await self._readers.session.close()

    def between(self, begin_s: float, end_s: float) -> tuple[Load, ...]:
        """The samples of that stretch of the run, oldest first; a day's at most are kept."""
        return tuple(load for load in self._samples if begin_s <= load.at_s < end_s)

    async def server_cpu_s(self) -> float | None:
        """CPU seconds of the server's processes so far: the difference of two readings is what a phase cost."""
        usage = await self._usage()
        return usage.cpu_s if usage else None

    async def moment(self) -> LoadSample:
        """What can be read now."""
        usage = await self._usage()
        times = psutil.cpu_times()
        # The kernel counts the time of virtual machines in user and nice, too.
        virtual_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # plain-english: ok
        all_s = sum(times) - virtual_s
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        gpus = self._readers.gpus
        share, activity = (gpus.share(), gpus.sm_activity()) if gpus else (None, None)
        return LoadSample(self._clock() - self._began_s, usage, all_s - idle_s, all_s, share, activity)

    async def _usage(self) -> Usage | None:
        return await self._readers.usage.read() if self._readers.usage else None

    async def _sample(self) -> None:
        earlier = await self.moment()
        while True:
            await asyncio.sleep(self._interval_s)
            later = await self.moment()
            self._samples.append(load_between(earlier, later))
            earlier = later


async def open_loads(
    endpoint: Endpoint,
    *,
    began_s: float,
    metrics_url: str = "",
    interval_s: float = INTERVAL_S,
    timeout_s: float = TIMEOUT_S,
    server_pid: int = 0,
) -> Loads:
    """A sampler for this server, to be entered with `async with`.

    began_s: the run's start on time.monotonic. server_pid: the process of the server that started this load test; 0:
    this load test is no child of the server, which is then found by its port. If the server's
    usage cannot be read, its loads are None and `notes` says why.
    """
    session, gpus = aiohttp.ClientSession(), GpuReader()
    try:
        usage, note = await find_usage(
            session, endpoint, metrics_url=metrics_url, timeout_s=timeout_s, server_pid=server_pid
        )
        notes = [note] if note else []
        if await asyncio.to_thread(_is_here, endpoint):
            await gpus.start()
            notes += [f"no GPU: {gpus.why}"] if gpus.why else []
        else:
            notes.append("no GPU: the server is on another machine")
    except BaseException:
        await gpus.stop()
        await session.close()
        raise
    return Loads(Readers(usage, gpus, session, tuple(notes)), began_s=began_s, interval_s=interval_s)


def _is_here(endpoint: Endpoint) -> bool:
    try:
        return is_this_machine(urlsplit(endpoint.http_url).hostname or "")
    except NotListening:  # a name without an address: the requests will report it
        return False
