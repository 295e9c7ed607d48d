"""The shipped model that answers its input."""

import hashlib

import numpy as np
import onnxruntime as ort

from deploy.models.identity import INPUT, OUTPUT, SHIPPED, identity
from penstock.engines.config_pbtxt import read_config
from penstock.vision.card import card_from_config


def test_shipped_identity_is_what_its_program_makes() -> None:
    """Byte for byte, and MODEL.md has its size and hash."""
    assert SHIPPED.read_bytes() == identity()
    page = (SHIPPED.parents[1] / "MODEL.md").read_text()
    assert f"{len(identity())} bytes, SHA-256 `{hashlib.sha256(identity()).hexdigest()}`" in page


def test_shipped_identity_answers_its_input_in_any_size() -> None:
    """A batch of rows of any length comes back unchanged, as config.pbtxt names it; it is no model of images."""
    session = ort.InferenceSession(identity(), providers=["CPUExecutionProvider"])
    for shape in ((1, 16), (8, 150_528), (2, 0)):
        tensor = np.random.default_rng(1).random(shape, np.float32)
        (answer,) = session.run([OUTPUT], {INPUT: tensor})
        np.testing.assert_array_equal(answer, tensor)
    config = read_config(SHIPPED.parents[1] / "config.pbtxt")
    assert ([spec.name for spec in config.inputs], [spec.name for spec in config.outputs]) == ([INPUT], [OUTPUT])
    assert (config.max_batch_size, card_from_config(config)) == (8, None)
