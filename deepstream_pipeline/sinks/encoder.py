"""H.264 of pictures: even sizes, true times, one thread. libx264 of PyAV's wheel, or its h264_nvenc: a card's NVENC.

What NVENC makes of a picture was never seen by who wrote this: no machine of theirs has a card with one. Its options
are those that FFmpeg's nvenc.c reads, and nvenc.py tries them on the card before any sink relies on them. FFmpeg opens
each of its encoders with a CUDA context of its own, with Python's lock held: some 0.1 s a stream, at its first picture.
"""

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import TypeAlias

import cv2
import numpy as np
from av import VideoFrame
from av.codec import CodecContext
from av.container import OutputContainer
from av.error import FFmpegError
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.frame import PictureType
from av.video.stream import VideoStream

from deepstream_pipeline.types import ByteArray

Packets: TypeAlias = "list[Packet[VideoStream]]"

TIME_BASE = Fraction(1, 90_000)
KEY_EVERY_S = 2.0
SQUARE = Fraction(1)  # width and height of a pixel are equal
_TICKS_PER_S = 90_000
_GOP_FRAMES = 600  # at most, where there is no picture for long


class EncoderKind(StrEnum):
    """What a sink of video is told to encode with. auto: NVENC where the card has one and it opens, else the CPU."""

    AUTO = "auto"
    CPU = "cpu"
    NVENC = "nvenc"


class H264(StrEnum):
    """What encodes, as FFmpeg calls it."""

    X264 = "libx264"
    NVENC = "h264_nvenc"


class EncoderRefused(Exception):
    """NVENC does not open, or broke off. The text is FFmpeg's word for it."""


@dataclass(frozen=True, slots=True)
class Quality:
    """crf: of x264, less is better. is_live: no frame waits in the encoder for those behind it."""

    crf: int = 23
    is_live: bool = False
    key_every_s: float = KEY_EVERY_S

    def options(self, codec: H264 = H264.X264) -> dict[str, str]:
        """Without B-frames a file begins at 0 and the order of packets is that of the pictures."""
        options = {"bf": "0", "g": str(_GOP_FRAMES), "forced-idr": "1"}
        return options | (self._nvenc() if codec is H264.NVENC else self._x264())

    def _x264(self) -> dict[str, str]:
        return {"preset": "veryfast", "crf": str(self.crf)} | ({"tune": "zerolatency"} if self.is_live else {})

    def _nvenc(self) -> dict[str, str]:
        """The same number as crf for its constant quality (0 would mean automatic); a picture's packet at once."""
        kept = {"preset": "p4", "profile": "high", "rc": "vbr", "cq": str(max(self.crf, 1)), "spatial-aq": "1"}
        return kept | {"delay": "0", "zerolatency": "1", "tune": "ll" if self.is_live else "hq"}


def even(width: int, height: int) -> tuple[int, int]:
    """The size with sides that yuv420p can have: an odd one grows by a pixel."""
    return width + width % 2, height + height % 2


def set_up(context: VideoCodecContext, size: tuple[int, int], sample_aspect_ratio: Fraction = SQUARE) -> None:
    """Sets a new encoder's size (even), pixel shape, colour space and time base."""
    context.width, context.height = size
    context.sample_aspect_ratio = sample_aspect_ratio
    context.pix_fmt = "yuv420p"
    context.time_base = TIME_BASE
    context.framerate = Fraction(30)  # a hint for its rate control: the times of the frames are what counts
    context.thread_count = 1
    context.colorspace = _BT601
    context.color_range = _LIMITED


class Encoder:
    """Pictures in, packets out; open from its first moment. `pictures` knows their times."""

    def __init__(self, codec: H264, coder: "VideoStream | VideoCodecContext", pictures: "Pictures") -> None:
        """coder: set up. Raises EncoderRefused where NVENC does not open."""
        self.pictures = pictures
        self._is_nvenc = codec is H264.NVENC
        self._coder = coder
        context = coder.codec_context if isinstance(coder, VideoStream) else coder
        try:
            context.open()
        except FFmpegError as error:
            self._refuse(error)
            raise

    def encode(self, picture: ByteArray, pts_s: float) -> Packets:
        """The packets that are done with this picture, timed. Raises EncoderRefused where NVENC breaks off."""
        frame = self.pictures.frame(picture, pts_s)
        try:
            return self.pictures.timed(self._coder.encode(frame))
        except FFmpegError as error:
            self._refuse(error)
            raise

    def flush(self) -> Packets:
        """What waits in it; nothing where NVENC broke off. Then it takes no more."""
        try:
            return self.pictures.timed(self._coder.encode(None))
        except FFmpegError:
            if self._is_nvenc:
                return []
            raise

    def _refuse(self, error: FFmpegError) -> None:
        """NVENC's errors are no errors of a file, which some of them would be taken for by their class."""
        if self._is_nvenc:
            raise EncoderRefused(error.strerror or type(error).__name__) from error


def stream_encoder(
    container: OutputContainer,
    size: tuple[int, int],
    quality: Quality,
    codec: H264,
    sample_aspect_ratio: Fraction = SQUARE,
) -> Encoder:
    """The encoder of a container's one stream, of even sides. Raises EncoderRefused: the container is spoilt then."""
    stream: VideoStream = container.add_stream(codec.value, options=quality.options(codec))
    set_up(stream.codec_context, size, sample_aspect_ratio)
    return Encoder(codec, stream, Pictures(size, key_every_s=quality.key_every_s))


def lone_encoder(size: tuple[int, int], quality: Quality, codec: H264) -> Encoder:
    """An encoder of no container: its key frames carry their parameter sets. Raises EncoderRefused."""
    context = CodecContext.create(codec.value, "w")
    assert isinstance(context, VideoCodecContext)
    context.options = quality.options(codec)
    set_up(context, size)
    return Encoder(codec, context, Pictures(size, key_every_s=quality.key_every_s))


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
