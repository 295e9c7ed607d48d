"""The shipped model `street`, as the gateway runs it, on scenes and a clip that it was not trained on."""

import hashlib
import re

import cv2
import numpy as np
import pytest

from deploy.models.street.clip import make_clip
from deploy.models.street.count import LineCounter, count_clip
from deploy.models.street.detector import FOLDER, StreetDetector
from deploy.models.street.evaluate import judge, precision_of
from deploy.models.street.scene import SCENARIOS
from deploy.models.street.scenes import fit
from deploy.models.street.stage import LABELS
from server.core.result import Detections
from server.vision.decode import Decoded
from server.vision.preprocess import prepare

SEED = 4  # neither the training's nor the tuning's nor that of MODEL.md's figures
CLIP_SEED = 33

Box = tuple[float, float, float, float]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    cv2.setNumThreads(1)


def test_street_finds_what_is_there_in_every_scenario() -> None:
    """mAP@0.5 of at least 0.90 over 150 scenes with crowds, occlusion, noise and darkness."""
    scenes = judge(SEED, 30)
    assert len(scenes) == 30 * len(SCENARIOS)
    result = precision_of(scenes)
    assert result.mean >= 0.90, result
    assert all(value is not None and value > 0.8 for value in result.by_class)


def test_street_counts_who_crosses_the_line_of_a_clip() -> None:
    """As many of each class in each direction as in truth."""
    clip = make_clip(CLIP_SEED, 18.0, 10.0)
    report = count_clip(clip, StreetDetector(), frames=clip.frames())
    assert {label for label, _ in report.true} == set(LABELS)
    assert report.found == report.true


def test_training_sees_pictures_as_the_gateway_prepares_them() -> None:
    """The trainer's own fit() gives the very pixels that the card asks for, wide pictures and tall ones."""
    spec = StreetDetector().card.prepare_spec
    for shape in ((360, 640), (576, 768), (300, 200)):
        picture = np.random.default_rng(0).integers(0, 256, (*shape, 3)).astype(np.uint8)
        array, geometry = prepare(Decoded(picture, shape[1], shape[0]), spec)
        fitted, scale = fit(picture, (spec.width, spec.height))
        assert np.allclose(array, fitted.transpose(2, 0, 1) / 255, atol=1e-6)
        assert geometry.scale_x == pytest.approx(scale, rel=0.01)


def test_shipped_file_is_the_one_that_is_described() -> None:
    """MODEL.md tells its size and hash."""
    data = (FOLDER / "1" / "model.onnx").read_bytes()
    text = (FOLDER / "MODEL.md").read_text()
    assert hashlib.sha256(data).hexdigest() in text
    assert re.search(rf"{len(data):,} bytes", text)


def test_batch_gives_what_single_pictures_give() -> None:
    """Whatever the batcher puts together."""
    detector = StreetDetector()
    pictures = [np.full((90, 160, 3), 90, np.uint8), np.full((120, 90, 3), 200, np.uint8)]
    together = detector.find(pictures)
    assert [len(found.score) for found in together] == [len(detector.find([one])[0].score) for one in pictures]


def found(*boxes: Box) -> Detections:
    """People, all of them sure."""
    return Detections(
        np.array(boxes, np.float32).reshape(-1, 4), np.ones(len(boxes), np.float32), np.zeros(len(boxes), np.int64)
    )


def test_line_counter_counts_both_directions_across_a_gap() -> None:
    """One goes right, one left; the second is hidden for a while right on the line."""
    clip = make_clip(CLIP_SEED, 4.0, 10.0)
    middle = (np.array(clip.line.start) + np.array(clip.line.end)) / 2
    counter = LineCounter(clip.line, clip.fps)
    for frame in range(40):
        x, y = middle
        boxes = [(x - 80 + 4 * frame, y - 40.0, x - 60 + 4 * frame, float(y))]
        if abs(frame - 20) > 3:
            boxes.append((x + 60 - 4 * frame + 10, y - 20.0, x + 80 - 4 * frame + 10, y + 20.0))
        counter.see(found(*boxes), np.array([[200.0, 30, 30], [30, 30, 200]])[: len(boxes)])
    assert counter.counts() == {("person", "right"): 1, ("person", "left"): 1}
