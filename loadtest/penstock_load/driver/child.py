"""A driver process: `python -m penstock_load.driver.child`. Lines of JSON in on stdin, out on what was stdout.

It lives as long as its stdin is open and decides nothing: what to send, when, and when to stop comes from the parent.
What a library writes to stdout goes to stderr, so that it breaks no line.
"""

import asyncio
import contextlib
import gc
import importlib
import itertools
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import uvloop

from penstock_load.clients.client import Client, Endpoint, TargetError
from penstock_load.driver.loops import Asking, Due, OpenLoop, RequestLane, mix, run_callers
from penstock_load.driver.protocol import (
    BATCH,
    FLUSH_S,
    MAX_LINE_BYTES,
    Batch,
    Begin,
    DriverError,
    DriverSetup,
    Failed,
    FromDriver,
    GeneratorLoad,
    Go,
    PhaseEnd,
    PhasePlan,
    Ready,
    Send,
    Sent,
    ToDriver,
    first_error,
    read_recording,
)
from penstock_load.pacer import schedule_seconds, send_times
from penstock_load.results import Side
from penstock_load.scenario import RequestSpec, Shape

_WRITE_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S = 2.0
_NICENESS = -10
_PLAIN_ERRORS = (
    DriverError,
    TargetError,
    ValueError,
    OSError,
)  # their text is a sentence; all else is a mistake with a traceback


class Connect(Protocol):
    """Makes the client of an ask: penstock_load.clients.connect.connect."""

    async def __call__(
        self, ask: RequestSpec, endpoint: Endpoint, *, seed: int, images: str, timeout_s: float
    ) -> Client: ...


class Output:
    """Lines to the parent; a parent that does not read stops the writer, and after a while ends it."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._encoder = msgspec.json.Encoder()

    async def say(self, line: FromDriver) -> None:
        """Writes a line to the pipe. Raises TimeoutError if it is not read."""
        self._writer.write(self._encoder.encode(line) + b"\n")
        async with asyncio.timeout(_WRITE_TIMEOUT_S):
            await self._writer.drain()

    async def say_records(self, asking: Asking) -> None:
        """All that ended so far; at least one line, which says that this process lives."""
        await self.say(Batch(asking.take(BATCH), asking.in_flight))
        while asking.records:
            await self.say(Batch(asking.take(BATCH), asking.in_flight))


@dataclass(frozen=True, slots=True)
class Driver:
    """One of `parts` processes that share every phase. lanes: of each side, in the order of the asks."""

    setup: DriverSetup
    part: int
    parts: int
    lanes: dict[Side, Sequence[RequestLane]]
    output: Output

    async def run(self, plan: PhasePlan, begin_s: float) -> None:
        """The phase, from that moment on; says its records and its end."""
        recording = _recording_of(plan)
        seconds = schedule_seconds(plan.arrivals, plan.seconds, recording=recording) if plan.arrivals else plan.seconds
        slots = mix(self.setup.asks, seed=self.setup.seed)
        asking = Asking(
            plan.round, plan.phase, plan.side, self.lanes[plan.side], slots, self.setup.epoch_s, time.monotonic
        )
        gc.collect()
        gc.freeze()  # what lives now is not searched again, so no long pause falls into the phase
        async with asyncio.TaskGroup() as group:
            telling = group.create_task(_tell(asking, self.output))
            reading = group.create_task(_read_load(begin_s, seconds))
            await self._send(asking, plan, (begin_s, seconds), recording)
            load = await reading
            telling.cancel()
        await self.output.say_records(asking)
        await self.output.say(PhaseEnd(asking.count, load.seconds, load.cpu_s))

    async def send(self, order: Send) -> None:
        """One request outside a phase; says its answer."""
        began_s = time.monotonic()
        answer = await self.lanes[Side.TARGET][order.lane].client.send(order.number)
        await self.output.say(Sent(order.number, answer, time.monotonic() - began_s))

    async def _send(
        self, asking: Asking, plan: PhasePlan, span: tuple[float, float], recording: Sequence[float]
    ) -> None:
        begin_s, seconds = span
        if plan.arrivals:
            due = self._due(plan, begin_s, recording)
            most = max(1, self.setup.max_in_flight // self.parts)
            await OpenLoop(asking, due, max_in_flight=most).run(timeout_s=self.setup.timeout_s)
            return
        callers = len(range(self.part, plan.callers, self.parts))
        numbers = itertools.count(self.part, self.parts)
        await asyncio.sleep(begin_s - time.monotonic())
        await run_callers(asking, numbers, callers=callers, until_s=begin_s + seconds, timeout_s=self.setup.timeout_s)

    def _due(self, plan: PhasePlan, begin_s: float, recording: Sequence[float]) -> Iterator[Due]:
        """This process's part of the schedule."""
        assert plan.arrivals is not None
        seed = random.Random(f"{self.setup.seed} {plan.round} {plan.phase}").getrandbits(63)
        times = send_times(
            plan.arrivals, plan.seconds, seed=seed, capacity_per_s=plan.capacity_per_s, recording=recording
        )
        numbered = itertools.islice(enumerate(times), self.part, None, self.parts)
        return ((number, begin_s + at_s) for number, at_s in numbered)


