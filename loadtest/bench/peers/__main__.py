"""The same model file and pictures behind other serving frameworks, in interleaved rounds."""

import argparse
import asyncio
import random
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import uvloop

from deploy.models.street.scene import SCENARIOS, make_scene
from loadtest.bench.peers.contenders import (
    CONTENDERS,
    BadModel,
    Contender,
    FoundObject,
    NotPrepared,
    ServedModel,
    prepare,
    python_of,
    read_model,
    version_of,
)
from loadtest.bench.peers.measuring import PeerFigures, PeerLoad, audition, check, measure
from loadtest.bench.report import format_table, present, spread, spreads
from loadtest.bench.wire import BadAnswer
from penstock_load.clients.payloads import JPEG_QUALITY, read_pictures

Say = Callable[[str], None]
LIGHT_SHARE = 0.5  # of the slowest contender's rate
FAILURES = (NotPrepared, BadAnswer)


class OursFailed(Exception):
    """Our own server did not serve, so there is nothing to compare with; the message is a sentence."""


@dataclass(slots=True)
class PeerRounds:
    """measured: by name, a figure a round. light_rate: of the open loop. left_out: a reason for each missing server."""

    light_rate: float
    measured: dict[str, list[PeerFigures]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


async def run_rounds(
    contenders: Sequence[Contender], model: ServedModel, load: PeerLoad, *, count: int, say: Say
) -> PeerRounds:
    """Runs count rounds of all servers that answer as ours does. A server that fails in a round is left out of all.

    One server is up at a time; the order is another one in each round. Raises OursFailed.
    """
    rounds, peers = await _auditioned(contenders, model, load, say)
    for number in range(count):
        for contender in random.sample(peers, len(peers)):
            say(f"round {number + 1} of {count}: {contender.name}")
            try:
                measured = await measure(contender, model, load, light_rate=rounds.light_rate, seed=number)
            except FAILURES as error:
                _leave_out(contender, contenders[0], error, rounds, say)
                peers = [peer for peer in peers if peer is not contender]
            else:
                rounds.measured.setdefault(contender.name, []).append(measured)
    rounds.measured = {one.name: rounds.measured[one.name] for one in peers}
    return rounds


async def _auditioned(
    contenders: Sequence[Contender], model: ServedModel, load: PeerLoad, say: Say
) -> tuple[PeerRounds, list[Contender]]:
    """(the empty rounds, those who answer the same boxes as the first one)."""
    rounds, peers, rates = PeerRounds(0.0), [], []
    ours: list[list[FoundObject]] = []
    for contender in contenders:
        say(f"are its boxes ours: {contender.name}")
        try:
            boxes, rate = await audition(contender, model, load)
            ours = ours or boxes
            check(ours, boxes, name=contender.name, score_threshold=model.card.score_threshold)
        except FAILURES as error:
            _leave_out(contender, contenders[0], error, rounds, say)
        else:
            peers.append(contender)
            rates.append(rate)
    rounds.light_rate = load.light_rate or min(rates) * LIGHT_SHARE
    return rounds, peers


def _leave_out(contender: Contender, ours: Contender, error: Exception, rounds: PeerRounds, say: Say) -> None:
    if contender is ours:
        raise OursFailed(str(error)) from error
    rounds.left_out.append(str(error))
    say(f"left out: {error}")


HEAD = ("server", "rate/s", "full p50 ms", "full p99 ms", "light p50 ms", "light p99 ms")
COST_HEAD = ("server", "CPU ms", "client ms", "RSS MiB", "PSS MiB", "processes")
RATIO_HEAD = ("ours / peer", "rate", "full p50", "full p99", "light p50", "light p99", "CPU ms", "PSS")
# full: the closed loop, as many callers as always; light: the open loop at the same rate for all. CPU ms: an answer's.
FIGURES: dict[str, Callable[[PeerFigures], float]] = {
    "rate": lambda one: one.closed.rate,
    "full_p50_ms": lambda one: one.closed.p50_ms,
    "full_p99_ms": lambda one: one.closed.p99_ms,
    "light_p50_ms": lambda one: one.light.p50_ms,
    "light_p99_ms": lambda one: one.light.p99_ms,
    "server_ms": lambda one: one.server_ms,
    "client_ms": lambda one: one.client_ms,
    "rss_mib": lambda one: one.rss_mib,
    "pss_mib": lambda one: one.pss_mib,
}
# Ours by theirs within a round: above 1 ours is faster (rate), or slower and dearer (the others).
RATIOS = {
    "rate_ratio": "rate",
    "full_p50_ratio": "full_p50_ms",
    "full_p99_ratio": "full_p99_ms",
    "light_p50_ratio": "light_p50_ms",
    "light_p99_ratio": "light_p99_ms",
    "server_ms_ratio": "server_ms",
    "pss_ratio": "pss_mib",
}


def rows_of(
    rounds: Mapping[str, Sequence[PeerFigures]], *, ours: str, versions: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """A row a contender, in the order of rounds; ours: whose figures are divided by the others'."""
    return [
        {
            "name": name,
            "version": (versions or {}).get(name, ""),
            **spreads(FIGURES, theirs),
            "processes": max(one.processes for one in theirs),
            **{
                ratio: spread([FIGURES[of](a) / FIGURES[of](b) for a, b in zip(rounds[ours], theirs, strict=True)])
                for ratio, of in RATIOS.items()
            },
        }
        for name, theirs in rounds.items()
    ]


def format_rows(rows: Sequence[dict[str, Any]], *, ours: str) -> str:
    """The tables, for people."""
    names = [f"{row['name']} {row['version']}".strip() for row in rows]
    speed, cost = list(FIGURES)[:5], [*list(FIGURES)[5:], "processes"]
    tables = [
        format_table(head, [(name, *(row[one] for one in figures)) for name, row in zip(names, rows, strict=True)])
        for head, figures in ((HEAD, speed), (COST_HEAD, cost))
    ]
    ratios = [(row["name"], *(row[ratio] for ratio in RATIOS)) for row in rows if row["name"] != ours]
    return "\n\n".join([*tables, format_table(RATIO_HEAD, ratios)])


NAMES = tuple(contender.name for contender in CONTENDERS)
ENVIRONMENTS = tuple(contender.environment for contender in CONTENDERS if contender.environment)
RENEW = 8
SCENE_SEED, SCENE_COUNT, SCENE_SIZE = 41, 8, (640, 480)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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


async def run(options: argparse.Namespace, model: ServedModel, contenders: Sequence[Contender]) -> dict[str, Any]:
    """Raises OursFailed, ValueError, and CancelledError at SIGTERM, when the server that is up has been ended."""
    if task := asyncio.current_task():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    load = PeerLoad(
        pictures_of(options.images),
        options.concurrency,
        options.warm_up,
        options.seconds,
        options.renew,
        options.light_rate,
    )
    rounds = await run_rounds(contenders, model, load, count=options.rounds, say=_say)
    rows = rows_of(rounds.measured, ours=contenders[0].name, versions=_versions(contenders))
    return {
        "model": model.name,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "concurrency": options.concurrency,
        "renew": options.renew,
        "light_rate": rounds.light_rate,
        "instances": model.instances,
        "threads": model.card.threads,
        "picture_bytes": [len(picture) for picture in load.pictures],
        "rows": rows,
        "left_out": rounds.left_out,
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all was built or measured, 1 if a server was left out or nothing could be measured."""
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
    note = (
        f"{result['model']}, {result['instances']} instances or workers with {result['threads']} thread each; full: "
        f"{options.concurrency} callers (closed loop), light: {result['light_rate']:.0f} requests/s (open loop); "
        f"{options.rounds} interleaved rounds of {options.seconds} s each: median (lowest-highest)"
    )
    left_out = [f"left out: {sentence}" for sentence in result["left_out"]]
    table = "\n".join([format_rows(result["rows"], ours=contenders[0].name), *left_out])
    present([result], note, table, options.json)
    return 1 if result["left_out"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
