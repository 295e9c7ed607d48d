"""What a bench says: a table for people, the same as JSON, and the conditions it ran under."""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from penstock_load.committed import Committed
from penstock_load.hardware import describe, read_machine
from penstock_load.report.document import plain_number
from penstock_load.results import Spread

VERSIONS_OF = ("grpcio", "aiohttp", "uvicorn", "uvloop", "tritonclient", "numpy", "opencv-python-headless")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BenchSpread:
    """A figure over the rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        digits = 0 if self.median >= 100 else 2
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f}-{self.high:,.{digits}f})"


def spread(figures: Sequence[float]) -> BenchSpread:
    """Median, lowest and highest."""
    return BenchSpread(statistics.median(figures), min(figures), max(figures))


def ratio_row(model: str, measure: str, values: Sequence[float], of: str) -> list[dict[str, Any]]:
    """A row of a GPU bench's results that targets.toml can name; none without a value. of: what by what."""
    row = {"kind": "ratio", "model": model, "measure": measure, "of": of, "rounds": len(values)}
    return [row | {"value": asdict(spread(values))}] if values else []


def chosen_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """An argparse type: some of these words, separated by commas."""

    def read(text: str) -> tuple[str, ...]:
        words = tuple(word for word in text.replace(" ", ",").split(",") if word)
        unknown = [word for word in words if word not in known]
        if unknown or not words:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)!r}; there are {', '.join(known)}")
        return words

    return read


def conditions() -> dict[str, str]:
    """Hardware, versions and command, without which a figure says nothing."""
    cores, machine = len(os.sched_getaffinity(0)), read_machine()
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in VERSIONS_OF)
    return {
        "cpu": f"{machine.cpu}, {cores} cores, load {os.getloadavg()[0]:.1f}",
        "versions": f"Python {platform.python_version()} {versions}",
        "command": " ".join(["python", "-m", _module_name(), *sys.argv[1:]]),
        "machine": describe(machine),
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def format_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; the first to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def markdown_table(title: str, head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table under a heading, if there is a title; empty without rows."""
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    body = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([*([f"## {title}", ""] if title else []), *body, ""])


def spread_range(found: BenchSpread | Spread | None) -> str:
    """ "3.3 (3.1 to 3.4)"; empty for None."""
    if found is None:
        return ""
    return f"{plain_number(found.median)} ({plain_number(found.low)} to {plain_number(found.high)})"


def verdict_rows(judged: Committed | None) -> list[tuple[str, str, str, str, str]]:
    """Title, measured, "at least 3 / 7", state and measure of every verdict whose measure the result has."""
    if judged is None:
        return []
    spreads = {measurement.measure: measurement.spread for measurement in judged.measurements}
    return [
        (
            verdict.title,
            spread_range(spreads[verdict.measure]),
            f"{verdict.comparison.replace('_', ' ')} {plain_number(verdict.figure)}"
            + (f" / {plain_number(verdict.goal)}" if verdict.goal else ""),
            f"**{verdict.state}**",
            verdict.measure,
        )
        for verdict in judged.verdicts
        if verdict.measure in spreads
    ]


def spreads(figures: Mapping[str, Callable[[T], float]], runs: Sequence[T]) -> dict[str, BenchSpread]:
    """Each figure over the runs."""
    return {name: spread([figure(run) for run in runs]) for name, figure in figures.items()}


def present(results: Sequence[object], note: str, table: str, path: Path | None) -> None:
    """Prints the conditions, the note and the table; writes the results to path, if given."""
    print("\n" + "\n".join(f"{name}: {value}" for name, value in conditions().items()))
    print(f"{note}\n\n{table}")
    if path is not None:
        write_json(path, results)


def write_json(path: Path, results: Sequence[object], **more: object) -> None:
    """Writes the conditions and the results (dictionaries and dataclasses) as JSON."""
    body = {"conditions": conditions(), "results": results, **more}
    path.write_text(json.dumps(body, indent=2, default=asdict) + "\n")


def _module_name() -> str:
    specification = sys.modules["__main__"].__spec__
    return specification.name.removesuffix(".__main__") if specification else Path(sys.argv[0]).name
