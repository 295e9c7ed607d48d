"""Generates the table of measurements from the committed results.

python -m loadtest.bench.results_table                      # prints it
python -m loadtest.bench.results_table --write PAGE.md    # puts it between <!-- results --> and <!-- /results -->
python -m loadtest.bench.results_table --check PAGE.md    # exit code 1 if the page has another table
"""

import argparse
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from loadtest.bench.report import markdown_table
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
GPU = f"{BENCH}gpu"
NOTHING = "Nothing is measured yet: `loadtest/results` is empty."
HEADLINES: Mapping[str, Sequence[Mapping[str, str]]] = tomllib.loads(
    Path(__file__).with_name("headlines.toml").read_text(encoding="utf-8")
)
USUAL_ROUNDS = 3


class ReadmeError(ValueError):
    """A text without a place for the table. The text is one sentence."""


def results_table(committed: Iterable[Committed]) -> str:
    """The table as markdown: of each scenario, machine and model the newest result, missed targets first."""
    newest: dict[tuple[str, str, tuple[str, ...]], Committed] = {}
    for one in committed:
        newest.setdefault((one.name, one.on, tuple(one.models)), one)
    lines = [line for name in HEADLINES for key, one in newest.items() if key[0] == name for line in _lines(one)]
    if not lines:
        return NOTHING + "\n"
    lines.sort(key=lambda line: line[VERDICT] != "fail")
    return f"{markdown_table('', HEAD, lines)}\n{NOTE}\n"


def with_table(text: str, table: str) -> str:
    """The text with the table between the two marks. Raises ReadmeError."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ReadmeError(f"no {BEGIN} and {END} in it, each on a line of its own; the table goes between them")
    return f"{before}{begin}\n{table}{end}{after}"


def _lines(one: Committed) -> Iterator[tuple[str, ...]]:
    measured = {measurement.measure: measurement for measurement in one.measurements}
    for texts in HEADLINES[one.name]:
        if here := [name for name in texts if name in measured]:
            yield _line(one, measured[here[0]], texts[here[0]])


def _line(one: Committed, measurement: Measurement, text: str) -> tuple[str, ...]:
    verdict = _verdict_of(one, measurement.measure)
    return (
        one.name.removeprefix(BENCH),
        f"{_subject(one)}: {text}{_few(measurement)}",
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
