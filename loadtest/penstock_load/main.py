"""Composes a run: phases and rounds, a search for the knee, or a search for the number of video streams."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import product

import msgspec

from penstock_load.clients.client import Client, Endpoint, TargetError
from penstock_load.clients.connect import connect, preflight, server_identity
from penstock_load.clients.control import ReloadPlan, Stream, VideoClient, reload_cycles
from penstock_load.driver.protocol import DriverError
from penstock_load.hardware import is_local, read_machine
from penstock_load.measure.buckets import Buckets, latency_in
from penstock_load.measure.measures import capacity_per_s, knee_measurement, measure, measurement_of
from penstock_load.phase_runner import PhaseRunner, RunOptions, Step, Watch, open_phase_runner
from penstock_load.results import Measurement, PhaseResult, Reload, Run, Side
from penstock_load.scenario import Arrivals, Phase, RequestSpec, Shape, Unit
from penstock_load.search import Knee, KneeSearch, StreamSearch, Trial, trial_verdict
from penstock_load.targets import UNITS, Target
from penstock_load.verdict import circumstances_of, judge
from penstock_load.witness.readers import MetricsError

PREFLIGHT_TIMEOUT_S = 30.0  # a first request may load or compile a model
STOPPED = "the run was stopped before its end"


class SessionError(Exception):
    """The run cannot begin: the target cannot be asked, a file is missing. One sentence."""


@dataclass(slots=True)
class Gathered:
    """What a run has come to so far. complaints: why it cannot pass."""

    phases: list[PhaseResult] = field(default_factory=list)
    reloads: list[Reload] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


async def run_session(order: RunOptions, watch: Watch) -> Run:
    """The run of the order's scenario, unjudged. Raises SessionError where it cannot begin.

    What breaks it midway, Ctrl-C too, is a complaint of the run, beside the figures of the phases before.
    """
    async with begun(order, watch) as (rig, run):
        gathered = Gathered()
        async with ending_in_complaints(gathered):
            for number in range(1, order.rounds + 1):
                await _run_round(order, rig, gathered, number=number)
    return finished(run, gathered, measure(gathered.phases, gathered.reloads))


@asynccontextmanager
async def begun(order: RunOptions, watch: Watch) -> AsyncIterator[tuple[PhaseRunner, Run]]:
    """The open rig and the run's head, once every side has answered one request of each kind. Raises SessionError."""
    began_at = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        await _ask_each_once(order)
        identity = await server_identity(order.target, PREFLIGHT_TIMEOUT_S)
        async with open_phase_runner(order, watch) as rig:
            yield rig, head_of(order, began_at, f"{identity.name} {identity.version}".strip())
    except (TargetError, DriverError, MetricsError) as error:
        raise SessionError(str(error)) from error


@asynccontextmanager
async def ending_in_complaints(gathered: Gathered) -> AsyncIterator[None]:
    """What ends the block early becomes a complaint. After Ctrl-C or SIGTERM no further wait is begun here."""
    try:
        yield
    except (DriverError, TargetError) as error:
        gathered.complaints.append(f"{STOPPED}: {error}")
    except asyncio.CancelledError as stop:
        gathered.complaints.append(f"{STOPPED} by {stop.args[0] if stop.args else 'Ctrl-C'}")


def finished(run: Run, gathered: Gathered, measurements: Iterable[Measurement]) -> Run:
    """The run with what it came to. A judged phase, or one that found the capacity, whose generator complained is
    a complaint of the run: neither its figures nor what was made of them can be trusted."""
    health = [
        f"{result.phase}, round {result.round}: {result.health.complaint}"
        for result in gathered.phases
        if result.health.complaint and (result.is_judged or result.is_capacity)
    ]
    return msgspec.structs.replace(
        run,
        phases=tuple(gathered.phases),
        reloads=tuple(gathered.reloads),
        measurements=tuple(measurements),
        complaints=(*gathered.complaints, *health),
    )


