"""One contender measured once: up, checked, warmed, loaded, read, ended. Nothing else of the bench runs meanwhile."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import psutil

from loadtest.bench.closed_loop import Call, Lap, run_closed_loop
from loadtest.bench.peers.answers import Found, difference
from loadtest.bench.peers.child import Child, running
from loadtest.bench.peers.contenders import Contender
from loadtest.bench.peers.model import ServedModel
from loadtest.bench.wire import BadAnswer, HttpPort
from loadtest.witness.process_cpu import CpuMeter

READY_TIMEOUT_S = 90.0
MIB = 1 << 20
_POLL_S = 0.2


class OtherAnswer(Exception):
    """A peer answers other boxes than we do, so it is none; the message is a sentence."""


@dataclass(frozen=True, slots=True)
class Load:
    """What every contender gets. pictures: JPEGs. seconds: of the measured stretch."""

    pictures: tuple[bytes, ...]
    concurrency: int
    warm_up_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Of a whole process tree: RSS counts shared pages once a process, PSS shares them out."""

    rss_mib: float
    pss_mib: float
    processes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One lap of one contender; CPU in milliseconds an answer, of the server's tree and of the load generator."""

    lap: Lap
    server_ms: float
    client_ms: float
    memory: Memory


async def measure(contender: Contender, model: ServedModel, load: Load) -> Measured:
    """A lap of the contender, started for it and ended after it. Raises NotServing, NotPrepared, BadAnswer."""
    async with _asked(contender, model, load.pictures) as (child, call):
        memory = await _warm_up(child, call, load)
        meter = CpuMeter(psutil.Process(child.process.pid))
        before = meter.read_s(), time.process_time()
        lap = await run_closed_loop(call, concurrency=load.concurrency, seconds=load.seconds)
        after = meter.read_s(), time.process_time()
        server, client = ((b - a) * 1000 / max(lap.count, 1) for a, b in zip(before, after, strict=True))
        return Measured(lap, server, client, memory)


async def boxes_of(contender: Contender, model: ServedModel, pictures: Sequence[bytes]) -> list[list[Found]]:
    """What the contender finds in each picture. Raises NotServing, NotPrepared, BadAnswer."""
    with running(contender, model) as child:
        async with HttpPort(child.url) as port:
            requests = [contender.write(picture, model) for picture in pictures]
            await _until_ready(child, port, contender, model, pictures[0])
            return [contender.read(await port.post(request)) for request in requests]


def check(ours: Sequence[list[Found]], theirs: Sequence[list[Found]], *, name: str, score_threshold: float) -> None:
    """Raises OtherAnswer where a picture's boxes are not the same."""
    for number, (expected, found) in enumerate(zip(ours, theirs, strict=True)):
        if what := difference(expected, found, score_threshold=score_threshold):
            raise OtherAnswer(f"{name} is no peer, because it answers otherwise to picture {number}: {what}")


@contextlib.asynccontextmanager
async def _asked(contender: Contender, model: ServedModel, pictures: Sequence[bytes]):  # type: ignore[no-untyped-def]
    with running(contender, model) as child:
        async with HttpPort(child.url) as port:
            requests = [contender.write(picture, model) for picture in pictures]
            await _until_ready(child, port, contender, model, pictures[0])

            async def call(number: int) -> None:
                await port.post(requests[number % len(requests)])

            yield child, call


async def _until_ready(child: Child, port: HttpPort, contender: Contender, model: ServedModel, picture: bytes) -> None:
    """Until a picture is answered: no two servers say in the same way that they are ready."""
    request = contender.write(picture, model)
    until = time.monotonic() + READY_TIMEOUT_S
    last = "nothing listens"
    while time.monotonic() < until:
        child.family()
        if child.process.poll() is not None:
            raise child.failure(f"ended with {child.process.returncode} while it started")
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + until - time.monotonic()):
                await port.post(request)
                return
        except BadAnswer as error:
            last = str(error)
        except (aiohttp.ClientError, TimeoutError):
            pass
        await asyncio.sleep(_POLL_S)
    raise child.failure(f"was not ready within {READY_TIMEOUT_S:.0f} s ({last})")


async def _warm_up(child: Child, call: Call, load: Load) -> Memory:
    """The memory as it is under load, read at the warm-up's end so that reading it costs no measured time."""

    async def read_late() -> Memory:
        await asyncio.sleep(load.warm_up_s * 0.8)
        return await asyncio.to_thread(memory_of, child.family())

    lap, memory = await asyncio.gather(
        run_closed_loop(call, concurrency=load.concurrency, seconds=load.warm_up_s), read_late()
    )
    if not lap.count:
        raise child.failure(f"answered nothing in {load.warm_up_s} s of warm-up")
    return memory


def memory_of(processes: Sequence[psutil.Process]) -> Memory:
    """Of these processes, as far as they live."""
    rss = pss = count = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            full = process.memory_full_info()
            rss, pss, count = rss + full.rss, pss + full.pss, count + 1
    return Memory(rss / MIB, pss / MIB, count)
