"""One-image clients with and without MPS and batching; Triton against the same program without a server."""

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.bench.gpu.callers import CallerLane
from loadtest.bench.gpu.programs import MpsDaemon, RawWorkers
from loadtest.bench.gpu.stretch import CudaRegions, GpuBench, SystemRegions, busy_cpu_s, callers_stretch, check_answers
from loadtest.bench.gpu.tritons import BenchTriton, Face, Variant, face_of, read_config, tensor_request, write_variant
from penstock.gpu.mps.planner import single_row_limit

CALLERS = 2  # of each client
IN_FLIGHT = 2  # images of a client
LIMITED, UNLIMITED, BATCHED = "limited", "unlimited", "batched"  # the models' names begin with these
SHARED = "shared"  # as batched, but its instances share one process, which runs the program
MAX_SHARING = 32  # instances that share it


@dataclass(frozen=True, slots=True)
class ChartMode:
    """A line of the chart. has_mps: in the Triton under MPS. models: which of its models are asked."""

    name: str
    has_mps: bool
    models: str


_MODES = (
    ChartMode("none", has_mps=False, models=UNLIMITED),
    ChartMode("mps", has_mps=True, models=LIMITED),
    ChartMode("mps-unlimited", has_mps=True, models=UNLIMITED),
    ChartMode("batching", has_mps=False, models=BATCHED),
    ChartMode("mps+batching", has_mps=True, models=BATCHED),
    ChartMode("mps+shared", has_mps=True, models=SHARED),
)
MODES = {mode.name: mode for mode in _MODES}


@dataclass(frozen=True, slots=True)
class ChartPlan:
    """part: its name in the file. clients: how many, a point each. batched: the model that all share.

    modes: those measured. threads: percent of the GPU's that a limited one-image client under MPS may use; 0: as the
    planner limits so many. parameters: of every model.
    """

    part: str
    clients: Sequence[int]
    batched: Variant
    modes: Sequence[ChartMode] = tuple(MODES.values())
    threads: int = 0
    parameters: tuple[tuple[str, str], ...] = ()

    def limit(self, clients: int) -> int:
        """Percent of the threads for each of so many limited clients."""
        return self.threads or round(single_row_limit(clients)) or 100

    def variants(self, *, has_mps: bool) -> list[Variant]:
        """The models of one Triton, an instance a client."""
        kinds = {mode.models for mode in self.modes if mode.has_mps == has_mps}
        found = {BATCHED: replace(self.batched, parameters=self.parameters)} if BATCHED in kinds else {}
        if SHARED in kinds:
            found |= {variant.name: variant for variant in map(self.shared, self.clients)}
        for kind in sorted(kinds - {BATCHED, SHARED}):
            for count in self.clients:
                limit = (("active-thread-percentage", str(self.limit(count))),) if kind == LIMITED else ()
                parameters = (*self.parameters, *limit)
                found |= {
                    name: Variant(name, 1, in_flight=IN_FLIGHT, parameters=parameters)
                    for name in self.names(kind, count)
                }
        return list(found.values())

    def shared(self, clients: int) -> Variant:
        """The batched model with an instance for each request in flight, and one process that runs its program."""
        parameters = (*self.parameters, ("program-process", "shared"))
        instances = min(CALLERS * clients, MAX_SHARING)
        return replace(self.batched, name=f"{SHARED}-{clients:02d}", instances=instances, parameters=parameters)

    def names(self, kind: str, clients: int) -> list[str]:
        """The models that so many clients ask, one for each client; the batched or shared one alone."""
        if kind in (BATCHED, SHARED):
            return [kind if kind == BATCHED else self.shared(clients).name]
        name = f"{kind}-{self.limit(clients)}" if kind == LIMITED else kind
        return [f"{name}-{number:02d}" for number in range(clients)]


@dataclass(frozen=True, slots=True)
class _Place:
    """A Triton of a chart. models: that it loads."""

    chart: ChartPlan
    has_mps: bool
    triton: BenchTriton
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _ChartPoint:
    """One run of every round."""

    part: str
    mode: str
    clients: int
    triton: BenchTriton
    lanes: tuple[CallerLane, ...]


