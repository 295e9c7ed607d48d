"""Masks as COCO's run lengths: written as pycocotools writes them, and read back."""

import numpy as np
import pytest
from pycocotools import mask as coco

from penstock.protocol.vision_results import Mask
from penstock.vision.masks import mask_of, rle_of


def noise(seed: int) -> np.ndarray:
    """Pixels of a picture of 97 x 61: from nearly none to nearly all are set, some in long runs."""
    draw = np.random.default_rng(seed)
    coarse = draw.random((1 + 60 // (seed % 7 + 1), 97)) < seed / 20
    bits: np.ndarray = np.repeat(coarse, seed % 7 + 1, axis=0)[:61]
    return np.pad(bits, ((0, 61 - len(bits)), (0, 0)))


@pytest.mark.parametrize("seed", range(21))
def test_run_lengths_are_pycocotools_and_read_back_the_same(seed: int) -> None:
    """An independent encoder writes the same text; what is read has the same pixels."""
    bits = noise(seed)
    text = rle_of(Mask(61, 97, 0, 0, bits))
    assert text == coco.encode(np.asfortranarray(bits.astype(np.uint8)))["counts"].decode()
    read = mask_of(text, 61, 97)
    whole = np.zeros((61, 97), np.bool_)
    whole[read.top : read.top + read.bits.shape[0], read.left : read.left + read.bits.shape[1]] = read.bits
    assert np.array_equal(whole, bits)


@pytest.mark.parametrize(
    "text",
    ["", "0", "\x00", "~", "lo0P", "PPPPPPPPPPPPPPPPPPP1", "o", "é", "lo0l1X1"],
    ids=["none", "too few", "control", "beyond", "cut off", "too long", "negative", "not ASCII", "half"],
)
def test_run_lengths_of_no_mask_are_refused(text: str) -> None:
    """Text that is no encoding of that size is a ValueError, and takes no memory."""
    with pytest.raises(ValueError, match="run length"):
        mask_of(text, 100, 100)
