"""The command line of the GPU bench."""

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

PARTS = ("chart", "whole", "raw", "served", "jpeg", "faults")
CLIENTS = (1, 2, 4, 8, 16, 32, 47)


def parse_arguments(about: str | None, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options. Exits with a sentence where they make no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench.gpu", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=_parts, default=PARTS, metavar="PART,…", help=", ".join(PARTS))
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), metavar="FILE", help="the figures [gpu.json]")
    parser.add_argument("--add", action="store_true", help="what the file has of parts that are not measured now stays")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.2, help="of each lap [1.2]")
    parser.add_argument("--settle", type=float, default=0.2, help="seconds before each lap that are left out [0.2]")
    parser.add_argument("--load-seconds", type=float, default=150.0, help="that models may take to load [150]")
    _add_subjects(parser)
    _add_places(parser)
    chosen = parser.parse_args(arguments)
    if chosen.rounds < 1 or chosen.seconds <= 0 or min(chosen.clients) < 1 or max(chosen.clients) > max(CLIENTS):
        parser.error(f"--rounds and --seconds are above 0, --clients from 1 to {max(CLIENTS)}")
    counts = (chosen.instances, chosen.jpeg_instances, chosen.fault_instances, chosen.jpeg_callers, chosen.generators)
    if min(*counts, *chosen.processes, *chosen.batch) < 1 or not 1 <= chosen.threads <= 100 or chosen.settle < 0:
        parser.error("--threads is from 1 to 100, --settle not below 0, and every number of instances, … is above 0")
    return chosen


def _add_subjects(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS), metavar="N", help="of chart, whole")
    parser.add_argument(
        "--threads", type=int, default=12, metavar="PERCENT", help="of a card's that a client of chart's may use [12]"
    )
    parser.add_argument("--instances", type=int, default=4, metavar="N", help="of chart's batched model [4]")
    parser.add_argument("--input", choices=("fp32", "uint8"), default="fp32", help="of the model's tensors [fp32]")
    parser.add_argument("--processes", type=int, nargs="+", default=[4, 8], metavar="N", help="of raw and served [4 8]")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[64, 128], metavar="N", help="of raw and served [64 128]"
    )
    parser.add_argument("--slo-ms", type=float, default=15.0, help="of jpeg's p99 [15]")
    parser.add_argument("--jpeg-callers", type=int, default=192, metavar="N", help="of jpeg's closed loop [192]")
    parser.add_argument("--jpeg-instances", type=int, default=4, metavar="N", help="of jpeg's models [4]")
    parser.add_argument(
        "--up-flags", type=shlex.split, default=(), metavar="'FLAGS'", help="more, of jpeg's penstock up"
    )
    parser.add_argument("--jpeg-seconds", type=float, default=2.5, help="of each rate tried [2.5]")
    parser.add_argument("--fault-instances", type=int, default=8, metavar="N", help="of faults' model [8]")
    parser.add_argument("--seed", type=int, default=1, help="of the order and the arrivals [1]")


def _add_places(parser: argparse.ArgumentParser) -> None:
    environment = os.environ.get("PENSTOCK_ENGINE_ENVIRONMENT")
    parser.add_argument("--source", type=Path, metavar="DIR", help="a model's folder instead of the exported ResNet-50")
    parser.add_argument("--no-gpu", dest="is_gpu", action="store_false", help="a miniature on the CPU, without MPS")
    parser.add_argument(
        "--engine-environment", type=Path, default=Path(environment) if environment else None, metavar="DIR",
        help="of Triton and its models, as penstock up takes it",
    )  # fmt: skip
    parser.add_argument(
        "--torch-python", metavar="FILE", help="an interpreter with torch [this one, else that of Triton's models]"
    )
    parser.add_argument("--generators", type=int, default=4, metavar="N", help="processes that make the load [4]")
    parser.add_argument("--work", type=Path, metavar="DIR", help="for models, sockets and logs; kept [a temporary one]")


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(word for word in text.replace(" ", ",").split(",") if word)
    unknown = [part for part in parts if part not in PARTS]
    if unknown or not parts:
        raise argparse.ArgumentTypeError(f"there is no part {', '.join(unknown)!r}; there are {', '.join(PARTS)}")
    return parts