def measure_charts(bench: GpuBench, charts: Sequence[ChartPlan], source: Path) -> None:
    """Every point of all charts in every round, in an order drawn anew. source: the model's folder.

    Raises BadAnswer, OSError.
    """
    face, facts = face_of(read_config(source)), bench.ledger.facts
    for chart in charts:
        limits, batched = ", ".join(f"{chart.limit(count)} of {count}" for count in chart.clients), chart.batched
        facts[f"{chart.part}, percent of the GPU's threads for each limited client"] = limits
        facts[f"{chart.part}, callers of each client"] = CALLERS
        form = (
            f"{batched.instances} instances, at most {batched.max_batch_size} rows, {batched.delay_us} µs queue delay"
        )
        facts[f"{chart.part}, batched model"] = form
        if any(mode.models == SHARED for mode in chart.modes):
            counts = ", ".join(f"{chart.shared(count).instances} for {count}" for count in chart.clients)
            facts[f"{chart.part}, instances that share one process, by clients"] = counts
    with ExitStack() as stack:
        points = _start(bench, charts, source, face, stack)
        for number in range(1, bench.plan.rounds + 1):
            random.Random(bench.plan.seed + number).shuffle(points)
            for point in points:
                figures, span = callers_stretch(bench, point.lanes, point.triton.meter())
                bench.add(point.part, number, {"mode": point.mode, "clients": point.clients}, figures, span)
            bench.save()


def _start(
    bench: GpuBench, charts: Sequence[ChartPlan], source: Path, face: Face, stack: ExitStack
) -> list[_ChartPoint]:
    """All Tritons at once, under one MPS daemon those that have MPS; every answer is looked at."""
    plan, began_s = bench.plan, time.monotonic()
    daemon = stack.enter_context(MpsDaemon(plan.work / "chart-pipes")) if plan.is_gpu else None
    places = []
    for chart in charts:
        for has_mps in sorted({mode.has_mps for mode in chart.modes}):
            name = f"{chart.part}-mps" if has_mps else chart.part
            variants = chart.variants(has_mps=has_mps)
            for variant in variants:
                write_variant(source, plan.work / f"{name}-models", variant, is_gpu=plan.is_gpu)
            environ = daemon.environ if daemon and has_mps else None
            triton = BenchTriton(plan.runtime, plan.work / f"{name}-models", plan.work / name, environ)
            models = tuple(variant.name for variant in variants)
            places.append(_Place(chart, has_mps, stack.enter_context(triton), models))
    most = max(max(chart.clients) for chart in charts)
    regions = stack.enter_context(SystemRegions(face, CALLERS * most, 1))
    for place in places:
        place.triton.wait(place.models, began_s + plan.load_s)
        regions.register(place.triton.port)
        what = f"{place.chart.part} {'with' if place.has_mps else 'without'} MPS ready after s"
        bench.ledger.facts[what] = round(time.monotonic() - began_s, 1)
    if daemon:
        bench.ledger.facts[f"{charts[0].part}, MPS clients"] = len(daemon.client_pids())
    points = [point for place in places for point in _points(place, face, regions)]
    for point in points:
        check_answers(point.lanes, regions)
    return points


def _points(place: _Place, face: Face, regions: SystemRegions) -> list[_ChartPoint]:
    chart, triton = place.chart, place.triton
    return [
        _ChartPoint(
            chart.part,
            mode.name,
            count,
            triton,
            _lanes(chart.names(mode.models, count), count, triton.port, face, regions),
        )
        for mode in chart.modes
        if mode.has_mps == place.has_mps
        for count in chart.clients
    ]