async def _run_round(order: RunOptions, rig: PhaseRunner, gathered: Gathered, *, number: int) -> None:
    phases = order.scenario.phases
    for (place, phase), side in product(enumerate(phases, 1), order.sides_of_round(number)):
        if phase.reloads:
            gathered.reloads += await _reload(order, rig, cycles=phase.reloads, number=number, side=side)
            continue
        capacity = capacity_per_s(gathered.phases, round=number, side=Side.TARGET)
        if phase.arrivals and phase.arrivals.unit is Unit.OF_CAPACITY and not capacity:
            gathered.complaints.append(f"{phase.name} could not run: nothing was answered while capacity was measured")
            continue
        step = Step(phase, number, order.rounds, place, len(phases), side, capacity)
        gathered.phases.append(await rig.run(step))


async def _ask_each_once(order: RunOptions) -> None:
    for side, endpoint in order.endpoints.items():
        for ask in order.scenario.requests:
            try:
                await preflight(ask, endpoint, seed=order.seed, images=order.images, timeout_s=PREFLIGHT_TIMEOUT_S)
            except TargetError as error:
                raise TargetError(f"--beside: {error}" if side is Side.BESIDE else str(error)) from None


async def _reload(order: RunOptions, rig: PhaseRunner, *, cycles: int, number: int, side: Side) -> tuple[Reload, ...]:
    endpoint, ask = order.endpoints[side], order.scenario.requests[0]
    plan = ReloadPlan(cycles=cycles, round=number, side=side)
    return await reload_cycles(endpoint, ask.model, connect=lambda: _client(ask, endpoint, order), plan=plan)


async def _client(ask: RequestSpec, endpoint: Endpoint, order: RunOptions) -> Client:
    return await connect(ask, endpoint, seed=order.seed, images=order.images, timeout_s=PREFLIGHT_TIMEOUT_S)


def head_of(order: RunOptions, began_at: str, server: str) -> Run:
    """A run that has not begun."""
    return Run(
        scenario=order.scenario.name,
        about=order.scenario.about,
        command=order.command,
        began_at=began_at,
        target_url=order.target.http_url,
        beside_url=order.beside.http_url if order.beside else "",
        server=server,
        is_local=is_local(order.target.http_url),
        machine=read_machine(),
        server_hardware=order.server_hardware,
        models=order.models,
        slo_p99_ms=order.scenario.slo_p99_ms,
        rounds=order.rounds,
        seed=order.seed,
        phases=(),
        commit=order.commit,
    )


def judged(run: Run, targets: Iterable[Target]) -> Run:
    """The run with a verdict for each target."""
    circumstances = circumstances_of(run)
    return msgspec.structs.replace(run, verdicts=judge(targets, run.measurements, circumstances))


CONFIRMING_TIMES = 3
START_OF_CAPACITY = 0.5
LEAST_REQUESTS = 10  # of a trial, on average: of so few one in 20,000 trials asks nothing at all


@dataclass(frozen=True, slots=True, kw_only=True)
class KneeOptions:
    """trial_s: how long a rate is tried at least (thrice that to confirm it). start_per_s: 0: half of the capacity."""

    trial_s: float = 5.0
    error_share: float = 0.01
    precision: float = 0.05
    start_per_s: float = 0.0
    highest_per_s: float = 100_000.0


async def run_knee(order: RunOptions, options: KneeOptions, watch: Watch) -> tuple[Run, Knee | None]:
    """The run whose phases are the trials, unjudged, and the search's result; None if it was stopped.

    The scenario gives the requests, the SLO and the phases before its ladder (warm-up, capacity). Raises SessionError.
    """
    gathered, knee = Gathered(), None
    async with begun(order, watch) as (rig, run), ending_in_complaints(gathered):
        start_per_s = await _prepare(order, options, rig, gathered)
        knee = await _search(order, options, rig, gathered, start_per_s=start_per_s)
        if knee.is_generators_limit:
            gathered.complaints.append(f"the search ended at the generator's limit: {knee.why}")
    found = [] if knee is None or knee.sustained_per_s is None else [knee_measurement([knee.sustained_per_s])]
    return finished(run, gathered, found), knee


