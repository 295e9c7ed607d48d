"""A layout that the user gives and the trial contradicts: the reason says why it fails, and what fits."""

from pathlib import Path

import numpy as np
import pytest

from penstock.models.inspect.inspection import Hints, Inspection, Verdict
from tests.models.inspect import mutants as by
from tests.models.inspect.made_models import asked, constant_model, inspected, numbers


def changed(shared_dir: Path, folder: Path, layout: str, *changes: by.Change, file: str = "yolox_nano") -> Inspection:
    """The inspection of a changed network with --layout."""
    network = by.Network(shared_dir / "models" / f"{file}.onnx")
    for change in changes:
        change(network)
    return inspected(network.save(folder / "model.onnx"), Hints(layout=layout))


@pytest.mark.parametrize(
    ("layout", "file", "why", "fits"),
    [
        ("yolov8", "yolox_nano", "some widths or heights are negative", "yolox"),
        ("yolo-end2end", "yolox_nano", "[n, 6] (x0, y0, x1, y1, score, class) was expected", "yolox"),
        ("db", "yolox_nano", "which is not a map of a picture", "yolox"),
        ("db", "osnet_x0_25_msmt17", "which is not a map of a picture", "embedding"),
        ("yolov5", "ultraface_rfb320", "(scores [4420, 2], boxes [4420, 4]) do not fit the layout yolov5", "ultraface"),
    ],
)
def test_a_wrong_layout_names_the_one_that_fits(
    shared_dir: Path, tmp_path: Path, layout: str, file: str, why: str, fits: str
) -> None:
    """The flag is given already, so the reason does not ask for it."""
    found = changed(shared_dir, tmp_path, layout, file=file)
    assert (found.verdict, asked(found)) == (Verdict.UNSERVABLE, [])
    assert f"--layout {layout} does not decode the outputs of the trial pictures" in found.reason
    assert why in found.reason
    assert f"without the flag, {fits} is recognised" in found.reason
    assert "use --layout" not in found.reason


def test_boxes_that_are_decoded_already_are_not_decoded_again(shared_dir: Path, tmp_path: Path) -> None:
    """Widths of hundreds of pixels are no logarithms, whatever the flag says."""
    found = changed(shared_dir, tmp_path, "yolox", by.decode_yolox)
    assert found.verdict is Verdict.UNSERVABLE
    assert "so boxes are decoded" in found.reason
    assert "without the flag, yolov5 is recognised" in found.reason


def test_outputs_that_no_layout_decodes_say_so(shared_dir: Path, tmp_path: Path) -> None:
    """Decoded boxes as corners: neither the given layout nor another one."""
    found = changed(shared_dir, tmp_path, "yolov5", by.decode_yolox, by.boxes_are_corners)
    assert found.verdict is Verdict.UNSERVABLE
    assert "corners in every row; no other layout is recognised" in found.reason


def test_what_is_missing_for_a_given_layout_is_still_asked(tmp_path: Path) -> None:
    """A text recogniser without characters cannot decode; the flag for them is named, not another layout."""
    path = constant_model(tmp_path / "text.onnx", {"out": numbers(1, 40, 97)}, image=(1, 3, 48, 320))
    found = inspected(path, Hints(layout="ctc"))
    assert (found.verdict, asked(found)) == (Verdict.AMBIGUOUS, ["--labels"])


def test_a_layout_that_the_values_do_not_refute_is_used_with_a_warning(tmp_path: Path) -> None:
    """Integers in column 6 look like DeepStream-Yolo; the flag wins."""
    rows = np.concatenate([numbers(1, 84, 4, low=1, high=3), numbers(1, 84, 1), np.zeros((1, 84, 1))], axis=2)
    path = constant_model(tmp_path / "model.onnx", {"out": rows.astype(np.float32)}, image=(1, 3, 64, 64))
    found = inspected(path, Hints(layout="yolox"))
    assert (found.verdict, found.recognition.layout) == (Verdict.SERVABLE, "yolox"), found.reason
    assert "--layout yolox is used, but the outputs look like deepstream-yolo" in " ".join(found.trial.warnings)