def _lanes(names: Sequence[str], clients: int, port: int, face: Face, regions: SystemRegions) -> tuple[CallerLane, ...]:
    models = [name for name in names for _ in range(CALLERS * clients // len(names))]
    pairs = zip(models, regions.regions[: len(models)], strict=True)
    return tuple(CallerLane(model, port, tensor_request(model, face, region, 1)) for model, region in pairs)


RAW_START_S = 0.3


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """processes: how many at once, a point each. batches: rows a request. parts: raw, served or both.

    forms: of FORMS, a model each. memories: cuda, system or both. in_flight: batches of an instance. callers: of each
    instance, a point each; each form is judged at its best.
    """

    processes: tuple[int, ...]
    batches: tuple[int, ...]
    parts: tuple[str, ...]
    forms: tuple[str, ...] = ("fused",)
    memories: tuple[str, ...] = ("cuda", "system")
    in_flight: int = 1
    callers: tuple[int, ...] = (CALLERS,)


FORMS = {"plain": (("fuse", "0"),), "fused": (), "compiled": (("compiler", "aot-inductor"),)}  # parameters, by name


@dataclass(frozen=True, slots=True)
class Point:
    """One run of every round."""

    part: str
    processes: int
    batch: int
    memory: str
    form: str = "fused"
    callers: int = 0  # of each process; 0 for raw

    @property
    def key(self) -> dict[str, str | int]:
        """As the ledger keeps it."""
        key: dict[str, str | int] = {"processes": self.processes, "batch": self.batch, "memory": self.memory}
        key |= {"callers": self.callers} if self.callers else {}
        return key if self.form == "fused" else key | {"form": self.form}


def points_of(engine: EnginePlan, memories: Sequence[str]) -> list[Point]:
    """Every number of processes with every batch; from the second kind of memory with the most processes only."""
    return [
        Point(part, processes, batch, memory, form, callers)
        for part in engine.parts
        for callers in (engine.callers if part == "served" else (0,))
        for form in engine.forms
        for processes in engine.processes
        for batch in engine.batches
        for memory in memories
        if memory == memories[0] or processes == max(engine.processes)
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
        points = points_of(engine, engine.memories if plan.is_gpu else ("system",))
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
        self._names = {
            form: [f"served-{form}-{number}" for number in range(max(engine.processes))] for form in engine.forms
        }
        self._triton: BenchTriton | None = None
        self._raw: dict[str, RawWorkers] = {}
        self._lanes: dict[tuple[str, str, int], list[CallerLane]] = {}

    def start(self, stack: ExitStack) -> None:
        """Both at once; returns when all are ready."""
        plan, engine, began_s = self._bench.plan, self._engine, time.monotonic()
        repository = plan.work / "engine-models"
        for form, names in self._names.items():
            for name in names:
                variant = Variant(
                    name,
                    max_batch_size=max(engine.batches),
                    buckets=engine.batches,
                    in_flight=engine.in_flight,
                    parameters=FORMS[form],
                )
                write_variant(self._source, repository, variant, is_gpu=plan.is_gpu)
            if "raw" in engine.parts:
                folder = repository / names[0]
                workers = RawWorkers(plan.torch_python, folder, len(names), self._environ)
                self._raw[form] = stack.enter_context(workers)
                workers.start(read_config(folder))
        if "served" in engine.parts:
            triton = BenchTriton(plan.runtime, repository, plan.work / "engine", self._environ)
            self._triton = stack.enter_context(triton)
            self._triton.wait([name for names in self._names.values() for name in names], began_s + plan.load_s)
            self._make_lanes(stack, self._triton)
        for workers in self._raw.values():
            workers.wait()
        self._bench.ledger.facts["raw and served, batches in flight"] = engine.in_flight
        self._bench.ledger.facts["raw and served ready after s"] = round(time.monotonic() - began_s, 1)

    def _make_lanes(self, stack: ExitStack, triton: BenchTriton) -> None:
        """A region a caller, large enough for the largest batch; the forms share them."""
        rows, face, callers = max(self._engine.batches), self._face, max(self._engine.callers)
        count = callers * max(self._engine.processes)
        system = stack.enter_context(SystemRegions(face, count, rows))
        system.register(triton.port)
        kinds = {"system": system.regions}
        if self._bench.plan.is_gpu:
            cuda = stack.enter_context(CudaRegions(face, count, rows, self._environ))
            cuda.register(triton.port)
            kinds["cuda"] = cuda.regions
        for form, names in self._names.items():
            for kind, regions in kinds.items():
                for batch in self._engine.batches:
                    self._lanes[form, kind, batch] = [
                        CallerLane(name, triton.port, tensor_request(name, face, region, batch), batch)
                        for name, region in zip(names * callers, regions, strict=True)
                    ]
            check_answers(self._lanes[form, "system", rows], system)

    def run_point(self, point: Point) -> tuple[dict[str, float], tuple[float, float]]:
        """The figures, and when they were measured."""
        return self._raw_run(point) if point.part == "raw" else self._served_run(point)

    def _served_run(self, point: Point) -> tuple[dict[str, float], tuple[float, float]]:
        assert self._triton is not None
        most = len(self._names[point.form])
        lanes = self._lanes[point.form, point.memory, point.batch]
        chosen = [lanes[caller * most + number] for caller in range(point.callers) for number in range(point.processes)]
        return callers_stretch(self._bench, chosen, self._triton.meter())

    def _raw_run(self, point: Point) -> tuple[dict[str, float], tuple[float, float]]:
        plan = self._bench.plan
        begin_s = time.monotonic() + RAW_START_S
        order = {"batch": point.batch, "memory": point.memory, "begin_s": begin_s, "settle_s": plan.settle_s}
        before_s, asked_s = busy_cpu_s(), time.monotonic()
        rate = self._raw[point.form].run(point.processes, order | {"seconds": plan.seconds})
        cores = (busy_cpu_s() - before_s) / (time.monotonic() - asked_s)
        span = (begin_s + plan.settle_s, begin_s + plan.settle_s + plan.seconds)
        return {"rate": rate, "machine_cores": cores}, span
