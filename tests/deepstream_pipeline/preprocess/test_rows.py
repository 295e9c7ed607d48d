"""A row is what the gateway would make of the same picture, to the bit, wherever it is written."""

import cv2
import numpy as np
import pytest

from penstock.protocol.inference import Datatype
from penstock.vision.decode import DecodedImage
from penstock.vision.preprocess import NUMPY_OF, geometry_of, prepare
from penstock.vision.spec import ColorFormat, InputOrder, PrepareSpec, ResizeMode
from penstock_video.sources.child_link import prepare_row, row_bytes_of

PICTURE = np.random.default_rng(1).integers(0, 256, (180, 320, 3), np.uint8)
SPECS = [
    PrepareSpec(96, 64, color=color, layout=layout, fit=fit, datatype=datatype, scale=1 / 255, offsets=(1, 2, 3))
    for color in ColorFormat
    for layout in InputOrder
    for fit in (ResizeMode.STRETCH, ResizeMode.PAD_RIGHT_BOTTOM, ResizeMode.PAD_SYMMETRIC)
    for datatype in (Datatype.FP32, Datatype.FP16, Datatype.UINT8)
] + [PrepareSpec(64, 64, fit=ResizeMode.CROP, shorter_side=72), PrepareSpec(0, 0, fit=ResizeMode.KEEP, max_side=100)]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.color.name}-{spec.layout.name}-{spec.fit.name}")
@pytest.mark.parametrize("is_bgr", [False, True])
def test_row_is_what_the_gateway_prepares(spec: PrepareSpec, is_bgr: bool) -> None:
    """Every colour order, layout, fit and datatype; from RGB and from BGR; written to the given array."""
    given = PICTURE[..., ::-1].copy() if is_bgr else PICTURE
    in_order = {
        ColorFormat.RGB: PICTURE,
        ColorFormat.BGR: PICTURE[..., ::-1].copy(),
        ColorFormat.GRAY: cv2.cvtColor(PICTURE, cv2.COLOR_RGB2GRAY),
    }[spec.color]
    expected, geometry = prepare(DecodedImage(in_order, 320, 180), spec)
    memory = np.zeros(row_bytes_of(320, 180, spec) + 64, np.uint8)
    row = prepare_row(given, spec, lambda shape, dtype: _view(memory, shape, dtype), is_bgr=is_bgr)
    assert np.shares_memory(row, memory)
    assert (row.dtype, row.nbytes) == (np.dtype(NUMPY_OF[spec.datatype]), memory.nbytes - 64)
    assert np.array_equal(row, expected)
    assert not memory[-64:].any()
    assert geometry_of(320, 180, spec) == geometry


def test_picture_whose_lines_lie_apart_is_prepared_the_same() -> None:
    """A decoder pads its lines; what is in the padding is not seen."""
    padded = np.full((180, 400, 3), 77, np.uint8)
    padded[:, :320] = PICTURE
    for color in ColorFormat:
        spec = PrepareSpec(96, 64, color=color)
        assert np.array_equal(prepare_row(padded[:, :320], spec), prepare_row(PICTURE, spec))


def _view(memory: np.ndarray, shape: tuple[int, ...], dtype: object) -> np.ndarray:
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return memory[:count].view(dtype).reshape(shape)
