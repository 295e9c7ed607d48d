"""The real files beside the checkout are recognised with no flag, by the packaged pictures alone."""

from pathlib import Path

import pytest

from penstock.models.inspect.inspection import Verdict, inspect_file
from penstock.models.inspect.proposal import proposed_config
from penstock.vision.card import card_from_config

FILES = {
    "FastestDet.onnx": ("fastestdet", (352, 352), 80, "1"),
    "yolox_nano.onnx": ("yolox", (416, 416), 80, "1"),
    "yolox_nano_free_batch.onnx": ("yolox", (416, 416), 80, "1"),
    "deimv2_atto.onnx": ("rt-detr", (320, 320), 80, "0"),
    "ultraface_rfb320.onnx": ("ultraface", (240, 320), 1, "0"),
    "osnet_x0_25_msmt17.onnx": ("embedding", (256, 128), 0, "0"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_real_file_needs_no_flag(shared_dir: Path, name: str) -> None:
    """Layout, size, labels and colour order, in a child process; the proposed card can be read."""
    layout, size, labels, color = FILES[name]
    found = inspect_file(shared_dir / "models" / name)
    assert (found.verdict, found.recognition.layout) == (Verdict.SERVABLE, layout), found.reason
    assert (found.recognition.input_size, len(found.recognition.labels)) == (size, labels)
    assert found.recognition.parameters["model-color-format"] == color
    card = card_from_config(proposed_config(found.facts, found.recognition, "model"))
    assert card is not None
    assert card.layout.name == layout


def test_the_trial_finds_what_the_reference_finds(shared_dir: Path) -> None:
    """Scores of YOLOX-Nano on a real photo, as shared/media/SOURCES.md has them."""
    found = inspect_file(shared_dir / "models" / "yolox_nano.onnx", pictures=[shared_dir / "media" / "astronaut.jpg"])
    assert found.trial.results == ("1 results: person 0.93",)


def test_the_projects_own_detector_is_recognised() -> None:
    """The shipped street network, by its outputs' names."""
    from tests.support.stack import CHECKOUT

    found = inspect_file(CHECKOUT / "model_repository" / "street" / "1" / "model.onnx")
    assert (found.verdict, found.recognition.layout) == (Verdict.SERVABLE, "center-heatmap")
