"""JPEG over HTTP to the best classes: how many pictures a second `penstock up` holds at a 99th percentile.

Ways side by side behind one gateway: the model's instance decodes (nvJPEG), in batches of Triton or of the core, or the
gateway's decoders do (the CPU). In each round: what a closed loop gets, then an open loop (Poisson) at shares of that,
by halves, each tried twice before it counts as not held: the highest at which 99 % of the pictures are answered within
the SLO of the moment at which they were due. What fails or is refused counts as late for ever. The load generator runs
on the same cores; its CPU time is reported separately.
"""

import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench.closed_loop import quantile
from loadtest.bench.gpu.callers import OK, CallerLane, exchange, reply_text
from loadtest.bench.gpu.generators import START_S, Schedule, ScheduleRun
from loadtest.bench.gpu.pictures import photos
from loadtest.bench.gpu.programs import PenstockUp
from loadtest.bench.gpu.stretch import GpuBench, busy_cpu_s
from loadtest.bench.gpu.tritons import picture_request
from loadtest.bench.wire import BadAnswer
from penstock.gateway.metrics import STAGES
from penstock_load.pacer import send_times
from penstock_load.scenario import Arrivals, Shape

PICTURES = 64
CONNECTIONS = 384
SHARES = tuple(0.97 * 0.95**place for place in range(20))  # of what the closed loop got, down to 0.37
SUSTAINED = 0.99
FIRST_ANSWER_S = 20.0
SAMPLE_EVERY = 8  # answers of which one's stages are read


@dataclass(frozen=True, slots=True)
class JpegPlan:
    """models: by who decodes (engine, gateway), all in `home`'s repository. callers: of the closed loop.

    seconds: of each rate that is tried.
    """

    home: Path
    environment: Path
    models: Mapping[str, str]
    flags: tuple[str, ...]
    slo_ms: float
    seconds: float
    callers: int


def measure_jpeg(bench: GpuBench, jpeg: JpegPlan) -> None:
    """Every way in every round. Raises BadAnswer, OSError."""
    plan = bench.plan
    pictures = photos(PICTURES, seed=plan.seed)
    bench.ledger.facts["jpeg bytes a picture"] = sum(map(len, pictures)) // len(pictures)
    with ExitStack() as stack:
        up = stack.enter_context(PenstockUp(jpeg.home, jpeg.models.values(), *jpeg.flags, environment=jpeg.environment))
        bench.tell("jpeg stack is ready", lambda: up.wait(time.monotonic() + plan.load_s))
        ways = {way: _Way(bench, jpeg, up, way, pictures) for way in jpeg.models}
        for number in range(1, plan.rounds + 1):
            order = list(ways.values())
            random.Random(plan.seed + number).shuffle(order)
            for way in order:
                way.run_round(number)
                bench.save()


