"""Who should form the batches: the gateway, Triton or nobody. The same model three times in one stack, interleaved.

    python -m deploy.models.resnet50
    python -m loadtest.bench.batching make bench-models
    penstock up --model-repository bench-models --engine-http-port 9000
    python -m loadtest.bench.batching run --json batching.json

Pictures go to the image endpoint; tiny tensors to infer, over both protocols, merged by the gateway or relayed one by
one. A ratio is the gateway's rate by the other's of the same round; of pictures, by the better of Triton and nobody.
"""

import argparse
import itertools
import os
import random
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import uvloop

from loadtest.bench.closed_loop import Call, run_closed_loop
from loadtest.bench.cost import Measured, Meters
from loadtest.bench.owned_models import OWNERS, NoModel, owned_name, write_owned
from loadtest.bench.report import Spread, format_table, present, spread
from loadtest.bench.wire import BadAnswer, GrpcPort, HttpPort, HttpRequest, grpc_infer, http_infer
from loadtest.payloads import MEDIA_TYPES, Picture, make_pictures
from loadtest.witness.process_cpu import NotListening, meter_of_port
from server.core.batching import Owner
from server.core.tensor import tensor_from_numpy

WARM_UP_S = 1.0
IMAGE_MODELS = ("street", "resnet50-random")
TINY_MODEL, TINY_NUMBERS, TINY_BATCH_SIZE = "identity_fp32", 16, 64
SHIPPED = Path(__file__).resolve().parents[2] / "model_repository"
HEAD = ("what", "owner", "rate/s", "ours / theirs", "p50 ms", "p99 ms", "CPU ms: gateway", "Triton", "client")


@dataclass(frozen=True, slots=True)
class Subject:
    """The same question to each owner's copy."""

    name: str
    calls: dict[Owner, Call]


@dataclass(frozen=True, slots=True)
class Row:
    """One owner over the rounds. ratio: the gateway's rate by this one's of the same round; its own: by the best."""

    subject: str
    concurrency: int
    owner: str
    rate: Spread
    ratio: Spread
    p50_ms: Spread
    p99_ms: Spread
    gateway_cpu_ms: Spread
    triton_cpu_ms: Spread
    client_cpu_ms: Spread


def make(options: argparse.Namespace) -> None:
    """The repository of the bench. Raises NoModel, OSError."""
    options.folder.mkdir(parents=True)
    home = Path(os.environ.get("PENSTOCK_HOME", "~/.penstock")).expanduser()
    for model in IMAGE_MODELS:
        source = next((f for f in (SHIPPED / model, home / "models" / model) if f.is_dir()), None)
        if source is None:
            raise NoModel(f"model {model!r} is neither shipped nor in {home}; make it with the first command")
        write_owned(source, options.folder)
    write_owned(SHIPPED / TINY_MODEL, options.folder, max_batch_size=TINY_BATCH_SIZE)


def image_subject(model: str, gateway: HttpPort, pictures: Sequence[Picture]) -> Subject:
    """Pictures to the image endpoint of each copy."""
    calls: dict[Owner, Call] = {}
    for owner in OWNERS:
        path = f"/v2/models/{owned_name(model, owner)}/image"
        calls[owner] = _posts(gateway, [HttpRequest(path, {"content-type": p.media_type}, p.content) for p in pictures])
    return Subject(f"images, {model}", calls)


def tiny_subjects(gateway: HttpPort, grpc: GrpcPort) -> list[Subject]:
    """64 bytes to the identity, over both protocols: merged, or relayed."""
    tensor = tensor_from_numpy("x", np.arange(TINY_NUMBERS, dtype=np.float32)[None])
    compared = (Owner.GATEWAY, Owner.OFF)
    http_calls, grpc_calls = {}, {}
    for owner in compared:
        name = owned_name(TINY_MODEL, owner)
        http_calls[owner] = _posts(gateway, [http_infer(name, tensor)])
        grpc_calls[owner] = _messages(grpc, grpc_infer(name, tensor))
    return [Subject("64 B, HTTP", http_calls), Subject("64 B, gRPC", grpc_calls)]


def _posts(port: HttpPort, requests: Sequence[HttpRequest]) -> Call:
    async def call(number: int) -> None:
        await port.post(requests[number % len(requests)])

    return call


def _messages(port: GrpcPort, message: bytes) -> Call:
    async def call(_: int) -> None:
        await port.model_infer(message)

    return call


