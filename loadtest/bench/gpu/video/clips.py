"""The cameras of the bench: a rendered street as 720p and 1080p H.264 and 1080p HEVC.

All of one length, 30 frames a second, no B-frames, a keyframe every two seconds, as cameras send. Played in a loop.

    python -m loadtest.bench.gpu.video.clips DIR [SECONDS]      # beforehand, into what --work is to be
"""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import cv2

from deploy.models.street.clip import make_clip

FPS, GOP = 30, 60
_SEED = 4


@dataclass(frozen=True, slots=True)
class Camera:
    """codec: PyAV's encoder. goal: streams that the H200's targets ask for; measure: their name of it."""

    name: str
    words: str
    codec: str
    width: int
    height: int
    bits_per_s: int
    goal: int
    measure: str


CAMERAS = {
    one.name: one
    for one in (
        Camera("h264-720p", "720p30 H.264", "libx264", 1280, 720, 3_000_000, 315, "streams_720p30_h264"),
        Camera("h264-1080p", "1080p30 H.264", "libx264", 1920, 1080, 6_000_000, 170, "streams_1080p30_h264"),
        Camera("hevc-1080p", "1080p30 HEVC", "libx265", 1920, 1080, 4_000_000, 265, "streams_1080p30_hevc"),
    )
}
_OPTIONS = {
    "libx264": {"preset": "veryfast", "bf": "0"},
    "libx265": {
        "preset": "superfast",
        "x265-params": f"bframes=0:open-gop=0:keyint={GOP}:min-keyint={GOP}:log-level=none",
    },
}


def clip_path(work: Path, camera: Camera) -> Path:
    """Where it lies."""
    return work / f"{camera.name}.mp4"


def make_clips(work: Path, cameras: tuple[Camera, ...], seconds: float) -> None:
    """Those that are not there yet; the street is rendered once, at 720p. Raises OSError."""
    wanted = [camera for camera in cameras if not clip_path(work, camera).is_file()]
    if not wanted:
        return
    logging.getLogger("libav").setLevel(logging.ERROR)
    clip = make_clip(_SEED, seconds, FPS, size=(1280, 720), scenario="noise")
    opened = [_Writer(clip_path(work, camera), camera) for camera in wanted]
    for picture, _ in clip.frames():
        for writer in opened:
            writer.add(picture)
    for writer in opened:
        writer.close()


class _Writer:
    def __init__(self, path: Path, camera: Camera) -> None:
        self._path, self._new = path, path.with_suffix(".new.mp4")
        self._size = (camera.width, camera.height)
        self._container = av.open(str(self._new), "w")
        options = _OPTIONS[camera.codec] | {"maxrate": str(camera.bits_per_s * 3 // 2)}
        options["bufsize"] = str(camera.bits_per_s * 2)
        stream: Any = self._container.add_stream(camera.codec, rate=FPS, options=options)
        stream.width, stream.height = self._size
        stream.pix_fmt, stream.bit_rate, stream.gop_size = "yuv420p", camera.bits_per_s, GOP
        self._stream = stream

    def add(self, picture: Any) -> None:
        is_its_size = (picture.shape[1], picture.shape[0]) == self._size
        shown = picture if is_its_size else cv2.resize(picture, self._size, interpolation=cv2.INTER_LINEAR)
        self._container.mux(self._stream.encode(av.VideoFrame.from_ndarray(shown, "bgr24")))

    def close(self) -> None:
        self._container.mux(self._stream.encode(None))
        self._container.close()
        self._new.replace(self._path)


def facts_of(path: Path) -> dict[str, float]:
    """frames, and the bits a second that it came to."""
    with av.open(str(path)) as container:
        frames = container.streams.video[0].frames
    return {"frames": frames, "bits_per_s": round(path.stat().st_size * 8 * FPS / max(frames, 1))}


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    make_clips(Path(sys.argv[1]), tuple(CAMERAS.values()), float(sys.argv[2]) if len(sys.argv) > 2 else 8.0)
