"""The chart of 2017 again: one-image clients without MPS, with it, with batching, with both; all stand side by side.

A client is a model instance, that is a process with a CUDA context of its own. Two callers keep it busy, and it begins
the second one's image while the first one's is computed (`batches-in-flight`), as a client does that runs by itself:
the way through the server is not what is measured. So there are 47 models of one instance each behind a Triton without
MPS and behind another with, 48 contexts with Triton's own, MPS's limit before CUDA 13.1; N of them are asked. With
batching as many callers share one model, whose batches Triton forms. The batched model with MPS has a Triton and a
daemon of its own, since the other's 48 are taken.

With MPS a client may use a part of the card's threads only, the same at every point: 12 % fits sixteen clients by
NVIDIA's advice (100 % over half their number), the most that targets speak of.
The part "whole" is without that limit, beside 8 and 16 clients without MPS.
"""

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.bench.gpu.closed import Lane
from loadtest.bench.gpu.daemon import MpsDaemon
from loadtest.bench.gpu.folders import Variant, write_variant
from loadtest.bench.gpu.perf_analyzer import perf_analyzer_rate
from loadtest.bench.gpu.regions import SystemRegions
from loadtest.bench.gpu.requests import Face, face_of, read_config, tensor_request
from loadtest.bench.gpu.stretch import Bench, callers_stretch, check_answers
from loadtest.bench.gpu.tritons import BenchTriton

BATCHED = "batched"
MODES = ("none", "mps", "batching", "mps+batching")
PLACES = {"none": "plain", "mps": "mps", "mps-whole": "mps-whole", "batching": "plain", "mps+batching": "mps-batched"}
BATCH_LIMIT = 32  # at most 94 callers, shared by some instances
CALLERS = 2  # of each client
CALLERS_FACT = "callers of each client"
THREADS = "chart, percent of the card's threads for a client of MPS"
WHOLE_CLIENTS = (8, 16)  # that targets speak of
IN_FLIGHT = 2  # images of a client


@dataclass(frozen=True, slots=True)
class ChartPlan:
    """clients: of each mode how many, a point each. instances: of the batched model.

    threads: percent of the card's that a one-image client under MPS may use. part: what its laps are of.
    """

    clients: Mapping[str, Sequence[int]]
    instances: int
    threads: int
    part: str = "chart"

    @property
    def points(self) -> list[tuple[str, int]]:
        """Every mode with every number of clients that it has."""
        return [(mode, count) for mode, counts in self.clients.items() for count in counts]

    @property
    def most(self) -> int:
        """Clients of any mode."""
        return max(count for _, count in self.points)


def whole_plan(chart: ChartPlan) -> ChartPlan:
    """What MPS does by itself, without the limit of threads; without MPS only what targets speak of."""
    spoken_of = [count for count in chart.clients["none"] if count in WHOLE_CLIENTS]
    clients = {"none": spoken_of or [chart.most], "mps-whole": sorted({*spoken_of, chart.most})}
    return replace(chart, clients=clients, part="whole")


@dataclass(frozen=True, slots=True)
class _Place:
    """A Triton of the chart and the lanes to its models."""

    triton: BenchTriton
    lanes: tuple[Lane, ...]


def measure_chart(bench: Bench, chart: ChartPlan, source: Path) -> None:
    """Every point in every round, in an order drawn anew. source: the model's folder. Raises BadAnswer, OSError."""
    face = face_of(read_config(source))
    if "mps" in chart.clients:
        bench.ledger.facts[THREADS] = chart.threads
    bench.ledger.facts[f"{chart.part}, {CALLERS_FACT}"] = CALLERS
    with ExitStack() as stack:
        places = _start(bench, chart, source, face, stack)
        points = chart.points
        for number in range(1, bench.plan.rounds + 1):
            random.Random(bench.plan.seed + number).shuffle(points)
            for mode, count in points:
                place = places[mode]
                figures, span = callers_stretch(bench, place.lanes[: CALLERS * count], place.triton.meter())
                bench.add(chart.part, number, {"mode": mode, "clients": count}, figures, span)
            bench.save()
        _ask_perf_analyzer(bench, places, chart.most)


def _ask_perf_analyzer(bench: Bench, places: dict[str, "_Place"], clients: int) -> None:
    """Once, of the batched model without MPS: whether somebody else's callers get what ours got."""
    if place := places.get("batching"):
        port, work = place.triton.port, bench.plan.work
        said = perf_analyzer_rate(bench.plan.runtime, work, port, BATCHED, CALLERS * clients)
        bench.ledger.facts[f"chart, batching, perf_analyzer's rate with {CALLERS * clients} callers"] = said


def _start(bench: Bench, chart: ChartPlan, source: Path, face: Face, stack: ExitStack) -> dict[str, _Place]:
    plan, most = bench.plan, chart.most
    names = [f"client-{number:02d}" for number in range(most)]
    wanted: dict[str, list[str]] = {}
    for mode, counts in chart.clients.items():
        wanted.setdefault(PLACES[mode], []).extend([BATCHED] if _is_batched(mode) else names[: max(counts)])
    began_s = time.monotonic()
    tritons: dict[str, tuple[BenchTriton, MpsDaemon | None]] = {}
    for place, models in wanted.items():
        repository = plan.work / f"{chart.part}-{place}-models"
        for model in models:
            write_variant(source, repository, _variant(model, chart), is_gpu=plan.is_gpu)
        daemon = None
        if place != "plain" and plan.is_gpu:
            threads = chart.threads if place == "mps" else 100
            daemon = stack.enter_context(MpsDaemon(plan.work / f"{chart.part}-{place}-pipes", threads))
        triton = BenchTriton(
            plan.runtime, repository, plan.work / f"{chart.part}-{place}", daemon.environ if daemon else None
        )
        tritons[place] = (stack.enter_context(triton), daemon)
    regions = stack.enter_context(SystemRegions(face, CALLERS * most, 1))
    for place, (triton, daemon) in tritons.items():
        triton.wait(wanted[place], began_s + plan.load_s)
        regions.register(triton.port)
        bench.ledger.facts[f"{chart.part} {place} ready after s"] = round(time.monotonic() - began_s, 1)
        if daemon:
            bench.ledger.facts[f"{chart.part} {place} MPS clients"] = len(daemon.client_pids())
    of_callers = [name for name in names for _ in range(CALLERS)]
    own = [tensor_request(name, face, region, 1) for name, region in zip(of_callers, regions.regions, strict=True)]
    shared = [tensor_request(BATCHED, face, region, 1) for region in regions.regions]
    places = {}
    for mode, counts in chart.clients.items():
        triton = tritons[PLACES[mode]][0]
        lanes = tuple(
            Lane(BATCHED if _is_batched(mode) else name, triton.port, request)
            for name, request in zip(of_callers, shared if _is_batched(mode) else own, strict=True)
        )[: CALLERS * max(counts)]
        places[mode] = _Place(triton, lanes)
        check_answers(lanes, regions)
    return places


def _is_batched(mode: str) -> bool:
    return mode.endswith("batching")


def _variant(model: str, chart: ChartPlan) -> Variant:
    if model != BATCHED:
        return Variant(model, in_flight=IN_FLIGHT)
    return Variant(model, instances=chart.instances, max_batch_size=BATCH_LIMIT, has_dynamic_batching=True)
