"""What `penstock models optimize` prints for a person, at 80 columns."""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from server.optimize.fusion import Fusion
    from server.optimize.report import Report
    from server.optimize.timing import Comparison

_MOST_ROWS = 16


def show(report: "Report", folder: Path) -> None:
    """Fusions, accuracy, speed, and at the end what to be warned of."""
    console = Console(highlight=False)
    smaller = f"{_kilobytes(report.source_bytes)} → {_kilobytes(report.int8_bytes)}"
    console.print(f"{report.name} is in {escape(str(folder))} ({smaller})", soft_wrap=True)
    _say_unreadable(console, report)
    console.print(f"\n[bold]What ONNX Runtime fused here[/bold] (the engine runs level {report.fusion.engine_level!r})")
    console.print(_fusion_table(report.fusion))
    for line in _fusion_lines(report.fusion):
        console.print(line, markup=False, soft_wrap=True)
    console.print("\n[bold]Accuracy[/bold]")
    for line in _accuracy_lines(report):
        console.print(line, markup=False)
    console.print(f"\n[bold]Speed[/bold], 8-bit instructions of this CPU: {_instructions(report)}")
    console.print(_speed_table(report.comparisons))
    console.print(
        f"the network alone, threads: {report.threads}, {len(report.comparisons[0].ratios)} rounds in turns",
        style="dim",
    )
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)


def _fusion_table(fusion: "Fusion") -> Table:
    """A row an operator, the frequent ones first; of the INT8 model the file and what the engine runs."""
    table = Table("operator")
    columns = [("float", item) for item in fusion.float_levels]
    columns += [("INT8", item) for item in (fusion.int8_levels[0], fusion.int8_levels[-1])]
    for kind, item in columns:
        table.add_column(f"{kind}\n{item.level}", justify="right")
    counts = [item.counts for _, item in columns]
    names = sorted({name for found in counts for name in found}, key=lambda name: (-max(_of(name, counts)), name))
    for name in names[:_MOST_ROWS]:
        table.add_row(escape(name), *(str(number or "") for number in _of(name, counts)))
    if rest := names[_MOST_ROWS:]:
        others = [str(sum(found.get(name, 0) for name in rest) or "") for found in counts]
        table.add_row(f"{len(rest)} others", *others)
    table.add_section()
    table.add_row("all nodes", *(str(item.total) for _, item in columns))
    return table


def _of(name: str, counts: list[dict[str, int]]) -> list[int]:
    return [found.get(name, 0) for found in counts]


def _fusion_lines(fusion: "Fusion") -> list[str]:
    last = fusion.float_levels[-1]
    lines = [f"float: {last.has_relu} convolutions hold their ReLU, {last.has_sum} the addition of a shortcut too"]
    if fusion.example is not None:
        lines += [
            f"example: {' + '.join(fusion.example.before)}",
            f"  float: {fusion.example.float_after}",
            f"  INT8:  {fusion.example.int8_after}",
        ]
    return lines


def _accuracy_lines(report: "Report") -> list[str]:
    from server.optimize.folder import judgement_lines
    from server.optimize.report import RANDOM_WEIGHTS

    pictures = f"{report.calibrating} pictures calibrated, {report.held_out} judged"
    if report.judgement is None:
        return [RANDOM_WEIGHTS]
    kept = f", {len(report.chosen.left_float)} nodes left float" if report.chosen.left_float else ""
    return [*judgement_lines(report.judgement), f"{pictures}; ranges by {report.chosen.ranges}{kept}"]


def _speed_table(comparisons: "tuple[Comparison, ...]") -> Table:
    table = Table("batch", "float ms", "INT8 ms", "times as fast", "by round")
    for item in comparisons:
        table.add_row(
            str(item.batch_size),
            f"{statistics.median(item.float_ms):.2f}",
            f"{statistics.median(item.int8_ms):.2f}",
            f"{item.ratio:.2f}",
            " ".join(f"{ratio:.2f}" for ratio in item.ratios),
        )
    return table


def _instructions(report: "Report") -> str:
    from server.optimize.folder import instructions_text

    return instructions_text(report)


def _say_unreadable(console: Console, report: "Report") -> None:
    if report.unreadable:
        first = f"{len(report.unreadable)} pictures could not be read and were left out; the first: "
        console.print(first + report.unreadable[0], style="yellow", markup=False, soft_wrap=True)


def _kilobytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:.0f} kB"
