"""Two cards by one: ResNet-50 served by `penstock up`, and cameras of `penstock video run`.

    python -m loadtest.bench.gpu.cards [--only served,streams] [--rounds 3] [--json cards.json] [--work DIR]

Each round measures one card and both, in a random order. Both stacks run all the time, since a start takes up to a
minute; the idle one has memory of the first card, and computes nothing. served: JPEGs a second that
closed-loop callers get over HTTP, decoded on the card; workers call Triton, which forms the batches. streams: frames a
second that are inferred of 720p30 H.264 cameras, twice as many of them, and of video programs, on two cards; rows go
through memory of the host, since clients cannot register a card's memory with several engines. The load generator and
the gateway use the same cores: before you blame a card, look at machine_cores and core_cores (the gateway's core
process, which cannot use more than one). Needs two NVIDIA GPUs, and was never run on them. --rehearse MODEL,MODEL runs
everything once on a stand-in for NVML and a CPU, with models for served and streams that are in DIR already.
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.bench.gpu.callers import CallerLane
from loadtest.bench.gpu.generators import Generators
from loadtest.bench.gpu.pictures import photos
from loadtest.bench.gpu.programs import Export, PenstockUp, export_all, python_with_torch
from loadtest.bench.gpu.stretch import busy_cpu_s
from loadtest.bench.gpu.tritons import picture_request
from loadtest.bench.gpu.video.clips import CAMERAS, clip_path, make_clips
from loadtest.bench.gpu.video.fleet import Fleet, FleetSetup
from loadtest.bench.wire import BadAnswer
from penstock.engines.triton.runtime import default_environment
from penstock.gpu.cards import ALL, Card, choose_cards
from penstock.gpu.mps.control import VISIBLE_CARDS
from penstock.gpu.nvml import read_cards

GOAL = 1.9
JPEG_MODEL, FRAME_MODEL = "resnet50-jpeg-random", "resnet50-frames-random"  # takes encoded pictures; takes rows
LOAD_S, CLIP_S, START_S, PICTURES = 120.0, 8.0, 120.0, 64
GPUS_VARIABLE, STACK_VARIABLE = "PENSTOCK_GPUS", "PENSTOCK_HTTP_PORT"  # the second chooses one of two stacks


@dataclass(frozen=True, slots=True)
class CardsPlan:
    """callers, streams, programs: for each card; of the closed loop, cameras, video programs. workers: of the gateway.
    seconds: of a measurement. models: for pictures, and for frames. decoder: of the cameras."""

    work: Path
    environment: Path
    cards: tuple[Card, ...]
    seconds: float
    callers: int
    streams: int
    programs: int
    workers: int
    models: tuple[str, str] = (JPEG_MODEL, FRAME_MODEL)
    decoder: str = "nvdec"

    def gpus(self, count: int) -> str:
        """The value of --gpus for this number of cards."""
        return ",".join(card.uuid for card in self.cards[:count])

    def stack(self, model: str, count: int) -> PenstockUp:
        """With this number of cards, in a home of its own with the same models."""
        home = self.work / f"cards-{count}"
        home.mkdir(exist_ok=True)
        if not (home / "models").exists():
            (home / "models").symlink_to(self.work / "models")
        flags = ("--mps", "on" if self.decoder == "nvdec" else "off", "--workers", str(self.workers))
        return PenstockUp(home, [model], *flags, environment=self.environment, gpus=self.gpus(count))


def two_cards() -> tuple[Card, ...]:
    """The first two cards that CUDA sees. Raises BadAnswer if it sees fewer."""
    cards = choose_cards(ALL, read_cards(), os.environ.get(VISIBLE_CARDS))
    if len(cards) < 2:
        has = f"{len(cards)} NVIDIA GPU{'s' * (len(cards) != 1)}"
        raise BadAnswer(f"this bench compares two NVIDIA GPUs with one, and CUDA sees {has} here; run it where two are")
    return cards[:2]


def measure_served(plan: CardsPlan, count: int, up: PenstockUp) -> dict[str, float]:
    """Pictures a second that the stack, with this number of cards, serves. Raises BadAnswer, OSError."""
    model = plan.models[0]
    requests = [picture_request(model, picture) for picture in photos(PICTURES, seed=1)]
    with Generators(max(2, (os.cpu_count() or 2) // 4)) as generators:
        callers = plan.callers * count
        lanes = [CallerLane(model, up.port, requests[number % len(requests)]) for number in range(callers)]
        with _Cores(up) as cores:
            run = generators.closed(lanes, settle_s=2.0, seconds=plan.seconds)()
    good = sum(not ask.failure for ask in run.asks)
    return {"per_s": good / run.seconds, "failed": float(len(run.asks) - good), **cores.used}


def measure_streams(plan: CardsPlan, count: int, up: PenstockUp) -> dict[str, float]:
    """Frames a second that are inferred, of plan.streams cameras for each of so many cards. Raises BadAnswer."""
    clip = clip_path(plan.work, CAMERAS["h264-720p"])
    setup = FleetSetup(plan.models[1], clip, plan.decoder, plan.programs * count)
    with (
        _variable(GPUS_VARIABLE, plan.gpus(count)),
        _variable(STACK_VARIABLE, str(up.port)),
        Fleet(setup, plan.work / f"fleet-{count}", plan.streams * count) as fleet,
    ):
        fleet.wait(START_S * count)
        with _Cores(up) as cores:
            before = fleet.look()
            time.sleep(plan.seconds)
            after = fleet.look()
    seconds = after.at_s - before.at_s
    inferred = after.page.total("inferred_total") - before.page.total("inferred_total")
    return {"per_s": inferred / seconds, "of_wanted": inferred / seconds / (30 * plan.streams * count), **cores.used}


class _Cores:
    """A context: the cores in use meanwhile, of the machine and of each kind of the stack's processes."""

    def __init__(self, up: PenstockUp) -> None:
        self._up = up
        self.used: dict[str, float] = {}

    def __enter__(self) -> "_Cores":
        self._before, self._began_s = self._read(), time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.monotonic() - self._began_s
        self.used = {
            f"{kind}_cores": round((after_s - self._before.get(kind, 0.0)) / seconds, 2)
            for kind, after_s in self._read().items()
        }

    def _read(self) -> dict[str, float]:
        return {"machine": busy_cpu_s(), **self._up.cpu_s()}


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Sets a variable of the environment meanwhile."""
    former = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if former is None:
            del os.environ[name]
        else:
            os.environ[name] = former


PARTS: dict[str, Callable[[CardsPlan, int, PenstockUp], dict[str, float]]] = {
    "served": measure_served,
    "streams": measure_streams,
}


def ratio_row(part: str, rounds: Sequence[dict[int, dict[str, float]]]) -> dict[str, Any]:
    """Two cards by one: the median over the rounds, each with its own, and their spread."""
    ratios = [found[2]["per_s"] / found[1]["per_s"] for found in rounds]
    return {
        "part": part,
        "two_by_one": round(statistics.median(ratios), 3),
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "goal": GOAL,
        "is_met": statistics.median(ratios) >= GOAL,
        "rounds": [{str(count): figures for count, figures in found.items()} for found in rounds],
    }


def run_bench(
    plan: CardsPlan, parts: Sequence[str], rounds: int, tell: Callable[[str], object]
) -> list[dict[str, Any]]:
    """A row for each part. Raises BadAnswer, OSError."""
    rows = []
    for part in parts:
        found: list[dict[int, dict[str, float]]] = []
        with ExitStack() as running:
            model = plan.models[list(PARTS).index(part)]
            stacks = {count: running.enter_context(plan.stack(model, count)) for count in (1, 2)}
            for up in stacks.values():
                up.wait(time.monotonic() + LOAD_S)
            for number in range(1, rounds + 1):
                counts = [1, 2]
                random.Random(number).shuffle(counts)
                found.append({})
                for count in counts:
                    found[-1][count] = figures = PARTS[part](plan, count, stacks[count])
                    tell(f"{part}, round {number}, {count} GPU{'s' * (count > 1)}: {figures}")
        rows.append(ratio_row(part, found))
    return rows


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench.gpu.cards", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--only", choices=tuple(PARTS), help="one part [both]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="length of each measurement [6]")
    parser.add_argument("--callers", type=int, default=192, help="clients for each GPU [192]")
    parser.add_argument("--streams", type=int, default=200, help="720p cameras for each GPU [200]")
    parser.add_argument("--programs", type=int, default=4, help="video programs for each GPU; at most 8 in all [4]")
    workers = max(2, (os.cpu_count() or 2) // 2)
    parser.add_argument("--workers", type=int, default=workers, help="gateway workers [half of the cores]")
    parser.add_argument("--instances", type=int, default=6, help="instances of each model on each GPU [6]")
    parser.add_argument("--rehearse", metavar="MODEL,MODEL", help="run these models without GPUs [measure]")
    parser.add_argument("--json", type=Path, default=Path("cards.json"), help="result file [cards.json]")
    parser.add_argument("--work", type=Path, help="folder for clips, models and logs; not deleted [a temporary one]")
    environment = os.environ.get("PENSTOCK_ENGINE_ENVIRONMENT") or default_environment(Path(sys.prefix))
    parser.add_argument("--engine-environment", type=Path, default=Path(environment), help="environment with Triton")
    return parser.parse_args(arguments)


def _prepared(options: argparse.Namespace, work: Path, cards: tuple[Card, ...], parts: Sequence[str]) -> CardsPlan:
    """The plan, after its models and clips are made. Raises BadAnswer, OSError."""
    plan = CardsPlan(
        work,
        options.engine_environment,
        cards,
        options.seconds,
        options.callers,
        options.streams,
        options.programs,
        options.workers,
    )
    if options.rehearse:
        pictures, _, frames = options.rehearse.partition(",")
        plan = replace(plan, models=(pictures, frames or pictures), decoder="cpu")
    else:
        flags = ("--instances", str(options.instances), "--batching", "triton")
        wanted = {
            "served": Export(work, JPEG_MODEL, ("--pictures", *flags)),
            "streams": Export(work, FRAME_MODEL, ("--input", "uint8", *flags)),
        }
        export_all([wanted[part] for part in parts], python_with_torch(options.engine_environment))
    if "streams" in parts:
        make_clips(work, (CAMERAS["h264-720p"],), CLIP_S)
    return plan


def main(arguments: Sequence[str] | None = None) -> int:
    """0: measured; 2: this machine cannot run it, with the reason."""
    options = parse_arguments(arguments)
    try:
        cards = two_cards()
        with tempfile.TemporaryDirectory() as temporary:
            work = options.work or Path(temporary)
            work.mkdir(parents=True, exist_ok=True)
            parts = [options.only] if options.only else list(PARTS)
            plan = _prepared(options, work, cards, parts)
            rows = run_bench(plan, parts, options.rounds, lambda line: sys.stderr.write(f"{line}\n"))
    except (BadAnswer, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    facts = {"cards": [card.name for card in cards], "host": platform.node(), "cores": os.cpu_count()}
    options.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1))
    for row in rows:
        sys.stdout.write(f"{row['part']}: two GPUs by one {row['two_by_one']} {row['spread']}, goal {GOAL}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
