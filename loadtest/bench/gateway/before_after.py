"""Compares two checkouts of Penstock on one machine, in interleaved pairs: relay, images, video, idle memory.

    python -m loadtest.bench.gateway.before_after --before ../old --json before-after.json

The bench starts both stacks (`penstock up --engine triton` of each checkout's .venv, own home and ports) and ends them.
A pair is one stretch against each, in random order; the other stack is idle meanwhile, but stays up. For `video` each
stretch starts `penstock video run` on a looped clip; for `memory` a pair starts both stacks anew, one at a time.
A ratio above 1 is better for the new checkout: after by before for rates, before by after for CPU time and memory. The
interval contains the median ratio with 95 % confidence, whatever the distribution (order statistics of the pairs).
"""

import argparse
import math
import os
import random
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import uvloop

from loadtest.bench.child import CHECKOUT, Child
from loadtest.bench.closed_loop import Call, run_closed_loop
from loadtest.bench.report import BenchSpread, format_table, present, spread
from loadtest.bench.video.program import VideoProgram, memory_of
from loadtest.bench.video.rounds import make_street
from loadtest.bench.wire import BadAnswer, BenchHttp, BenchRequest, GrpcPort, grpc_infer, http_infer
from penstock.engines.triton import launch as triton_launch
from penstock.protocol.inference import tensor_from_numpy
from penstock_load.clients.payloads import make_pictures
from penstock_load.witness.process_cpu import CpuMeter

WARM_UP_S, START_S, IDLE_S, CLIP_S = 2.0, 120.0, 3.0, 10.0
PARTS = ("relay-http", "relay-grpc", "image", "video", "memory")
RELAYED, DETECTOR = "identity_fp32", "street"
RATE, CPU_MS = "answers/s", "CPU ms an answer"
HEAD = ("", "before", "after", "ratio, 95 %")
_READY = re.compile(r"ready: REST http://\S+:(\d+)  gRPC \S+:(\d+) ")
Stretch = dict[str, float]


@dataclass(frozen=True, slots=True)
class Interval:
    """95 % confidence interval of a median ratio."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure over the pairs. ratio: above 1 is better for `after`."""

    what: str
    measure: str
    before: BenchSpread
    after: BenchSpread
    ratio: Interval

    @property
    def row(self) -> tuple[object, ...]:
        """A row of the table."""
        return f"{self.what}, {self.measure}", self.before, self.after, self.ratio


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
    return Interval(statistics.median(ordered), ordered[rank], ordered[count - 1 - rank])


def compare(what: str, before: Sequence[Stretch], after: Sequence[Stretch]) -> list[Comparison]:
    """Every measure of the pairs. Raises ValueError for fewer than six."""
    return [
        Comparison(
            what,
            measure,
            spread([one[measure] for one in before]),
            spread([one[measure] for one in after]),
            median_interval([
                new[measure] / old[measure] if measure == RATE else old[measure] / new[measure]
                for old, new in zip(before, after, strict=True)
            ]),
        )
        for measure in before[0]
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stack:
    """A checkout's running `penstock up`. program: its command `penstock`, which ends with the bench.

    environ: of its video programs, which join this stack only.
    """

    program: tuple[str, ...]
    environ: dict[str, str]
    child: Child
    http_port: int
    grpc_port: int

    @property
    def meter(self) -> CpuMeter:
        """Of the whole stack."""
        return CpuMeter(psutil.Process(self.child.process.pid))


@contextmanager
def stack_of(
    checkout: Path, folder: Path, *flags: str, engine: str = "triton", more: Mapping[str, str] | None = None
) -> Iterator[Stack]:
    """flags: of `penstock up`. more: of its environment. Raises BadAnswer if it does not become ready."""
    folder.mkdir(parents=True, exist_ok=True)
    bond = (sys.executable, "-I", "-S", triton_launch.__file__, str(os.getpid()))  # it ends with the bench
    program = (*bond, str(checkout / ".venv" / "bin" / "penstock"))
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "PYTHON"))}
    environ["TMPDIR"] = str(folder)  # where video programs look for a stack
    free = ("http", "grpc", "metrics", "engine-http", "engine-grpc", "engine-metrics")
    ports = [word for port in free for word in (f"--{port}-port", "0")]
    if (checkout / "server" / "penstock" / "console").is_dir():  # former checkouts have no such setting
        environ["PENSTOCK_CONSOLE"] = "off"
    command = [*program, "up", "--engine", engine, "--home", str(folder / "home"), *ports, *flags]
    started_with = {**environ, **(more or {})}
    child = Child(f"penstock up of {checkout}", command, folder / "up.log", started_with, folder=checkout)
    try:
        child.wait(lambda: bool(_READY.search(child.text())), time.monotonic() + START_S)
        found = _READY.search(child.text())
        assert found is not None
        yield Stack(program, environ, child, int(found[1]), int(found[2]))
    finally:
        child.end()


