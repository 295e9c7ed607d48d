"""One timed interval of load with its CPU and GPU telemetry; shared-memory regions of the callers."""

import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import psutil

from loadtest.bench.closed_loop import make_repetition
from loadtest.bench.gpu.callers import OK, BrokenConnection, CallerLane, CallersRun, exchange, reply_text
from loadtest.bench.gpu.figures import Key, PointLedger, key_text
from loadtest.bench.gpu.generators import START_S, Generators
from loadtest.bench.gpu.tritons import Face, Region, ask, region_bytes
from loadtest.bench.wire import BadAnswer
from penstock.engines.triton.runtime import TritonRuntime
from penstock.gpu.telemetry.sampler import Sampler, TelemetryUnavailable
from penstock_load.report.document import plain_number
from penstock_load.witness.process_cpu import CpuMeter

SHARED_MEMORY = Path("/dev/shm")
_HOLDER = (sys.executable, "-m", "loadtest.bench.gpu.cuda_region")


class SystemRegions:
    """So many regions of the system's shared memory, alike, filled with noise; removed when it ends."""

    def __init__(self, face: Face, count: int, rows: int) -> None:
        """rows: that each holds."""
        self._mark = f"penstock_bench_{uuid.uuid4().hex[:8]}"
        self._size_bytes = region_bytes(face, rows)
        self._in_bytes = rows * face.input.row_bytes
        self.regions = tuple(Region(f"{self._mark}_{number}", "system") for number in range(count))
        noise = noise_of(face, rows)
        for region in self.regions:
            path = SHARED_MEMORY / region.name
            with path.open("wb") as file:
                file.write(noise)
                file.truncate(self._size_bytes)

    def register(self, port: int) -> None:
        """With the Triton of that HTTP port. Raises BadAnswer."""
        for region in self.regions:
            body = {"key": f"/{region.name}", "offset": 0, "byte_size": self._size_bytes}
            ask(port, f"/v2/systemsharedmemory/region/{region.name}/register", body)

    def output(self, number: int) -> bytes:
        """The region's output rows, as they stand there now."""
        return (SHARED_MEMORY / self.regions[number].name).read_bytes()[self._in_bytes :]

    def clear_output(self, number: int) -> None:
        """Zeros where the region's output rows are."""
        with (SHARED_MEMORY / self.regions[number].name).open("r+b") as file:
            file.seek(self._in_bytes)
            file.write(bytes(self._size_bytes - self._in_bytes))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for region in self.regions:
            with suppress(OSError):
                (SHARED_MEMORY / region.name).unlink()


