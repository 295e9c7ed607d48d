"""H.264 of pictures: even sizes, true times, one thread. libx264 of PyAV's wheel."""

from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import cv2
import numpy as np
from av import VideoFrame
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.frame import PictureType
from av.video.stream import VideoStream

from deepstream_pipeline.types import ByteArray

Packets: TypeAlias = "list[Packet[VideoStream]]"

TIME_BASE = Fraction(1, 90_000)
KEY_EVERY_S = 2.0
_TICKS_PER_S = 90_000
_GOP_FRAMES = 600  # at most, where there is no picture for long
_PRESET = "veryfast"


@dataclass(frozen=True, slots=True)
class Quality:
    """crf: of x264, less is better. is_live: no frame waits in the encoder for those behind it."""

    crf: int = 23
    is_live: bool = False
    key_every_s: float = KEY_EVERY_S

    def options(self) -> dict[str, str]:
        """For libx264. Without B-frames a file begins at 0 and the order of packets is that of the pictures."""
        options = {"preset": _PRESET, "crf": str(self.crf), "bf": "0", "g": str(_GOP_FRAMES), "forced-idr": "1"}
        return options | ({"tune": "zerolatency"} if self.is_live else {})


def even(width: int, height: int) -> tuple[int, int]:
    """The size with sides that yuv420p can have: an odd one grows by a pixel."""
    return width + width % 2, height + height % 2


def set_up(context: VideoCodecContext, size: tuple[int, int]) -> None:
    """Tell a fresh encoder its size (even), and how colours and times are meant."""
    context.width, context.height = size
    context.pix_fmt = "yuv420p"
    context.time_base = TIME_BASE
    context.framerate = Fraction(30)  # a hint for its rate control: the times of the frames are what counts
    context.thread_count = 1
    context.colorspace = _BT601
    context.color_range = _LIMITED


class Pictures:
    """Makes an encoder's frames of pictures: fits them into one size, and gives them times that rise."""

    def __init__(self, size: tuple[int, int], *, key_every_s: float = KEY_EVERY_S) -> None:
        self.size = size
        self._first_s: float | None = None
        self._last_pts = -1  # ticks of the frame before
        self._key_ticks = round(key_every_s * _TICKS_PER_S)
        self._next_key = 0
        self._step_ticks = _TICKS_PER_S // 25  # of a file with one frame

    @property
    def step_s(self) -> float:
        """Between the last two frames."""
        return self._step_ticks / _TICKS_PER_S

    def frame(self, picture: ByteArray, pts_s: float) -> VideoFrame:
        """The frame of an RGB picture of any size, at that time of its source."""
        if self._first_s is None:
            self._first_s = pts_s
        pts = max(round((pts_s - self._first_s) * _TICKS_PER_S), self._last_pts + 1)
        frame = VideoFrame.from_ndarray(cv2.cvtColor(fitted(picture, self.size), cv2.COLOR_RGB2YUV_I420), "yuv420p")
        frame.pts, frame.time_base = pts, TIME_BASE
        if pts >= self._next_key:
            frame.pict_type = PictureType.I
            self._next_key = pts + self._key_ticks
        self._step_ticks = pts - self._last_pts if self._last_pts >= 0 else self._step_ticks
        self._last_pts = pts
        return frame

    def timed(self, packets: Packets) -> Packets:
        """The encoder's packets, each with a duration: that of the last frame's step, which a file's last one needs."""
        for packet in packets:
            packet.duration = self._step_ticks
        return packets


def fitted(picture: ByteArray, size: tuple[int, int]) -> ByteArray:
    """The picture in that size: an odd side padded with its edge, another shape scaled, with black bars."""
    height, width = picture.shape[:2]
    if (width, height) == size:
        return np.ascontiguousarray(picture)
    if even(width, height) == size:
        padded: ByteArray = np.pad(picture, ((0, size[1] - height), (0, size[0] - width), (0, 0)), mode="edge")
        return padded
    scale = min(size[0] / width, size[1] / height)
    inner = (max(1, min(size[0], round(width * scale))), max(1, min(size[1], round(height * scale))))
    canvas = np.zeros((size[1], size[0], 3), np.uint8)
    left, top = (size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2
    interpolation = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    canvas[top : top + inner[1], left : left + inner[0]] = cv2.resize(picture, inner, interpolation=interpolation)
    return canvas


_BT601 = 5  # AVCOL_SPC_BT470BG: what cv2.COLOR_RGB2YUV_I420 makes
_LIMITED = 1  # AVCOL_RANGE_MPEG
