"""`penstock video run` against its limit, against a plain loop, with many streams, and with too many.

    python -m deploy.models.googlenet && penstock models load googlenet-random
    python -m loadtest.bench.video --json video.json

By hand, against a running stack (`penstock up --engine triton`); the video program is its client. In rounds:

limit     One 720p H.264 stream. If FFmpeg alone decodes D frames a second on all cores, the conversion to the network's
          row makes R, and the engine, asked with prepared rows by the pipeline's own client, E, then the three one
          after the other on the same cores make 1 / (1/D + 1/R + 1/E): the harmonic limit. The ratio is ours by it,
          within a round. Beside it the peer: a loop of OpenCV's VideoCapture and onnxruntime with the same model.
          googlenet-random has random weights: true arithmetic, and answers that mean nothing.
streams   Files that wait for the engine, 1 to 16 of them: the aggregate by the best aggregate of the round.
overload  As many cameras as files, at one and a half times what the files reached: what is answered in time. Every
          picture is decoded, since others build on it; so where decoding takes a share d of the CPU of an answered
          frame, and the CPU is full, at most (1 - 1.5 d) / (1 - d) of the capacity are left, which is printed, too.
"""

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import structlog

from loadtest.bench.report import present
from loadtest.bench.video.figures import Result, model_result, overload_result, streams_result, table
from loadtest.bench.video.limits import Preparing
from loadtest.bench.video.rounds import ModelBench, StreamsBench, VideoBench, frames_of, make_street
from loadtest.bench.wire import BadAnswer
from penstock.gateway.workers.running_stacks import RunningStack, running_stacks
from penstock_video.cli.engine import joinable
from penstock_video.errors import PipelineError
from penstock_video.infer.engine import Engine
from penstock_video.infer.options import EngineAddress

PARTS = ("limit", "streams", "overload")
CHECKOUT = Path(__file__).resolve().parents[3]
CLIP_S, ENGINE_S = 20.0, 30.0


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench.video", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    home = os.environ.get("PENSTOCK_HOME", "~/.penstock")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--model", nargs="+", default=["street", "googlenet-random"], metavar="NAME", help="of limit")
    parser.add_argument(
        "--streams-model", nargs="+", default=["street"], metavar="NAME", help="of streams and overload"
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="N")
    parser.add_argument("--bound-ms", type=float, default=1000.0, help="latency that overload's goodput keeps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each stretch")
    parser.add_argument("--batch-size", type=int, metavar="N", help="of `penstock video run` [its own choice]")
    parser.add_argument("--clip", type=Path, metavar="FILE", help="a 720p H.264 clip instead of the rendered street")
    parser.add_argument("--home", type=Path, default=Path(home), help=f"whose models/ the peer reads, too [{home}]")
    parser.add_argument("--out", "--json", dest="json", type=Path, metavar="FILE", help="write the results here, too")
    chosen = parser.parse_args(arguments)
    if chosen.rounds < 1 or chosen.seconds <= 0 or min(chosen.streams) < 1:
        parser.error("--rounds, --seconds and --streams are above 0")
    return chosen


def run(options: argparse.Namespace) -> list[Result]:
    """Every part's result. Raises BadAnswer, PipelineError."""
    with ExitStack() as stack:
        bench = _bench(options, stack)
        models = [ModelBench(bench, name) for name in options.model] if "limit" in options.only else []
        counts = options.streams if "streams" in options.only else [max(options.streams)]
        has_streams = bool({"streams", "overload"} & set(options.only))
        names = options.streams_model if has_streams else []
        several = [StreamsBench(bench, name, counts) for name in names]
        for _ in range(options.rounds):
            for model in models:
                model.run_round()
                _tick()
            for streams in several:
                streams.run_round(with_overload="overload" in options.only)
                _tick()
        results: list[Result] = [model_result(one.model, one.load_text, one.rounds) for one in models]
        if "streams" in options.only:
            results += [streams_result(streams.model, streams.rounds) for streams in several]
        if "overload" in options.only:
            bound_s = options.bound_ms / 1000
            results += [overload_result(streams.model, bound_s, streams.rounds) for streams in several]
        return results


def _bench(options: argparse.Namespace, stack: ExitStack) -> VideoBench:
    running = _running()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
    clip = options.clip or folder / "street.mp4"
    if options.clip is None:
        make_street(clip, CLIP_S)
        _tick()
    engine = Engine(EngineAddress(running.run_dir, running.http_url, running.grpc_address))
    stack.callback(engine.close)
    engine.start(ENGINE_S)
    preparing = Preparing(clip)
    stack.callback(preparing.close)
    names = options.model if "limit" in options.only else []
    return VideoBench(
        stack=running,
        engine=engine,
        preparing=preparing,
        clip=clip,
        frames=frames_of(clip),
        seconds=options.seconds,
        folder=folder,
        models={name: _model_folder(name, options.home.expanduser()) for name in names},
        flags=("--batch-size", str(options.batch_size)) if options.batch_size else (),
    )


def _running() -> RunningStack:
    running = joinable(running_stacks())
    if running is None:
        raise BadAnswer("no stack of this user runs here; start one with `penstock up`")
    return running


def _model_folder(name: str, home: Path) -> Path:
    for folder in (CHECKOUT / "model_repository" / name, home / "models" / name):
        if (folder / "1" / "model.onnx").is_file():
            return folder
    raise BadAnswer(
        f"no model.onnx of {name!r} in model_repository or {home / 'models'}, which the peer needs; see --home"
    )


def _tick() -> None:
    print(".", end="", file=sys.stderr, flush=True)


def main() -> int:
    """0 when everything was measured."""
    options = parse_arguments()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    try:
        results = run(options)
    except (BadAnswer, PipelineError, OSError) as error:
        print(f"video: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("video: stopped; nothing is left running", file=sys.stderr)
        return 130
    note = f"{options.rounds} interleaved rounds of {options.seconds:g} s: median (lowest-highest)"
    present(results, note, "\n\n".join(table(result) for result in results), options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
