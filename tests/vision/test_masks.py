"""Run lengths of masks against COCO's own encoder, and outlines."""

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pycocotools import mask as coco

from penstock.protocol.vision_results import DepthMap, Mask
from penstock.vision.masks import mask_of, png16_of, polygons_of, rle_of, run_lengths
from tests.vision.layouts.decoding import Array, mask_iou, whole


def plain_run_lengths(bits: Array) -> list[int]:
    """Counts pixel by pixel, from column to column. bits: (height, width)."""
    counts, is_set = [0], False
    for pixel in bits.ravel(order="F").tolist():
        if pixel != is_set:
            counts.append(0)
            is_set = pixel
        counts[-1] += 1
    return counts


def coco_counts(bits: Array) -> str:
    text: bytes = coco.encode(np.asfortranarray(bits.astype(np.uint8)))["counts"]
    return text.decode("ascii")


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    """Masks of every density and place: full, empty, one pixel, at any edge of the picture, and inside."""
    rows, columns = draw(st.integers(0, 12)), draw(st.integers(0, 12))
    top, left = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    below, right = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    fill = draw(st.sampled_from([None, True, False]))
    bits = draw(arrays(np.bool_, (rows, columns))) if fill is None else np.full((rows, columns), fill)
    height, width = max(top + rows + below, 1), max(left + columns + right, 1)
    return Mask(height, width, left if rows * columns else 0, top if rows * columns else 0, bits)


@given(masks())
def test_run_lengths_are_those_of_cocos_encoder(mask: Mask) -> None:
    """Of the mask in its whole picture; and as counted pixel by pixel."""
    assert rle_of(mask) == coco_counts(whole(mask))
    assert run_lengths(mask) == plain_run_lengths(whole(mask))


@given(masks())
def test_mask_of_its_run_lengths_is_the_same_cut_to_its_pixels(mask: Mask) -> None:
    """No row or column at the edge of the bits is empty."""
    found = mask_of(rle_of(mask), mask.height, mask.width)
    assert (whole(found) == whole(mask)).all()
    assert found.area == mask.area
    if found.area:
        assert all(found.bits[edge].any() for edge in (0, -1))
        assert all(found.bits[:, edge].any() for edge in (0, -1))


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (9, 1), (480, 640)])
@pytest.mark.parametrize("is_full", [False, True])
def test_full_and_empty_masks_have_one_run(size: tuple[int, int], *, is_full: bool) -> None:
    """COCO starts with the length of False, which is 0 for a full mask."""
    mask = Mask(*size, 0, 0, np.full(size, is_full))
    assert run_lengths(mask) == ([0, size[0] * size[1]] if is_full else [size[0] * size[1]])
    assert rle_of(mask) == coco_counts(mask.bits)


def test_run_lengths_of_bits_that_are_a_part_of_another_array() -> None:
    """A mask may be a view of the picture's mask."""
    picture = np.random.default_rng(0).random((60, 80)) < 0.5
    mask = Mask(60, 80, 10, 20, picture[20:50, 10:70])
    assert rle_of(mask) == coco_counts(whole(mask))


@pytest.mark.parametrize(
    "text",
    ["", "0", "\x00", "~", "lo0P", "PPPPPPPPPPPPPPPPPPP1", "o", "é", "lo0l1X1"],
    ids=["none", "too few", "control", "beyond", "cut off", "too long", "negative", "not ASCII", "half"],
)
def test_run_lengths_of_no_mask_are_refused(text: str) -> None:
    """Text that is no encoding of that size is a ValueError, and takes no memory."""
    with pytest.raises(ValueError, match="run length"):
        mask_of(text, 100, 100)


def test_outlines_filled_are_the_mask() -> None:
    """A mask without holes: an ellipse at the picture's edge and a turned rectangle."""
    picture = np.zeros((120, 160), np.uint8)
    cv2.ellipse(picture, (10, 20), (40, 15), 20, 0, 360, 1, -1)
    cv2.fillPoly(picture, [np.array([[90, 50], [140, 70], [120, 110], [70, 90]], np.int32)], 1)
    mask = mask_of(coco_counts(picture), 120, 160)
    outlines = polygons_of(mask)
    assert len(outlines) == 2
    assert all(outline.dtype == np.float32 and outline.shape[1:] == (2,) for outline in outlines)
    filled = np.zeros_like(picture)
    cv2.fillPoly(filled, [outline.astype(np.int32) for outline in outlines], 1)
    assert mask_iou(filled.astype(bool), picture.astype(bool)) == 1


def test_empty_mask_has_no_outline() -> None:
    """Neither bits of no size nor bits that are all False."""
    assert polygons_of(Mask(5, 5, 0, 0, np.zeros((0, 0), np.bool_))) == []
    assert polygons_of(Mask(5, 5, 1, 1, np.zeros((3, 3), np.bool_))) == []


@pytest.mark.parametrize("values", [[0, 1, 2.5], [-1e30, 0, 1e30], [7, 7, 7], [1e-30, 2e-30, 3e-30]])
def test_depth_as_a_picture_is_exact_to_one_step_of_sixteen_bits(values: list[float]) -> None:
    """Depth = pixel × scale + offset."""
    depth = np.array([values], np.float32)
    png, scale, offset = png16_of(DepthMap(depth))
    pixels = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_UNCHANGED)
    assert pixels.dtype == np.uint16
    assert np.abs(pixels * scale + offset - depth.astype(np.float64)).max() <= scale * 0.51
