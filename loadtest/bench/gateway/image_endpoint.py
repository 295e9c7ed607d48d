"""The image endpoint's rate against its limit: decode, resize, engine and outputs to results, each measured alone.

    python -m loadtest.bench.gateway.image_endpoint --model yolox-nano --image street.jpg

The limit. Gateway, Triton and this load generator share the cores, so a picture costs the sum of its stages. If
decode alone makes D pictures a second on all cores, resize R, the engine E (raw tensors over gRPC, at the concurrency
of the endpoint), and O results are made of outputs, then the four, one after the other on the same cores, make
1 / (1/D + 1/R + 1/E + 1/O): the harmonic limit. What HTTP, queues and hops cost is what is missing to 1.00. Where an
engine leaves cores idle, stages run side by side and the endpoint can pass 1.00; then the slowest stage alone is the
limit, which is shown, too.

The embedded engine has no port of its own. Then E is ONNX Runtime alone, one thread on each core (--engine-file), and
the model's config comes from the gateway:

    python -m loadtest.bench.gateway.image_endpoint --engine-grpc 127.0.0.1:8001 --engine-file model.onnx --model NAME
"""

import argparse
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from loadtest.bench.closed_loop import Call, MeasuredRepetition, Meters, run_closed_loop
from loadtest.bench.report import BenchSpread, format_table, present, spread, spreads
from loadtest.bench.stages import StageProcesses, StageRun, raw_tensors
from loadtest.bench.wire import BadAnswer, BenchHttp, BenchRequest, GrpcPort, grpc_infer
from penstock.engines.config_pbtxt import config_from_proto
from penstock.protocol.engine import ModelConfig
from penstock.protocol.grpc_messages import decode_response
from penstock.protocol.inference import Array, InferRequest
from penstock.vision.card import VisionCard, card_from_config
from penstock.vision.spec import PrepareSpec
from penstock_load.clients.payloads import MEDIA_TYPES, Picture, make_pictures
from penstock_load.witness.process_cpu import NotListening, meter_of_port

StageCall = Callable[[float], StageRun]
WARM_UP_S = 0.5
HEAD = ("stage", "images/s", "CPU ms: stage", "gateway", "Triton", "client")


@dataclass(slots=True)
class ImageRounds:
    """What was measured so far, round by round."""

    decode: list[StageRun] = field(default_factory=list)
    resize: list[StageRun] = field(default_factory=list)
    outputs: list[StageRun] = field(default_factory=list)
    session: list[StageRun] = field(default_factory=list)  # the engine alone, where it has no port
    engine: list[MeasuredRepetition] = field(default_factory=list)
    endpoint: list[MeasuredRepetition] = field(default_factory=list)


def harmonic_limit(*rates: float) -> float:
    """The rate of stages that share the same cores, each measured alone."""
    return 1 / sum(1 / rate for rate in rates)


def result_of(options: argparse.Namespace, rounds: ImageRounds) -> dict[str, Any]:
    """The rounds as figures with their spread: images a second, milliseconds of CPU an image.

    ratio: the endpoint's rate by the harmonic limit of the same round. slowest_ratio: by its slowest stage alone.
    """
    engine_rates = [one.rate for one in rounds.session] or [one.timing.rate for one in rounds.engine]
    together = zip(rounds.decode, rounds.resize, rounds.outputs, engine_rates, strict=True)
    stages = [(decode.rate, resize.rate, parse.rate, engine) for decode, resize, parse, engine in together]
    served = [whole.timing.rate for whole in rounds.endpoint]
    limits, slowest = [harmonic_limit(*rates) for rates in stages], [min(rates) for rates in stages]
    alone = {"rate": lambda one: one.rate, "cpu_ms": lambda one: one.cpu_ms}
    cpu = {
        "gateway_cpu_ms": lambda one: one.gateway_ms,
        "triton_cpu_ms": lambda one: one.triton_ms,
        "client_cpu_ms": lambda one: one.client_ms,
    }
    timed = {name: lambda one, name=name: getattr(one.timing, name) for name in ("rate", "p50_ms", "p99_ms")}
    return {
        "model": options.model,
        "concurrency": options.concurrency,
        **_named("decode", spreads(alone, rounds.decode)),
        **_named("resize", spreads(alone, rounds.resize)),
        **_named("outputs", spreads(alone, rounds.outputs)),
        **_named("engine", spreads(alone, rounds.session) if rounds.session else spreads(timed | cpu, rounds.engine)),
        "limit_rate": spread(limits),
        **_named("endpoint", spreads(timed | cpu, rounds.endpoint)),
        "ratio": spread([rate / limit for rate, limit in zip(served, limits, strict=True)]),
        "slowest_ratio": spread([rate / limit for rate, limit in zip(served, slowest, strict=True)]),
    }


def _named(stage: str, figures: dict[str, BenchSpread]) -> dict[str, BenchSpread]:
    return {f"{stage}_{name}": figure for name, figure in figures.items()}


