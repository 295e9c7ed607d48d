"""One contender measured once: up, warmed, loaded, read, ended. Nothing else of the bench runs meanwhile."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import psutil

from loadtest.bench.closed_loop import Lap
from loadtest.bench.peers.answers import Found, difference
from loadtest.bench.peers.child import Child, running
from loadtest.bench.peers.contenders import Contender
from loadtest.bench.peers.laps import Caller, closed_lap, open_lap
from loadtest.bench.peers.model import ServedModel
from loadtest.bench.wire import BadAnswer, HttpPort
from loadtest.witness.process_cpu import CpuMeter

READY_TIMEOUT_S = 90.0
FIRST_ANSWER_TIMEOUT_S = 20.0
MIB = 1 << 20
_POLL_S = 0.2


class OtherAnswer(Exception):
    """A peer answers other boxes than we do, so it is none; the message is a sentence."""


@dataclass(frozen=True, slots=True)
class Load:
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
class Memory:
    """Of a whole process tree: RSS counts shared pages once a process, PSS shares them out."""

    rss_mib: float
    pss_mib: float
    processes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One round of one contender; CPU in milliseconds an answer, of the server's tree and of the load generator.

    closed: as fast as it goes. light: an open loop at a rate that is the same for all.
    """

    closed: Lap
    light: Lap
    server_ms: float
    client_ms: float
    memory: Memory


@dataclass(frozen=True, slots=True)
class Up:
    """A server that answers."""

    child: Child
    caller: Caller


async def measure(contender: Contender, model: ServedModel, load: Load, *, light_rate: float, seed: int) -> Measured:
    """A round of the contender, started for it and ended after it. Raises NotServing, NotPrepared, BadAnswer."""
    async with _up(contender, model, load) as up:
        memory = await _warm_up(up, load)
        meter = CpuMeter(psutil.Process(up.child.process.pid))
        before = meter.read_s(), time.process_time()
        closed = await closed_lap(up.caller, concurrency=load.concurrency, seconds=load.seconds)
        after = meter.read_s(), time.process_time()
        server, client = ((b - a) * 1000 / max(closed.count, 1) for a, b in zip(before, after, strict=True))
        light = await open_lap(up.caller, rate=light_rate, seconds=load.seconds, seed=seed)
        return Measured(closed, light, server, client, memory)


async def audition(contender: Contender, model: ServedModel, load: Load) -> tuple[list[list[Found]], float]:
    """(what the contender finds in each picture, about how many it answers a second). Raises as measure does."""
    async with _up(contender, model, load) as up:
        boxes = [contender.read(await up.caller.ask(number)) for number in range(len(load.pictures))]
        await _warm_up(up, load)
        lap = await closed_lap(up.caller, concurrency=load.concurrency, seconds=load.warm_up_s)
        return boxes, lap.rate


def check(ours: Sequence[list[Found]], theirs: Sequence[list[Found]], *, name: str, score_threshold: float) -> None:
    """Raises OtherAnswer where a picture's boxes are not the same."""
    for number, (expected, found) in enumerate(zip(ours, theirs, strict=True)):
        if what := difference(expected, found, score_threshold=score_threshold):
            raise OtherAnswer(f"{name} is no peer, because it answers otherwise to picture {number}: {what}")


@contextlib.asynccontextmanager
async def _up(contender: Contender, model: ServedModel, load: Load) -> AsyncIterator[Up]:
    with running(contender, model) as child:
        async with HttpPort(child.url) as port:
            caller = Caller(port, [contender.write(jpeg, model) for jpeg in load.pictures], renew=load.renew)
            await _until_ready(child, caller)
            yield Up(child, caller)


async def _until_ready(child: Child, caller: Caller) -> None:
    """Until a picture is answered: no two servers say in the same way that they are ready."""
    until = time.monotonic() + READY_TIMEOUT_S
    last = "nothing listens"
    while time.monotonic() < until:
        child.family()
        if child.process.poll() is not None:
            raise child.failure(f"ended with {child.process.returncode} while it started")
        try:
            async with asyncio.timeout(FIRST_ANSWER_TIMEOUT_S):
                await caller.ask(0)
                return
        except (BadAnswer, TimeoutError) as error:
            last = str(error) or "no answer"
        await asyncio.sleep(_POLL_S)
    raise child.failure(f"was not ready within {READY_TIMEOUT_S:.0f} s ({last})")


async def _warm_up(up: Up, load: Load) -> Memory:
    """The memory as it is under load, read at the warm-up's end so that reading it costs no measured time."""

    async def read_late() -> Memory:
        await asyncio.sleep(load.warm_up_s * 0.8)
        return await asyncio.to_thread(memory_of, up.child.family())

    lap, memory = await asyncio.gather(
        closed_lap(up.caller, concurrency=load.concurrency, seconds=load.warm_up_s), read_late()
    )
    if not lap.count:
        raise up.child.failure(f"answered nothing in {load.warm_up_s} s of warm-up")
    return memory


def memory_of(processes: Sequence[psutil.Process]) -> Memory:
    """Of these processes, as far as they live."""
    rss = pss = count = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            full = process.memory_full_info()
            rss, pss, count = rss + full.rss, pss + full.pss, count + 1
    return Memory(rss / MIB, pss / MIB, count)
