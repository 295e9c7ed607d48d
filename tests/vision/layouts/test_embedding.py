"""Embeddings: the vector of a picture, and what real weights say of real persons."""

from pathlib import Path

import cv2
import numpy as np
import onnxruntime
import pytest

from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.errors import EngineFailed
from penstock.protocol.inference import Datatype, InferResponse, tensor_from_numpy
from penstock.protocol.vision_results import Embedding
from penstock.vision.card import card_from_config
from penstock.vision.decode import DecodedImage
from penstock.vision.preprocess import prepare
from penstock.vision.results import parse
from tests.vision.layouts.decoding import Array, decoded, fitted

GEOMETRY = fitted((50, 100), (128, 256))


@pytest.mark.parametrize("shape", [(4,), (1, 4), (4, 1, 1), (1, 4, 1, 1)])
def test_embedding_is_the_outputs_vector(shape: tuple[int, ...]) -> None:
    """With trailing axes of 1 or without, and untouched."""
    vector = np.array([1.5, -2, 0, 4], np.float32)
    result = decoded(Embedding, "embedding", (vector.reshape(shape),), GEOMETRY)
    assert (result.vector.tolist(), result.vector.dtype) == (vector.tolist(), np.float32)


def test_embedding_of_a_batch_is_each_pictures_own() -> None:
    """[batch, d] and [batch, d, 1, 1]."""
    batch = np.arange(6, dtype=np.float32).reshape(3, 2)
    for array in (batch, batch.reshape(3, 2, 1, 1)):
        assert decoded(Embedding, "embedding", (array,), GEOMETRY, 2).vector.tolist() == [4, 5]


@pytest.mark.parametrize("factor", [1e-20, 1.0, 1e20, 6e37])
def test_normalised_embedding_has_length_one_whatever_its_size(factor: float) -> None:
    """Its squares are beyond float32 at both ends."""
    vector = (np.array([3, -4], np.float32) * np.float32(factor)).astype(np.float32)
    result = decoded(Embedding, "embedding", (vector,), GEOMETRY, is_unit_length=True)
    assert result.vector.tolist() == pytest.approx([0.6, -0.8], abs=1e-6)


@pytest.mark.parametrize(
    ("array", "is_unit_length", "what"),
    [
        (np.zeros(8, np.float32), True, "all zeros"),
        (np.zeros(0, np.float32), False, "[d]"),
        (np.zeros((4, 4), np.float32), False, "1-D"),
        (np.array([1, np.nan], np.float32), False, "NaN"),
    ],
)
def test_vector_that_is_none_is_refused_with_a_sentence(array: Array, what: str, *, is_unit_length: bool) -> None:
    """A vector of zeros has no direction; other shapes are no vector."""
    with pytest.raises(EngineFailed) as failed:
        decoded(Embedding, "embedding", (array,), GEOMETRY, is_unit_length=is_unit_length)
    assert what in str(failed.value)


# Two persons of the video, followed by hand: (frame, x0, y0, x1, y1).
CROPS = ((30, 631, 250, 667, 352), (60, 467, 200, 503, 293), (30, 668, 247, 698, 345), (60, 505, 199, 532, 284))


def crops(media: Path) -> list[Array]:
    """RGB crops, a list for each person one after the other."""
    video = cv2.VideoCapture(str(media / "vtest.avi"))
    frames = {}
    for number in range(max(frame for frame, *_ in CROPS) + 1):
        frames[number] = video.read()[1]
    return [np.ascontiguousarray(frames[frame][y0:y1, x0:x1, ::-1]) for frame, x0, y0, x1, y1 in CROPS]


def osnet_config(output: str) -> ModelConfig:
    """Re-identification: squashed to 128 x 256, RGB, ImageNet's mean and deviation."""
    parameters = {
        "network-type": "other",
        "layout": "embedding",
        "net-scale-factor": str(1 / 255),
        "offsets": "123.675;116.28;103.53",
        "channel-scale-factors": f"{1 / 0.229};{1 / 0.224};{1 / 0.225}",
        "normalize-embedding": "1",
    }
    return ModelConfig(
        name="osnet",
        backend="onnxruntime",
        max_batch_size=0,
        inputs=(TensorSpec("x", Datatype.FP32, (3, 256, 128)),),
        outputs=(TensorSpec(output, Datatype.FP32, (512,)),),
        parameters=parameters,
    )


def test_real_weights_find_the_same_person_again(shared_dir: Path) -> None:
    """Two crops of a person are nearer than those of different persons, and as a plain run has them."""
    session = onnxruntime.InferenceSession(str(shared_dir / "models" / "osnet_x0_25_msmt17.onnx"))
    name, output = session.get_inputs()[0].name, session.get_outputs()[0].name
    card = card_from_config(osnet_config(output))
    assert card is not None
    vectors = []
    for crop in crops(shared_dir / "media"):
        height, width = crop.shape[:2]
        array, geometry = prepare(DecodedImage(crop, width, height), card.prepare_spec)
        answer = session.run(None, {name: array[np.newaxis]})[0]
        result = parse(card, InferResponse("osnet", "1", (tensor_from_numpy(output, answer),)), 0, geometry)
        assert isinstance(result, Embedding)
        plain = cv2.resize(crop, (128, 256), interpolation=cv2.INTER_LINEAR).astype(np.float32) / 255
        plain = (plain - (0.485, 0.456, 0.406)) / (0.229, 0.224, 0.225)
        wanted = session.run(None, {name: plain.transpose(2, 0, 1)[np.newaxis].astype(np.float32)})[0][0]
        assert result.vector == pytest.approx(wanted / np.linalg.norm(wanted), abs=1e-3)
        vectors.append(result.vector)
    likeness = np.stack(vectors) @ np.stack(vectors).T
    same = min(likeness[0, 1], likeness[2, 3])
    assert same > likeness[:2, 2:].max() + 0.1
