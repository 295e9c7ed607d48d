"""What `penstock infer` prints of each picture: a table for people, or one JSON line for programs."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from server.commands.gateway import ImageAnswer, ImageResult
from server.commands.terminal import say_failure

STAGES = ("decode", "preprocess", "queue", "infer", "postprocess")


class Report(Protocol):
    """Told of every picture once, and of its drawing where there is one."""

    def result(self, picture: Path, answer: ImageAnswer) -> None: ...

    def drawn(self, target: Path) -> None: ...

    def failure(self, picture: Path, why: str) -> None: ...


class JsonLines:
    """On standard output one object a picture: {"file": …, the gateway's answer} or {"file": …, "error": …}.

    What was drawn, on standard error.
    """

    def result(self, picture: Path, answer: ImageAnswer) -> None:
        told = msgspec.to_builtins(answer)
        if not answer.explain:
            del told["explain"]
        _write_line({"file": str(picture), **told})

    def drawn(self, target: Path) -> None:
        sys.stderr.write(f"drawn: {target}\n")

    def failure(self, picture: Path, why: str) -> None:
        _write_line({"file": str(picture), "error": why})


class Tables:
    """A table a picture on standard output; what failed, on standard error."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)

    def result(self, picture: Path, answer: ImageAnswer) -> None:
        title = f"{picture} · {answer.model_name} {answer.model_version}"
        self._console.print(escape(title), soft_wrap=True)  # a table's own title would be as narrow as the table
        for result in answer.results:
            self._console.print(_table(result) if result else "nothing found")
        self._console.print(_timings(answer.timings_ms), style="dim", soft_wrap=True)
        for told in answer.explain:
            self._console.print(f"batch: {told.text}", markup=False, soft_wrap=True)

    def drawn(self, target: Path) -> None:
        self._console.print(f"drawn: {target}", markup=False, soft_wrap=True)

    def failure(self, picture: Path, why: str) -> None:
        say_failure(why)


def _write_line(row: Mapping[str, object]) -> None:
    sys.stdout.write(msgspec.json.encode(row).decode() + "\n")
    sys.stdout.flush()


def _table(result: ImageResult) -> Table:
    table = Table()
    table.add_column("label")
    table.add_column("score", justify="right")
    if result.detections is None:
        for item in result.classes or ():
            table.add_row(escape(item.name), f"{item.score:.3f}")
        return table
    for corner in ("x1", "y1", "x2", "y2"):
        table.add_column(corner, justify="right")
    for box in result.detections:
        table.add_row(escape(box.name), f"{box.score:.3f}", *(f"{value:.1f}" for value in box.xyxy))
    return table


def _timings(timings_ms: Mapping[str, float]) -> str:
    stages = [f"{stage} {timings_ms[stage]:.1f}" for stage in STAGES if stage in timings_ms]
    total = f" = {timings_ms['total']:.1f} ms" if "total" in timings_ms else " ms"
    return " + ".join(stages) + total
