"""Forty changed real networks: each is adapted to, refused, or needs a flag, by the packaged pictures or by photos."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.models.inspect.inspection import Inspection, Verdict
from tests.models.inspect import mutants as by
from tests.models.inspect.made_models import asked, inspected

YOLOX, DEIM, FACES, FASTEST = ("yolox_nano.onnx", "deimv2_atto.onnx", "ultraface_rfb320.onnx", "FastestDet.onnx")
V8 = (by.as_yolov8, by.columns_first)
V8_ROWS = (by.as_yolov8,)


@dataclass(frozen=True)
class Mutant:
    """A network, its changes, and what is seen: a card parameter, a flag that is needed, or words of the reason."""

    file: str
    changes: Sequence[by.Change]
    layout: str = ""
    card: tuple[str, str] = ("", "")
    asks: str = ""
    reason: str = ""


PIXEL = 1 / 255
MUTANTS: dict[str, Mutant] = {
    "yolox of RGB": Mutant(YOLOX, [by.swap_colors], asks="--color"),
    "yolox decoded of RGB": Mutant(YOLOX, [by.decode_yolox, by.swap_colors], asks="--color"),
    "yolov8 of BGR": Mutant(YOLOX, [*V8, by.swap_colors], asks="--color"),
    "deim of BGR": Mutant(DEIM, [by.swap_colors], asks="--color"),
    "faces of BGR": Mutant(FACES, [by.swap_colors], asks="--color"),
    "fastestdet of RGB": Mutant(FASTEST, [by.swap_colors], asks="--color"),
    "yolox of 0 to 1": Mutant(YOLOX, [by.scaled(255)], asks="--scale"),
    "yolox decoded of 0 to 1": Mutant(YOLOX, [by.decode_yolox, by.scaled(255)], asks="--scale"),
    "yolov8 of 0 to 255": Mutant(YOLOX, [*V8, by.scaled(PIXEL)], asks="--scale"),
    "deim of 0 to 255": Mutant(DEIM, [by.scaled(PIXEL)], asks="--scale"),
    "fastestdet of 0 to 255": Mutant(FASTEST, [by.scaled(PIXEL)], asks="--scale"),
    "yolox of NHWC": Mutant(YOLOX, [by.channels_last], "yolox", ("network-input-order", "1")),
    "yolov8 of NHWC": Mutant(YOLOX, [*V8, by.channels_last], "yolov8", ("network-input-order", "1")),
    "deim of NHWC": Mutant(DEIM, [by.channels_last], "rt-detr", ("network-input-order", "1")),
    "faces of NHWC": Mutant(FACES, [by.channels_last], "ultraface", ("network-input-order", "1")),
    "fastestdet of NHWC": Mutant(FASTEST, [by.channels_last], "fastestdet", ("network-input-order", "1")),
    "yolox with columns first": Mutant(YOLOX, [by.transposed], asks="--layout"),
    "yolov8 with columns first": Mutant(YOLOX, V8, "yolov8", ("layout", "yolov8")),
    "yolov8 with rows first": Mutant(YOLOX, V8_ROWS, "yolov8", ("layout", "yolov8")),
    "yolox without sigmoid": Mutant(YOLOX, [by.scores_are_logits(4, 85)], "yolox", ("apply-sigmoid", "1")),
    "yolox decoded without sigmoid": Mutant(
        YOLOX, [by.decode_yolox, by.scores_are_logits(4, 85)], "yolov5", ("apply-sigmoid", "1")
    ),
    "yolov8 without sigmoid": Mutant(
        YOLOX, [by.as_yolov8, by.scores_are_logits(4, 84)], "yolov8", ("apply-sigmoid", "1")
    ),
    "deim without sigmoid": Mutant(DEIM, [by.output_is_logits("scores")], asks="--layout"),
    "faces without softmax": Mutant(FACES, [by.output_is_logits("scores")], asks="--layout"),
    "yolox decoded": Mutant(YOLOX, [by.decode_yolox], "yolov5", ("padding-value", "114")),
    "yolox decoded as corners": Mutant(YOLOX, [by.decode_yolox, by.boxes_are_corners], asks="--layout"),
    "yolov8 with corners": Mutant(YOLOX, [by.as_yolov8, by.boxes_are_corners, by.columns_first], asks="--layout"),
    "deim with centres": Mutant(DEIM, [by.output_of_centres("boxes")], asks="--layout"),
    "faces with centres": Mutant(FACES, [by.output_of_centres("boxes")], asks="--layout"),
    "yolox decoded in parts": Mutant(YOLOX, [by.decode_yolox, by.boxes_times(1 / 416)], asks="--layout"),
    "yolov8 in parts": Mutant(YOLOX, [by.as_yolov8, by.boxes_times(1 / 416), by.columns_first], asks="--layout"),
    "deim in parts": Mutant(DEIM, [by.output_times("boxes", 1 / 640)], asks="--layout"),
    "faces in pixels": Mutant(FACES, [by.output_times("boxes", 320)], asks="--layout"),
    "deim with height and width": Mutant(DEIM, [by.size_is_height_width], asks="--layout"),
    "deim without batch axis": Mutant(DEIM, [by.lose_batch_axis], "rt-detr", ("layout", "rt-detr")),
    "yolox with scores of 0": Mutant(YOLOX, [by.scores_are_zero], reason="all scores are 0"),
    "yolov8 with scores of 0": Mutant(YOLOX, [by.as_yolov8, by.scores_are_zero], reason="all scores are 0"),
    "yolox with NaN": Mutant(YOLOX, [by.broken_values], reason="NaN"),
    "yolov8 with NaN": Mutant(YOLOX, [*V8, by.broken_values], reason="NaN"),
    "faces with NaN": Mutant(FACES, [by.broken_values], reason="NaN"),
}


def seen(found: Inspection, mutant: Mutant) -> bool:
    """Whether the inspection shows what the mutant is."""
    if mutant.reason:
        return found.verdict is Verdict.UNSERVABLE and mutant.reason in found.reason
    if mutant.asks:
        return found.verdict is Verdict.AMBIGUOUS and mutant.asks in asked(found)
    key, value = mutant.card
    is_adapted = found.recognition.layout == mutant.layout and found.recognition.parameters.get(key) == value
    return is_adapted and found.verdict is Verdict.SERVABLE


COMPARED = [name for name, mutant in MUTANTS.items() if mutant.asks in ("--color", "--scale")]
QUICK = ("yolox of RGB", "deim of 0 to 255")  # of those, one a flag; the others in make test-long
PHOTOS = ("astronaut", "chelsea", "coffee")


@pytest.mark.parametrize(
    ("name", "photos"),
    [
        *((name, ()) for name in MUTANTS),
        *(pytest.param(name, PHOTOS, marks=() if name in QUICK else pytest.mark.long) for name in COMPARED),
    ],
)
def test_a_wrong_guess_cannot_be_missed(shared_dir: Path, tmp_path: Path, name: str, photos: tuple[str, ...]) -> None:
    """The change shows in the card, in a flag that is needed, or in the reason why nothing is served."""
    mutant = MUTANTS[name]
    network = by.Network(shared_dir / "models" / mutant.file)
    for change in mutant.changes:
        change(network)
    media = [shared_dir / "media" / f"{photo}.jpg" for photo in photos]
    found = inspected(network.save(tmp_path / "mutant.onnx"), None, *media)
    assert seen(found, mutant), (found.verdict, found.reason, found.recognition, found.trial)
