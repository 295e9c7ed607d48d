"""Runs one phase at a time with drivers, witnesses and samplers, and writes the records."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from penstock_load.clients.client import Endpoint
from penstock_load.driver.processes import Drivers
from penstock_load.driver.protocol import DriverSetup, PhasePlan
from penstock_load.measure.ledger import Ledger
from penstock_load.measure.run_folder import RECORDS_FILE, RecordsFile
from penstock_load.measure.summary import LiveCounts, PhaseFacts, summarise_phase
from penstock_load.pacer import offered_rate
from penstock_load.results import GeneratorHealth, LiveView, PhaseResult, Record, Side, Status
from penstock_load.scenario import Phase, Scenario, Shape
from penstock_load.witness.loads import Loads, open_loads
from penstock_load.witness.witness import Given, Witnesses, open_witnesses

MAX_IN_FLIGHT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """A run as it was asked for. folder: where records.jsonl and run.json go; it is there.

    beside: the server to compare with, phase by phase. given: of the target.
    server_hardware: what the user says the target runs on. command: as it was typed. commit: "" if unknown.
    """

    scenario: Scenario
    target: Endpoint
    folder: Path
    beside: Endpoint | None = None
    rounds: int = 1
    seed: int = 1
    processes: int = 1
    max_in_flight: int = MAX_IN_FLIGHT
    images: str = ""
    given: Given = field(default_factory=Given)
    server_hardware: str = ""
    command: str = ""
    commit: str = ""

    @property
    def endpoints(self) -> dict[Side, Endpoint]:
        """Who is asked, by side."""
        sides = {Side.TARGET: self.target}
        return sides if self.beside is None else sides | {Side.BESIDE: self.beside}

    @property
    def models(self) -> tuple[str, ...]:
        """The models that are asked, each once, in the scenario's order."""
        return tuple(dict.fromkeys(ask.model for ask in self.scenario.requests))

    def sides_of_round(self, number: int) -> Sequence[Side]:
        """In which order the sides are asked: who is first changes from round to round."""
        sides = list(self.endpoints)
        return sides if number % 2 else sides[::-1]


class Watch(Protocol):
    """Receives the events of a run. Must be fast: the run waits for it."""

    def note(self, sentence: str) -> None:
        """Something that the reader should know, once."""
        ...

    def show(self, view: LiveView) -> None:
        """How the phase stands, twice a second."""
        ...

    def phase_done(self, result: PhaseResult) -> None:
        """A phase has its figures."""
        ...


SHOW_EVERY_S = 0.5
SPARKS = 60


@dataclass(frozen=True, slots=True)
class Step:
    """Which phase of which round against whom. Numbers count from 1."""

    phase: Phase
    round: int
    rounds: int
    number: int
    count: int
    side: Side = Side.TARGET
    capacity_per_s: float | None = None


@dataclass(slots=True)
class _Progress:
    """What came of the phase so far. worst_lag_s: since the last look."""

    counts: LiveCounts = field(default_factory=LiveCounts)
    ledger: Ledger = field(default_factory=Ledger)
    worst_lag_s: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=SPARKS))

    def add(self, records: Sequence[Record]) -> None:
        self.counts.add(records)
        self.ledger.add(records)
        sent = (record.sent_s - record.intended_s for record in records if record.status is not Status.NOT_SENT)
        self.worst_lag_s = max(self.worst_lag_s, max(sent, default=0.0))


