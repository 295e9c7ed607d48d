"""Generates the table of measurements from the committed results.

python -m loadtest.bench.results_table                      # prints it
python -m loadtest.bench.results_table --write PAGE.md    # puts it between <!-- results --> and <!-- /results -->
python -m loadtest.bench.results_table --check PAGE.md    # exit code 1 if the page has another table
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from penstock_load.committed import FOLDER, JUDGED, Committed, ResultsError, read_committed
from penstock_load.results import Measurement, Verdict
from penstock_load.targets import BENCH, TargetsError, read_targets, requirement_text
from penstock_load.verdict import spread_text

BEGIN, END = "<!-- results -->", "<!-- /results -->"
HEAD = ("scenario", "what", "measured", "target", "verdict", "on")
VERDICT = HEAD.index("verdict")
NOTE = (
    "Medians over interleaved rounds (lowest to highest), from the folders beside this page, which contain hardware, "
    "versions and commands. Made by `python -m loadtest.bench.results_table --write loadtest/results/README.md`."
)
PEERS = f"{BENCH}peers"
VIDEO = f"{BENCH}video"
GPU = f"{BENCH}gpu"
GPU_VIDEO = f"{BENCH}gpu.video"
NOTHING = "Nothing is measured yet: `loadtest/results` is empty."
# A line each; of several measures the first that the result has.
HEADLINES: Mapping[str, Sequence[Sequence[str]]] = {
    "image-steady": (("capacity_per_s",), ("p99_ms",)),
    "image-burst": (("p99_ms",),),
    "tensor-small": (("rate_ratio", "capacity_per_s"),),
    "tensor-large": (("rate_ratio", "capacity_per_s"),),
    "mixed-models": (("p99_ms",),),
    "grpc-stream": (("p99_ms",),),
    "overload": (("goodput_of_capacity",),),
    "soak": (("rss_slope_mib_per_min", "p99_drift"),),
    "cold-start": (("first_answer_ms",),),
    "bench image_endpoint": (("limit_share",),),
    "video-streams": (("streams_held",),),
    VIDEO: (("limit_share",), ("rate_ratio",), ("goodput_of_capacity",)),
    PEERS: (("rate_ratio",),),
    GPU: (("mps_ratio_8",), ("mps_ratio_16",), ("batching_over_mps",), ("raw_share",), ("knee_per_s",)),
    GPU_VIDEO: (("streams_720p30_h264",), ("streams_1080p30_h264",), ("streams_1080p30_hevc",), ("nvdec_share",)),
}
_TEXTS = {
    "capacity_per_s": "capacity",
    "p99_ms": "p99 at the scenario's load",
    "rate_ratio": "capacity by direct Triton's",
    "goodput_of_capacity": "goodput by capacity",
    "rss_slope_mib_per_min": "growth of the server's memory",
    "p99_drift": "p99 at the end by that at the beginning, less 1",
    "first_answer_ms": "first answer after a load",
    "streams_held": "cameras held",
    "limit_share": "rate by the harmonic limit of decode, resize and engine",
}
_PEERS_TEXTS = "pictures a second by the best peer's"
_GPU_TEXTS = {
    "mps_ratio_8": "8 one-image clients of a bare Triton with MPS, threads limited, by the same without",
    "mps_ratio_16": "16 one-image clients of a bare Triton with MPS, threads limited, by the same without",
    "batching_over_mps": "47 clients: batching with MPS by MPS alone, threads limited",
    "raw_share": "tensors in CUDA's shared memory, served by a bare Triton, by the same program raw",
    "knee_per_s": "JPEG over HTTP at p99 15 ms",
}
_GPU_VIDEO_TEXTS = {
    "streams_720p30_h264": "720p30 H.264 cameras held at p99 100 ms: NVDEC, every frame inferred and tracked",
    "streams_1080p30_h264": "1080p30 H.264 cameras held, likewise",
    "streams_1080p30_hevc": "1080p30 HEVC cameras held, likewise",
    "nvdec_share": "720p: the held cameras' frames by what NVDEC alone decodes",
}
_VIDEO_TEXTS = {
    "limit_share": "one stream (or googlenet-random, the worse) by the harmonic limit of decode, resize and engine",
    "rate_ratio": "one stream (or googlenet-random, the worse) by the best of four OpenCV loops",
    "goodput_of_capacity": "16 cameras (or of googlenet-random, the worse): in time at 1.5 times the capacity",
}


USUAL_ROUNDS = 3


class ReadmeError(ValueError):
    """A text without a place for the table. The text is one sentence."""


def results_table(committed: Iterable[Committed]) -> str:
    """The table as markdown: of each scenario and machine the newest result, missed targets first."""
    newest: dict[tuple[str, str], Committed] = {}
    for one in committed:
        newest.setdefault((one.name, one.on), one)
    lines = [line for name in HEADLINES for (of, _), one in newest.items() if of == name for line in _lines(one)]
    if not lines:
        return NOTHING + "\n"
    lines.sort(key=lambda line: line[VERDICT] != "fail")
    rows = [HEAD, tuple("---" for _ in HEAD), *lines]
    return "\n".join(
        ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows] + ["", NOTE, ""]
    )


def with_table(text: str, table: str) -> str:
    """The text with the table between the two marks. Raises ReadmeError."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ReadmeError(f"no {BEGIN} and {END} in it, each on a line of its own; the table goes between them")
    return f"{before}{begin}\n{table}{end}{after}"


