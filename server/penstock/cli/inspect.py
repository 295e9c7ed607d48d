"""`penstock models inspect`: the recognised layout of a model file, its card, and open questions."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.model_flags import AllowsCode, ModelFlags, with_model_flags
from penstock.cli.terminal import fail, one_line, print_json, progress_bar, stoppable
from penstock.models.inspect.facts import UnreadableModel
from penstock.models.inspect.inspection import Inspection, Question, Verdict, inspect_file

_MIB = 1 << 20
_LONGEST = 100  # characters of a metadata value or a card's parameter on the page
_SHOWN_LABELS = 5
_File = Annotated[Path, typer.Argument(metavar="FILE", help="an ONNX, .pt2 or TorchScript file", show_default=False)]


@with_model_flags
def inspect(
    file: _File,
    as_json: Annotated[bool, typer.Option("--json", help="print only JSON")] = False,
    allow_model_code: AllowsCode = False,
    flags: ModelFlags = ModelFlags(),  # noqa: B008 - replaced by its fields
) -> None:
    """Show a model file's inputs and outputs, the recognised layout with evidence, the card, and the flags needed.

    A limited child process reads the file and runs it on two pictures. Exit code 0: `models add` needs no more flags.
    """
    try:
        with stoppable("nothing was changed"), progress_bar() as bar:
            bar.add_task("inspecting", total=None)
            found = inspect_file(file, flags.hints(), pictures=flags.pictures(), allows_code=allow_model_code)
    except UnreadableModel as error:
        code = 1 if os.path.exists(file) else 2
        if as_json:
            print_json({"problem": str(error)})
            raise typer.Exit(code) from None
        fail(str(error), code=code)
    if as_json:
        print_json(found)
    else:
        print_page(found, Console(highlight=False))
    raise typer.Exit(0 if found.is_servable else 1)


def print_page(found: Inspection, console: Console) -> None:
    """Prints the page. On a terminal, sentences wrap at words; elsewhere, each is one line."""
    if console.is_terminal:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column()
        for label, text in rows(found):
            table.add_row(label, Text(one_line(text)))
        console.print(table)
        return
    for label, text in rows(found):
        sys.stdout.write(f"{label:<9} {one_line(text)}\n")


def rows(found: Inspection) -> Iterator[tuple[str, str]]:
    """(label, text) of the page; a label of "" continues the one before."""
    facts = found.facts
    quantised = ", quantised to 8 bits" if facts.is_quantised else ""
    opset = f", opset {facts.opset}" if facts.opset else ""
    count = f", {facts.node_count} operators" if facts.node_count else ""
    made = f"{facts.producer or 'unknown producer'}{opset}{count}{quantised}"
    yield "file", f"{facts.path}: {facts.size_bytes / _MIB:.1f} MiB, {made}"
    yield "sha256", facts.sha256
    yield from _listed("inputs", [str(tensor) for tensor in facts.inputs])
    yield from _listed("outputs", [str(tensor) for tensor in facts.outputs])
    yield from _listed("metadata", [f"{key}: {_short(value)}" for key, value in facts.metadata.items()])
    yield from _listed("data", [f"in another file: {location}" for location in facts.external_data])
    yield from _card(found)
    yield from _trial(found)
    yield from _listed("assumed", list(found.recognition.assumptions))
    yield from _listed("warning", [*found.recognition.warnings, *found.trial.warnings])
    yield from _listed("open", [question_text(question) for question in found.recognition.questions])
    yield "verdict", _verdict(found)


def question_text(question: Question) -> str:
    """The question, the flag that answers it, and its values."""
    choices = f" {' or '.join(question.choices)}" if question.choices else ""
    need = "" if question.is_blocking else " (optional)"
    return f"{question.ambiguous}; use {question.flag}{choices}{need}"


def _card(found: Inspection) -> Iterator[tuple[str, str]]:
    recognition = found.recognition
    if not recognition.layout:
        return
    yield "layout", recognition.layout
    yield from _listed("why", list(recognition.evidence))
    if recognition.input_size is not None:
        yield "size", f"{recognition.input_size[1]}x{recognition.input_size[0]} pixels (width x height)"
    if recognition.labels:
        more = f" … ({len(recognition.labels)})" if len(recognition.labels) > _SHOWN_LABELS else ""
        yield "labels", "; ".join(recognition.labels[:_SHOWN_LABELS]) + more
    card = {key: value for key, value in recognition.parameters.items() if key != "labels"}
    yield from _listed("card", [f"{key}: {_short(value)}" for key, value in card.items()])


def _trial(found: Inspection) -> Iterator[tuple[str, str]]:
    trial = found.trial
    pairs = zip(trial.pictures, trial.results, strict=False)
    yield from _listed("trial", [*(f"{name}: {seen}" for name, seen in pairs), *trial.evidence])
    if trial.failure:
        yield "failed", trial.failure


def _listed(label: str, texts: list[str]) -> Iterator[tuple[str, str]]:
    for number, text in enumerate(texts):
        yield "" if number else label, text


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters)"


def _verdict(found: Inspection) -> str:
    if found.verdict is Verdict.SERVABLE:
        return f"servable: penstock models add {found.facts.path}, with the same flags"
    return f"{found.verdict.value}: {found.reason}"
