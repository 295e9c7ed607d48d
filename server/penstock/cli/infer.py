"""`penstock infer`: sends pictures to the running gateway and prints labelled results as a table or as JSON lines."""

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec import UNSET
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.cli.drawn_result import CannotDraw, draw_file, mask_area
from penstock.cli.gateway_client import LIST_HINT, ApiKey, GatewayClient, Url, gateway_of
from penstock.cli.model_list import complete_model, in_short, unknown_model
from penstock.cli.pictures import SUFFIXES, NoPictures, content_type_of, drawn_paths, means_folder, pictures_of
from penstock.cli.terminal import fail, print_failure, print_json
from penstock.protocol.errors import GatewayUnreachable, InferenceError, ModelNotFound
from penstock.protocol.image_answer import (
    ClassArea,
    Detection,
    ImageAnswer,
    ImageResult,
    Keypoint,
    MaskForm,
    RecognisedText,
)
from penstock.vision.drawing import MIN_KEYPOINT_SCORE
from penstock.vision.masks import MAX_PIXEL as MAX_DEPTH_PIXEL
from penstock.vision.parameters import Parameters

CORNERS = ("x1", "y1", "x2", "y2")
MAX_KEYPOINTS = 10_000  # of a skeleton; a drawing leaves out lines to keypoints that are not in the result
STAGES = ("decode", "preprocess", "queue", "infer", "postprocess")


class JsonLinesPrinter:
    """On standard output one object a picture: {"file": …, the gateway's answer} or {"file": …, "error": …}.

    The names of drawings, on standard error.
    """

    def result(self, picture: Path, answer: ImageAnswer) -> None:
        print_json({"file": str(picture), **msgspec.to_builtins(answer)})

    def drawn(self, target: Path) -> None:
        sys.stderr.write(f"drawn: {target}\n")

    def failure(self, picture: Path, why: str) -> None:
        print_json({"file": str(picture), "error": why})