def table(result: dict[str, Any]) -> str:
    """For people."""
    names = {"decode": "decode alone", "resize": "resize alone", "engine": "engine alone"}
    names |= {"outputs": "outputs alone", "limit": "limit"}
    columns = ("rate", "cpu_ms", "gateway_cpu_ms", "triton_cpu_ms", "client_cpu_ms")
    rows = [
        (text, *(result.get(f"{stage}_{column}", "") for column in columns))
        for stage, text in (names | {"endpoint": "image endpoint"}).items()
    ]
    return "\n".join(
        [
            format_table(HEAD, rows),
            "",
            f"of the harmonic limit: {result['ratio']}   of the slowest stage alone: {result['slowest_ratio']}",
            f"endpoint latency, ms: p50 {result['endpoint_p50_ms']}   p99 {result['endpoint_p99_ms']}",
        ]
    )


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Raises BadAnswer, NotListening, and InvalidRequest for a picture that cannot be decoded."""
    pictures = [Picture(p.read_bytes(), MEDIA_TYPES[p.suffix.lower()]) for p in options.image] or make_pictures(
        8, seed=1
    )
    meters = Meters(
        meter_of_port(urlsplit(options.url).port or 80), meter_of_port(int(options.engine_grpc.rpartition(":")[2]))
    )
    async with BenchHttp(options.url) as gateway, GrpcPort(options.engine_grpc) as engine:
        config = config_from_proto((await engine.model_config(options.model)).config)
        card = picture_card(config)
        spec = card.prepare_spec
        contents = [picture.content for picture in pictures]
        tensors = raw_tensors(contents, spec, config)
        messages = [grpc_infer(options.model, tensor) for tensor in tensors]
        outputs = [await _outputs(engine, options.model, message) for message in messages]
        path = f"/v2/models/{options.model}/image"
        requests = [BenchRequest(path, {"content-type": p.media_type}, p.content) for p in pictures]

        async def ask_engine(number: int) -> None:
            await engine.model_infer(messages[number % len(messages)])

        async def ask_endpoint(number: int) -> None:
            await gateway.post(requests[number % len(requests)])

        with StageProcesses(contents, spec) as stages:
            alone: dict[str, StageCall] = {
                "decode": stages.decode_alone,
                "resize": stages.resize_alone,
                "outputs": partial(stages.outputs_alone, card, outputs),
            }
            if options.engine_file:
                alone["session"] = partial(stages.engine_alone, options.engine_file, tensors)
                calls = {"endpoint": ask_endpoint}
            else:
                calls = {"engine": ask_engine, "endpoint": ask_endpoint}
            return result_of(options, await _rounds(options, meters, alone, calls))


async def _outputs(engine: GrpcPort, model_name: str, message: bytes) -> dict[str, Array]:
    response = decode_response(await engine.model_infer(message), InferRequest(model_name, ()), 0.0)
    return {tensor.name: tensor.to_numpy().copy() for tensor in response.outputs}


def prepare_spec(config: ModelConfig) -> PrepareSpec:
    """How the model wants its images. Raises BadAnswer where it does not say."""
    return picture_card(config).prepare_spec


def picture_card(config: ModelConfig) -> VisionCard:
    """The model's card. Raises BadAnswer where it has none."""
    card = card_from_config(config)
    if card is None:
        raise BadAnswer(f"model {config.name!r} does not say how it sees images (`network-type` in its config.pbtxt)")
    return card


async def _rounds(
    options: argparse.Namespace, meters: Meters, alone: Mapping[str, StageCall], calls: Mapping[str, Call]
) -> ImageRounds:
    """alone, calls: by their name in ImageRounds. The order is another one in each round."""
    rounds = ImageRounds()
    for call in calls.values():
        await run_closed_loop(call, concurrency=options.concurrency, seconds=min(WARM_UP_S, options.seconds))
    for _ in range(options.rounds):
        for turn in random.sample([*alone, *calls], len(alone) + len(calls)):
            if turn in alone:  # blocks the loop on purpose: a stage is measured while nothing else runs
                getattr(rounds, turn).append(alone[turn](options.seconds))
            else:
                call, seconds = calls[turn], options.seconds
                measured = await meters.measure(call, concurrency=options.concurrency, seconds=seconds)
                getattr(rounds, turn).append(measured)
        print(".", end="", file=sys.stderr, flush=True)
    return rounds


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench.gateway.image_endpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the gateway's REST address")
    parser.add_argument(
        "--engine-grpc", default="127.0.0.1:9001", help="Triton's gRPC address (penstock up --engine-grpc-port 9001)"
    )
    parser.add_argument(
        "--engine-file", type=Path, metavar="ONNX", help="the model's file, for a stack with --engine embedded"
    )
    parser.add_argument("--model", default="fastestdet")
    parser.add_argument("--image", type=Path, nargs="*", default=[], metavar="FILE", help="default: generated pictures")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at once, of endpoint and engine alike")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each stretch; a round has five")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here, too")
    return parser.parse_args(arguments)


def main() -> int:
    """0 when everything was measured."""
    options = parse_arguments()
    try:
        result = uvloop.run(run(options))
    except (BadAnswer, NotListening) as error:
        print(f"image_endpoint: {error}", file=sys.stderr)
        return 1
    rounds = f"{options.rounds} interleaved rounds of 5 × {options.seconds} s"
    note = f"{options.model} at concurrency {options.concurrency}, {rounds}: median (lowest-highest)"
    present([result], note, table(result), options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
