"""What the machines are busy with, sampled once a second: the server's processes, all cores, the GPUs."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self
from urllib.parse import urlsplit

import aiohttp
import psutil

from loadtest.clients.client import Endpoint
from loadtest.results import Load
from loadtest.witness.gpu_reader import GpuReader
from loadtest.witness.process_cpu import NotListening, Usage, is_this_machine
from loadtest.witness.usage import UsageReader, find_usage

INTERVAL_S = 1.0
KEPT = 24 * 3600  # samples: a day's
TIMEOUT_S = 5.0
MIB = 1 << 20


class Readers(NamedTuple):
    """Who reads; None where nobody can. session: theirs, closed with them. notes: why nobody can, a sentence each."""

    usage: UsageReader | None = None
    gpus: GpuReader | None = None
    session: aiohttp.ClientSession | None = None
    notes: tuple[str, ...] = ()


class Moment(NamedTuple):
    """What was read at one moment. busy_s, all_s: seconds of all of this machine's cores together."""

    at_s: float
    usage: Usage | None
    busy_s: float
    all_s: float
    gpu: float | None
    gpu_sm: float | None = None


def load_between(earlier: Moment, later: Moment) -> Load:
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

    began_s: the run's start on `clock`; every time is since then. notes: one sentence for each thing nobody can read.
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
        self._samples: deque[Load] = deque(maxlen=KEPT)
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

    async def moment(self) -> Moment:
        """What can be read now."""
        usage = await self._usage()
        times = psutil.cpu_times()
        all_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)  # guests are users, too
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        gpus = self._readers.gpus
        share, activity = (gpus.share(), gpus.sm_activity()) if gpus else (None, None)
        return Moment(self._clock() - self._began_s, usage, all_s - idle_s, all_s, share, activity)

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
) -> Loads:
    """A sampler for this server, to be entered with `async with`.

    began_s: the run's start on time.monotonic. Where nobody can say what the server uses, its loads are None and
    `notes` says why.
    """
    session, gpus = aiohttp.ClientSession(), GpuReader()
    try:
        usage, note = await find_usage(session, endpoint, metrics_url=metrics_url, timeout_s=timeout_s)
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
    except NotListening:  # a name without an address: the requests will say so
        return False