class TablePrinter:
    """One table per picture on standard output; failures on standard error."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)

    def result(self, picture: Path, answer: ImageAnswer) -> None:
        title = f"{picture} · {answer.model_name} {answer.model_version}"
        self._console.print(escape(title), soft_wrap=True)  # a table's own title would be as narrow as the table
        for result in answer.results:
            shown = _shown(result) if result else "nothing found"
            self._console.print(shown, soft_wrap=isinstance(shown, str))
        self._console.print(_timings(answer.timings_ms), style="dim", soft_wrap=True)
        for explanation in answer.explain:
            self._console.print(f"batch: {explanation.text}", markup=False, soft_wrap=True)

    def drawn(self, target: Path) -> None:
        self._console.print(f"drawn: {target}", markup=False, soft_wrap=True)

    def failure(self, picture: Path, why: str) -> None:
        print_failure(why)


ResultPrinter = JsonLinesPrinter | TablePrinter


_FIRST_VALUES = 8  # of an embedding


def _shown(result: ImageResult) -> Table | str:
    """The printed form of a result that is not empty."""
    if result.detections is not UNSET:
        return _boxes(result.detections)
    if result.embedding is not UNSET:
        values = " ".join(f"{value:.4f}" for value in result.embedding[:_FIRST_VALUES])
        more = " …" if len(result.embedding) > _FIRST_VALUES else ""
        return f"embedding of {len(result.embedding)} values: {values}{more}"
    if result.depth is not UNSET:
        height, width = result.depth.size
        low, high = result.depth.offset, result.depth.offset + result.depth.scale * MAX_DEPTH_PIXEL
        return f"depth of {width}x{height} pixels, from {low:.4g} to {high:.4g}"
    if result.segmentation is not UNSET:
        height, width = result.segmentation.size
        areas: list[ClassArea] = sorted(result.segmentation.classes, key=lambda area: -area.area)
        rows = [(one.label, f"{one.area}", f"{one.area / max(height * width, 1):.1%}") for one in areas]
        return _table(("label", "pixels", "share"), rows)
    if result.text is not UNSET:
        return _text(result.text)
    return _table(("label", "score"), [(item.label, f"{item.score:.3f}") for item in result.classes or ()])


def _boxes(found: Sequence[Detection]) -> Table:
    """One row per box, with the angle of oriented boxes, the area of masks and the number of visible keypoints."""
    columns, rows = ["label", "score", *CORNERS], [[one.label, f"{one.score:.3f}", *_pixels(one.xyxy)] for one in found]

    def add(column: str, cells: Sequence[str]) -> None:
        if any(cells):
            columns.append(column)
            for row, cell in zip(rows, cells, strict=True):
                row.append(cell)

    add("angle", [f"{math.degrees(one.xywhr[4]):.1f}°" if one.xywhr else "" for one in found])
    add("mask", ["" if one.mask is UNSET and one.polygons is UNSET else f"{mask_area(one)}" for one in found])
    add("keypoints", [_seen(one.keypoints) if one.keypoints else "" for one in found])
    return _table(columns, rows)


def _seen(keypoints: Sequence[Keypoint]) -> str:
    return f"{sum(score >= MIN_KEYPOINT_SCORE for _, _, score in keypoints)} of {len(keypoints)}"


def _text(lines: Sequence[RecognisedText]) -> Table:
    """One row per line of text, with the corners of its bounding box if the model finds regions."""
    columns = ["text", "score"]
    if any(line.polygon for line in lines):
        columns += CORNERS
    rows = []
    for line in lines:
        corners = tuple(zip(*line.polygon, strict=True)) if line.polygon else ()
        around = (min(corners[0]), min(corners[1]), max(corners[0]), max(corners[1])) if corners else ()
        rows.append([line.text, f"{line.score:.3f}", *_pixels(around)])
    return _table(columns, rows)


def _pixels(values: Sequence[float]) -> list[str]:
    return [f"{value:.1f}" for value in values]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Numbers, all columns but the first, are aligned at the right."""
    table = Table()
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _timings(timings_ms: Mapping[str, float]) -> str:
    stages = [f"{stage} {timings_ms[stage]:.1f}" for stage in STAGES if stage in timings_ms]
    total = f" = {timings_ms['total']:.1f} ms" if "total" in timings_ms else " ms"
    return " + ".join(stages) + total


def infer(
    model: Annotated[str, typer.Argument(help="a model of the running gateway", autocompletion=complete_model)],
    files: Annotated[list[Path], typer.Argument(help="pictures (JPEG, PNG, WebP), or folders of them")],
    url: Url = None,
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON line a picture, and nothing else")] = False,
    draw: Annotated[Path | None, typer.Option(help="draw into this file, or into this folder")] = None,
    timeout_ms: Annotated[int | None, typer.Option(min=1, help="deadline of each request")] = None,
    conf: Annotated[float | None, typer.Option("--conf", "--threshold", min=0, max=1, help="score threshold")] = None,
    iou: Annotated[float | None, typer.Option(min=0, max=1, help="IoU threshold of NMS")] = None,
    classes: Annotated[str | None, typer.Option(help="only these classes: ids or labels, as person,car")] = None,
    max_detections: Annotated[int | None, typer.Option(min=1, help="maximum number of results")] = None,
    masks: Annotated[
        MaskForm | None, typer.Option(help="form of masks in the result [rle]", show_default=False)
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="say of each picture how its batch was formed")] = False,
) -> None:
    """Send pictures to a model of the running gateway and print the results, in pixels of each picture.

    The options from --conf to --masks override the model's settings.

    A picture that fails is reported and the others go on; the exit code is 1 then.
    """
    report: ResultPrinter = JsonLinesPrinter() if as_json else TablePrinter()
    pictures, is_complete = _find(files, report)
    targets = _targets(draw, pictures)
    given = {"conf": conf, "iou": iou, "classes": classes, "max_detections": max_detections, "masks": masks}
    query = {key: str(value) for key, value in given.items() if value is not None}
    question = _InferCommand(gateway_of(url, api_key), model, timeout_ms, query, explain)
    for picture, target in zip(pictures, targets, strict=True):
        is_complete = _one(question, picture, target, report) and is_complete
    if not is_complete:
        raise typer.Exit(1)


