"""The parent's side: starts driver processes, gives them phases, hands on their records, and notices when one dies."""

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from penstock_load.driver.loops import GRACE_S
from penstock_load.driver.protocol import (
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
    SendTally,
    allowed_lag_s,
    first_error,
    judge,
    read_recording,
)
from penstock_load.pacer import schedule_seconds, send_times
from penstock_load.results import GeneratorHealth, Record
from penstock_load.scenario import Shape

START_TIMEOUT_S = 60.0  # imports, payloads and a first word with the target, on a machine that is busy
SILENCE_TIMEOUT_S = 30.0  # a process says something ten times a second
CLOSE_TIMEOUT_S = 5.0
LEAD_S = 0.25  # from the order to the phase's begin: time for every process to read it
_MAX_STDERR_BYTES = 8192

OnRecords = Callable[[Sequence[Record]], None]


@dataclass(slots=True)
class _Child:
    """One driver process. stderr: the end of what it wrote there."""

    number: int
    process: asyncio.subprocess.Process
    stderr: bytes = b""
    listening: asyncio.Task[None] | None = None
    in_flight: int = 0
    decoder: msgspec.json.Decoder[FromDriver] = field(default_factory=lambda: msgspec.json.Decoder(FromDriver))

    async def say(self, line: Begin | Go) -> None:
        """Raises DriverError if the process cannot receive it."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(msgspec.json.encode(line) + b"\n")
            async with asyncio.timeout(SILENCE_TIMEOUT_S):
                await self.process.stdin.drain()
        except (ConnectionError, TimeoutError):
            raise await self._death("it received an order") from None

    async def hear(self, *, timeout_s: float, during: str) -> FromDriver:
        """Its next line. Raises DriverError where it fails, ends or says nothing for so long."""
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await self.process.stdout.readline()
        except TimeoutError:
            raise DriverError(
                f"driver process {self.number} has said nothing for {timeout_s:g} s during {during}"
            ) from None
        if not line.endswith(b"\n"):
            raise await self._death(during)
        said = self.decoder.decode(line)
        if isinstance(said, Failed):
            raise DriverError(said.message)
        return said

    async def _death(self, during: str) -> DriverError:
        """How it ended, once it has."""
        try:
            code = await asyncio.wait_for(self.process.wait(), CLOSE_TIMEOUT_S)
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        except TimeoutError:
            how = "its pipes closed, but it still runs"
        if self.listening:
            await asyncio.wait((self.listening,), timeout=CLOSE_TIMEOUT_S)
        last_words = self.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        quoted = f": {last_words}" if last_words else ""
        return DriverError(f"driver process {self.number} ended during {during} ({how}){quoted}")

    async def listen(self) -> None:
        """Keeps the end of what it writes to stderr."""
        assert self.process.stderr is not None
        while chunk := await self.process.stderr.read(1 << 16):
            self.stderr = (self.stderr + chunk)[-_MAX_STDERR_BYTES:]

    async def close(self, *, is_kill: bool) -> None:
        """Ends the process: closes its stdin, then kills it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        if not is_kill:
            await _ended_within(self.process, CLOSE_TIMEOUT_S)
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        if self.listening:
            await self.listening


