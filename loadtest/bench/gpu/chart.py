"""One-image clients with and without MPS and batching; Triton against the same program without a server."""

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench.gpu.callers import CallerLane
from loadtest.bench.gpu.programs import MpsDaemon, RawWorkers
from loadtest.bench.gpu.stretch import CudaRegions, GpuBench, SystemRegions, busy_cpu_s, callers_stretch, check_answers
from loadtest.bench.gpu.tritons import BenchTriton, Face, Variant, face_of, read_config, tensor_request, write_variant

BATCHED = "batched"
PLACES = {"none": "plain", "mps": "mps", "batching": "plain", "mps+batching": "mps-batched"}  # by mode
BATCH_LIMIT = 32  # at most 94 callers, shared by some instances
CALLERS = 2  # of each client
IN_FLIGHT = 2  # images of a client


@dataclass(frozen=True, slots=True)
class ChartPlan:
    """clients: how many, a point each. instances: of the batched model.

    threads: percent of the GPU's that a one-image client under MPS may use.
    """

    clients: Sequence[int]
    instances: int
    threads: int


@dataclass(frozen=True, slots=True)
class _Place:
    """A Triton of the chart and the lanes to its models."""

    triton: BenchTriton
    lanes: tuple[CallerLane, ...]


def measure_chart(bench: GpuBench, chart: ChartPlan, source: Path) -> None:
    """Every point in every round, in an order drawn anew. source: the model's folder. Raises BadAnswer, OSError."""
    face = face_of(read_config(source))
    bench.ledger.facts["chart, percent of the card's threads for a client of MPS"] = chart.threads
    bench.ledger.facts["chart, callers of each client"] = CALLERS
    with ExitStack() as stack:
        places = _start(bench, chart, source, face, stack)
        points = [(mode, count) for mode in PLACES for count in chart.clients]
        for number in range(1, bench.plan.rounds + 1):
            random.Random(bench.plan.seed + number).shuffle(points)
            for mode, count in points:
                place = places[mode]
                figures, span = callers_stretch(bench, place.lanes[: CALLERS * count], place.triton.meter())
                bench.add("chart", number, {"mode": mode, "clients": count}, figures, span)
            bench.save()


def _start(bench: GpuBench, chart: ChartPlan, source: Path, face: Face, stack: ExitStack) -> dict[str, _Place]:
    plan, most = bench.plan, max(chart.clients)
    names = [f"client-{number:02d}" for number in range(most)]
    wanted = {"plain": [BATCHED, *names], "mps": names, "mps-batched": [BATCHED]}
    began_s = time.monotonic()
    tritons: dict[str, tuple[BenchTriton, MpsDaemon | None]] = {}
    for place, models in wanted.items():
        repository = plan.work / f"chart-{place}-models"
        for model in models:
            write_variant(source, repository, _variant(model, chart), is_gpu=plan.is_gpu)
        daemon = None
        if place != "plain" and plan.is_gpu:
            threads = chart.threads if place == "mps" else 100
            daemon = stack.enter_context(MpsDaemon(plan.work / f"chart-{place}-pipes", threads))
        triton = BenchTriton(plan.runtime, repository, plan.work / f"chart-{place}", daemon.environ if daemon else None)
        tritons[place] = (stack.enter_context(triton), daemon)
    regions = stack.enter_context(SystemRegions(face, CALLERS * most, 1))
    for place, (triton, daemon) in tritons.items():
        triton.wait(wanted[place], began_s + plan.load_s)
        regions.register(triton.port)
        bench.ledger.facts[f"chart {place} ready after s"] = round(time.monotonic() - began_s, 1)
        if daemon:
            bench.ledger.facts[f"chart {place} MPS clients"] = len(daemon.client_pids())
    places = {}
    for mode, name in PLACES.items():
        models = [BATCHED if mode.endswith("batching") else model for model in names for _ in range(CALLERS)]
        triton = tritons[name][0]
        lanes = tuple(
            CallerLane(model, triton.port, tensor_request(model, face, region, 1))
            for model, region in zip(models, regions.regions, strict=True)
        )
        places[mode] = _Place(triton, lanes)
        check_answers(lanes, regions)
    return places


def _variant(model: str, chart: ChartPlan) -> Variant:
    if model != BATCHED:
        return Variant(model, in_flight=IN_FLIGHT)
    return Variant(model, instances=chart.instances, max_batch_size=BATCH_LIMIT, has_dynamic_batching=True)


RAW_START_S = 0.3


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """processes: how many at once, a point each. batches: rows a request. parts: raw, served or both."""

    processes: tuple[int, ...]
    batches: tuple[int, ...]
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One run of every round."""

    part: str
    processes: int
    batch: int
    memory: str

    @property
    def key(self) -> dict[str, str | int]:
        """As the ledger keeps it."""
        return {"processes": self.processes, "batch": self.batch, "memory": self.memory}


def points_of(engine: EnginePlan, memories: Sequence[str]) -> list[Point]:
    """Every number of processes with every batch; from the system's memory with the most processes only."""
    return [
        Point(part, processes, batch, memory)
        for part in engine.parts
        for processes in engine.processes
        for batch in engine.batches
        for memory in memories
        if memory == memories[0] or (processes == max(engine.processes) and batch > 1)
    ]


