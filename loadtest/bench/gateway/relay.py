"""What the gateway costs: it against the Triton behind it, the same bytes, the same machine, interleaved.

    python -m deploy.models.resnet50 && penstock models load resnet50-random
    python -m loadtest.bench.gateway.relay --json relay.json

Each model takes one FP32 tensor. One of a free length, as the shipped identity_fp32, is asked in two sizes. Where
targets.toml has a floor and a goal for the ratio, they stand beside it.
"""

import argparse
import itertools
import math
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
import uvloop

from loadtest.bench.closed_loop import Call, MeasuredRepetition, Meters, run_closed_loop
from loadtest.bench.report import format_table, present, spread
from loadtest.bench.wire import BadAnswer, BenchHttp, GrpcPort, grpc_infer, http_infer
from penstock.engines.config_pbtxt import config_from_proto
from penstock.protocol.engine import ModelConfig
from penstock.protocol.inference import Datatype, Tensor, tensor_from_numpy
from penstock_load.targets import Target, read_targets
from penstock_load.witness.process_cpu import NotListening, meter_of_port

T = TypeVar("T")
SIZES = (16, 3 * 224 * 224)  # float32 numbers: a tiny model's input, and a classifier's picture
WARM_UP_S = 0.5
MODELS = ("identity_fp32", "street", "resnet50-random")
LARGE_BYTES = 64 << 10
HEAD = (
    "protocol, model, clients",
    "gateway/s",
    "direct/s",
    "ratio",
    "floor / goal",
    "p50 ms: gateway",
    "direct",
    "p99 ms: gateway",
    "direct",
    "CPU ms: gateway",
    "Triton",
    "direct",
)


@dataclass(frozen=True, slots=True)
class RelaySubject:
    """A model, a tensor for it, and what targets.toml wants of the ratio."""

    model: str
    tensor: Tensor
    target: Target | None

    @property
    def size(self) -> str:
        """The tensor's bytes, in words."""
        size_bytes = self.tensor.data.nbytes
        return f"{size_bytes} B" if size_bytes < 1000 else f"{size_bytes / 1000:,.0f} kB"


@dataclass(frozen=True, slots=True)
class Pair:
    """The same request, to the gateway and to Triton itself."""

    protocol: str
    subject: RelaySubject
    gateway: Call
    direct: Call


async def make_pairs(options: argparse.Namespace, stack: AsyncExitStack) -> list[Pair]:
    """Every protocol with every model and size. Raises BadAnswer where the two answers differ."""
    http = [await stack.enter_async_context(BenchHttp(url)) for url in (options.url, options.engine)]
    grpc = [await stack.enter_async_context(GrpcPort(address)) for address in (options.grpc, options.engine_grpc)]
    targets, pairs = read_targets(), []
    for model in options.model:
        config = config_from_proto((await grpc[1].model_config(model)).config)
        for subject in subjects_of(config, targets):
            request, message = http_infer(model, subject.tensor), grpc_infer(model, subject.tensor)
            if not same(*[await port.post(request) for port in http]):
                raise BadAnswer(f"gateway and Triton differ over HTTP for {model}, {subject.size}")
            if not same(*[await port.model_infer(message) for port in grpc]):
                raise BadAnswer(f"gateway and Triton differ over gRPC for {model}, {subject.size}")
            pairs.append(Pair("HTTP", subject, *(_again(port.post, request) for port in http)))
            pairs.append(Pair("gRPC", subject, *(_again(port.model_infer, message) for port in grpc)))
    return pairs


def same(one: bytes, other: bytes) -> bool:
    """Whether two answers hold the same; Triton's Python backend gives a model's outputs in no order."""
    return one == other or Counter(one) == Counter(other)