async def make_calls(ports: Stack, stack: AsyncExitStack) -> dict[str, Call]:
    """The calls to one stack by part: a tiny tensor over HTTP and gRPC, and a picture of 640 x 480."""
    http = await stack.enter_async_context(BenchHttp(f"http://127.0.0.1:{ports.http_port}"))
    grpc = await stack.enter_async_context(GrpcPort(f"127.0.0.1:{ports.grpc_port}"))
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

    return {"relay-http": relay_http, "relay-grpc": relay_grpc, "image": image}


async def call_stretch(call: Call, cpu_s: Callable[[], float], concurrency: int, seconds: float) -> Stretch:
    """One stretch of a closed loop. cpu_s: CPU seconds of the measured program so far. Raises BadAnswer."""
    used_s = cpu_s()
    stretch = await run_closed_loop(call, concurrency=concurrency, seconds=seconds)
    return {RATE: stretch.rate, CPU_MS: (cpu_s() - used_s) * 1000 / max(stretch.count, 1)}


async def measure_calls(
    stacks: dict[str, Stack], options: argparse.Namespace, parts: Sequence[str]
) -> list[Comparison]:
    """All pairs of one kind of request after the other. Raises BadAnswer."""
    results = []
    async with AsyncExitStack() as context:
        calls = {side: await make_calls(stack, context) for side, stack in stacks.items()}
        for part in parts:
            pairs: dict[str, list[Stretch]] = {side: [] for side in stacks}
            for side in stacks:
                await run_closed_loop(calls[side][part], concurrency=options.concurrency, seconds=WARM_UP_S)
            for _ in range(options.pairs):
                for side in random.sample(list(stacks), 2):
                    read_s = stacks[side].meter.read_s
                    found = await call_stretch(calls[side][part], read_s, options.concurrency, options.seconds)
                    pairs[side].append(found)
                _tick()
            results += compare(part, pairs["before"], pairs["after"])
    return results


def measure_video(stacks: dict[str, Stack], options: argparse.Namespace, clip: Path) -> list[Comparison]:
    """Frames a second of one looped stream, and CPU time a frame of program and stack. Raises BadAnswer."""
    pairs: dict[str, list[Stretch]] = {side: [] for side in stacks}
    for _ in range(options.pairs):
        for side in random.sample(list(stacks), 2):
            stack = stacks[side]
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            video = VideoProgram(
                stack.program, stack.meter, DETECTOR, [clip], port, "--loop", environ=stack.environ
            )  # fmt: skip
            with video as program:
                found = program.measure(options.seconds)
            pairs[side].append({RATE: found.rate, CPU_MS: found.cpu_ms})
        _tick()
    return compare("video", pairs["before"], pairs["after"])


def measure_memory(checkouts: dict[str, Path], options: argparse.Namespace, folder: Path) -> list[Comparison]:
    """MiB of a stack that was started, never asked and left alone for some seconds. Raises BadAnswer."""
    pairs: dict[str, list[Stretch]] = {side: [] for side in checkouts}
    for number in range(options.pairs):
        for side in random.sample(list(checkouts), 2):
            with stack_of(checkouts[side], folder / f"memory-{side}-{number}") as stack:
                time.sleep(IDLE_S)
                pairs[side].append({"MiB (PSS)": memory_of(stack.meter).pss_mib})
        _tick()
    return compare("idle stack", pairs["before"], pairs["after"])


def run(options: argparse.Namespace, folder: Path) -> list[Comparison]:
    """Every part. Raises BadAnswer."""
    checkouts = {"before": options.before.resolve(), "after": options.after.resolve()}
    results: list[Comparison] = []
    asked = [part for part in PARTS if part in options.only]
    with ExitStack() as context:
        if set(asked) - {"memory"}:
            stacks = {side: context.enter_context(stack_of(one, folder / side)) for side, one in checkouts.items()}
            if parts := [part for part in asked if part not in ("video", "memory")]:
                results += uvloop.run(measure_calls(stacks, options, parts))
            if "video" in asked:
                make_street(folder / "street.mp4", CLIP_S)
                results += measure_video(stacks, options, folder / "street.mp4")
    if "memory" in asked:
        results += measure_memory(checkouts, options, folder)
    return results


def _tick() -> None:
    print(".", end="", file=sys.stderr, flush=True)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench.gateway.before_after",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--before", type=Path, required=True, metavar="DIR", help="the old checkout, with its .venv")
    parser.add_argument("--after", type=Path, default=CHECKOUT, metavar="DIR", help="the new one [this checkout]")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each stretch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    return parser.parse_args(arguments)


def main() -> int:
    """0 when everything was measured."""
    options = parse_arguments()
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-pairs-") as folder:
            results = run(options, Path(folder))
    except (BadAnswer, ValueError) as error:
        print(f"before_after: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("before_after: stopped; nothing is left running", file=sys.stderr)
        return 130
    note = f"{options.pairs} pairs of 2 × {options.seconds:g} s at concurrency {options.concurrency}"
    present(results, note, format_table(HEAD, [result.row for result in results]), options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