def measure_engine(bench: GpuBench, engine: EnginePlan, source: Path) -> None:
    """Every point in every round, in an order drawn anew. Raises BadAnswer, OSError."""
    plan = bench.plan
    with ExitStack() as stack:
        environ = None
        if plan.is_gpu:
            environ = stack.enter_context(MpsDaemon(plan.work / "engine-pipes")).environ
        rooms = _Rooms(bench, engine, source, environ)
        rooms.start(stack)
        points = points_of(engine, ("cuda", "system") if plan.is_gpu else ("system",))
        for number in range(1, plan.rounds + 1):
            random.Random(plan.seed + number).shuffle(points)
            for point in points:
                figures, span = rooms.run_point(point)
                bench.add(point.part, number, point.key, figures, span)
            bench.save()


class _Rooms:
    """The Triton, its regions and the raw processes."""

    def __init__(self, bench: GpuBench, engine: EnginePlan, source: Path, environ: dict[str, str] | None) -> None:
        self._bench, self._engine, self._environ = bench, engine, environ
        self._source, self._face = source, face_of(read_config(source))
        self._names = [f"served-{number}" for number in range(max(engine.processes))]
        self._triton: BenchTriton | None = None
        self._raw: RawWorkers | None = None
        self._lanes: dict[tuple[str, int], list[CallerLane]] = {}

    def start(self, stack: ExitStack) -> None:
        """Both at once; returns when all are ready."""
        plan, engine, began_s = self._bench.plan, self._engine, time.monotonic()
        repository = plan.work / "engine-models"
        for name in self._names:
            variant = Variant(name, max_batch_size=max(engine.batches), buckets=engine.batches)
            write_variant(self._source, repository, variant, is_gpu=plan.is_gpu)
        if "raw" in engine.parts:
            folder = repository / self._names[0]
            self._raw = stack.enter_context(RawWorkers(plan.torch_python, folder, len(self._names), self._environ))
            self._raw.start(read_config(folder))
        if "served" in engine.parts:
            triton = BenchTriton(plan.runtime, repository, plan.work / "engine", self._environ)
            self._triton = stack.enter_context(triton)
            self._triton.wait(self._names, began_s + plan.load_s)
            self._make_lanes(stack, self._triton)
        if self._raw:
            self._raw.wait()
        self._bench.ledger.facts["raw and served ready after s"] = round(time.monotonic() - began_s, 1)

    def _make_lanes(self, stack: ExitStack, triton: BenchTriton) -> None:
        """A region a caller, large enough for the largest batch."""
        count, rows, face = CALLERS * len(self._names), max(self._engine.batches), self._face
        system = stack.enter_context(SystemRegions(face, count, rows))
        system.register(triton.port)
        kinds = {"system": system.regions}
        if self._bench.plan.is_gpu:
            cuda = stack.enter_context(CudaRegions(face, count, rows, self._environ))
            cuda.register(triton.port)
            kinds["cuda"] = cuda.regions
        for kind, regions in kinds.items():
            for batch in self._engine.batches:
                self._lanes[kind, batch] = [
                    CallerLane(name, triton.port, tensor_request(name, face, region, batch), batch)
                    for name, region in zip(self._names * CALLERS, regions, strict=True)
                ]
        check_answers(self._lanes["system", rows], system)

    def run_point(self, point: Point) -> tuple[dict[str, float], tuple[float, float]]:
        """The figures, and when they were measured."""
        return self._raw_run(point) if point.part == "raw" else self._served_run(point)

    def _served_run(self, point: Point) -> tuple[dict[str, float], tuple[float, float]]:
        assert self._triton is not None
        most = len(self._names)
        lanes = self._lanes[point.memory, point.batch]
        chosen = [lanes[caller * most + number] for caller in range(CALLERS) for number in range(point.processes)]
        return callers_stretch(self._bench, chosen, self._triton.meter())

    def _raw_run(self, point: Point) -> tuple[dict[str, float], tuple[float, float]]:
        assert self._raw is not None
        plan = self._bench.plan
        begin_s = time.monotonic() + RAW_START_S
        order = {"batch": point.batch, "memory": point.memory, "begin_s": begin_s, "settle_s": plan.settle_s}
        before_s, asked_s = busy_cpu_s(), time.monotonic()
        rate = self._raw.run(point.processes, order | {"seconds": plan.seconds})
        cores = (busy_cpu_s() - before_s) / (time.monotonic() - asked_s)
        span = (begin_s + plan.settle_s, begin_s + plan.settle_s + plan.seconds)
        return {"rate": rate, "machine_cores": cores}, span
