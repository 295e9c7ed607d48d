"""Videos read back: what a player would see."""

from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np

from penstock_video.types import ByteArray


@dataclass(frozen=True)
class Read:
    """Times of the frames in seconds from the file's beginning; the pictures' sizes; the pictures."""

    times: list[float]
    sizes: set[tuple[int, int]]
    pictures: list[ByteArray]
    codec: str
    pixel_format: str
    duration_s: float
    frames: int


def read_video(path: Path | str) -> Read:
    """All of a video; of a cut one, what can be decoded."""
    times, pictures = [], []
    with av.open(str(path), timeout=20) as container:
        stream = container.streams.video[0]
        try:
            for frame in container.decode(stream):
                times.append(float(frame.time or 0.0))
                pictures.append(frame.to_ndarray(format="rgb24").astype(np.uint8, copy=False))
        except av.error.InvalidDataError:
            pass
        return Read(
            times,
            {(picture.shape[1], picture.shape[0]) for picture in pictures},
            pictures,
            stream.codec_context.name,
            stream.codec_context.pix_fmt or "",
            float((container.duration or 0) / 1_000_000),
            stream.frames,
        )