def trial_s(options: KneeOptions, rate_per_s: float) -> float:
    """How long the rate is tried: as long as was said, and at a low one until there is something to judge."""
    return max(options.trial_s, LEAST_REQUESTS / rate_per_s)


async def _prepare(order: RunOptions, options: KneeOptions, rig: PhaseRunner, gathered: Gathered) -> float:
    """Warm-up and capacity; the rate to begin with."""
    phases = [phase for phase in order.scenario.phases if phase.callers]
    results = [await rig.run(Step(phase, 1, 1, place, len(phases))) for place, phase in enumerate(phases, 1)]
    capacity = capacity_per_s(results, round=1, side=Side.TARGET) or 2.0
    # Only where the search begins depends on it, so a generator that was busy then does no harm.
    gathered.phases += [msgspec.structs.replace(result, is_capacity=False) for result in results]
    return options.start_per_s or max(START_OF_CAPACITY * capacity, 1.0)


async def _search(
    order: RunOptions, options: KneeOptions, rig: PhaseRunner, gathered: Gathered, *, start_per_s: float
) -> Knee:
    search = KneeSearch(
        start_per_s,
        max(options.highest_per_s, start_per_s),
        precision=options.precision,
        lowest_per_s=min(1.0, start_per_s),
    )
    number = 0
    while (rate := search.next_rate()) is not None:
        number += 1
        seconds = trial_s(options, rate) * (CONFIRMING_TIMES if search.is_confirming else 1)
        phase = Phase(
            name=f"trial {number}: {rate:.4g}/s", seconds=seconds, arrivals=Arrivals(shape=Shape.POISSON, rate=rate)
        )
        result = await rig.run(Step(phase, 1, 1, number, number))
        gathered.phases.append(result)
        outcome, reason = trial_verdict(result, slo_p99_ms=order.scenario.slo_p99_ms, error_share=options.error_share)
        search.record(rate, outcome, reason)
    knee = search.result
    assert knee is not None, "the search has ended"
    return knee


ASK_S, START_S, LOOK_S, SETTLE_S = 10.0, 30.0, 0.25, 3.0
PREFIX = "load-"


async def run_streams(order: RunOptions, watch: Watch) -> Run:
    """The run of a scenario of streams, unjudged. Raises SessionError where the video program cannot be asked.

    Streams that it has already stay, and count as its load; the test's own are gone afterwards.
    """
    gathered, found = Gathered(), []
    began_at = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        async with VideoClient(order.target, ASK_S) as client:
            others = await client.streams()
            if others:
                watch.note(f"{len(others)} streams were there already; they are part of what is measured")
            async with ending_in_complaints(gathered):
                for number in range(1, order.rounds + 1):
                    found.append(await _Search(order, watch, client).run(number))
    except TargetError as error:
        raise SessionError(str(error)) from error
    run = head_of(order, began_at, "the video program")
    return finished(run, gathered, measured([one for one in found if one], run.machine.cores if run.is_local else 0))


def measured(found: "list[tuple[int, Stream]]", cores: int) -> Iterator[Measurement]:
    """The rounds' numbers as figures; those of a size and rate that targets speak of have names of their own."""
    if not found:
        return
    held = [float(count) for count, _ in found]
    names = {"streams_held": held}
    if cores:
        names["streams_per_core"] = [count / cores for count in held]
    stream = found[-1][1]
    names[f"streams_{stream.height}p{stream.fps:.0f}_{stream.codec}"] = held
    for name, values in names.items():
        if name in UNITS:
            yield measurement_of(name, UNITS[name], values)


