"""What the users send: pictures of a folder, or pictures made from a seed."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

MEDIA_TYPES = {".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".png": "image/png", ".webp": "image/webp"}
JPEG_QUALITY = 90
# Of a folder: each process of the generator holds them all in memory.
MOST_PICTURES = 1024
MOST_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Picture:
    """An encoded image and its media type."""

    content: bytes
    media_type: str


def read_pictures(folder: Path) -> list[Picture]:
    """The folder's first pictures by name: 1024 at most, and 128 MiB. Raises ValueError where there is none."""
    paths = _that_fit(_picture_paths(folder))
    if not paths:
        raise ValueError(f"no picture ({', '.join(MEDIA_TYPES)}) in {folder}")
    return [Picture(path.read_bytes(), MEDIA_TYPES[path.suffix.lower()]) for path in paths]


def pictures_left_out(folder: Path) -> str:
    """One sentence where `read_pictures` does not read all of the folder, else empty."""
    paths = _picture_paths(folder)
    if (count := len(_that_fit(paths))) == len(paths):
        return ""
    limit = f"limit {MOST_PICTURES} and {MOST_BYTES >> 20} MiB"
    return f"only the first {count} of {len(paths)} pictures in {folder} are sent ({limit})"


def make_pictures(count: int, *, seed: int, size: tuple[int, int] = (640, 480)) -> list[Picture]:
    """JPEGs of coarse noise with fine grain: about as hard to decode as photos of that (width, height)."""
    return [Picture(_jpeg(np.random.default_rng([seed, index]), size), "image/jpeg") for index in range(count)]


def make_raw_tensor(shape: Sequence[int], dtype: type[np.generic], *, seed: int) -> bytes:
    """A tensor of that shape as little-endian bytes: floats in [0, 1), whole numbers in [0, 127)."""
    generator = np.random.default_rng(seed)
    if np.issubdtype(dtype, np.floating):
        return generator.random(shape).astype(dtype).tobytes()
    return generator.integers(0, 127, shape).astype(dtype).tobytes()


def _picture_paths(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix.lower() in MEDIA_TYPES)


def _that_fit(paths: list[Path]) -> list[Path]:
    """The first ones, one at least."""
    sizes = itertools.accumulate(path.stat().st_size for path in paths[:MOST_PICTURES])
    return paths[: max(1, sum(1 for size_bytes in sizes if size_bytes <= MOST_BYTES))]


def _jpeg(generator: np.random.Generator, size: tuple[int, int]) -> bytes:
    coarse = generator.integers(0, 256, (12, 16, 3), np.uint8)
    scene = cv2.resize(coarse, size, interpolation=cv2.INTER_CUBIC).astype(np.int16)
    grain = generator.integers(-12, 13, scene.shape, np.int16)
    is_encoded, jpeg = cv2.imencode(
        ".jpg", np.clip(scene + grain, 0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY]
    )
    assert is_encoded, "OpenCV has no JPEG encoder"
    return jpeg.tobytes()
