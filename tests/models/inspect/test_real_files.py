"""The real files beside the checkout are recognised with no flag, by the packaged pictures alone."""

import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.models.inspect import trial
from penstock.models.inspect.child import run
from penstock.models.inspect.inspection import Hints, InspectionRequest, Limits, Verdict, inspect_file
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
    assert found.trial.results == ("1 result: person 0.93",)


def test_the_projects_own_detector_is_recognised() -> None:
    """The shipped street network, by its outputs' names."""
    from tests.support.stack import CHECKOUT

    found = inspect_file(CHECKOUT / "model_repository" / "street" / "1" / "model.onnx")
    assert (found.verdict, found.recognition.layout) == (Verdict.SERVABLE, "center-heatmap")


def test_a_busy_machine_settles_the_same_questions(shared_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DEIMv2's colour order is seen on sections of the pictures, which are run although each call takes long."""
    clock = itertools.count(step=0.9)
    slow = SimpleNamespace(monotonic=lambda: next(clock), process_time=time.process_time)
    monkeypatch.setattr(trial, "time", slow)
    file = shared_dir / "models" / "deimv2_atto.onnx"
    found = run(InspectionRequest(str(file), Hints(), Limits()))
    assert found.trial.pictures == ("the packaged picture people", "the packaged picture street")
    assert found.recognition.questions == ()
    assert any("sections cut from the pictures" in sentence for sentence in found.trial.evidence)
