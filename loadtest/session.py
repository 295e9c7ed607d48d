"""Composes a run: asks each side once, runs every phase of every round, and gathers what they came to."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import product

import msgspec

from loadtest.clients.client import Client, Endpoint, TargetError
from loadtest.clients.connect import connect, preflight, server_identity
from loadtest.cold_start import ReloadPlan, reload_cycles
from loadtest.driver.protocol import DriverError
from loadtest.hardware import is_local, read_machine
from loadtest.measure.measures import capacity_per_s, measure
from loadtest.order import Order, Watch
from loadtest.results import Measurement, PhaseResult, Reload, Run, Side
from loadtest.rig import Rig, Step, open_rig
from loadtest.scenario import Ask, Unit
from loadtest.targets import Target
from loadtest.verdict import circumstances_of, judge
from loadtest.witness.metrics_text import MetricsError

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


async def run_session(order: Order, watch: Watch) -> Run:
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
async def begun(order: Order, watch: Watch) -> AsyncIterator[tuple[Rig, Run]]:
    """The open rig and the run's head, once every side has answered one request of each kind. Raises SessionError."""
    began_at = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        await _ask_each_once(order)
        identity = await server_identity(order.target, PREFLIGHT_TIMEOUT_S)
        async with open_rig(order, watch) as rig:
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


async def _run_round(order: Order, rig: Rig, gathered: Gathered, *, number: int) -> None:
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


async def _ask_each_once(order: Order) -> None:
    for side, endpoint in order.endpoints.items():
        for ask in order.scenario.requests:
            try:
                await preflight(ask, endpoint, seed=order.seed, images=order.images, timeout_s=PREFLIGHT_TIMEOUT_S)
            except TargetError as error:
                raise TargetError(f"--beside: {error}" if side is Side.BESIDE else str(error)) from None


async def _reload(order: Order, rig: Rig, *, cycles: int, number: int, side: Side) -> tuple[Reload, ...]:
    endpoint, ask = order.endpoints[side], order.scenario.requests[0]
    plan = ReloadPlan(cycles=cycles, round=number, side=side)
    return await reload_cycles(endpoint, ask.model, connect=lambda: _client(ask, endpoint, order), plan=plan)


async def _client(ask: Ask, endpoint: Endpoint, order: Order) -> Client:
    return await connect(ask, endpoint, seed=order.seed, images=order.images, timeout_s=PREFLIGHT_TIMEOUT_S)


def head_of(order: Order, began_at: str, server: str) -> Run:
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
    )


def judged(run: Run, targets: Iterable[Target]) -> Run:
    """The run with a verdict for each target."""
    circumstances = circumstances_of(run)
    return msgspec.structs.replace(run, verdicts=judge(targets, run.measurements, circumstances))
