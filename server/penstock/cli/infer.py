"""`penstock infer`: sends pictures to the running gateway and prints labelled results as a table or as JSON lines."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import cv2
import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.cli.gateway_client import (
    ApiKey,
    GatewayClient,
    GatewayError,
    GatewayModelNotFound,
    GatewayUnreachable,
    ImageResult,
    ImageResults,
    Url,
    gateway_of,
)
from penstock.cli.model_list import in_short
from penstock.cli.pictures import SUFFIXES, NoPictures, content_type_of, drawn_paths, means_folder, pictures_of
from penstock.cli.terminal import fail, print_failure, print_json
from penstock.protocol.errors import InvalidRequest
from penstock.vision.captions import CaptionedBox
from penstock.vision.decode import decode
from penstock.vision.drawing import color_of, draw_boxes, draw_lines
from penstock.vision.spec import ColorFormat

STAGES = ("decode", "preprocess", "queue", "infer", "postprocess")


class JsonLinesPrinter:
    """On standard output one object a picture: {"file": …, the gateway's answer} or {"file": …, "error": …}.

    What was drawn, on standard error.
    """

    def result(self, picture: Path, answer: ImageResults) -> None:
        row = msgspec.to_builtins(answer)
        if not answer.explain:
            del row["explain"]
        print_json({"file": str(picture), **row})

    def drawn(self, target: Path) -> None:
        sys.stderr.write(f"drawn: {target}\n")

    def failure(self, picture: Path, why: str) -> None:
        print_json({"file": str(picture), "error": why})


class TablePrinter:
    """A table a picture on standard output; what failed, on standard error."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)

    def result(self, picture: Path, answer: ImageResults) -> None:
        title = f"{picture} · {answer.model_name} {answer.model_version}"
        self._console.print(escape(title), soft_wrap=True)  # a table's own title would be as narrow as the table
        for result in answer.results:
            self._console.print(_table(result) if result else "nothing found")
        self._console.print(_timings(answer.timings_ms), style="dim", soft_wrap=True)
        for explanation in answer.explain:
            self._console.print(f"batch: {explanation.text}", markup=False, soft_wrap=True)

    def drawn(self, target: Path) -> None:
        self._console.print(f"drawn: {target}", markup=False, soft_wrap=True)

    def failure(self, picture: Path, why: str) -> None:
        print_failure(why)


ResultPrinter = JsonLinesPrinter | TablePrinter


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


NO_PIXEL_LIMIT = 1 << 62  # the gateway has its own; here a person draws into a file of theirs


def infer(
    model: Annotated[str, typer.Argument(help="a model of the running gateway")],
    files: Annotated[list[Path], typer.Argument(help="pictures (JPEG, PNG, WebP), or folders of them")],
    url: Url = None,
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON line a picture, and nothing else")] = False,
    draw: Annotated[Path | None, typer.Option(help="draw into this file, or into this folder")] = None,
    timeout_ms: Annotated[int | None, typer.Option(min=1, help="deadline of each request")] = None,
    threshold: Annotated[float | None, typer.Option(min=0, max=1, help="leave out scores below it")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="say of each picture how its batch was formed")] = False,
) -> None:
    """Send pictures to a model of the running gateway and print what it finds, with boxes in the pictures' pixels.

    A picture that fails is reported and the others go on; the exit code is 1 then.
    """
    report: ResultPrinter = JsonLinesPrinter() if as_json else TablePrinter()
    pictures, is_complete = _find(files, report)
    targets = _targets(draw, pictures)
    question = _InferCommand(gateway_of(url, api_key), model, timeout_ms, threshold, explain)
    for picture, target in zip(pictures, targets, strict=True):
        is_complete = _one(question, picture, target, report) and is_complete
    if not is_complete:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _InferCommand:
    """What is asked of every picture alike."""

    gateway: GatewayClient
    model_name: str
    timeout_ms: int | None
    threshold: float | None
    with_explanation: bool

    def ask(self, data: bytes) -> ImageResults:
        """Raises GatewayError, with the reason where the engine has the model but does not serve it."""
        kind = content_type_of(data)
        try:
            answer = self.gateway.infer_image(
                self.model_name, data, kind, timeout_ms=self.timeout_ms, with_explanation=self.with_explanation
            )
        except GatewayModelNotFound as error:
            reason = self._why_not_served()
            if reason == in_short(error.refusal):  # the refusal states the reason already
                raise GatewayError(reason) from error
            raise (GatewayError(f"{error.refusal}: {reason}") if reason else error) from error
        return answer if self.threshold is None else answer.above(self.threshold)

    def _why_not_served(self) -> str:
        """As the repository index has it; empty where it has nothing to say."""
        with suppress(GatewayError):
            index = self.gateway.repository_index()
            reasons = dict.fromkeys(row.reason for row in index if row.name == self.model_name and row.reason)
            return in_short("; ".join(reasons))
        return ""


