"""The same model and the same pictures behind ours and its peers, in interleaved rounds.

    python -m loadtest.bench.peers prepare
    python -m loadtest.bench.peers run --rounds 5 --seconds 8 --json FILE

Before anything is measured every peer must answer our boxes to the bench's pictures. One server is up at a time, each
started anew in each round; generator and server share the cores, for every server alike. "full" is a closed loop: the
rate, and latencies that compare servers under the same number of callers. "light" is an open loop of Poisson arrivals
at half of the slowest one's rate, the same moments for all; its latencies run from the intended moments.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import uvloop

from deploy.models.street.scene import SCENARIOS, make_scene
from loadtest.bench.peers.contenders import CONTENDERS, Contender
from loadtest.bench.peers.environments import NotPrepared, prepare, python_of, version_of
from loadtest.bench.peers.measuring import Load
from loadtest.bench.peers.model import BadModel, ServedModel, read_model
from loadtest.bench.peers.rounds import OursFailed, run_rounds
from loadtest.bench.peers.table import Row, format_rows, rows_of
from loadtest.bench.report import conditions, write_json
from loadtest.payloads import JPEG_QUALITY, read_pictures

NAMES = tuple(contender.name for contender in CONTENDERS)
ENVIRONMENTS = tuple(contender.environment for contender in CONTENDERS if contender.environment)
RENEW = 8
SCENE_SEED, SCENE_COUNT, SCENE_SIZE = 41, 8, (640, 480)


@dataclass(frozen=True, slots=True)
class Result:
    """What --json keeps, apart from the conditions. rows: as in the table."""

    model: str
    rounds: int
    seconds: float
    concurrency: int
    renew: int
    light_rate: float
    instances: int
    threads: int
    picture_bytes: tuple[int, ...]
    rows: tuple[Row, ...]
    left_out: tuple[str, ...]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("prepare", help="build the peers' environments, .venv-peers/NAME")
    building.add_argument("names", nargs="*", metavar="NAME", help=f"default: all ({', '.join(ENVIRONMENTS)})")
    running = commands.add_parser("run", help="measure")
    running.add_argument("--peers", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    running.add_argument("--model", default="street", help="a model of model_repository, or a folder of one")
    running.add_argument("--images", type=Path, metavar="DIR", help="default: drawn streets, 640 x 480")
    running.add_argument("--concurrency", type=int, default=8, help="requests at once")
    running.add_argument("--renew", type=int, default=RENEW, help="requests after which a connection is opened anew")
    running.add_argument("--light-rate", type=float, metavar="RATE", help="default: half of the slowest one's rate")
    running.add_argument("--rounds", type=int, default=5)
    running.add_argument("--seconds", type=float, default=8.0, help="of each measured stretch")
    running.add_argument("--warm-up", type=float, default=3.0, help="seconds before each")
    running.add_argument("--json", type=Path, metavar="FILE", help="write the results here, too")
    chosen = parser.parse_args(arguments)
    if chosen.command == "prepare" and (unknown := set(chosen.names) - set(ENVIRONMENTS)):
        parser.error(f"no environment is called {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}")
    if chosen.command == "run" and any(value is not None and value <= 0 for value in _positive(chosen)):
        parser.error("--rounds, --concurrency, --seconds, --warm-up and --light-rate must be above 0")
    return chosen


def _positive(chosen: argparse.Namespace) -> tuple[float | None, ...]:
    return chosen.rounds, chosen.concurrency, chosen.seconds, chosen.warm_up, chosen.light_rate


def pictures_of(folder: Path | None) -> tuple[bytes, ...]:
    """The folder's JPEGs, or drawn streets of all scenarios. Raises ValueError where the folder has none."""
    if folder is not None:
        jpegs = tuple(p.content for p in read_pictures(folder) if p.media_type == "image/jpeg")
        if not jpegs:
            raise ValueError(f"no JPEG in {folder}: the peers take JPEGs only")
        return jpegs
    return tuple(_scene(number) for number in range(SCENE_COUNT))


def _scene(number: int) -> bytes:
    scenario = SCENARIOS[number % len(SCENARIOS)]
    picture, _ = make_scene(SCENE_SEED, number, size=SCENE_SIZE, scenario=scenario)
    is_encoded, jpeg = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    assert is_encoded, "OpenCV has no JPEG encoder"
    return jpeg.tobytes()


def _chosen(names: Sequence[str]) -> list[Contender]:
    """Ours first, whether it was named or not: it is what the others are compared with. Raises NotPrepared."""
    chosen = [CONTENDERS[0], *(one for one in CONTENDERS[1:] if one.name in names)]
    for contender in chosen:
        if contender.environment:
            python_of(contender.environment)
    return chosen


def _versions(contenders: Sequence[Contender]) -> dict[str, str]:
    return {one.name: version_of(one.environment, one.package) for one in contenders if one.environment}


async def run(options: argparse.Namespace, model: ServedModel, contenders: Sequence[Contender]) -> Result:
    """Raises OursFailed, ValueError, and CancelledError at SIGTERM, when the server that is up has been ended."""
    if task := asyncio.current_task():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    load = Load(
        pictures_of(options.images),
        options.concurrency,
        options.warm_up,
        options.seconds,
        options.renew,
        options.light_rate,
    )
    rounds = await run_rounds(contenders, model, load, count=options.rounds, say=_say)
    rows = rows_of(rounds.measured, ours=contenders[0].name, versions=_versions(contenders))
    return Result(
        model=model.name,
        rounds=options.rounds,
        seconds=options.seconds,
        concurrency=options.concurrency,
        renew=options.renew,
        light_rate=rounds.light_rate,
        instances=model.instances,
        threads=model.card.threads,
        picture_bytes=tuple(len(picture) for picture in load.pictures),
        rows=tuple(rows),
        left_out=tuple(rounds.left_out),
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print(result: Result, contenders: Sequence[Contender]) -> None:
    print("\n" + "\n".join(f"{name}: {value}" for name, value in conditions().items()))
    print(
        f"{result.model}, {result.instances} instances or workers with {result.threads} thread each; full: "
        f"{result.concurrency} callers (closed loop), light: {result.light_rate:.0f} requests/s (open loop); "
        f"{result.rounds} interleaved rounds of {result.seconds} s each: median (lowest-highest)\n"
    )
    print(format_rows(result.rows, ours=contenders[0].name))
    for sentence in result.left_out:
        print(f"left out: {sentence}")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all was built or measured, 1 when somebody was left out or nothing could be measured."""
    options = parse_arguments(arguments)
    try:
        if options.command == "prepare":
            for name in options.names or ENVIRONMENTS:
                prepare(name, _say)
            return 0
        model, contenders = read_model(options.model), _chosen(options.peers)
        result = uvloop.run(run(options, model, contenders))
    except (BadModel, NotPrepared, OursFailed, ValueError) as error:
        _say(f"peers: {error}")
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        _say("peers: stopped")
        return 130
    _print(result, contenders)
    if options.json:
        write_json(options.json, [result])
    return 1 if result.left_out else 0


if __name__ == "__main__":
    raise SystemExit(main())
