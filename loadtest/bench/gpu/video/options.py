"""The command line of the bench of video on a GPU."""

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from loadtest.bench.gpu.video.clips import CAMERAS
from loadtest.bench.gpu.video.pieces import PARTS

MODEL = "googlenet-torch-uint8-random"
_MINIATURE = "street"  # needs no PyTorch


def parse_arguments(about: str | None, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options. Exits with a sentence where they make no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench.gpu.video",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", type=_words(PARTS), metavar="PART,…", help=f"{', '.join(PARTS)} [all]")
    parser.add_argument(
        "--cameras",
        type=_words(tuple(CAMERAS)),
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


def _words(known: tuple[str, ...]) -> "type[tuple[str, ...]]":
    def read(text: str) -> tuple[str, ...]:
        words = tuple(word for word in text.replace(" ", ",").split(",") if word)
        unknown = [word for word in words if word not in known]
        if unknown or not words:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)!r}; there are {', '.join(known)}")
        return words

    return read  # type: ignore[return-value]