def subjects_of(config: ModelConfig, targets: Iterable[Target]) -> list[RelaySubject]:
    """One tensor of the model's own shape; one a size where that is free. Raises BadAnswer where it takes another."""
    spec = config.inputs[0]
    if len(config.inputs) != 1 or spec.datatype is not Datatype.FP32 or spec.shape.count(-1) > 1:
        raise BadAnswer(f"model {config.name!r} does not take one FP32 tensor; give another with --model")
    known = math.prod(size for size in spec.shape if size > 0)
    shapes = [tuple(max(size, 0) or numbers // known for size in spec.shape) for numbers in SIZES]
    subjects = []
    for shape in dict.fromkeys(shapes):
        rows = (1, *shape) if config.max_batch_size else shape
        tensor = tensor_from_numpy(spec.name, np.random.default_rng(1).random(rows, np.float32))
        scenario = "tensor-large" if tensor.data.nbytes >= LARGE_BYTES else "tensor-small"
        wanted = [
            target
            for target in targets
            if target.measure == "rate_ratio"
            and scenario in target.scenarios
            and any(fnmatch(config.name, pattern) for pattern in target.models)
        ]
        subjects.append(RelaySubject(config.name, tensor, wanted[0] if wanted else None))
    return subjects


async def compare(pair: Pair, concurrency: int, meters: Meters, options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of one stretch each, in random order. ratio: the gateway's rate by Triton's of the same round.

    floor, goal: of the ratio, None if targets.toml has none.
    """
    gateway: list[MeasuredRepetition] = []
    direct: list[MeasuredRepetition] = []
    for call in (pair.gateway, pair.direct):
        await run_closed_loop(call, concurrency=concurrency, seconds=min(WARM_UP_S, options.seconds))
    for _ in range(options.rounds):
        turns = [(pair.gateway, gateway), (pair.direct, direct)]
        random.shuffle(turns)
        for call, repetitions in turns:
            repetitions.append(await meters.measure(call, concurrency=concurrency, seconds=options.seconds))
    target = pair.subject.target
    return {
        "protocol": pair.protocol,
        "model": pair.subject.model,
        "size": pair.subject.size,
        "floor": target.figure if target else None,
        "goal": target.goal if target else None,
        "concurrency": concurrency,
        **{f"{name}_{figure}": spread([getattr(one.timing, figure) for one in runs])
           for name, runs in (("gateway", gateway), ("direct", direct)) for figure in ("rate", "p50_ms", "p99_ms")},
        "ratio": spread([g.timing.rate / d.timing.rate for g, d in zip(gateway, direct, strict=True)]),
        "gateway_cpu_ms": spread([m.gateway_ms for m in gateway]),
        "triton_cpu_ms": spread([m.triton_ms for m in gateway]),
        "direct_cpu_ms": spread([m.triton_ms for m in direct]),
        "client_cpu_ms": spread([m.client_ms for m in gateway]),
    }  # fmt: skip


def row(result: dict[str, Any]) -> Sequence[object]:
    """A line of the table: rates and the ratio with their spread, the rest by the median."""
    medians = ("gateway_p50_ms", "direct_p50_ms", "gateway_p99_ms", "direct_p99_ms")
    return (
        f"{result['protocol']} {result['model']} {result['size']} ×{result['concurrency']}",
        *(result[name] for name in ("gateway_rate", "direct_rate", "ratio")),
        "" if result["floor"] is None else f"{result['floor']:g} / {result['goal']:g}",
        *(f"{result[name].median:.2f}" for name in (*medians, "gateway_cpu_ms", "triton_cpu_ms", "direct_cpu_ms")),
    )


def _again(send: Callable[[T], Awaitable[bytes]], request: T) -> Call:
    async def call(_: int) -> None:
        await send(request)

    return call


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.gateway.relay", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the gateway's REST address")
    parser.add_argument("--grpc", default="127.0.0.1:8001", help="the gateway's gRPC address")
    parser.add_argument(
        "--engine", default="http://127.0.0.1:9000", help="Triton's REST address (penstock up --engine-http-port 9000)"
    )
    parser.add_argument(
        "--engine-grpc", default="127.0.0.1:9001", help="Triton's gRPC address (penstock up --engine-grpc-port 9001)"
    )
    parser.add_argument("--model", nargs="+", default=list(MODELS), metavar="NAME")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each stretch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, too")
    return parser.parse_args(arguments)


async def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every comparison, each printed as it is there. Raises BadAnswer, NotListening."""
    meters = Meters(meter_of_port(urlsplit(options.url).port or 80), meter_of_port(urlsplit(options.engine).port or 80))
    results = []
    async with AsyncExitStack() as stack:
        pairs = await make_pairs(options, stack)
        for pair, concurrency in itertools.product(pairs, options.concurrency):
            results.append(await compare(pair, concurrency, meters, options))
            print(".", end="", file=sys.stderr, flush=True)
    return results


def main() -> int:
    """0 when everything was measured."""
    options = parse_arguments()
    try:
        results = uvloop.run(run(options))
    except (BadAnswer, NotListening) as error:
        print(f"relay: {error}", file=sys.stderr)
        return 1
    note = f"{options.rounds} interleaved rounds of {options.seconds} s: median (lowest-highest)"
    present(results, note, format_table(HEAD, [row(result) for result in results]), options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