async def compare(subject: Subject, concurrency: int, meters: Meters, options: argparse.Namespace) -> list[Row]:
    """Rounds of one stretch an owner, in another order each time."""
    laps: dict[Owner, list[Measured]] = {owner: [] for owner in subject.calls}
    for call in subject.calls.values():
        await run_closed_loop(call, concurrency=concurrency, seconds=min(WARM_UP_S, options.seconds))
    for _ in range(options.rounds):
        for owner in random.sample(list(laps), len(laps)):
            laps[owner].append(
                await meters.measure(subject.calls[owner], concurrency=concurrency, seconds=options.seconds)
            )
        print(".", end="", file=sys.stderr, flush=True)
    return [_row(subject, concurrency, owner, laps) for owner in laps]


def _row(subject: Subject, concurrency: int, owner: Owner, laps: dict[Owner, list[Measured]]) -> Row:
    measured, ours = laps[owner], laps[Owner.GATEWAY]
    others = [laps[other] for other in laps if other is not Owner.GATEWAY] if owner is Owner.GATEWAY else [measured]
    best = [max(lap.lap.rate for lap in one_round) for one_round in zip(*others, strict=True)]
    return Row(
        subject=subject.name,
        concurrency=concurrency,
        owner=owner,
        rate=spread([one.lap.rate for one in measured]),
        ratio=spread([one.lap.rate / rate for one, rate in zip(ours, best, strict=True)]),
        p50_ms=spread([one.lap.p50_ms for one in measured]),
        p99_ms=spread([one.lap.p99_ms for one in measured]),
        gateway_cpu_ms=spread([one.gateway_ms for one in measured]),
        triton_cpu_ms=spread([one.triton_ms for one in measured]),
        client_cpu_ms=spread([one.client_ms for one in measured]),
    )


def cells(row: Row) -> Sequence[object]:
    """A line of the table."""
    word = "of the best" if row.owner == Owner.GATEWAY else ""
    cpu = (row.gateway_cpu_ms, row.triton_cpu_ms, row.client_cpu_ms)
    return (
        f"{row.subject} ×{row.concurrency}",
        row.owner,
        row.rate,
        f"{row.ratio} {word}".strip(),
        f"{row.p50_ms.median:.2f}",
        f"{row.p99_ms.median:.2f}",
        *(f"{figure.median:.2f}" for figure in cpu),
    )


async def run(options: argparse.Namespace) -> list[Row]:
    """Every comparison. Raises BadAnswer, NotListening."""
    meters = Meters(meter_of_port(urlsplit(options.url).port or 80), meter_of_port(urlsplit(options.engine).port or 80))
    pictures = [Picture(p.read_bytes(), MEDIA_TYPES[p.suffix.lower()]) for p in options.image] or make_pictures(
        8, seed=1
    )
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(HttpPort(options.url))
        grpc = await stack.enter_async_context(GrpcPort(options.grpc))
        subjects = [image_subject(model, gateway, pictures) for model in options.model]
        for subject, concurrency in itertools.product(subjects, options.concurrency):
            rows += await compare(subject, concurrency, meters, options)
        for subject, concurrency in itertools.product(tiny_subjects(gateway, grpc), options.tiny_concurrency):
            rows += await compare(subject, concurrency, meters, options)
    return rows


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench.batching",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="write the repository of the copies")
    making.add_argument("folder", type=Path, help="a new folder")
    running = commands.add_parser("run", help="measure a stack that serves it")
    running.add_argument("--url", default="http://127.0.0.1:8000", help="the gateway's REST address")
    running.add_argument("--grpc", default="127.0.0.1:8001", help="the gateway's gRPC address")
    running.add_argument(
        "--engine", default="http://127.0.0.1:9000", help="Triton's REST address (penstock up --engine-http-port 9000)"
    )
    running.add_argument("--model", nargs="*", default=list(IMAGE_MODELS), metavar="NAME", help="for the pictures")
    running.add_argument("--image", type=Path, nargs="*", default=[], metavar="FILE", help="default: generated")
    running.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="of pictures")
    running.add_argument("--tiny-concurrency", type=int, nargs="*", default=[32], metavar="N")
    running.add_argument("--rounds", type=int, default=5)
    running.add_argument("--seconds", type=float, default=3.0, help="of each stretch")
    running.add_argument("--json", type=Path, metavar="FILE", help="write the results here, too")
    return parser.parse_args(arguments)


def main() -> int:
    """0 when everything was made or measured."""
    options = parse_arguments()
    try:
        if options.command == "make":
            make(options)
            return 0
        rows = uvloop.run(run(options))
    except (BadAnswer, NotListening, NoModel, OSError) as error:
        print(f"batching: {error}", file=sys.stderr)
        return 1
    note = f"{options.rounds} interleaved rounds of {options.seconds} s: median (lowest-highest)"
    present(rows, note, format_table(HEAD, [cells(row) for row in rows]), options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