class _Way:
    """Pictures to one of the models."""

    def __init__(self, bench: GpuBench, jpeg: JpegPlan, up: PenstockUp, way: str, pictures: Sequence[bytes]) -> None:
        """Asks it once. Raises BadAnswer."""
        self._bench, self._jpeg, self._up, self._way = bench, jpeg, up, way
        self._requests = tuple(picture_request(jpeg.models[way], picture) for picture in pictures)
        until_s = time.monotonic() + FIRST_ANSWER_S
        while (reply := exchange(up.port, self._requests[0], timeout_s=FIRST_ANSWER_S)).status != OK:
            if time.monotonic() > until_s:  # decoders start with the first pictures, and the model may have a deadline
                raise BadAnswer(f"{jpeg.models[way]} answered {reply_text(reply)}")
            time.sleep(0.2)

    def run_round(self, number: int) -> None:
        """Capacity, then rates by halves: the highest that was held."""
        capacity = self._capacity()
        figures, span = {"capacity_per_s": capacity, "held_per_s": 0.0}, (0.0, 0.0)
        first, end = 0, len(SHARES)
        while first < end:
            place = (first + end) // 2
            tried, tried_span = self._try_twice(number, place, capacity)
            if tried["in_time"] >= SUSTAINED:
                figures, span, end = figures | tried | {"held_per_s": tried["ok_per_s"]}, tried_span, place
            else:
                first = place + 1
        self._bench.add("jpeg", number, {"decoded_by": self._way}, figures, span, model=self._model)

    def _try_twice(self, number: int, place: int, capacity: float) -> tuple[dict[str, float], tuple[float, float]]:
        """A rate that was not held once more: one moment of the machine's is not to halve what is found."""
        key = {"decoded_by": self._way, "share": f"{SHARES[place]:.2f}"}
        for _ in range(2):
            tried, span = self._try(number, capacity * SHARES[place])
            self._bench.add("jpeg rate", number, key, tried, span, model=self._model)
            if tried["in_time"] >= SUSTAINED:
                break
        return tried, span

    @property
    def _model(self) -> str:
        return self._jpeg.models[self._way]

    def _capacity(self) -> float:
        model, port = self._jpeg.models[self._way], self._up.port
        lanes = [CallerLane(model, port, self._requests[n % len(self._requests)]) for n in range(self._jpeg.callers)]
        seconds = self._bench.plan.seconds
        run = self._bench.generators.closed(lanes, settle_s=1.0, seconds=seconds)()
        good = sum(not ask.failure for ask in run.asks)
        if not good:
            why = run.asks[0].failure if run.asks else "nothing"
            raise BadAnswer(f"{model} answered {self._jpeg.callers} callers {why}")
        return good / seconds

    def _try(self, number: int, rate: float) -> tuple[dict[str, float], tuple[float, float]]:
        seconds = self._jpeg.seconds
        arrivals = Arrivals(shape=Shape.POISSON, rate=rate)
        moments = tuple(send_times(arrivals, seconds, seed=self._bench.plan.seed + number))
        schedule = Schedule(self._up.port, self._requests, moments, CONNECTIONS, sample_every=SAMPLE_EVERY)
        begin_s = time.monotonic() + START_S
        wait = self._bench.generators.opened(schedule)
        time.sleep(max(0.0, begin_s - time.monotonic()))
        before, busy_s = self._up.cpu_s(), busy_cpu_s()
        time.sleep(max(0.0, begin_s + seconds - time.monotonic()))
        elapsed_s = time.monotonic() - begin_s
        used, busy_s = self._up.cpu_s(), busy_cpu_s() - busy_s
        run = wait()
        figures = rate_figures(run, len(moments), seconds, self._jpeg.slo_ms) | stage_figures(run.samples)
        figures |= {f"{kind}_cores": (used[kind] - before[kind]) / elapsed_s for kind in used}
        return figures | {"machine_cores": busy_s / elapsed_s}, (begin_s, begin_s + seconds)


def rate_figures(run: ScheduleRun, asked: int, seconds: float, slo_ms: float) -> dict[str, float]:
    """in_time: the share of all that were due; the percentiles are of all, too: what got no good answer is inf."""
    ordered = sorted(run.latencies_ms) + [math.inf] * (asked - len(run.latencies_ms))
    late = sorted(run.late_ms) or [0.0]
    return {
        "asked_per_s": asked / seconds,
        "ok_per_s": len(run.latencies_ms) / seconds,
        "in_time": sum(latency <= slo_ms for latency in run.latencies_ms) / max(asked, 1),
        "p50_ms": quantile(ordered, 0.5),
        "p99_ms": quantile(ordered, 0.99),
        "late_p99_ms": quantile(late, 0.99),
        "failed": float(sum(run.failures.values()) + run.unsent),
        "generator_cores": run.cpu_s / seconds,
    }


def stage_figures(answers: Sequence[bytes]) -> dict[str, float]:
    """p50 and p99 of each stage by the answers' own `timings_ms`, and their batches' mean size."""
    read = [json.loads(answer) for answer in answers]
    if not read:
        return {}
    found = {"batch_size": sum(answer["batch_size"] for answer in read) / len(read)}
    for stage in (*STAGES, "total"):
        ordered = sorted(answer["timings_ms"][stage] for answer in read)
        found |= {f"{stage}_p50_ms": quantile(ordered, 0.5), f"{stage}_p99_ms": quantile(ordered, 0.99)}
    return found
