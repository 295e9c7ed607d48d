"""The program served against the same program raw: as many processes, the same batches, in the same round, under MPS.

Served: a Triton with a model of one instance a process; each is asked by two callers with whole batches, whose tensors
lie in the system's shared memory or in the card's, so that the next batch waits when one is done. Raw: the backend's
own code in a loop, two batches in flight, from shared memory of the system's or from the card's.
"""

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench.gpu.closed import Lane
from loadtest.bench.gpu.daemon import MpsDaemon
from loadtest.bench.gpu.folders import Variant, write_variant
from loadtest.bench.gpu.raw import RawWorkers
from loadtest.bench.gpu.regions import CudaRegions, SystemRegions
from loadtest.bench.gpu.requests import face_of, read_config, tensor_request
from loadtest.bench.gpu.stretch import Bench, busy_cpu_s, callers_stretch, check_answers
from loadtest.bench.gpu.tritons import BenchTriton

CALLERS = 2  # of each served model
RAW_START_S = 0.3


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """processes: how many at once, a point each. batches: rows a request. parts: raw, served or both."""

    processes: tuple[int, ...]
    batches: tuple[int, ...]
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One lap of every round."""

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


def measure_engine(bench: Bench, engine: EnginePlan, source: Path) -> None:
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
                figures, span = rooms.lap(point)
                bench.add(point.part, number, point.key, figures, span)
            bench.save()


class _Rooms:
    """The Triton, its regions and the raw processes."""

    def __init__(self, bench: Bench, engine: EnginePlan, source: Path, environ: dict[str, str] | None) -> None:
        self._bench, self._engine, self._environ = bench, engine, environ
        self._source, self._face = source, face_of(read_config(source))
        self._names = [f"served-{number}" for number in range(max(engine.processes))]
        self._triton: BenchTriton | None = None
        self._raw: RawWorkers | None = None
        self._lanes: dict[tuple[str, int], list[Lane]] = {}

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
                    Lane(name, triton.port, tensor_request(name, face, region, batch), batch)
                    for name, region in zip(self._names * CALLERS, regions, strict=True)
                ]
        check_answers(self._lanes["system", rows], system)

    def lap(self, point: Point) -> tuple[dict[str, float], tuple[float, float]]:
        """The figures, and when they were measured."""
        return self._raw_lap(point) if point.part == "raw" else self._served_lap(point)

    def _served_lap(self, point: Point) -> tuple[dict[str, float], tuple[float, float]]:
        assert self._triton is not None
        most = len(self._names)
        lanes = self._lanes[point.memory, point.batch]
        chosen = [lanes[caller * most + number] for caller in range(CALLERS) for number in range(point.processes)]
        return callers_stretch(self._bench, chosen, self._triton.meter())

    def _raw_lap(self, point: Point) -> tuple[dict[str, float], tuple[float, float]]:
        assert self._raw is not None
        plan = self._bench.plan
        begin_s = time.monotonic() + RAW_START_S
        lap = {"batch": point.batch, "memory": point.memory, "begin_s": begin_s, "settle_s": plan.settle_s}
        before_s, asked_s = busy_cpu_s(), time.monotonic()
        rate = self._raw.lap(point.processes, lap | {"seconds": plan.seconds})
        cores = (busy_cpu_s() - before_s) / (time.monotonic() - asked_s)
        span = (begin_s + plan.settle_s, begin_s + plan.settle_s + plan.seconds)
        return {"rate": rate, "machine_cores": cores}, span
