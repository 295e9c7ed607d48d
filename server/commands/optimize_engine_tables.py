"""What `penstock models optimize --tensorrt` prints for a person, at 80 columns."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from server.optimize.tensorrt.layers import EngineLayers
    from server.optimize.tensorrt.report import EngineReport

_MOST_KINDS, _MOST_NOTES = 12, 3


def show_engine(report: "EngineReport", folder: Path) -> None:
    """Where it fits, fusions, accuracy, speed, and at the end what to be warned of."""
    key, console = report.key, Console(highlight=False)
    console.print(f"{report.name} is in {escape(str(folder))} ({report.plan_bytes / 1e6:.1f} MB)", soft_wrap=True)
    built = f"built before, in {report.build_s:.0f} s" if report.is_cached else f"built in {report.build_s:.0f} s"
    console.print(f"for {key.card} and TensorRT {key.tensorrt} only; {built}", markup=False, soft_wrap=True)
    if report.unreadable:
        first = f"{len(report.unreadable)} pictures could not be read and were left out; the first: "
        console.print(first + report.unreadable[0], style="yellow", markup=False, soft_wrap=True)
    console.print("\n[bold]What TensorRT fused[/bold]")
    console.print(_layers_table(report.layers))
    for line in _layer_lines(report.layers):
        console.print(line, markup=False, soft_wrap=True)
    console.print("\n[bold]Accuracy[/bold]")
    for line in _accuracy_lines(report):
        console.print(line, markup=False)
    console.print("\n[bold]Speed[/bold] of the engine alone, copies left out")
    console.print(_speed_table(report))
    for line in report.noted[:_MOST_NOTES]:
        console.print(f"TensorRT: {line}", style="dim", markup=False, soft_wrap=True)
    if len(report.noted) > _MOST_NOTES:
        console.print(f"TensorRT: {len(report.noted) - _MOST_NOTES} more warnings, in --json", style="dim")
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)


def _layers_table(layers: "EngineLayers") -> Table:
    table = Table("layers of the engine", "")
    for kind, count in list(layers.kinds.items())[:_MOST_KINDS]:
        table.add_row(escape(kind), str(count))
    if rest := list(layers.kinds.values())[_MOST_KINDS:]:
        table.add_row(f"{len(rest)} other kinds", str(sum(rest)))
    table.add_section()
    table.add_row(f"all, of {layers.network_nodes} nodes of the file", str(layers.total))
    return table


def _layer_lines(layers: "EngineLayers") -> list[str]:
    precisions = ", ".join(f"{count} write {name}" for name, count in layers.precisions.items())
    lines = [f"{layers.fused} hold several nodes, {layers.copies} only move or cast; of the others {precisions}"]
    if layers.example is not None:
        lines += [
            f"example: {' + '.join(layers.example.nodes)}",
            f"  {layers.example.kind} in {layers.example.precision}",
        ]
    return lines


def _accuracy_lines(report: "EngineReport") -> list[str]:
    from server.optimize.folder import judgement_lines
    from server.optimize.report import RANDOM_WEIGHTS

    closest = ", ".join(f"{item.output} {item.cosine:.5f}" for item in report.closeness)
    lines = [f"lowest cosine of an output with the float model's: {closest}"]
    if report.judgement is None:
        return [RANDOM_WEIGHTS, *lines]
    how = f"{report.held_out} pictures judged"
    if report.quantised is not None:
        left = len(report.quantised.left_float)
        kept = f", {left} nodes left float" if left else ""
        how = f"{report.calibrating} pictures calibrated, {how}; ranges by {report.quantised.ranges}{kept}"
    return [*judgement_lines(report.judgement, "the engine"), how, *lines]


def _speed_table(report: "EngineReport") -> Table:
    table = Table("batch", "ms", "pictures/s", "ms by round")
    for item in report.timings:
        rounds = " ".join(f"{value:.3f}" for value in item.round_ms)
        table.add_row(str(item.batch_size), f"{item.median_ms:.3f}", f"{item.pictures_a_second:,.0f}", rounds)
    return table
