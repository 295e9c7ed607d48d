"""Command line of the GPU video bench, and its state file: which pieces are done."""

import argparse
import json
import os
import random
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.bench.gpu.video.clips import CAMERAS

PARTS = ("nvdec", "streams", "hand-over", "cpu", "faults")
OF_EVERY_CAMERA = ("nvdec", "streams")
ONCE = ("faults",)  # in the first of the rounds


@dataclass(frozen=True, slots=True)
class BenchPiece:
    """part: of PARTS. camera: of clips.CAMERAS. number: of the round, from 1."""

    part: str
    camera: str
    number: int

    @property
    def name(self) -> str:
        """Of its file, and for people."""
        return f"{self.part}-{self.camera}-{self.number}"

    def path(self, out: Path) -> Path:
        """Where it is kept."""
        return out / f"{self.name}.json"


def pieces_of(parts: Sequence[str], cameras: Sequence[str], rounds: Sequence[int]) -> Iterator[BenchPiece]:
    """In order: of each camera NVDEC alone, then at once what is held against it; cameras in an order drawn."""
    for number in rounds:
        drawn = list(cameras)
        random.Random(number).shuffle(drawn)
        yield from (BenchPiece(part, camera, number) for camera in drawn for part in OF_EVERY_CAMERA if part in parts)
        for part in (one for one in PARTS if one in parts and one not in OF_EVERY_CAMERA):
            if part not in ONCE or number == min(rounds):
                yield BenchPiece(part, cameras[0], number)


def left_of(pieces: Iterable[BenchPiece], folder: "Folder") -> list[BenchPiece]:
    """Those that are to be measured. NVDEC alone is so again where the streams held against it are: in the same run."""
    pieces = list(pieces)
    streams = {(one.camera, one.number) for one in pieces if one.part == "streams" and not folder.has(one)}
    return [
        one for one in pieces if not folder.has(one) or (one.part == "nvdec" and (one.camera, one.number) in streams)
    ]