class Drivers:
    """Processes that send a phase together. Start them once a run; run() one phase at a time; aclose() at the end.

    They run in a session of their own, so that Ctrl-C reaches the parent only; they end when the parent does.
    began_s: when the schedule of the last phase began, since the setup's epoch.
    """

    def __init__(self, setup: DriverSetup, children: Sequence[_Child]) -> None:
        self._setup = setup
        self._children = children
        self._is_broken = False
        self.began_s = 0.0

    @classmethod
    async def start(cls, setup: DriverSetup, *, processes: int) -> "Drivers":
        """All of them, connected to their targets. Raises DriverError, and leaves no process then."""
        children: list[_Child] = []
        drivers = cls(setup, children)
        try:
            for number in range(processes):
                children.append(await _spawn(number))
            async with asyncio.TaskGroup() as group:
                for child in children:
                    group.create_task(_prepare(child, Begin(setup, child.number, processes)))
        except BaseException as failure:
            drivers._is_broken = True
            await drivers.aclose()
            if isinstance(failure, ExceptionGroup):
                raise first_error(failure) from None
            raise
        return drivers

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes, in order: what they use is the generator's."""
        return tuple(child.process.pid for child in self._children)

    @property
    def in_flight(self) -> int:
        """Requests under way, by what the processes last said."""
        return sum(child.in_flight for child in self._children)

    async def run(self, plan: PhasePlan, on_records: OnRecords) -> GeneratorHealth:
        """The phase, to its last answer; on_records gets every request's record, about ten times a second.

        Raises DriverError: a plan that cannot be run is refused before anything is sent. Where a process fails
        (DriverError), where on_records raises, or when it is cancelled, these drivers can only be closed.
        """
        if self._is_broken:
            raise DriverError(f"phase {plan.phase!r} cannot run: the drivers stopped in the middle of another")
        plan = await asyncio.to_thread(_checked, plan)
        self._is_broken = True
        begin_s = time.monotonic() + LEAD_S
        self.began_s = begin_s - self._setup.epoch_s
        tally = SendTally(self.began_s + plan.seconds, allowed_lag_s(self._setup.slo_p99_ms))
        most_s = LEAD_S + plan.seconds + self._setup.timeout_s + GRACE_S + SILENCE_TIMEOUT_S
        try:
            async with asyncio.timeout(most_s), asyncio.TaskGroup() as group:
                follow = [_follow(child, Go(plan, begin_s), tally, on_records) for child in self._children]
                tasks = [group.create_task(each) for each in follow]
        except TimeoutError:
            raise DriverError(f"phase {plan.phase!r} has not ended after {most_s:g} s") from None
        except ExceptionGroup as failure:
            raise first_error(failure) from None
        self._is_broken = False
        return judge(tally, [task.result() for task in tasks], seconds=plan.seconds)

    async def aclose(self) -> None:
        """No process is left, however they fared; at once after a failure, else within seconds."""
        async with asyncio.TaskGroup() as group:
            for child in self._children:
                group.create_task(child.close(is_kill=self._is_broken))


def _checked(plan: PhasePlan) -> PhasePlan:
    """The plan with the length of its schedule, which a recording may have to say. Reads files. Raises DriverError."""
    if plan.arrivals is None:
        return plan
    try:
        recording: Sequence[float] = ()
        if plan.arrivals.shape is Shape.REPLAY:
            recording = read_recording(Path(plan.arrivals.file), phase=plan.phase, round=plan.round)
        send_times(plan.arrivals, plan.seconds, seed=0, capacity_per_s=plan.capacity_per_s, recording=recording)
        seconds = schedule_seconds(plan.arrivals, plan.seconds, recording=recording)
    except ValueError as error:
        raise DriverError(f"phase {plan.phase!r} cannot run: {error}") from None
    return msgspec.structs.replace(plan, seconds=seconds)


async def _spawn(number: int) -> _Child:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "penstock_load.driver.child",
        stdin=pipe, stdout=pipe, stderr=pipe, limit=MAX_LINE_BYTES, start_new_session=True,
    )  # fmt: skip
    child = _Child(number, process)
    child.listening = asyncio.create_task(child.listen())
    return child


async def _prepare(child: _Child, begin: Begin) -> None:
    await child.say(begin)
    said = await child.hear(timeout_s=START_TIMEOUT_S, during="its start")
    if not isinstance(said, Ready):
        raise DriverError(f"driver process {child.number} said {type(said).__name__} instead of Ready")


async def _follow(child: _Child, order: Go, tally: SendTally, on_records: OnRecords) -> GeneratorLoad:
    """One process through the phase. Raises DriverError, and what on_records raises."""
    during, count = f"phase {order.plan.phase!r}", 0
    await child.say(order)
    while True:
        match await child.hear(timeout_s=SILENCE_TIMEOUT_S, during=during):
            case Batch(records, in_flight):
                child.in_flight = in_flight
                count += len(records)
                tally.add(records)
                if records:
                    on_records(records)
            case PhaseEnd() as end:
                if end.count != count:
                    raise DriverError(f"driver process {child.number} wrote {end.count} records, {count} came")
                return GeneratorLoad(end.seconds, end.cpu_s)
            case other:
                raise DriverError(f"driver process {child.number} said {type(other).__name__} during {during}")


async def _ended_within(process: asyncio.subprocess.Process, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await process.wait()
    except TimeoutError:
        return
