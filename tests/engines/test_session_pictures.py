"""Encoded pictures as the input of an ONNX session, on the CPU, where torch is installed; on the GPU: tests/gpu."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: `make gpu` builds the environment that has it")
pytest.importorskip("torchvision", reason="torchvision is not installed")

from penstock.engines.torch_serving.parameters import TorchRequestError  # noqa: E402  behind the skips
from penstock.engines.torch_serving.session_pictures import SessionPictures  # noqa: E402
from penstock.vision.decode import decode  # noqa: E402
from penstock.vision.preprocess import prepare  # noqa: E402
from tests.engines.test_picture_kernel import IMAGENET, of_the_gateway  # noqa: E402
from tests.vision import images  # noqa: E402

JPEG, PNG = images.jpeg(images.picture(301, 217)), images.png(images.picture(90, 70), color_type=2)


def answer(names: Sequence[str], inputs: Mapping[str, Any]) -> list[Any]:
    """Stands for a session: its outputs are its input."""
    assert isinstance(inputs["image"], np.ndarray)
    return [inputs["image"].copy() for _ in names]


@pytest.fixture
def session() -> SessionPictures:
    return SessionPictures(IMAGENET, answer, input_name="image", max_batch_size=2, device="cpu")


def pictures(*encoded: bytes) -> dict[str, Any]:
    return {"image": np.array([[one] for one in encoded], object)}


def test_session_gets_each_picture_as_the_gateway_prepares_it(session: SessionPictures) -> None:
    """A JPEG and a PNG of one request: the same numbers as the gateway's own path."""
    (found,) = session.run(["y"], pictures(JPEG, PNG))
    gateway = of_the_gateway(IMAGENET)
    expected = [prepare(decode(encoded, gateway.color), gateway)[0] for encoded in (JPEG, PNG)]
    np.testing.assert_array_equal(found, np.stack(expected))


def test_picture_that_cannot_be_decoded_is_the_clients_error(session: SessionPictures) -> None:
    """The row is named; the next request is answered."""
    with pytest.raises(TorchRequestError, match="row 2 of 2: the picture is not a JPEG, PNG or WebP"):
        session.run(["y"], pictures(JPEG, b"GIF89a"))
    assert len(session.run(["y"], pictures(JPEG))[0]) == 1


def test_more_pictures_than_the_batch_size_are_rejected(session: SessionPictures) -> None:
    """The input has max_batch_size rows."""
    with pytest.raises(TorchRequestError, match="3 pictures are more than max_batch_size 2"):
        session.run(["y"], pictures(JPEG, JPEG, JPEG))
