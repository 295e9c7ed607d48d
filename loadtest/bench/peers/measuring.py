"""Starts one framework's server, and measures rate, latency and CPU."""

import asyncio
import contextlib
import itertools
import os
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from loadtest.bench.child import Child
from loadtest.bench.closed_loop import Repetition, make_repetition, run_closed_loop
from loadtest.bench.peers.contenders import SERVERS, Contender, FoundObject, ServedModel, ServerAddress, difference
from loadtest.bench.peers.servers.detector import ENVIRONMENT_NAME
from loadtest.bench.wire import BadAnswer, BenchHttp, BenchRequest
from penstock_load.clients.client import Answer
from penstock_load.driver.loops import Asking, OpenLoop, RequestLane
from penstock_load.pacer import send_times
from penstock_load.results import Side, Status
from penstock_load.scenario import Arrivals, Shape
from penstock_load.witness.process_cpu import CpuMeter

END_TIMEOUT_S = 15.0
ORPHAN_TIMEOUT_S = 1.0  # LitServe leaves its workers running at SIGTERM


@contextlib.contextmanager
def running(contender: Contender, model: ServedModel) -> Iterator[tuple[Child, str]]:
    """(the server, its address) for as long as the block, in an empty folder of its own; it may not be ready yet.

    Raises BadAnswer, NotPrepared.
    """
    folder = Path(tempfile.mkdtemp(prefix="peer-"))
    child = None
    try:
        place = ServerAddress(_free_port(), folder, model)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "PYTHON"))}
        own = {
            ENVIRONMENT_NAME: model.card_json,
            "PEER_WORKERS": str(model.instances),
            "HOME": str(folder),
            "TMPDIR": str(folder),
        } | ({} if contender.is_ours else {"PYTHONPATH": str(SERVERS)})
        environ = {**kept, **own, **contender.variables(place)}
        child = Child(contender.name, contender.command(place), folder / "output.log", environ, folder=folder)
        yield child, f"http://127.0.0.1:{place.port}"
    finally:
        if child:
            shared = _shared_memory(child.family())
            child.end(END_TIMEOUT_S, ORPHAN_TIMEOUT_S)
            for path in shared:
                path.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _shared_memory(family: list[psutil.Process]) -> set[Path]:
    """The files under /dev/shm that these processes have mapped."""
    found = set()
    for process in family:
        with contextlib.suppress(psutil.Error, OSError):
            found |= {Path(m.path) for m in process.memory_maps() if m.path.startswith("/dev/shm/")}
    return {path for path in found if path.exists()}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


LEAD_S = 0.1
TIMEOUT_S = 30.0
MAX_IN_FLIGHT = 512


class Caller:
    """Asks one server for the pictures in turn. renew: every so many requests a connection is opened anew, 0 never.

    Workers of a server share one listening socket: the worker that accepts a connection keeps it. Eight permanent
    connections can all end up with one worker, which then does the work of all.
    """

    def __init__(self, port: BenchHttp, requests: Sequence[BenchRequest], *, renew: int) -> None:
        self._port = port
        self._requests = requests
        self._last = [_closing(request) for request in requests]
        self._renew = renew

    async def ask(self, number: int) -> bytes:
        """The answer's body. Raises BadAnswer, also where the connection breaks."""
        is_last = self._renew and number % self._renew == self._renew - 1
        request = (self._last if is_last else self._requests)[number % len(self._requests)]
        try:
            return await self._port.post(request)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BadAnswer(f"{request.path} was not answered: {error or type(error).__name__}") from error

    async def call(self, number: int) -> None:
        """One of a closed loop."""
        await self.ask(number)

    async def send(self, number: int) -> Answer:
        """As the driver wants it: never an exception."""
        try:
            return Answer(Status.OK, received_bytes=len(await self.ask(number)))
        except BadAnswer as error:
            return Answer(Status.FAILED, error=str(error)[:200])

    async def aclose(self) -> None:
        """The connections are the port's."""


async def open_run(caller: Caller, *, rate: float, seconds: float, seed: int) -> Repetition:
    """Poisson arrivals at that rate whatever the answers do; latencies from the intended moments. Raises BadAnswer."""
    epoch_s = time.monotonic() + LEAD_S
    lanes, clock = [RequestLane("image", caller)], time.monotonic
    asking = Asking(round=0, phase="latency", side=Side.TARGET, lanes=lanes, slots=[0], epoch_s=epoch_s, clock=clock)
    moments = (epoch_s + at_s for at_s in send_times(Arrivals(shape=Shape.POISSON, rate=rate), seconds, seed=seed))
    loop = OpenLoop(asking, zip(itertools.count(), moments, strict=False), max_in_flight=MAX_IN_FLIGHT)
    await loop.run(timeout_s=TIMEOUT_S)
    for record in asking.records:
        if record.status is not Status.OK:
            raise BadAnswer(f"at {rate:.0f} requests a second one was not answered: {record.error}")
    return make_repetition([record.done_s - record.intended_s for record in asking.records], seconds)


def _closing(request: BenchRequest) -> BenchRequest:
    return BenchRequest(request.path, {**request.headers, "connection": "close"}, request.body)