@dataclass(frozen=True)
class _InferCommand:
    """The request that is the same for every picture. query: of the image endpoint."""

    gateway: GatewayClient
    model_name: str
    timeout_ms: int | None
    query: Mapping[str, str]
    with_explanation: bool

    def ask(self, data: bytes) -> ImageAnswer:
        """Raises InferenceError, with the reason where the engine has the model but does not serve it."""
        kind = content_type_of(data)
        try:
            return self.gateway.infer_image(
                self.model_name,
                data,
                kind,
                timeout_ms=self.timeout_ms,
                with_explanation=self.with_explanation,
                query=self.query,
            )
        except ModelNotFound as error:
            reasons, refusal = self._reasons(), error.message.removesuffix(LIST_HINT)
            if reasons and self.model_name not in reasons:
                where = f"at {self.gateway.url}"
                raise InferenceError(unknown_model(self.model_name, reasons, where, url=self.gateway.url)) from error
            reason = reasons.get(self.model_name, "")
            if reason == in_short(refusal):  # the refusal states the reason already
                raise InferenceError(reason) from error
            raise (InferenceError(f"{refusal}: {reason}") if reason else error) from error

    @cached_property
    def skeleton(self) -> tuple[tuple[int, int], ...]:
        """Of the model's config.pbtxt; empty if it has none, or if the client may not read it."""
        try:
            parameters = Parameters(self.model_name, self.gateway.model_parameters(self.model_name))
            return parameters.pairs("skeleton", below=MAX_KEYPOINTS)
        except InferenceError:
            return ()

    def _reasons(self) -> dict[str, str]:
        """By model of the repository index, why it is not served, else ""; {} if the index cannot be read."""
        found: dict[str, list[str]] = {}
        with suppress(InferenceError):
            for row in self.gateway.repository_index():
                found.setdefault(row.name, []).append(row.reason)
        return {name: in_short("; ".join(dict.fromkeys(filter(None, said)))) for name, said in found.items()}


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
    """The targets of the drawings. Ends the command before the first request if they cannot be written."""
    if draw is None:
        return [None] * len(pictures)
    if draw.exists() and means_folder(draw) and not draw.is_dir():
        fail(f"--draw: {draw} is a file without a picture's suffix: give a folder, or a name such as {draw}.jpg")
    if not draw.parent.is_dir():
        fail(f"--draw: there is no folder {draw.parent}: create it, or choose another path")
    targets = drawn_paths(draw, pictures)
    for target in targets:
        if target.suffix.lower() not in SUFFIXES:
            fail(f"--draw: {target.name!r} is not a picture's name: end it with .jpg, .png or .webp")
        if any(target.exists() and target.samefile(picture) for picture in pictures):
            fail(f"--draw: {target} is one of the pictures themselves: give another name or folder")
    return list(targets)


def _one(question: _InferCommand, picture: Path, target: Path | None, report: ResultPrinter) -> bool:
    """Whether the picture has a result and, with --draw, a drawing."""
    try:
        data = picture.read_bytes()
        answer = question.ask(data)
        report.result(picture, answer)
        if target is not None:
            result = answer.results[0]
            has_keypoints = any(one.keypoints for one in result.detections or ())
            draw_file(data, result, target, question.skeleton if has_keypoints else ())
            report.drawn(target)
    except GatewayUnreachable as error:
        fail(str(error), code=1)
    except InferenceError as error:
        report.failure(picture, f"{picture}: {error}")
    except OSError as error:
        report.failure(picture, f"{picture} cannot be read ({error.strerror}): check its permissions")
    except ValueError as error:
        report.failure(picture, f"{picture}: the result cannot be read: {error}")
    except CannotDraw as error:
        report.failure(picture, str(error))
    else:
        return True
    return False
