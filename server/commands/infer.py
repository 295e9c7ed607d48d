"""`penstock infer`: pictures to the running gateway, labelled results back."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import cv2
import typer

from server.commands.captions import CaptionedBox
from server.commands.defaults import ApiKey, gateway_of
from server.commands.drawing import draw_boxes, draw_lines
from server.commands.gateway import Gateway, GatewayError, ImageAnswer, ImageResult, NothingAnswers, UnknownModel
from server.commands.model_rows import in_short
from server.commands.pictures import SUFFIXES, NoPictures, content_type_of, drawn_paths, means_folder, pictures_of
from server.commands.report import JsonLines, Report, Tables
from server.commands.terminal import fail
from server.core.errors import InvalidRequest
from server.vision.decode import decode
from server.vision.spec import ColorFormat

NO_PIXEL_LIMIT = 1 << 62  # the gateway has its own; here a person draws into a file of theirs


def infer(
    model: Annotated[str, typer.Argument(help="a model of the running gateway")],
    files: Annotated[list[Path], typer.Argument(help="pictures (JPEG, PNG, WebP), or folders of them")],
    url: Annotated[str | None, typer.Option(help="the gateway [http://127.0.0.1:8000]", show_default=False)] = None,
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
    report: Report = JsonLines() if as_json else Tables()
    pictures, is_complete = _find(files, report)
    targets = _targets(draw, pictures)
    question = _Question(gateway_of(url, api_key), model, timeout_ms, threshold, explain)
    for picture, target in zip(pictures, targets, strict=True):
        is_complete = _one(question, picture, target, report) and is_complete
    if not is_complete:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Question:
    """What is asked of every picture alike."""

    gateway: Gateway
    model_name: str
    timeout_ms: int | None
    threshold: float | None
    asks_why: bool

    def ask(self, data: bytes) -> ImageAnswer:
        """Raises GatewayError, with the reason where the engine has the model but does not serve it."""
        kind = content_type_of(data)
        try:
            answer = self.gateway.infer_image(
                self.model_name, data, kind, timeout_ms=self.timeout_ms, asks_why=self.asks_why
            )
        except UnknownModel as error:
            reason = self._why_not_served()
            if reason == in_short(error.refusal):  # the gateway's own word, and told already
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


def _find(files: list[Path], report: Report) -> tuple[list[Path], bool]:
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


def _one(question: _Question, picture: Path, target: Path | None, report: Report) -> bool:
    """Whether the picture was answered, and drawn where that was asked."""
    try:
        data = picture.read_bytes()
        answer = question.ask(data)
        report.result(picture, answer)
        if target is not None:
            _draw(data, answer.results[0], target)
            report.drawn(target)
    except NothingAnswers as error:
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
        picture = decode(data, ColorFormat.BGR, max_pixels=NO_PIXEL_LIMIT).pixels
    except InvalidRequest as error:
        raise _CannotDraw(f"{target} cannot be drawn: {error}") from error
    if result.detections is not None:
        boxes = [CaptionedBox(item.xyxy, item.caption, item.class_id) for item in result.detections]
        drawn = draw_boxes(picture, boxes)
    else:
        drawn = draw_lines(picture, [item.caption for item in result.classes or ()])
    try:
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(cv2.imencode(target.suffix, drawn)[1].tobytes())
    except OSError as error:
        raise _CannotDraw(f"{target} cannot be written ({error.strerror}): give --draw another place") from error