READY_TIMEOUT_S = 90.0
FIRST_ANSWER_TIMEOUT_S = 20.0
MIB = 1 << 20
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """What every contender gets. pictures: JPEGs. seconds: of each measured stretch. renew: of Caller.

    light_rate: of the open loop, requests a second; None for half of what the slowest reaches at its audition.
    """

    pictures: tuple[bytes, ...]
    concurrency: int
    warm_up_s: float
    seconds: float
    renew: int
    light_rate: float | None = None


@dataclass(frozen=True, slots=True)
class PeerFigures:
    """One round of one contender; CPU in milliseconds an answer, of the server's tree and of the load generator.

    closed: as fast as it goes. light: an open loop at a rate that is the same for all.
    """

    closed: Repetition
    light: Repetition
    server_ms: float
    client_ms: float
    rss_mib: float
    pss_mib: float
    processes: int


async def measure(
    contender: Contender, model: ServedModel, load: PeerLoad, *, light_rate: float, seed: int
) -> PeerFigures:
    """A round of the contender, started for it and ended after it. Raises BadAnswer, NotPrepared."""
    async with _up(contender, model, load) as (child, caller):
        rss_mib, pss_mib, processes = await _warm_up(child, caller, load)
        meter = CpuMeter(psutil.Process(child.process.pid))
        before = meter.read_s(), time.process_time()
        closed = await run_closed_loop(caller.call, concurrency=load.concurrency, seconds=load.seconds)
        after = meter.read_s(), time.process_time()
        server, client = ((b - a) * 1000 / max(closed.count, 1) for a, b in zip(before, after, strict=True))
        light = await open_run(caller, rate=light_rate, seconds=load.seconds, seed=seed)
        return PeerFigures(closed, light, server, client, rss_mib, pss_mib, processes)


async def audition(contender: Contender, model: ServedModel, load: PeerLoad) -> tuple[list[list[FoundObject]], float]:
    """(what the contender finds in each picture, about how many it answers a second). Raises as measure does."""
    async with _up(contender, model, load) as (child, caller):
        boxes = [contender.read(await caller.ask(number)) for number in range(len(load.pictures))]
        await _warm_up(child, caller, load)
        run = await run_closed_loop(caller.call, concurrency=load.concurrency, seconds=load.warm_up_s)
        return boxes, run.rate


def check(
    ours: Sequence[list[FoundObject]], theirs: Sequence[list[FoundObject]], *, name: str, score_threshold: float
) -> None:
    """Raises BadAnswer if a picture's boxes are not the same."""
    for number, (expected, found) in enumerate(zip(ours, theirs, strict=True)):
        if what := difference(expected, found, score_threshold=score_threshold):
            raise BadAnswer(f"{name} is no peer, because it answers otherwise to picture {number}: {what}")


@contextlib.asynccontextmanager
async def _up(contender: Contender, model: ServedModel, load: PeerLoad) -> AsyncIterator[tuple[Child, Caller]]:
    """The server, answering pictures: no two servers say in the same way that they are ready."""
    with running(contender, model) as (child, url):
        async with BenchHttp(url) as port:
            caller = Caller(port, [contender.write(jpeg, model) for jpeg in load.pictures], renew=load.renew)
            until = time.monotonic() + READY_TIMEOUT_S
            while why := await _why_not_ready(caller):
                child.family()
                if child.process.poll() is not None:
                    raise child.failure(f"ended with {child.process.returncode} while it started")
                if time.monotonic() > until:
                    raise child.failure(f"was not ready within {READY_TIMEOUT_S:.0f} s: {why}")
                await asyncio.sleep(_POLL_S)
            yield child, caller


async def _why_not_ready(caller: Caller) -> str:
    """Empty once a picture is answered."""
    try:
        async with asyncio.timeout(FIRST_ANSWER_TIMEOUT_S):
            await caller.ask(0)
    except BadAnswer as error:
        return str(error)
    except TimeoutError:
        return f"no answer within {FIRST_ANSWER_TIMEOUT_S:.0f} s"
    return ""


async def _warm_up(child: Child, caller: Caller, load: PeerLoad) -> tuple[float, float, int]:
    """Memory under load (see memory_of), read at the warm-up's end so that reading it costs no measured time."""

    async def read_late() -> tuple[float, float, int]:
        await asyncio.sleep(load.warm_up_s * 0.8)
        return await asyncio.to_thread(memory_of, child.family())

    run, memory = await asyncio.gather(
        run_closed_loop(caller.call, concurrency=load.concurrency, seconds=load.warm_up_s), read_late()
    )
    if not run.count:
        raise child.failure(f"answered nothing in {load.warm_up_s} s of warm-up")
    return memory


def memory_of(processes: Sequence[psutil.Process]) -> tuple[float, float, int]:
    """(RSS in MiB, which counts shared pages once a process; PSS, which divides them; living processes)."""
    rss = pss = count = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            full = process.memory_full_info()
            rss, pss, count = rss + full.rss, pss + full.pss, count + 1
    return rss / MIB, pss / MIB, count
