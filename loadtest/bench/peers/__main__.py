"""The same model file and pictures behind other serving frameworks, in interleaved rounds."""

import argparse
import asyncio
import random
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
from loadtest.bench.peers.measuring import NotServing, OtherAnswer, PeerFigures, PeerLoad, audition, check, measure
from loadtest.bench.report import BenchSpread, conditions, format_table, spread, write_json
from loadtest.bench.wire import BadAnswer
from penstock_load.clients.payloads import JPEG_QUALITY, read_pictures

Say = Callable[[str], None]
LIGHT_SHARE = 0.5  # of the slowest contender's rate
FAILURES = (NotServing, NotPrepared, OtherAnswer, BadAnswer)


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


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One contender over the rounds. rate: answers a second; server_ms, client_ms: of CPU, an answer.

    full: the closed loop, as many callers as always. light: the open loop at the same rate for all.

    The ratios are ours / this one's within a round, so above 1 ours is faster (rate) or slower, dearer (the others).
    """

    name: str
    version: str
    rate: BenchSpread
    full_p50_ms: BenchSpread
    full_p99_ms: BenchSpread
    light_p50_ms: BenchSpread
    light_p99_ms: BenchSpread
    server_ms: BenchSpread
    client_ms: BenchSpread
    rss_mib: BenchSpread
    pss_mib: BenchSpread
    processes: int
    rate_ratio: BenchSpread
    full_p50_ratio: BenchSpread
    full_p99_ratio: BenchSpread
    light_p50_ratio: BenchSpread
    light_p99_ratio: BenchSpread
    server_ms_ratio: BenchSpread
    pss_ratio: BenchSpread


def rows_of(
    rounds: Mapping[str, Sequence[PeerFigures]], *, ours: str, versions: Mapping[str, str] | None = None
) -> list[PeerRow]:
    """A row a contender, in the order of rounds; ours: whose figures are divided by the others'."""
    return [_row(name, (versions or {}).get(name, ""), measured, rounds[ours]) for name, measured in rounds.items()]


def _row(name: str, version: str, theirs: Sequence[PeerFigures], ours: Sequence[PeerFigures]) -> PeerRow:
    pairs = list(zip(ours, theirs, strict=True))
    return PeerRow(
        name=name,
        version=version,
        rate=spread([one.closed.rate for one in theirs]),
        full_p50_ms=spread([one.closed.p50_ms for one in theirs]),
        full_p99_ms=spread([one.closed.p99_ms for one in theirs]),
        light_p50_ms=spread([one.light.p50_ms for one in theirs]),
        light_p99_ms=spread([one.light.p99_ms for one in theirs]),
        server_ms=spread([one.server_ms for one in theirs]),
        client_ms=spread([one.client_ms for one in theirs]),
        rss_mib=spread([one.memory.rss_mib for one in theirs]),
        pss_mib=spread([one.memory.pss_mib for one in theirs]),
        processes=max(one.memory.processes for one in theirs),
        rate_ratio=spread([a.closed.rate / b.closed.rate for a, b in pairs]),
        full_p50_ratio=spread([a.closed.p50_ms / b.closed.p50_ms for a, b in pairs]),
        full_p99_ratio=spread([a.closed.p99_ms / b.closed.p99_ms for a, b in pairs]),
        light_p50_ratio=spread([a.light.p50_ms / b.light.p50_ms for a, b in pairs]),
        light_p99_ratio=spread([a.light.p99_ms / b.light.p99_ms for a, b in pairs]),
        server_ms_ratio=spread([a.server_ms / b.server_ms for a, b in pairs]),
        pss_ratio=spread([a.memory.pss_mib / b.memory.pss_mib for a, b in pairs]),
    )


def format_rows(rows: Sequence[PeerRow], *, ours: str) -> str:
    """The tables, for people."""
    names = [f"{row.name} {row.version}".strip() for row in rows]
    figures = [
        (name, row.rate, row.full_p50_ms, row.full_p99_ms, row.light_p50_ms, row.light_p99_ms)
        for name, row in zip(names, rows, strict=True)
    ]
    costs = [
        (name, row.server_ms, row.client_ms, row.rss_mib, row.pss_mib, row.processes)
        for name, row in zip(names, rows, strict=True)
    ]
    ratios = [_ratios(row) for row in rows if row.name != ours]
    return "\n\n".join([format_table(HEAD, figures), format_table(COST_HEAD, costs), format_table(RATIO_HEAD, ratios)])


def _ratios(row: PeerRow) -> tuple[object, ...]:
    full = (row.full_p50_ratio, row.full_p99_ratio)
    light = (row.light_p50_ratio, row.light_p99_ratio)
    return (row.name, row.rate_ratio, *full, *light, row.server_ms_ratio, row.pss_ratio)


NAMES = tuple(contender.name for contender in CONTENDERS)
ENVIRONMENTS = tuple(contender.environment for contender in CONTENDERS if contender.environment)
RENEW = 8
SCENE_SEED, SCENE_COUNT, SCENE_SIZE = 41, 8, (640, 480)


@dataclass(frozen=True, slots=True)
class PeersResult:
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
    rows: tuple[PeerRow, ...]
    left_out: tuple[str, ...]


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


async def run(options: argparse.Namespace, model: ServedModel, contenders: Sequence[Contender]) -> PeersResult:
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
    return PeersResult(
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


def _print(result: PeersResult, contenders: Sequence[Contender]) -> None:
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
    _print(result, contenders)
    if options.json:
        write_json(options.json, [result])
    return 1 if result.left_out else 0


if __name__ == "__main__":
    raise SystemExit(main())
