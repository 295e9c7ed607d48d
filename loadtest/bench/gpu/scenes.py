"""Frames, photos and crops on which answers of two engines are compared: the same in every run."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from loadtest.bench.gpu.pictures import Pixels
from loadtest.bench.wire import BadAnswer
from penstock.vision.decode import DecodedImage
from penstock.vision.spec import ColorFormat

FRAME_CROPS, PHOTO_CROPS = 2, 24
_LEAST_CROP, _MOST_CROP = 0.25, 0.75  # of the sides


@dataclass(frozen=True, slots=True)
class Crop:
    """A part of a picture in pixels. source: its index."""

    source: int
    left: int
    top: int
    width: int
    height: int


class Scenes:
    """Pictures in BGR, each whole and in crops drawn from a seed."""

    def __init__(self, pictures: Sequence[Pixels], crops: Sequence[int], *, seed: int = 1, limit: int = 0) -> None:
        """crops: of each picture. limit: so many evenly spread scenes; 0 for all."""
        random = np.random.default_rng(seed)
        self._pictures = pictures
        every = [
            part
            for source, (pixels, count) in enumerate(zip(pictures, crops, strict=True))
            for part in _parts(source, pixels, count, random)
        ]
        step = max(1, -(-len(every) // limit)) if limit else 1
        self._parts = every[::step]

    def __len__(self) -> int:
        return len(self._parts)

    def digest(self) -> str:
        """SHA-256 of all pixels and crops."""
        found = hashlib.sha256(repr(self._parts).encode())
        for number in sorted({part.source for part in self._parts}):
            pixels = np.ascontiguousarray(self._pictures[number])
            found.update(repr(pixels.shape).encode())
            found.update(pixels.data)
        return found.hexdigest()

    def decoded(self, number: int, color: ColorFormat) -> DecodedImage:
        """That scene, as the gateway's decoder returns it."""
        part = self._parts[number]
        pixels = self._pictures[part.source][part.top : part.top + part.height, part.left : part.left + part.width]
        if color is ColorFormat.GRAY:
            pixels = cv2.cvtColor(np.ascontiguousarray(pixels), cv2.COLOR_BGR2GRAY)
        elif color is ColorFormat.RGB:
            pixels = pixels[..., ::-1]
        return DecodedImage(np.ascontiguousarray(pixels), part.width, part.height)


def _parts(source: int, pixels: Pixels, crops: int, random: np.random.Generator) -> Iterator[Crop]:
    height, width = pixels.shape[:2]
    yield Crop(source, 0, 0, width, height)
    for share in random.uniform(_LEAST_CROP, _MOST_CROP, crops):
        own_width, own_height = int(width * share), int(height * share)
        left, top = int(random.integers(width - own_width + 1)), int(random.integers(height - own_height + 1))
        yield Crop(source, left, top, own_width, own_height)


def read_scenes(media: Path, *, limit: int = 0) -> Scenes:
    """All frames of the folder's videos, and its photos, with crops. Raises BadAnswer without a picture."""
    frames = [frame for path in sorted(media.glob("*.avi")) for frame in _frames(path)]
    photos = [pixels for path in sorted(media.glob("*.jpg")) if (pixels := cv2.imread(str(path))) is not None]
    if not frames and not photos:
        raise BadAnswer(f"{media} has no .avi and no .jpg that OpenCV reads: name a folder with --media")
    crops = [FRAME_CROPS] * len(frames) + [PHOTO_CROPS] * len(photos)
    return Scenes([*frames, *photos], crops, limit=limit)


def _frames(path: Path) -> Iterator[Pixels]:
    video = cv2.VideoCapture(str(path))
    try:
        while True:
            is_read, frame = video.read()
            if not is_read:
                return
            yield frame
    finally:
        video.release()