def _recording_of(plan: PhasePlan) -> Sequence[float]:
    if plan.arrivals is None or plan.arrivals.shape is not Shape.REPLAY:
        return ()
    return read_recording(Path(plan.arrivals.file), phase=plan.phase, round=plan.round)


async def _tell(asking: Asking, output: Output) -> None:
    while True:
        await asyncio.sleep(FLUSH_S)
        await output.say_records(asking)


async def _read_load(begin_s: float, seconds: float) -> GeneratorLoad:
    """What this thread uses while the schedule lasts."""
    await asyncio.sleep(begin_s - time.monotonic())
    began_s, used_s = time.monotonic(), time.thread_time()
    await asyncio.sleep(begin_s + seconds - time.monotonic())
    return GeneratorLoad(time.monotonic() - began_s, time.thread_time() - used_s)


async def _connect(begin: Begin, output: Output) -> Driver:
    module, _, name = begin.setup.connect.partition(":")
    connect: Connect = getattr(importlib.import_module(module), name)
    setup = begin.setup
    lanes: dict[Side, Sequence[RequestLane]] = {}
    for side, endpoint in setup.endpoints.items():
        lanes[side] = [
            RequestLane(
                ask.label, await connect(ask, endpoint, seed=setup.seed, images=setup.images, timeout_s=setup.timeout_s)
            )
            for ask in setup.asks
        ]
    return Driver(setup, begin.part, begin.parts, lanes, output)


async def _serve(lines: asyncio.Queue[ToDriver], output: Output) -> None:
    """Does what the lines say, one after the other; ends with the first thing that fails, having said it."""
    driver: Driver | None = None
    sending: set[asyncio.Task[None]] = set()
    try:
        while True:
            match await lines.get():
                case Begin() as begin:
                    if driver:
                        await _close(driver)
                    driver = await _connect(begin, output)
                    await output.say(Ready())
                case Go(plan, begin_s) if driver:
                    await driver.run(plan, begin_s)
                case Send() as order if driver:
                    task = asyncio.create_task(driver.send(order))
                    sending.add(task)
                    task.add_done_callback(sending.discard)
    except (*_PLAIN_ERRORS, ExceptionGroup) as failure:
        error = first_error(failure)
        if not isinstance(error, _PLAIN_ERRORS):
            raise error from None
        await output.say(Failed(str(error) or type(error).__name__))
    finally:
        if driver:
            await _close(driver)


async def _close(driver: Driver) -> None:
    clients = {id(lane.client): lane.client for lanes in driver.lanes.values() for lane in lanes}
    closing = [asyncio.ensure_future(client.aclose()) for client in clients.values()]
    if closing:
        await asyncio.wait(closing, timeout=_CLOSE_TIMEOUT_S)


async def _listen(reader: asyncio.StreamReader, lines: asyncio.Queue[ToDriver]) -> None:
    """Until stdin is closed."""
    decoder = msgspec.json.Decoder(ToDriver)
    while line := await reader.readline():
        await lines.put(decoder.decode(line))


async def _main(stdin: int, stdout: int) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(stdin, "rb"))
    transport, flow = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(stdout, "wb"))
    output = Output(asyncio.StreamWriter(transport, flow, None, loop))
    lines: asyncio.Queue[ToDriver] = asyncio.Queue(4)
    serving = asyncio.create_task(_serve(lines, output))
    listening = asyncio.create_task(_listen(reader, lines))
    await asyncio.wait((serving, listening), return_when=asyncio.FIRST_COMPLETED)
    for task in (serving, listening):
        task.cancel()
    _, stuck = await asyncio.wait((serving, listening), timeout=2 * _CLOSE_TIMEOUT_S)
    if stuck:  # a client that does not let itself be cancelled; there may be no parent to kill this process
        os._exit(1)
    for task in (serving, listening):
        if not task.cancelled() and (error := task.exception()):
            raise error
    transport.close()


def _go_first() -> None:
    """Before other programs of this machine, where this user may say so (Linux: root, or CAP_SYS_NICE).

    A generator that waits for a core measures itself. Measured at 500/s with three busy programs on two cores, median
    of 8 interleaved rounds: the 99th percentile of lag fell from 17 to 8 ms. What it uses stays the same.
    A run that was started with a lower priority keeps it.
    """
    if os.getpriority(os.PRIO_PROCESS, 0) > 0:
        return
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)


def main() -> None:
    """Runs until stdin is closed, or until something failed and was said."""
    _go_first()
    stdin, stdout = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)
    sys.stdout = sys.stderr
    uvloop.run(_main(stdin, stdout))


if __name__ == "__main__":
    main()
