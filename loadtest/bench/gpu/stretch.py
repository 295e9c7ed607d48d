"""One measured lap: what the callers got, what it cost in cores, how busy the card was."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from loadtest.bench.closed_loop import make_lap
from loadtest.bench.gpu.closed import CallersLap, Lane
from loadtest.bench.gpu.connection import OK, BrokenConnection, exchange, said
from loadtest.bench.gpu.generators import START_S, Generators
from loadtest.bench.gpu.laps import Key, Ledger, in_words
from loadtest.bench.gpu.regions import SystemRegions
from loadtest.bench.gpu.requests import ask
from loadtest.bench.wire import BadAnswer
from loadtest.report.wording import plain_number
from loadtest.witness.process_cpu import CpuMeter
from server.backends.triton_runtime import TritonRuntime
from server.gpu.telemetry import NoTelemetry, Sampler

FIRST_ANSWER_S = 60.0
_RATES = ("rate", "held_per_s", "ok_per_s")  # what a lap is told by
_ACTIVITY = {"sm": "sm_activity", "sm_occupancy": "sm_occupancy", "tensor": "tensor_activity"} | {
    "memory_bandwidth": "memory_bandwidth_activity",
    "graphics_engine": "kernel_running",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What every part is told. work: the bench's own folder, its path short. torch_python: an interpreter with torch.

    runtime: the Triton. processes: of the load generator. is_gpu: False for the miniature on a CPU, without MPS.
    """

    work: Path
    runtime: TritonRuntime
    torch_python: str
    is_gpu: bool
    rounds: int
    seconds: float
    settle_s: float
    load_s: float
    seed: int = 1


@dataclass
class Bench:
    """What every part uses. sampler: None where there is no card to read."""

    plan: Plan
    ledger: Ledger
    generators: Generators
    sampler: Sampler | None = None
    _pending: list[tuple[str, int, Key, dict[str, float], tuple[float, float], str]] = field(default_factory=list)

    def tell(self, what: str, work: Callable[[], object]) -> None:
        """Does the work and notes how long it took, at once: for people who wait, and for a run that is cut."""
        began_s = time.monotonic()
        work()
        took_s = time.monotonic() - began_s
        self.ledger.facts[f"{what} after s"] = round(took_s, 1)
        self.ledger.save()
        print(f"gpu: {what} after {took_s:.0f} s", file=sys.stderr, flush=True)

    def add(
        self,
        part: str,
        number: int,
        key: Key,
        figures: Mapping[str, float],
        span: tuple[float, float],
        *,
        model: str = "",
    ) -> None:
        """Notes a lap and says so; how busy the card was in the span is added when the round is saved."""
        self._pending.append((part, number, key, dict(figures), span, model))
        rate = next((figures[name] for name in _RATES if name in figures), 0.0)
        print(f"gpu: round {number}: {part}, {in_words(key)}: {plain_number(rate)}/s", file=sys.stderr, flush=True)

    def save(self) -> None:
        """Writes what there is."""
        for part, number, key, figures, span, model in self._pending:
            self.ledger.add(part, number, key, figures | self._activity(span), model)
        self._pending.clear()
        self.ledger.save()

    def _activity(self, span: tuple[float, float]) -> dict[str, float]:
        if self.sampler is None:
            return {}
        try:
            card = self.sampler.mean(*span)[0]
        except (NoTelemetry, IndexError):
            return {}
        found = {name: getattr(card.activity, field_name) for field_name, name in _ACTIVITY.items()}
        found["util"] = card.kernel_running  # nvidia-smi's, of the driver's own window of up to a second
        return {name: share for name, share in found.items() if share is not None}


def callers_stretch(
    bench: Bench, lanes: Sequence[Lane], meter: CpuMeter
) -> tuple[dict[str, float], tuple[float, float]]:
    """(the figures of one lap, when it was). Raises BadAnswer where a request failed: its figure would mean nothing."""
    plan = bench.plan
    begin_s = time.monotonic() + START_S + plan.settle_s
    wait = bench.generators.closed(lanes, settle_s=plan.settle_s, seconds=plan.seconds)
    time.sleep(max(0.0, begin_s - time.monotonic()))
    before = (meter.read_s(), busy_cpu_s())
    counted = batches_so_far(lanes)
    lap = wait()
    after = (meter.read_s(), busy_cpu_s())
    batches = batches_so_far(lanes) - counted
    figures = figures_of(lap, lanes)
    elapsed_s = time.monotonic() - begin_s
    server, machine = ((late - early) / elapsed_s for early, late in zip(before, after, strict=True))
    figures |= {"server_cores": server, "machine_cores": machine}
    if batches:
        figures["batch_size"] = len(lap.asks) * lanes[0].rows / batches
    return figures, (begin_s, begin_s + plan.seconds)


def figures_of(lap: CallersLap, lanes: Sequence[Lane]) -> dict[str, float]:
    """rate: rows a second. Latencies of requests. Raises BadAnswer where one failed, or none was answered."""
    failed = next((ask for ask in lap.asks if ask.failure), None)
    if failed:
        raise BadAnswer(f"{lanes[failed.lane].name} answered {failed.failure}")
    if not lap.asks:
        raise BadAnswer(f"{lanes[0].name} answered nothing for {lap.seconds:g} s")
    told = make_lap([ask.latency_ms / 1000 for ask in lap.asks], lap.seconds)
    rows = sum(lanes[ask.lane].rows for ask in lap.asks)
    cores = lap.cpu_s / lap.seconds
    return {"rate": rows / lap.seconds, "p50_ms": told.p50_ms, "p99_ms": told.p99_ms, "generator_cores": cores}


def check_answers(lanes: Sequence[Lane], regions: SystemRegions) -> None:
    """One request of each lane, which is the first of its model: an answer of zeros alone is no answer.

    Raises BadAnswer.
    """
    for number, lane in enumerate(lanes):
        regions.clear_output(number)
        try:
            reply = exchange(lane.port, lane.request, timeout_s=FIRST_ANSWER_S)
        except (BrokenConnection, OSError) as error:
            raise BadAnswer(f"{lane.name}: {error}") from error
        if reply.status != OK:
            raise BadAnswer(f"{lane.name} answered {said(reply)}")
        if not any(regions.output(number)):
            raise BadAnswer(f"{lane.name} answered nothing but zeros")


def batches_so_far(lanes: Sequence[Lane]) -> int:
    """Executions by Triton's statistics, where all lanes ask one model; else 0."""
    if len({lane.name for lane in lanes}) != 1 or len(lanes) < 2:
        return 0
    told = json.loads(ask(lanes[0].port, f"/v2/models/{lanes[0].name}/stats"))
    return int(told["model_stats"][0]["execution_count"])


def busy_cpu_s() -> float:
    """Seconds that this machine's cores were not idle, so far."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)