class PhaseRunner:
    """Made by `open_rig`. Times are seconds since the rig was opened."""

    def __init__(self, order: RunOptions, watch: Watch, records_file: RecordsFile, *, epoch_s: float) -> None:
        self._order = order
        self._watch = watch
        self._records_file = records_file
        self._epoch_s = epoch_s
        self._witnesses: dict[Side, Witnesses] = {}
        self._loads: dict[Side, Loads] = {}
        self._drivers: Drivers | None = None

    async def open(self, stack: AsyncExitStack) -> None:
        """Starts everything. Raises DriverError, MetricsError; what was started ends with the stack."""
        order = self._order
        for side, endpoint in order.endpoints.items():
            is_target = side is Side.TARGET
            given = order.given if is_target else Given()
            witnesses = await open_witnesses(
                endpoint, order.models, metrics_url=given.metrics_url, prometheus_url=given.prometheus_url
            )
            self._witnesses[side] = await stack.enter_async_context(witnesses)
            loads = await open_loads(
                endpoint, began_s=self._epoch_s, metrics_url=given.metrics_url, server_pid=given.server_pid
            )
            self._loads[side] = await stack.enter_async_context(loads)
            for sentence in (*witnesses.notes, *loads.notes) if is_target else ():
                self._watch.note(sentence)
        setup = DriverSetup(
            endpoints=order.endpoints,
            asks=order.scenario.requests,
            slo_p99_ms=order.scenario.slo_p99_ms,
            timeout_s=order.scenario.timeout_s,
            max_in_flight=order.max_in_flight,
            seed=order.seed,
            epoch_s=self._epoch_s,
            images=order.images,
        )
        self._drivers = await Drivers.start(setup, processes=order.processes)
        stack.push_async_callback(self._drivers.aclose)

    @property
    def now_s(self) -> float:
        """Since the rig was opened."""
        return time.monotonic() - self._epoch_s

    async def run(self, step: Step) -> PhaseResult:
        """The phase to its last answer, its records written, its figures beside the server's own.

        Raises DriverError, and OSError where the records cannot be written.
        """
        assert self._drivers is not None, "open() comes first"
        witnesses, loads = self._witnesses[step.side], self._loads[step.side]
        await witnesses.before()
        cpu_before_s, began_s, progress = await loads.server_cpu_s(), self.now_s, _Progress()
        showing = asyncio.create_task(self._show(step, began_s, progress))
        try:
            health = await self._drivers.run(_plan(step), lambda records: self._take(progress, records))
        finally:
            showing.cancel()
            with suppress(asyncio.CancelledError):
                await showing
        cpu_after_s = await loads.server_cpu_s()
        cpu_s = _grown(cpu_before_s, cpu_after_s)
        facts = _facts(step, began_s=self._drivers.began_s, health=health, server_cpu_s=cpu_s)
        result = await asyncio.to_thread(
            summarise_phase,
            progress.ledger,
            facts,
            slo_p99_ms=self._order.scenario.slo_p99_ms,
            health=health,
            loads=loads.between(began_s, self.now_s),
        )
        witness = await witnesses.after(result.all, self._order.scenario.requests)
        result = msgspec.structs.replace(result, witness=witness)
        self._watch.phase_done(result)
        return result

    def _take(self, progress: _Progress, records: Sequence[Record]) -> None:
        self._records_file.append(records)
        progress.add(records)

    async def _show(self, step: Step, began_s: float, progress: _Progress) -> None:
        while True:
            await asyncio.sleep(SHOW_EVERY_S)
            elapsed_s = self.now_s - began_s
            self._watch.show(self._view(step, elapsed_s, _offered(step, elapsed_s), progress))

    def _view(self, step: Step, elapsed_s: float, offered_per_s: float, progress: _Progress) -> LiveView:
        live = progress.counts.snapshot(self.now_s)
        has_answers = live.ok + live.timeouts > 0
        progress.recent.append(live.p99_ms if has_answers else float("nan"))
        lag_ms, progress.worst_lag_s = progress.worst_lag_s * 1e3, 0.0
        return LiveView(
            phase=step.phase.name,
            phase_number=step.number,
            phase_count=step.count,
            round=step.round,
            rounds=step.rounds,
            elapsed_s=elapsed_s,
            seconds=step.phase.seconds,
            offered_per_s=offered_per_s,
            sent=live.sent,
            ok=live.ok,
            refused=live.refused,
            failed=live.failed,
            timeouts=live.timeouts,
            in_flight=self._drivers.in_flight if self._drivers else 0,
            rate_per_s=live.ok_per_s,
            slo_p99_ms=self._order.scenario.slo_p99_ms,
            generator_lag_ms=lag_ms,
            p50_ms=live.p50_ms if has_answers else None,
            p99_ms=live.p99_ms if has_answers else None,
            complaint=f"{live.not_sent} could not be sent" if live.not_sent else "",
            recent=tuple(progress.recent),
            side=step.side,
            is_open_loop=step.phase.arrivals is not None,
        )


@asynccontextmanager
async def open_phase_runner(order: RunOptions, watch: Watch) -> AsyncIterator[PhaseRunner]:
    """The instruments for this order, closed with the block. Raises DriverError, MetricsError, OSError."""
    with RecordsFile(order.folder / RECORDS_FILE) as records_file:
        rig = PhaseRunner(order, watch, records_file, epoch_s=time.monotonic())
        async with AsyncExitStack() as stack:
            await rig.open(stack)
            yield rig


def _plan(step: Step) -> PhasePlan:
    return PhasePlan(
        round=step.round,
        phase=step.phase.name,
        side=step.side,
        seconds=step.phase.seconds,
        arrivals=step.phase.arrivals,
        callers=step.phase.callers,
        capacity_per_s=step.capacity_per_s,
    )


def _grown(before: float | None, after: float | None) -> float | None:
    """None if it could not be read, or the server was started again meanwhile."""
    return None if before is None or after is None or after < before else after - before


def _offered(step: Step, at_s: float) -> float:
    """What the schedule asks at that moment; 0 in a closed loop, and in a replay, whose file is the drivers'."""
    arrivals, seconds = step.phase.arrivals, step.phase.seconds
    if arrivals is None or arrivals.shape is Shape.REPLAY:
        return 0.0
    return offered_rate(arrivals, at_s, seconds=seconds, capacity_per_s=step.capacity_per_s)


def _facts(step: Step, *, began_s: float, health: GeneratorHealth, server_cpu_s: float | None) -> PhaseFacts:
    replayed_s = health.intended / health.intended_per_s if health.intended_per_s else 0.0
    return PhaseFacts(
        round=step.round,
        phase=step.phase.name,
        side=step.side,
        is_judged=step.phase.is_judged,
        is_capacity=step.phase.is_capacity,
        is_open_loop=step.phase.arrivals is not None,
        began_s=began_s,
        seconds=step.phase.seconds or replayed_s,
        server_cpu_s=server_cpu_s,
    )
