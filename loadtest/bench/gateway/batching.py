"""Compares who forms batches: the gateway, Triton or neither. One model three times in one stack, interleaved.

python -m deploy.models.resnet50
python -m loadtest.bench.gateway.batching make bench-models
penstock up --model-repository bench-models --engine-http-port 9000
python -m loadtest.bench.gateway.batching run --json batching.json
"""

import argparse
import itertools
import os
import random
import shutil
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import uvloop
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from loadtest.bench.closed_loop import Call, MeasuredRepetition, Meters, run_closed_loop
from loadtest.bench.report import BenchSpread, format_table, present, spread
from loadtest.bench.wire import BadAnswer, BenchHttp, BenchRequest, GrpcPort, grpc_infer, http_infer
from penstock.protocol.inference import BatchOwner, tensor_from_numpy
from penstock_load.clients.payloads import MEDIA_TYPES, Picture, make_pictures
from penstock_load.witness.process_cpu import NotListening, meter_of_port

OWNER_PARAMETER = "batch_owner"
OWNERS = (BatchOwner.GATEWAY, BatchOwner.TRITON, BatchOwner.OFF)


class NoModel(Exception):
    """A folder cannot be copied three times; the message is a sentence."""


def owned_name(model: str, owner: BatchOwner) -> str:
    """The copy's name."""
    return f"{model}-{owner}"


def write_owned(source: Path, repository: Path, *, max_batch_size: int | None = None) -> None:
    """Three folders in the repository, alike but for the owner. max_batch_size: instead of the model's own.

    Raises NoModel for a folder that is no model, or one without a batch dimension.
    """
    config = _config(source)
    if config.max_batch_size == 0:
        raise NoModel(f"model {config.name!r} has max_batch_size 0, so it cannot be batched")
    for owner in OWNERS:
        folder = repository / owned_name(source.name, owner)
        shutil.copytree(source, folder)
        (folder / "config.pbtxt").write_text(text_format.MessageToString(_owned(config, owner, max_batch_size)))


