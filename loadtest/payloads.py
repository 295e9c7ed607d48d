"""What the users send: pictures of a folder, or pictures made from a seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

MEDIA_TYPES = {".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".png": "image/png", ".webp": "image/webp"}
JPEG_QUALITY = 90


@dataclass(frozen=True, slots=True)
class Picture:
    """An encoded image and its media type."""

    content: bytes
    media_type: str


def read_pictures(folder: Path) -> list[Picture]:
    """The folder's pictures, by name. Raises ValueError where there is none."""
    paths = sorted(path for path in folder.glob("*") if path.suffix.lower() in MEDIA_TYPES)
    if not paths:
        raise ValueError(f"no picture ({', '.join(MEDIA_TYPES)}) in {folder}")
    return [Picture(path.read_bytes(), MEDIA_TYPES[path.suffix.lower()]) for path in paths]


def make_pictures(count: int, *, seed: int, size: tuple[int, int] = (640, 480)) -> list[Picture]:
    """JPEGs of coarse noise with fine grain: about as hard to decode as photos of that (width, height)."""
    return [Picture(_jpeg(np.random.default_rng([seed, index]), size), "image/jpeg") for index in range(count)]


def make_raw_tensor(shape: Sequence[int], dtype: type[np.generic], *, seed: int) -> bytes:
    """A tensor of that shape as little-endian bytes: floats in [0, 1), whole numbers in [0, 127)."""
    generator = np.random.default_rng(seed)
    if np.issubdtype(dtype, np.floating):
        return generator.random(shape).astype(dtype).tobytes()
    return generator.integers(0, 127, shape).astype(dtype).tobytes()


def _jpeg(generator: np.random.Generator, size: tuple[int, int]) -> bytes:
    coarse = generator.integers(0, 256, (12, 16, 3), np.uint8)
    scene = cv2.resize(coarse, size, interpolation=cv2.INTER_CUBIC).astype(np.int16)
    grain = generator.integers(-12, 13, scene.shape, np.int16)
    is_encoded, jpeg = cv2.imencode(
        ".jpg", np.clip(scene + grain, 0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY]
    )
    assert is_encoded, "OpenCV has no JPEG encoder"
    return jpeg.tobytes()