class _CannotDraw(Exception):
    """The picture was answered but its drawing failed. The text is for a person."""


def _find(files: list[Path], report: ResultPrinter) -> tuple[list[Path], bool]:
    """The pictures, and whether every path had one."""
    pictures: list[Path] = []
    is_complete = True
    for path in files:
        try:
            pictures += pictures_of(path)
        except NoPictures as error:
            report.failure(path, str(error))
            is_complete = False
    return pictures, is_complete


def _targets(draw: Path | None, pictures: list[Path]) -> list[Path | None]:
    """Where the drawings go; refused here, before anything is asked of the gateway, where they cannot be."""
    if draw is None:
        return [None] * len(pictures)
    if draw.exists() and means_folder(draw) and not draw.is_dir():
        fail(f"--draw: {draw} is a file without a picture's suffix: give a folder, or a name such as {draw}.jpg")
    if not draw.parent.is_dir():
        fail(f"--draw: there is no folder {draw.parent}: make it, or give another place")
    targets = drawn_paths(draw, pictures)
    for target in targets:
        if target.suffix.lower() not in SUFFIXES:
            fail(f"--draw: {target.name!r} is no picture's name: end it with .jpg, .png or .webp")
        if any(target.exists() and target.samefile(picture) for picture in pictures):
            fail(f"--draw: {target} is one of the pictures themselves: give another name or folder")
    return list(targets)


def _one(question: _InferCommand, picture: Path, target: Path | None, report: ResultPrinter) -> bool:
    """Whether the picture was answered, and drawn where that was asked."""
    try:
        data = picture.read_bytes()
        answer = question.ask(data)
        report.result(picture, answer)
        if target is not None:
            _draw(data, answer.results[0], target)
            report.drawn(target)
    except GatewayUnreachable as error:
        fail(str(error), code=1)
    except GatewayError as error:
        report.failure(picture, f"{picture}: {error}")
    except OSError as error:
        report.failure(picture, f"{picture} cannot be read ({error.strerror}): check its permissions")
    except _CannotDraw as error:
        report.failure(picture, str(error))
    else:
        return True
    return False


def _draw(data: bytes, result: ImageResult, target: Path) -> None:
    """Decodes as the gateway does, so that the boxes fit whatever the EXIF orientation is."""
    try:
        drawn = decode(data, ColorFormat.BGR, max_pixels=NO_PIXEL_LIMIT).pixels
    except InvalidRequest as error:
        raise _CannotDraw(f"{target} cannot be drawn: {error}") from error
    if result.detections is not None:
        boxes = [CaptionedBox(item.xyxy, item.caption, item.class_id) for item in result.detections]
        draw_boxes(drawn, boxes)
    else:
        draw_lines(drawn, [(item.caption, color_of(row)) for row, item in enumerate(result.classes or ())])
    try:
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(cv2.imencode(target.suffix, drawn)[1].tobytes())
    except OSError as error:
        raise _CannotDraw(f"{target} cannot be written ({error.strerror}): give --draw another place") from error