def _config(source: Path) -> model_config_pb2.ModelConfig:
    try:
        config = text_format.Parse((source / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    except (OSError, text_format.ParseError) as error:
        raise NoModel(f"{source} is no model folder: {error}") from error
    config.name = config.name or source.name
    return config


def _owned(
    config: model_config_pb2.ModelConfig, owner: BatchOwner, max_batch_size: int | None
) -> model_config_pb2.ModelConfig:
    owned = model_config_pb2.ModelConfig()
    owned.CopyFrom(config)
    owned.name = owned_name(config.name, owner)
    owned.max_batch_size = max_batch_size or config.max_batch_size
    owned.ClearField("dynamic_batching")
    if owner is BatchOwner.TRITON:
        owned.dynamic_batching.SetInParent()
    owned.parameters[OWNER_PARAMETER].string_value = owner
    return owned


WARM_UP_S = 1.0
IMAGE_MODELS = ("street", "resnet50-random")
TINY_MODEL, TINY_NUMBERS, TINY_BATCH_SIZE = "identity_fp32", 16, 64
SHIPPED = Path(__file__).resolve().parents[3] / "model_repository"
HEAD = ("what", "owner", "rate/s", "ours / theirs", "p50 ms", "p99 ms", "CPU ms: gateway", "Triton", "client")


@dataclass(frozen=True, slots=True)
class BatchingSubject:
    """The same question to each owner's copy."""

    name: str
    calls: dict[BatchOwner, Call]


@dataclass(frozen=True, slots=True)
class BatchingRow:
    """One owner over the rounds. ratio: the gateway's rate by this one's of the same round; its own: by the best."""

    subject: str
    concurrency: int
    owner: str
    rate: BenchSpread
    ratio: BenchSpread
    p50_ms: BenchSpread
    p99_ms: BenchSpread
    gateway_cpu_ms: BenchSpread
    triton_cpu_ms: BenchSpread
    client_cpu_ms: BenchSpread


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


def image_subject(model: str, gateway: BenchHttp, pictures: Sequence[Picture]) -> BatchingSubject:
    """Pictures to the image endpoint of each copy."""
    calls: dict[BatchOwner, Call] = {}
    for owner in OWNERS:
        path = f"/v2/models/{owned_name(model, owner)}/image"
        calls[owner] = _posts(
            gateway, [BenchRequest(path, {"content-type": p.media_type}, p.content) for p in pictures]
        )
    return BatchingSubject(f"images, {model}", calls)


def tiny_subjects(gateway: BenchHttp, grpc: GrpcPort) -> list[BatchingSubject]:
    """64 bytes to the identity, over both protocols: merged, or relayed."""
    tensor = tensor_from_numpy("x", np.arange(TINY_NUMBERS, dtype=np.float32)[None])
    compared = (BatchOwner.GATEWAY, BatchOwner.OFF)
    http_calls, grpc_calls = {}, {}
    for owner in compared:
        name = owned_name(TINY_MODEL, owner)
        http_calls[owner] = _posts(gateway, [http_infer(name, tensor)])
        grpc_calls[owner] = _messages(grpc, grpc_infer(name, tensor))
    return [BatchingSubject("64 B, HTTP", http_calls), BatchingSubject("64 B, gRPC", grpc_calls)]


def _posts(port: BenchHttp, requests: Sequence[BenchRequest]) -> Call:
    async def call(number: int) -> None:
        await port.post(requests[number % len(requests)])

    return call


def _messages(port: GrpcPort, message: bytes) -> Call:
    async def call(_: int) -> None:
        await port.model_infer(message)

    return call


async def compare(
    subject: BatchingSubject, concurrency: int, meters: Meters, options: argparse.Namespace
) -> list[BatchingRow]:
    """Rounds of one stretch an owner, in another order each time."""
    repetitions: dict[BatchOwner, list[MeasuredRepetition]] = {owner: [] for owner in subject.calls}
    for call in subject.calls.values():
        await run_closed_loop(call, concurrency=concurrency, seconds=min(WARM_UP_S, options.seconds))
    for _ in range(options.rounds):
        for owner in random.sample(list(repetitions), len(repetitions)):
            repetitions[owner].append(
                await meters.measure(subject.calls[owner], concurrency=concurrency, seconds=options.seconds)
            )
        print(".", end="", file=sys.stderr, flush=True)
    return [_row(subject, concurrency, owner, repetitions) for owner in repetitions]


def _row(
    subject: BatchingSubject,
    concurrency: int,
    owner: BatchOwner,
    repetitions: dict[BatchOwner, list[MeasuredRepetition]],
) -> BatchingRow:
    measured, ours = repetitions[owner], repetitions[BatchOwner.GATEWAY]
    others = (
        [repetitions[other] for other in repetitions if other is not BatchOwner.GATEWAY]
        if owner is BatchOwner.GATEWAY
        else [measured]
    )
    best = [max(one.timing.rate for one in one_round) for one_round in zip(*others, strict=True)]
    return BatchingRow(
        subject=subject.name,
        concurrency=concurrency,
        owner=owner,
        rate=spread([one.timing.rate for one in measured]),
        ratio=spread([one.timing.rate / rate for one, rate in zip(ours, best, strict=True)]),
        p50_ms=spread([one.timing.p50_ms for one in measured]),
        p99_ms=spread([one.timing.p99_ms for one in measured]),
        gateway_cpu_ms=spread([one.gateway_ms for one in measured]),
        triton_cpu_ms=spread([one.triton_ms for one in measured]),
        client_cpu_ms=spread([one.client_ms for one in measured]),
    )


def cells(row: BatchingRow) -> Sequence[object]:
    """A line of the table."""
    word = "of the best" if row.owner == BatchOwner.GATEWAY else ""
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


async def run(options: argparse.Namespace) -> list[BatchingRow]:
    """Every comparison. Raises BadAnswer, NotListening."""
    meters = Meters(meter_of_port(urlsplit(options.url).port or 80), meter_of_port(urlsplit(options.engine).port or 80))
    pictures = [Picture(p.read_bytes(), MEDIA_TYPES[p.suffix.lower()]) for p in options.image] or make_pictures(
        8, seed=1
    )
    rows: list[BatchingRow] = []
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(BenchHttp(options.url))
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
        prog="python -m loadtest.bench.gateway.batching",
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
