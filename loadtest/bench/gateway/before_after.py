"""Compares two checkouts of Penstock: the same requests to both stacks, in turn, on one machine.

    (cd ../old && bin/penstock up --http-port 8100 --grpc-port 8101 --metrics-port 8102)
    penstock up
    python -m loadtest.bench.gateway.before_after --before 8100 8101

A pair is one stretch against each stack, in random order. A ratio is after by before for the rate, and before by after
for the CPU time per request: above 1 is better in both. The interval contains the median ratio with 95 % confidence,
whatever the distribution (order statistics of the pairs). The other stack is idle meanwhile, but stays up.
"""

import argparse
import math
import random
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop

from loadtest.bench.closed_loop import Call, run_closed_loop
from loadtest.bench.report import BenchSpread, format_table, present, spread
from loadtest.bench.wire import BadAnswer, BenchHttp, BenchRequest, GrpcPort, grpc_infer, http_infer
from penstock.protocol.inference import tensor_from_numpy
from penstock_load.clients.payloads import make_pictures
from penstock_load.witness.process_cpu import CpuMeter, NotListening, meter_of_server

WARM_UP_S = 2.0
RELAYED, DETECTOR = "identity_fp32", "street"
HEAD = ("request", "before/s", "after/s", "rate ratio, 95 %", "CPU ms: before", "after", "CPU ratio, 95 %")


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """rate: answers per second. cpu_ms: CPU time of the whole stack per answer."""

    rate: float
    cpu_ms: float


@dataclass(frozen=True, slots=True)
class Interval:
    """95 % confidence interval of a median ratio."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


@dataclass(frozen=True, slots=True)
class BeforeAfterResult:
    """One kind of request over the pairs."""

    request: str
    before_rate: BenchSpread
    after_rate: BenchSpread
    rate_ratio: Interval
    before_cpu_ms: BenchSpread
    after_cpu_ms: BenchSpread
    cpu_ratio: Interval


def median_interval(figures: Sequence[float]) -> Interval:
    """The median and the order statistics that enclose it with at least 95 % confidence; needs six figures.

    Raises ValueError for fewer.
    """
    ordered, count = sorted(figures), len(figures)
    if count < 6:
        raise ValueError(f"{count} pairs give no interval of 95 %; measure at least 6")
    outside, rank = 0.5**count, 0  # the probability that the median is below the lowest figure
    while outside + math.comb(count, rank + 1) * 0.5**count <= 0.025:
        rank += 1
        outside += math.comb(count, rank) * 0.5**count
    return Interval(float(np.median(ordered)), ordered[rank], ordered[count - 1 - rank])


async def make_calls(ports: Sequence[int], stack: AsyncExitStack) -> dict[str, Call]:
    """The calls to one stack by name: a tiny tensor over HTTP and gRPC, and a picture of 640 x 480."""
    http = await stack.enter_async_context(BenchHttp(f"http://127.0.0.1:{ports[0]}"))
    grpc = await stack.enter_async_context(GrpcPort(f"127.0.0.1:{ports[1]}"))
    tensor = tensor_from_numpy("x", np.ones((1, 16), np.float32))
    request, message = http_infer(RELAYED, tensor), grpc_infer(RELAYED, tensor)
    path = f"/v2/models/{DETECTOR}/image"
    pictures = [BenchRequest(path, {"content-type": p.media_type}, p.content) for p in make_pictures(8, seed=1)]

    async def relay_http(_: int) -> None:
        await http.post(request)

    async def relay_grpc(_: int) -> None:
        await grpc.model_infer(message)

    async def image(number: int) -> None:
        await http.post(pictures[number % len(pictures)])

    return {"relay HTTP": relay_http, "relay gRPC": relay_grpc, "image": image}


async def measure(call: Call, meter: CpuMeter, options: argparse.Namespace) -> MeasuredPair:
    """One stretch against one stack. Raises BadAnswer."""
    used_s = meter.read_s()
    stretch = await run_closed_loop(call, concurrency=options.concurrency, seconds=options.seconds)
    return MeasuredPair(stretch.rate, (meter.read_s() - used_s) * 1000 / max(stretch.count, 1))


async def run(options: argparse.Namespace) -> list[BeforeAfterResult]:
    """Measures all pairs of one kind of request after the other. Raises BadAnswer, NotListening."""
    sides = {"before": options.before, "after": options.after}
    results = []
    async with AsyncExitStack() as stack:
        calls = {side: await make_calls(ports, stack) for side, ports in sides.items()}
        meters = {side: meter_of_server("127.0.0.1", ports[0]) for side, ports in sides.items()}
        for name in calls["before"]:
            for side in sides:
                await run_closed_loop(calls[side][name], concurrency=options.concurrency, seconds=WARM_UP_S)
            pairs: dict[str, list[MeasuredPair]] = {"before": [], "after": []}
            for _ in range(options.pairs):
                for side in random.sample(list(sides), 2):
                    pairs[side].append(await measure(calls[side][name], meters[side], options))
                print(".", end="", file=sys.stderr, flush=True)
            results.append(result_of(name, pairs["before"], pairs["after"]))
    return results


def result_of(name: str, before: Sequence[MeasuredPair], after: Sequence[MeasuredPair]) -> BeforeAfterResult:
    """The figures of one kind of request from its pairs."""
    pairs = list(zip(before, after, strict=True))
    return BeforeAfterResult(
        name,
        spread([stretch.rate for stretch in before]),
        spread([stretch.rate for stretch in after]),
        median_interval([new.rate / old.rate for old, new in pairs]),
        spread([stretch.cpu_ms for stretch in before]),
        spread([stretch.cpu_ms for stretch in after]),
        median_interval([old.cpu_ms / new.cpu_ms for old, new in pairs]),
    )


def row(result: BeforeAfterResult) -> Sequence[object]:
    """A row of the table."""
    return (
        result.request,
        result.before_rate,
        result.after_rate,
        result.rate_ratio,
        result.before_cpu_ms,
        result.after_cpu_ms,
        result.cpu_ratio,
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench.gateway.before_after",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ports = ("HTTP", "GRPC")
    parser.add_argument("--before", type=int, nargs=2, metavar=ports, required=True, help="the old checkout's gateway")
    parser.add_argument("--after", type=int, nargs=2, metavar=ports, default=[8000, 8001], help="this checkout's")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each stretch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    return parser.parse_args(arguments)


def main() -> int:
    """0 when everything was measured."""
    options = parse_arguments()
    try:
        results = uvloop.run(run(options))
    except (BadAnswer, NotListening, ValueError) as error:
        print(f"before_after: {error}", file=sys.stderr)
        return 1
    note = f"{options.pairs} pairs of 2 × {options.seconds} s at concurrency {options.concurrency}"
    present(results, note, format_table(HEAD, [row(result) for result in results]), options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