class CudaRegions:
    """So many regions of a GPU's memory, held by a child process: under MPS it is one of the daemon's clients."""

    def __init__(self, face: Face, count: int, rows: int, environ: Mapping[str, str] | None = None) -> None:
        """environ: on top of this process's. Raises BadAnswer where there is no GPU memory to be had."""
        self._size_bytes = region_bytes(face, rows)
        self.regions = tuple(Region(f"penstock_bench_cuda_{uuid.uuid4().hex[:8]}_{n}", "cuda") for n in range(count))
        pipe = subprocess.PIPE
        with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY) as noise:
            noise.write(noise_of(face, rows))
            noise.flush()
            command = [*_HOLDER, str(self._size_bytes), str(count), noise.name]
            environment = os.environ | (environ or {})
            self._holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
            assert self._holder.stdout is not None
            said = json.loads(self._holder.stdout.readline() or '{"why": "it ended"}')
        if "why" in said:
            self.close()
            raise BadAnswer(f"no CUDA shared memory: {said['why']}")
        self._handles: list[str] = said["handles"]

    def register(self, port: int) -> None:
        """With the Triton of that HTTP port. Raises BadAnswer."""
        for region, handle in zip(self.regions, self._handles, strict=True):
            body = {"raw_handle": {"b64": handle}, "device_id": 0, "byte_size": self._size_bytes}
            ask(port, f"/v2/cudasharedmemory/region/{region.name}/register", body)

    def close(self) -> None:
        """Gives the memory back."""
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.close()
        try:
            self._holder.wait(5)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()
        self._holder.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def noise_of(face: Face, rows: int) -> bytes:
    """Input rows: numbers in [0, 1), or bytes."""
    generator, count = np.random.default_rng(1), rows * face.input.row_bytes
    if face.input.datatype == "FP32":
        return generator.random(count // 4, np.float32).tobytes()
    if face.input.datatype == "FP16":
        return generator.random(count // 2, np.float32).astype(np.float16).tobytes()
    if face.input.datatype == "UINT8":
        return generator.integers(0, 255, count, np.uint8).tobytes()
    return bytes(count)


FIRST_ANSWER_S = 60.0
_RATES = ("rate", "held_per_s", "ok_per_s")  # the figure that is printed after a run
_ACTIVITY = {"sm": "sm_activity", "sm_occupancy": "sm_occupancy", "tensor": "tensor_activity"} | {
    "memory_bandwidth": "memory_bandwidth_activity",
    "graphics_engine": "kernel_running",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of every part. work: the bench's own folder, its path short. torch_python: an interpreter with torch.

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
class GpuBench:
    """What every part uses. sampler: None without a card."""

    plan: Plan
    ledger: PointLedger
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
        """Records a run and prints it; GPU utilisation of the span is added when the round is saved."""
        self._pending.append((part, number, key, dict(figures), span, model))
        rate = next((figures[name] for name in _RATES if name in figures), 0.0)
        print(f"gpu: round {number}: {part}, {key_text(key)}: {plain_number(rate)}/s", file=sys.stderr, flush=True)

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
        except (TelemetryUnavailable, IndexError):
            return {}
        found = {name: getattr(card.activity, field_name) for field_name, name in _ACTIVITY.items()}
        found["util"] = card.kernel_running  # nvidia-smi's, of the driver's own window of up to a second
        return {name: share for name, share in found.items() if share is not None}


def callers_stretch(
    bench: GpuBench, lanes: Sequence[CallerLane], meter: CpuMeter
) -> tuple[dict[str, float], tuple[float, float]]:
    """(figures, span) of one run. Raises BadAnswer if a request failed: its figures would have no meaning."""
    plan = bench.plan
    begin_s = time.monotonic() + START_S + plan.settle_s
    wait = bench.generators.closed(lanes, settle_s=plan.settle_s, seconds=plan.seconds)
    time.sleep(max(0.0, begin_s - time.monotonic()))
    before = (meter.read_s(), busy_cpu_s())
    counted = server_statistics(lanes)
    run = wait()
    after = (meter.read_s(), busy_cpu_s())
    since = {name: value - counted[name] for name, value in server_statistics(lanes).items()}
    figures = figures_of(run, lanes)
    elapsed_s = time.monotonic() - begin_s
    server, machine = ((late - early) / elapsed_s for early, late in zip(before, after, strict=True))
    figures |= {"server_cores": server, "machine_cores": machine}
    if since.get("executions") and since["requests"]:
        figures["batch_size"] = len(run.asks) * lanes[0].rows / since["executions"]
        figures |= {f"{name}_us": since[name] / since["requests"] / 1000 for name in _DURATIONS}
    return figures, (begin_s, begin_s + plan.seconds)


def figures_of(run: CallersRun, lanes: Sequence[CallerLane]) -> dict[str, float]:
    """rate: rows a second. Latencies of requests. Raises BadAnswer where one failed, or none was answered."""
    failed = next((ask for ask in run.asks if ask.failure), None)
    if failed:
        raise BadAnswer(f"{lanes[failed.lane].name} answered {failed.failure}")
    if not run.asks:
        raise BadAnswer(f"{lanes[0].name} answered nothing for {run.seconds:g} s")
    timing = make_repetition([ask.latency_ms / 1000 for ask in run.asks], run.seconds)
    rows = sum(lanes[ask.lane].rows for ask in run.asks)
    cores = run.cpu_s / run.seconds
    return {"rate": rows / run.seconds, "p50_ms": timing.p50_ms, "p99_ms": timing.p99_ms, "generator_cores": cores}


def check_answers(lanes: Sequence[CallerLane], regions: SystemRegions) -> None:
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
            raise BadAnswer(f"{lane.name} answered {reply_text(reply)}")
        if not any(regions.output(number)):
            raise BadAnswer(f"{lane.name} answered nothing but zeros")


_DURATIONS = {"queue": "queue", "input": "compute_input", "infer": "compute_infer", "output": "compute_output"}


def server_statistics(lanes: Sequence[CallerLane]) -> dict[str, int]:
    """Triton's counters, where all lanes ask one model; else none.

    executions, requests; queue, input, infer, output: ns of all requests. With several batches in flight of an
    instance, infer ends when the instance takes the next request.
    """
    if len({lane.name for lane in lanes}) != 1 or len(lanes) < 2:
        return {}
    model = json.loads(ask(lanes[0].port, f"/v2/models/{lanes[0].name}/stats"))["model_stats"][0]
    of_requests = model["inference_stats"]
    found = {"executions": int(model["execution_count"]), "requests": int(of_requests["success"]["count"])}
    return found | {name: int(of_requests[field_name]["ns"]) for name, field_name in _DURATIONS.items()}


def busy_cpu_s() -> float:
    """Seconds that this machine's cores were not idle, so far."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)  # plain-english: ok