def _lines(one: Committed) -> Iterator[tuple[str, ...]]:
    measured = {measurement.measure: measurement for measurement in one.measurements}
    for measures in HEADLINES[one.name]:
        if here := [measured[name] for name in measures if name in measured]:
            yield _line(one, here[0])


def _line(one: Committed, measurement: Measurement) -> tuple[str, ...]:
    verdict = _verdict_of(one, measurement.measure)
    return (
        one.name.removeprefix(BENCH),
        f"{_subject(one)}: {_texts(one.name, measurement.measure)}{_few(measurement)}",
        spread_text(measurement, measurement.unit),
        requirement_text(verdict.comparison, verdict.figure, verdict.unit) if verdict else "",
        verdict.state if verdict else "",
        one.on,
    )


def _few(measurement: Measurement) -> str:
    """Said where a measurement was cut."""
    return f" (only {measurement.rounds} rounds)" if 1 < measurement.rounds < USUAL_ROUNDS else ""


def _subject(one: Committed) -> str:
    """The GPU bench has a form of the one network for each way that tensors and pictures take."""
    return "ResNet-50, random weights" if one.name == GPU else ", ".join(one.models)


def _texts(name: str, measure: str) -> str:
    if name == PEERS:
        return _PEERS_TEXTS
    if name == GPU:
        return _GPU_TEXTS[measure]
    if name == GPU_VIDEO:
        return _GPU_VIDEO_TEXTS[measure]
    return _VIDEO_TEXTS[measure] if name == VIDEO else _TEXTS[measure]


def _verdict_of(one: Committed, measure: str) -> Verdict | None:
    """What was judged, else what was not trusted; a row that speaks of something else is not shown."""
    about = [verdict for verdict in one.verdicts if verdict.measure == measure]
    judged = [verdict for verdict in about if verdict.state in JUDGED]
    distrusted = [verdict for verdict in about if verdict.state == "not measured"]
    return next(iter([*judged, *distrusted]), None)


def main(arguments: Sequence[str] | None = None) -> int:
    """0: printed, written, or as it should be. 1: --check found something else, or a file cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench.results_table", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--results", type=Path, default=FOLDER, metavar="DIR", help="default: loadtest/results")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", type=Path, metavar="FILE", help="exit code 1 where its table is not this one")
    what.add_argument("--write", type=Path, metavar="FILE", help="put the table into it")
    options = parser.parse_args(arguments)
    try:
        table = results_table(read_committed(read_targets(), options.results))
    except (ResultsError, TargetsError) as error:
        sys.stderr.write(f"results_table: {error}\n")
        return 1
    if path := options.check or options.write:
        return _check_or_write(path, table, writes=options.check is None)
    sys.stdout.write(table)
    return 0


def _check_or_write(path: Path, table: str, *, writes: bool) -> int:
    try:
        text = path.read_text(encoding="utf-8")
        wanted = with_table(text, table)
    except (OSError, UnicodeDecodeError, ReadmeError) as error:
        sys.stderr.write(f"results_table: {path}: {error}\n")
        return 1
    if text == wanted:
        return 0
    if writes:
        path.write_text(wanted, encoding="utf-8")
        return 0
    sys.stderr.write(
        f"{path}: its table is not that of the results; python -m loadtest.bench.results_table --write {path}\n"
    )
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
