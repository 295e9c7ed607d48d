"""The shipped model `street`, as the gateway runs it, on scenes that it was not trained on."""

import hashlib
import re

import numpy as np
import pytest

from deploy.models.street.evaluate import FOLDER, StreetDetector, judge, precision_of
from deploy.models.street.scene import SCENARIOS, fit
from penstock.vision.decode import DecodedImage
from penstock.vision.preprocess import prepare

SEED = 4  # neither the training's nor the tuning's nor that of MODEL.md's figures

Box = tuple[float, float, float, float]


def test_street_finds_what_is_there_in_every_scenario() -> None:
    """Over 20 scenes with crowds, occlusion, noise and darkness."""
    scenes = judge(SEED, 4)
    assert len(scenes) == 4 * len(SCENARIOS)
    assert precision_of(scenes).mean >= 0.8


@pytest.mark.long
def test_street_has_its_precision_over_many_scenes() -> None:
    """mAP@0.5 of at least 0.90 over 150 scenes."""
    result = precision_of(judge(SEED, 30))
    assert result.mean >= 0.90, result
    assert all(value is not None and value > 0.8 for value in result.by_class)


def test_training_sees_pictures_as_the_gateway_prepares_them() -> None:
    """The trainer's own fit() gives the very pixels that the card asks for, wide pictures and tall ones."""
    spec = StreetDetector().card.prepare_spec
    for shape in ((360, 640), (576, 768), (300, 200)):
        picture = np.random.default_rng(0).integers(0, 256, (*shape, 3)).astype(np.uint8)
        array, geometry = prepare(DecodedImage(picture, shape[1], shape[0]), spec)
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
