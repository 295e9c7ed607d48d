"""H.264 encoding by libx264 or NVENC."""

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

from penstock_video.types import ByteArray

Packets: TypeAlias = "list[Packet[VideoStream]]"

TIME_BASE = Fraction(1, 90_000)
KEY_EVERY_S = 2.0
SQUARE = Fraction(1)  # width and height of a pixel are equal
_TICKS_PER_S = 90_000
_GOP_FRAMES = 600  # maximum, if frames are far apart
_BT601 = 5  # AVCOL_SPC_BT470BG, from cv2.COLOR_RGB2YUV_I420
_LIMITED = 1  # AVCOL_RANGE_MPEG


class H264(StrEnum):
    """The encoder's FFmpeg name."""

    X264 = "libx264"
    NVENC = "h264_nvenc"


class EncoderRefused(Exception):
    """NVENC does not open, or failed. The text is FFmpeg's."""


@dataclass(frozen=True, slots=True)
class Quality:
    """crf: of x264, less is better; also NVENC's constant quality. is_live: the encoder delays no frame."""

    crf: int
    is_live: bool = False

    def options(self, codec: H264) -> dict[str, str]:
        """FFmpeg options, without B-frames: a file begins at 0 and packets are in picture order.

        NVENC returns each packet at once, so none is lost if it fails.
        """
        options = {"bf": "0", "g": str(_GOP_FRAMES), "forced-idr": "1"}
        if codec is H264.X264:
            live = {"tune": "zerolatency"} if self.is_live else {}
            return options | {"preset": "veryfast", "crf": str(self.crf)} | live
        options |= {"preset": "p4", "profile": "high", "rc": "vbr", "cq": str(max(self.crf, 1)), "spatial-aq": "1"}
        return options | {"delay": "0", "zerolatency": "1", "tune": "ll" if self.is_live else "hq"}


def even(width: int, height: int) -> tuple[int, int]:
    """The size rounded up to even sides, for yuv420p."""
    return width + width % 2, height + height % 2


class Encoder:
    """Encodes pictures of any size to packets of one size, with increasing times; open once constructed.

    Raises EncoderRefused if it is NVENC and does not open, or fails.
    """

    def __init__(
        self,
        coder: VideoStream | VideoCodecContext,
        size: tuple[int, int],
        codec: H264,
        *,
        key_every_s: float = KEY_EVERY_S,
        sample_aspect_ratio: Fraction = SQUARE,
    ) -> None:
        """coder: of this codec, with its options. size: even."""
        self._coder, self._size, self._is_nvenc = coder, size, codec is H264.NVENC
        self._first_s: float | None = None
        self._last_pts = -1  # ticks of the frame before
        self._key_ticks = round(key_every_s * _TICKS_PER_S)
        self._next_key = 0
        self._step_ticks = _TICKS_PER_S // 25  # of a file with one frame
        context = coder.codec_context if isinstance(coder, VideoStream) else coder
        context.width, context.height = size
        context.sample_aspect_ratio = sample_aspect_ratio
        context.pix_fmt = "yuv420p"
        context.time_base = TIME_BASE
        context.framerate = Fraction(30)  # a hint for rate control; frames have their own times
        context.thread_count = 1
        context.colorspace = _BT601
        context.color_range = _LIMITED
        try:
            context.open()
        except FFmpegError as error:
            self._refuse(error)
            raise

    def after(self, former: "Encoder") -> "Encoder":
        """Continues the times of a former encoder of the same stream."""
        self._first_s, self._last_pts, self._step_ticks = former._first_s, former._last_pts, former._step_ticks
        return self

    @property
    def step_s(self) -> float:
        """Seconds between the last two frames."""
        return self._step_ticks / _TICKS_PER_S

    def encode(self, picture: ByteArray, pts_s: float) -> Packets:
        """Packets that this RGB picture completed, timed. pts_s: its time at its source."""
        if self._first_s is None:
            self._first_s = pts_s
        pts = max(round((pts_s - self._first_s) * _TICKS_PER_S), self._last_pts + 1)
        frame = VideoFrame.from_ndarray(cv2.cvtColor(fitted(picture, self._size), cv2.COLOR_RGB2YUV_I420), "yuv420p")
        frame.pts, frame.time_base = pts, TIME_BASE
        if pts >= self._next_key:
            frame.pict_type = PictureType.I
            self._next_key = pts + self._key_ticks
        self._step_ticks = pts - self._last_pts if self._last_pts >= 0 else self._step_ticks
        self._last_pts = pts
        try:
            return self._timed(self._coder.encode(frame))
        except FFmpegError as error:
            self._refuse(error)
            raise

    def flush(self) -> Packets:
        """The remaining packets; NVENC has none, also after it failed. Call it last."""
        try:
            return self._timed(self._coder.encode(None))
        except FFmpegError:
            if self._is_nvenc:
                return []
            raise

    def _refuse(self, error: FFmpegError) -> None:
        """Converts NVENC's errors, whose classes look like those of files."""
        if self._is_nvenc:
            raise EncoderRefused(error.strerror or type(error).__name__) from error

    def _timed(self, packets: Packets) -> Packets:
        """Packets with the duration of the last frame's step, which a file's last packet needs."""
        for packet in packets:
            packet.duration = self._step_ticks
        return packets


def stream_encoder(
    container: OutputContainer,
    size: tuple[int, int],
    quality: Quality,
    codec: H264 = H264.X264,
    *,
    key_every_s: float = KEY_EVERY_S,
    sample_aspect_ratio: Fraction = SQUARE,
) -> Encoder:
    """Encoder of a container's only stream. Raises EncoderRefused, with the container then unusable."""
    stream = container.add_stream(codec.value, options=quality.options(codec))
    assert isinstance(stream, VideoStream)
    return Encoder(stream, size, codec, key_every_s=key_every_s, sample_aspect_ratio=sample_aspect_ratio)


def lone_encoder(size: tuple[int, int], quality: Quality, codec: H264 = H264.X264) -> Encoder:
    """An encoder without container: its keyframes contain their parameter sets. Raises EncoderRefused."""
    context = CodecContext.create(codec.value, "w")
    assert isinstance(context, VideoCodecContext)
    context.options = quality.options(codec)
    return Encoder(context, size, codec)


def fitted(picture: ByteArray, size: tuple[int, int]) -> ByteArray:
    """The picture in this size: odd sides are padded with the edge, other shapes scaled, with black bars."""
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
