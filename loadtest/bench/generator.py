"""What the open-loop driver can send: rates going up against a server that answers everything at once.

    python -m loadtest.bench.generator --processes 1 2

A rate is held where at least 99 % of it left in time, the 99th percentile of lag was within 10 ms (the rule of
loadtest/penstock_load/driver/protocol.py for an SLO of 100 ms) and no process was busy for 95 % of the time. The
limit of a round is
the highest rate that was held. The requests are real ones: the image client posts small pictures over
HTTP. The server, the driver processes and their parent share the cores, and this is part of the figure.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from loadtest.bench.report import conditions, format_table, spread, write_json
from loadtest.bench.wire import BadAnswer
from penstock_load.clients.client import Endpoint
from penstock_load.driver.processes import Drivers
from penstock_load.driver.protocol import DriverSetup, PhasePlan
from penstock_load.results import GeneratorHealth, Record, Side, Status
from penstock_load.scenario import Arrivals, Kind, RequestSpec, Shape

RATES = (500, 1000, 2000, 3000, 4000, 5000, 6000, 7000, 8000, 10000)
SLO_P99_MS = 100.0
PICTURE_PX = (64, 48)
START_TIMEOUT_S = 30.0
HEAD = ("processes, asked/s", "sent/s", "lag p50 ms", "lag p99 ms", "busy", "CPU ms/request", "held")


@dataclass(frozen=True, slots=True)
class RateStep:
    """One rate of one round. cpu_ms: of all driver processes, a request."""

    round: int
    asked_per_s: float
    health: GeneratorHealth
    cpu_ms: float

    @property
    def is_held(self) -> bool:
        """By the rule of the health, which has no complaint then."""
        return not self.health.complaint


@asynccontextmanager
async def null_server() -> AsyncIterator[str]:
    """The address of a null server in a process of its own."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "loadtest.bench.null_server")
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        assert process.stdout is not None
        port = int(await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


async def measure(options: argparse.Namespace, processes: int) -> list[RateStep]:
    """Every round's steps, until the first two rates in a row that were not held."""
    steps: list[RateStep] = []
    async with null_server() as url:
        setup = DriverSetup(
            endpoints={Side.TARGET: Endpoint(http_url=url, grpc_address="")},
            asks=(RequestSpec(kind=Kind.IMAGE, model="null", picture_px=PICTURE_PX),),
            slo_p99_ms=SLO_P99_MS,
            timeout_s=5.0,
            max_in_flight=4000,
            seed=1,
            epoch_s=time.monotonic(),
        )
        drivers = await Drivers.start(setup, processes=processes)
        try:
            await _step(drivers, 0, options.rates[0], 1.0)  # opens connections
            for number in range(1, options.rounds + 1):
                steps += await _round(drivers, number, options)
        finally:
            await drivers.aclose()
    return steps


async def _round(drivers: Drivers, number: int, options: argparse.Namespace) -> list[RateStep]:
    steps: list[RateStep] = []
    for rate in options.rates:
        steps.append(await _step(drivers, number, rate, options.seconds))
        if len(steps) > 1 and not steps[-1].is_held and not steps[-2].is_held:
            break
    return steps


async def _step(drivers: Drivers, number: int, rate: float, seconds: float) -> RateStep:
    failed = 0

    def count(records: Sequence[Record]) -> None:
        nonlocal failed
        failed += sum(record.status is Status.FAILED for record in records)

    arrivals = Arrivals(shape=Shape.CONSTANT, rate=rate)
    before_s = _cpu_s(drivers.pids)
    plan = PhasePlan(round=number, phase=f"{rate}/s", side=Side.TARGET, seconds=seconds, arrivals=arrivals)
    health = await drivers.run(plan, count)
    cpu_s = _cpu_s(drivers.pids) - before_s
    if failed:
        raise BadAnswer(f"{failed} of {health.intended} requests failed at {rate:g}/s")
    return RateStep(number, rate, health, cpu_s * 1000 / max(health.sent, 1))


def _cpu_s(pids: Iterable[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times)


def limit_of(steps: Sequence[RateStep]) -> RateStep | None:
    """A round's highest sustained rate, or none."""
    return max((step for step in steps if step.is_held), key=lambda step: step.asked_per_s, default=None)


def result_of(processes: int, steps: Sequence[RateStep]) -> dict[str, Any] | None:
    """The limit, and lag and cost at it, over the rounds; a round without a sustained rate counts as 0. None if no
    round has one."""
    numbers = sorted({step.round for step in steps})
    limits = [limit_of([step for step in steps if step.round == number]) for number in numbers]
    if not (held := [step for step in limits if step]):
        return None
    return {
        "processes": processes,
        "limit_per_s": spread([step.asked_per_s if step else 0.0 for step in limits]),
        "cpu_ms": spread([step.cpu_ms for step in held]),
        "lag_p50_ms": spread([step.health.lag_p50_ms for step in held]),
        "lag_p99_ms": spread([step.health.lag_p99_ms for step in held]),
    }


def rows_of(processes: int, steps: Sequence[RateStep]) -> list[tuple[str, ...]]:
    """A row a rate: the medians of the rounds that came so far."""
    rows: list[tuple[str, ...]] = []
    for rate in sorted({step.asked_per_s for step in steps}):
        same = [step for step in steps if step.asked_per_s == rate]
        figures = [
            (s.health.sent_per_s, s.health.lag_p50_ms, s.health.lag_p99_ms, s.health.cpu, s.cpu_ms) for s in same
        ]
        sent, p50, p99, busy, cpu_ms = (statistics.median(column) for column in zip(*figures, strict=True))
        held = f"{sum(step.is_held for step in same)} of {len(same)}"
        row = (f"{processes}, {rate:,.0f}", f"{sent:,.0f}", f"{p50:.2f}", f"{p99:.2f}", f"{busy:.0%}", f"{cpu_ms:.3f}")
        rows.append((*row, held))
    return rows


async def run(options: argparse.Namespace) -> None:
    """Measures, prints, and writes what was asked for."""
    print("\n".join(f"{name}: {said}" for name, said in conditions().items()))
    print(
        f"{options.rounds} rounds of {options.seconds:g} s a rate; the limit: median (lowest-highest) of the rounds\n"
    )
    rows: list[tuple[str, ...]] = []
    results: list[dict[str, Any]] = []
    for processes in options.processes:
        steps = await measure(options, processes)
        rows += rows_of(processes, steps)
        if result := result_of(processes, steps):
            results.append(result)
        else:
            print(f"{processes} process(es) held no rate; begin lower with --rates, or on a machine that is idle")
    print(format_table(HEAD, rows), end="\n\n")
    for result in results:
        print(
            f"{result['processes']} process(es) hold {result['limit_per_s']}/s at {result['cpu_ms']} CPU ms a request, "
            f"lag p50 {result['lag_p50_ms']} ms, p99 {result['lag_p99_ms']} ms"
        )
    if options.json:
        write_json(options.json, results)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="What the open-loop driver can send.")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="driver processes, one count each")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="requests a second, going up")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each rate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write figures and conditions to this file")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