class Folder:
    """The pieces that are there."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def has(self, piece: BenchPiece) -> bool:
        """Whether it was measured."""
        return piece.path(self._out).is_file()

    def write(self, piece: BenchPiece, found: Mapping[str, Any], conditions: Mapping[str, str]) -> None:
        """Whole or not at all. Raises OSError."""
        self._out.mkdir(parents=True, exist_ok=True)
        body = {"part": piece.part, "camera": piece.camera, "round": piece.number, "conditions": dict(conditions)}
        new = piece.path(self._out).with_suffix(".new")
        new.write_text(json.dumps(body | {"found": dict(found)}, indent=1) + "\n")
        new.replace(piece.path(self._out))

    def all(self) -> list[dict[str, Any]]:
        """Every piece, by part, camera and round. A file that is none is left alone. Raises OSError."""
        found = []
        for path in sorted(self._out.glob("*.json")):
            try:
                body = json.loads(path.read_text())
            except ValueError:
                continue
            if isinstance(body, dict) and {"part", "camera", "round", "found"} <= body.keys():
                found.append(body)
        order = {part: place for place, part in enumerate(PARTS)}
        return sorted(found, key=lambda one: (order.get(one["part"], len(order)), one["camera"], one["round"]))

    def full_at(self) -> int:
        """The most decoders at which a search found the card full, of any camera; 0 where none did."""
        return max((int(one["found"].get("full_at", 0)) for one in self.all()), default=0)

    def found(self, part: str, camera: str, number: int) -> dict[str, Any] | None:
        """Of that round, else of the last other round that has it."""
        rounds = {one["round"]: one["found"] for one in self.all() if (one["part"], one["camera"]) == (part, camera)}
        return rounds.get(number) or (rounds[max(rounds)] if rounds else None)


MODEL = "googlenet-torch-uint8-random"
_MINIATURE = "street"  # needs no PyTorch


def parse_arguments(about: str | None, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options. Exits with a sentence where they make no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench.gpu.video",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", type=_choices_text(PARTS), metavar="PART,…", help=f"{', '.join(PARTS)} [all]")
    parser.add_argument(
        "--cameras",
        type=_choices_text(tuple(CAMERAS)),
        default=tuple(CAMERAS),
        metavar="NAME,…",
        help=f"{', '.join(CAMERAS)} [all]",
    )
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 2, 3], metavar="N", help="their numbers [1 2 3]")
    parser.add_argument("--out", type=Path, default=Path("gpu-video"), metavar="DIR", help="for the files [gpu-video]")
    parser.add_argument("--again", action="store_true", help="measure what is in the folder already, too")
    parser.add_argument("--budget-s", type=float, default=0.0, help="begin nothing after so many seconds [no limit]")
    _add_lengths(parser)
    _add_product(parser)
    _add_places(parser)
    chosen = parser.parse_args(arguments)
    chosen.only = chosen.only or (PARTS if chosen.is_gpu else tuple(part for part in PARTS if part != "nvdec"))
    chosen.decoder = chosen.decoder or ("nvdec" if chosen.is_gpu else "cpu")
    chosen.model = chosen.model or (MODEL if chosen.is_gpu else _MINIATURE)
    counts = (chosen.programs, chosen.cameras_per_process, chosen.instances, chosen.max_batch, chosen.tries)
    if min(chosen.decoders or 0, chosen.search_s) < 0:
        parser.error("--decoders and --search-s must not be below 0")
    if min(*counts, *chosen.rounds) < 1 or chosen.seconds <= 0 or min(chosen.streams or [1]) < 1:
        parser.error("--rounds, --seconds, --streams and every number of programs, instances, … must be above 0")
    return chosen


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=7.0, help="of each window [7]")
    parser.add_argument("--settle", type=float, default=2.0, help="seconds before each window [2]")
    parser.add_argument("--start-s", type=float, default=60.0, help="that streams may take until all answer [60]")
    parser.add_argument("--load-s", type=float, default=150.0, help="that the stack may take to be ready [150]")
    parser.add_argument("--nvdec-seconds", type=float, default=3.0, help="of each shape of NVDEC alone [3]")
    parser.add_argument("--clip-seconds", type=float, default=8.0, help="of each clip [8]")
    parser.add_argument("--bound-ms", type=float, default=100.0, help="of the p99 [100]")
    parser.add_argument("--tries", type=int, default=6, help="numbers of streams tried in a search [6]")
    parser.add_argument(
        "--streams", type=int, nargs="+", metavar="N",
        help="to begin with [what an earlier round held and missed; else 0.95 of NVDEC alone, the target, NVDEC alone]",
    )  # fmt: skip
    parser.add_argument("--most", type=int, metavar="N", help="streams tried [1.03 of NVDEC alone]")
    parser.add_argument(
        "--decoders", type=int, metavar="N",
        help="that the card makes at once: no more streams are tried, fewer first; 0: not known [what a search met]",
    )  # fmt: skip
    parser.add_argument(
        "--search-s", type=float, default=75.0, metavar="S",
        help="begin no further number of a search after so many seconds, once one is held; 0: no limit [75]",
    )  # fmt: skip


def _add_product(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--programs", type=int, default=6, metavar="N", help="video programs [6]")
    parser.add_argument("--cameras-per-process", type=int, default=24, metavar="N", help="of the video programs [24]")
    parser.add_argument(
        "--pin-processes", action=argparse.BooleanOptionalAction, default=True, help="decode processes to a core [yes]"
    )
    parser.add_argument("--decoder", choices=("nvdec", "cpu"), help="of streams, hand-over, faults [nvdec]")
    parser.add_argument("--hand-over", choices=("auto", "device", "host"), default="auto", help="of streams [auto]")
    parser.add_argument("--batch-size", type=int, metavar="N", help="of the video programs [their own choice]")
    parser.add_argument("--push-timeout-us", type=int, default=15_000, metavar="N", help="batched-push-timeout [15000]")
    parser.add_argument("--model", help=f"that sees every frame [{MODEL}, which is made]")
    parser.add_argument("--instances", type=int, default=4, metavar="N", help="of the model [4]")
    parser.add_argument("--batching", choices=("off", "triton"), default="triton", help="of the model [triton]")
    parser.add_argument("--max-batch", type=int, default=64, metavar="N", help="of the model [64]")
    parser.add_argument("--mps", choices=("on", "off"), default="on", help="of penstock up [on]")
    parser.add_argument("--up-flags", type=shlex.split, default=(), metavar="'FLAGS'", help="more, of penstock up")


def _add_places(parser: argparse.ArgumentParser) -> None:
    environment = os.environ.get("PENSTOCK_ENGINE_ENVIRONMENT")
    parser.add_argument("--work", type=Path, metavar="DIR", help="for clips, models, logs; kept [a temporary one]")
    parser.add_argument(
        "--no-gpu", dest="is_gpu", action="store_false",
        help="a miniature: decoder cpu, model street, the embedded engine; no nvdec, no MPS",
    )  # fmt: skip
    parser.add_argument(
        "--engine-environment", type=Path, default=Path(environment) if environment else None, metavar="DIR",
        help="of Triton and its models, as penstock up takes it",
    )  # fmt: skip
    parser.add_argument("--torch-python", metavar="FILE", help="an interpreter with torch [this one, else Triton's]")


def _choices_text(known: tuple[str, ...]) -> "type[tuple[str, ...]]":
    def read(text: str) -> tuple[str, ...]:
        words = tuple(word for word in text.replace(" ", ",").split(",") if word)
        unknown = [word for word in words if word not in known]
        if unknown or not words:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)!r}; there are {', '.join(known)}")
        return words

    return read  # type: ignore[return-value]
