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
WHOLE_MODES = ("none", "mps-whole")
PLACES = {"none": "plain", "mps": "mps", "mps-whole": "mps-whole", "batching": "plain", "mps+batching": "mps-batched"}
BATCH_LIMIT = 32  # at most 94 callers, shared by some instances
CALLERS = 2  # of each client
CALLERS_FACT = "chart, callers of each client"
THREADS = "chart, percent of the card's threads for a client of MPS"
WHOLE_CLIENTS = (8, 16)  # that targets speak of
IN_FLIGHT = 2  # images of a client


@dataclass(frozen=True, slots=True)
class ChartPlan:
    """clients: how many, a point each. instances: of the batched model. modes: which of PLACES.

    threads: percent of the card's that a one-image client under MPS may use. part: what its laps are of.
    """

    clients: tuple[int, ...]
    instances: int
    threads: int
    modes: tuple[str, ...] = MODES
    part: str = "chart"

    @property
    def points(self) -> list[tuple[str, int]]:
        """Every mode with every number of clients that it has."""
        return [(mode, count) for mode in self.modes for count in self.clients if count <= self.most(mode)]

    def most(self, mode: str) -> int:
        """Clients that a mode is measured with: whole's none only beside what is compared with it."""
        if self.part == "whole" and mode == "none":
            return max((count for count in self.clients if count in WHOLE_CLIENTS), default=self.clients[0])
        return max(self.clients)


def whole_plan(chart: ChartPlan) -> ChartPlan:
    """What MPS does by itself, without the limit of threads."""
    most = max(chart.clients)
    clients = tuple(count for count in chart.clients if count in WHOLE_CLIENTS or count == most)
    return replace(chart, clients=clients, modes=WHOLE_MODES, part="whole")


@dataclass(frozen=True, slots=True)
class _Place:
    """A Triton of the chart and the lanes to its models."""

    triton: BenchTriton
    lanes: tuple[Lane, ...]


def measure_chart(bench: Bench, chart: ChartPlan, source: Path) -> None:
    """Every point in every round, in an order drawn anew. source: the model's folder. Raises BadAnswer, OSError."""
    face = face_of(read_config(source))
    if "mps" in chart.modes:
        bench.ledger.facts[THREADS] = chart.threads
    bench.ledger.facts[f"{chart.part}, callers of each client"] = CALLERS
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
        _ask_perf_analyzer(bench, places, max(chart.clients))


def _ask_perf_analyzer(bench: Bench, places: dict[str, "_Place"], clients: int) -> None:
    """Once, of the batched model without MPS: whether somebody else's callers get what ours got."""
    if place := places.get("batching"):
        port, work = place.triton.port, bench.plan.work
        said = perf_analyzer_rate(bench.plan.runtime, work, port, BATCHED, CALLERS * clients)
        bench.ledger.facts[f"chart, batching, perf_analyzer's rate with {CALLERS * clients} callers"] = said


def _start(bench: Bench, chart: ChartPlan, source: Path, face: Face, stack: ExitStack) -> dict[str, _Place]:
    plan, most = bench.plan, max(chart.clients)
    names = [f"client-{number:02d}" for number in range(most)]
    alone = names[: chart.most("none")] if "none" in chart.modes else []
    wanted = {
        "plain": alone + ([BATCHED] if "batching" in chart.modes else []),
        "mps": names if "mps" in chart.modes else [],
        "mps-whole": names if "mps-whole" in chart.modes else [],
        "mps-batched": [BATCHED] if "mps+batching" in chart.modes else [],
    }
    began_s = time.monotonic()
    tritons: dict[str, tuple[BenchTriton, MpsDaemon | None]] = {}
    for place, models in wanted.items():
        if models:
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
    for mode in chart.modes:
        triton = tritons[PLACES[mode]][0]
        is_own = not mode.endswith("batching")
        lanes = tuple(
            Lane(name if is_own else BATCHED, triton.port, request)
            for name, request in zip(of_callers, own if is_own else shared, strict=True)
        )
        lanes = lanes[: CALLERS * chart.most(mode)]
        places[mode] = _Place(triton, lanes)
        check_answers(lanes, regions)
    return places


def _variant(model: str, chart: ChartPlan) -> Variant:
    if model != BATCHED:
        return Variant(model, in_flight=IN_FLIGHT)
    return Variant(model, instances=chart.instances, max_batch_size=BATCH_LIMIT, has_dynamic_batching=True)