class _Search:
    def __init__(self, order: RunOptions, watch: Watch, client: VideoClient) -> None:
        phase = order.scenario.phases[0]
        self._seconds, self._search = phase.seconds, StreamSearch(phase.streams)
        self._uri = order.scenario.requests[0].uri
        self._slo_p99_ms = order.scenario.slo_p99_ms
        self._watch, self._client = watch, client
        self._names: list[str] = []
        self._stream: Stream | None = None

    async def run(self, number: int) -> tuple[int, Stream] | None:
        """How many streams were sustained, and one of them; None if not one ran."""
        try:
            while (count := self._search.next_count()) is not None:
                is_held = await self._is_held(number, count) or await self._is_held(number, count)
                self._search.record(count, is_held=is_held)
            return (self._search.held, self._stream) if self._stream is not None else None
        finally:
            await asyncio.shield(self._have(0))

    async def _is_held(self, number: int, count: int) -> bool:
        """By one trial; a number is only given up after two, since machines stand still at times."""
        trial = await self._try(count)
        complaint = trial.complaint(self._slo_p99_ms)
        figures = f"{trial.rate:.1f} frames/s, p99 {trial.p99_ms:.0f} ms, {trial.dropped_share:.1%} dropped"
        self._watch.note(f"round {number}: {count} streams: {figures}: {complaint or 'held'}")
        return not complaint

    async def _try(self, count: int) -> Trial:
        await self._have(count)
        trouble = await self._until_running()
        if trouble:
            return Trial(count, float("nan"), 0.0, 0.0, 0.0, trouble)
        await asyncio.sleep(SETTLE_S)
        began, before, page = time.monotonic(), await self._own(), await self._latency()
        await asyncio.sleep(self._seconds)
        seconds, after, later = time.monotonic() - began, await self._own(), await self._latency()
        self._stream = self._stream or next(iter(after.values()), None)
        return trial_of(before, after, later.since(page), seconds)

    async def _have(self, count: int) -> None:
        while len(self._names) > count:
            await self._client.remove(self._names[-1])
            self._names.pop()
        while len(self._names) < count:
            name = (
                f"{PREFIX}{len(self._names)}-{time.monotonic_ns() // 1000}"  # an id that is being removed is not free
            )
            self._names.append(
                name
            )  # before the request, so that the clean-up also removes a stream that was being added
            await self._client.add(name, self._uri)

    async def _until_running(self) -> str:
        """Why not every stream runs within the time; empty where they do."""
        until = time.monotonic() + START_S
        while True:
            waiting = [one for one in (await self._own()).values() if one.state != "running" or not one.inferred]
            if not waiting:
                return ""
            if time.monotonic() >= until:
                return f"a stream is {waiting[0].state}: {waiting[0].reason or 'no answer yet'}"
            await asyncio.sleep(LOOK_S)

    async def _own(self) -> dict[str, Stream]:
        found = {one.source_id: one for one in await self._client.streams()}
        missing = next((name for name in self._names if name not in found), "")
        if missing:
            raise TargetError(f"the video program lost the stream {missing}")
        return {name: found[name] for name in self._names}

    async def _latency(self) -> Buckets:
        return latency_in(await self._client.metrics(), self._names)


def trial_of(before: dict[str, Stream], after: dict[str, Stream], latency: Buckets, seconds: float) -> Trial:
    """What two looks at the same streams come to."""
    pairs = [(before[name], after[name]) for name in after]
    frames = sum(b.frames - a.frames for a, b in pairs)
    dropped = _dropped(after.values()) - _dropped(before.values())
    ill = next((b for _, b in pairs if b.state != "running"), None)
    return Trial(
        streams=len(after),
        p99_ms=latency.percentile_ms(0.99),
        dropped_share=dropped / max(frames, 1),
        played_share=min((b.position_s - a.position_s) / seconds for a, b in pairs),
        rate=sum(b.inferred - a.inferred for a, b in pairs) / seconds,
        trouble=f"a stream is {ill.state}: {ill.reason}" if ill is not None else "",
    )


def _dropped(streams: Iterable[Stream]) -> int:
    return sum(sum(stream.drops.values()) for stream in streams)
