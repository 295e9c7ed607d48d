"""H.264 encoding by libx264 or NVENC, and the probe for NVENC, a program since a faulty driver may hang."""

import functools
import re
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import TypeAlias

import av
import av.logging
import cv2
import msgspec
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


class EncoderKind(StrEnum):
    """The encoder of a video sink. auto: NVENC if the GPU has it and it opens, else the CPU."""

    AUTO = "auto"
    CPU = "cpu"
    NVENC = "nvenc"


class H264(StrEnum):
    """The encoder's FFmpeg name."""

    X264 = "libx264"
    NVENC = "h264_nvenc"


class EncoderRefused(Exception):
    """NVENC does not open, or failed. The text is FFmpeg's."""


@dataclass(frozen=True, slots=True)
class Quality:
    """crf: of x264, less is better. is_live: the encoder delays no frame."""

    crf: int = 23
    is_live: bool = False
    key_every_s: float = KEY_EVERY_S

    def options(self, codec: H264 = H264.X264) -> dict[str, str]:
        """FFmpeg options, without B-frames: a file begins at 0 and packets are in picture order."""
        options = {"bf": "0", "g": str(_GOP_FRAMES), "forced-idr": "1"}
        return options | (self._nvenc() if codec is H264.NVENC else self._x264())

    def _x264(self) -> dict[str, str]:
        return {"preset": "veryfast", "crf": str(self.crf)} | ({"tune": "zerolatency"} if self.is_live else {})

    def _nvenc(self) -> dict[str, str]:
        """crf as constant quality (0 would mean automatic); each packet at once."""
        kept = {"preset": "p4", "profile": "high", "rc": "vbr", "cq": str(max(self.crf, 1)), "spatial-aq": "1"}
        return kept | {"delay": "0", "zerolatency": "1", "tune": "ll" if self.is_live else "hq"}


def even(width: int, height: int) -> tuple[int, int]:
    """The size rounded up to even sides, for yuv420p."""
    return width + width % 2, height + height % 2


def set_up(context: VideoCodecContext, size: tuple[int, int], sample_aspect_ratio: Fraction = SQUARE) -> None:
    """Sets a new encoder's size (even), pixel shape, colour space and time base."""
    context.width, context.height = size
    context.sample_aspect_ratio = sample_aspect_ratio
    context.pix_fmt = "yuv420p"
    context.time_base = TIME_BASE
    context.framerate = Fraction(30)  # a hint for rate control; frames have their own times
    context.thread_count = 1
    context.colorspace = _BT601
    context.color_range = _LIMITED


class Encoder:
    """Encodes pictures to packets; open once constructed. `pictures` sets their times."""

    def __init__(self, codec: H264, coder: "VideoStream | VideoCodecContext", pictures: "Pictures") -> None:
        """coder: set up. Raises EncoderRefused if NVENC does not open."""
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
        """Packets that this picture completed, timed. Raises EncoderRefused if NVENC fails."""
        frame = self.pictures.frame(picture, pts_s)
        try:
            return self.pictures.timed(self._coder.encode(frame))
        except FFmpegError as error:
            self._refuse(error)
            raise

    def flush(self) -> Packets:
        """The remaining packets; none if NVENC failed. Call it last."""
        try:
            return self.pictures.timed(self._coder.encode(None))
        except FFmpegError:
            if self._is_nvenc:
                return []
            raise

    def _refuse(self, error: FFmpegError) -> None:
        """Converts NVENC's errors, whose classes look like file errors."""
        if self._is_nvenc:
            raise EncoderRefused(error.strerror or type(error).__name__) from error


def stream_encoder(
    container: OutputContainer,
    size: tuple[int, int],
    quality: Quality,
    codec: H264,
    sample_aspect_ratio: Fraction = SQUARE,
) -> Encoder:
    """Encoder of a container's only stream. Raises EncoderRefused, with the container then unusable."""
    stream: VideoStream = container.add_stream(codec.value, options=quality.options(codec))
    set_up(stream.codec_context, size, sample_aspect_ratio)
    return Encoder(codec, stream, Pictures(size, key_every_s=quality.key_every_s))


def lone_encoder(size: tuple[int, int], quality: Quality, codec: H264) -> Encoder:
    """An encoder without container: its keyframes contain their parameter sets. Raises EncoderRefused."""
    context = CodecContext.create(codec.value, "w")
    assert isinstance(context, VideoCodecContext)
    context.options = quality.options(codec)
    set_up(context, size)
    return Encoder(codec, context, Pictures(size, key_every_s=quality.key_every_s))


class Pictures:
    """Makes encoder frames of pictures: fits them into one size, with increasing times."""

    def __init__(self, size: tuple[int, int], *, key_every_s: float = KEY_EVERY_S) -> None:
        self.size = size
        self._first_s: float | None = None
        self._last_pts = -1  # ticks of the frame before
        self._key_ticks = round(key_every_s * _TICKS_PER_S)
        self._next_key = 0
        self._step_ticks = _TICKS_PER_S // 25  # of a file with one frame

    @property
    def step_s(self) -> float:
        """Seconds between the last two frames."""
        return self._step_ticks / _TICKS_PER_S

    def frame(self, picture: ByteArray, pts_s: float) -> VideoFrame:
        """The frame of an RGB picture of any size, at this time of its source."""
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
        """Packets with the duration of the last frame's step, which a file's last packet needs."""
        for packet in packets:
            packet.duration = self._step_ticks
        return packets


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


_BT601 = 5  # AVCOL_SPC_BT470BG, from cv2.COLOR_RGB2YUV_I420
_LIMITED = 1  # AVCOL_RANGE_MPEG


ASK_S = 20.0  # the first call after boot initialises every GPU: seconds without the persistence daemon
SIZE = (320, 240)  # not smaller than NVENC's minimum
_PROGRAM = (sys.executable, "-P", "-m", "penstock_video.sinks.encoder")
_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # of the driver; of Windows' WSL
_CARD = re.compile(r"GPU #\d+ - < (.+?) >")
_KEYS = (True, False, True, False)  # which of the tried pictures are requested as keyframes
_REAP_S = 1.0


class NvencAnswer(msgspec.Struct, frozen=True):
    """card: its name from the driver; several with commas. why_not: "" if NVENC encodes."""

    card: str = ""
    why_not: str = ""


@functools.cache
def nvenc_here() -> NvencAnswer:
    """The cached probe of this machine."""
    return ask_nvenc()


def ask_nvenc(
    timeout_s: float = ASK_S, *, command: tuple[str, ...] = _PROGRAM, devices: Iterable[Path] = _DEVICES
) -> NvencAnswer:
    """Probes NVENC, for timeout_s and a second at most; failures are in the answer. Needs a driver device in /dev."""
    if not any(device.exists() for device in devices):
        return NvencAnswer(why_not="no NVIDIA card is here")
    try:
        asked = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # FFmpeg's log of failures
            start_new_session=True,
        )
    except OSError as error:
        return NvencAnswer(why_not=f"its trial does not start: {error.strerror}")
    try:
        said, _ = asked.communicate(timeout=timeout_s)
        return msgspec.json.decode(said, type=NvencAnswer)
    except subprocess.TimeoutExpired:
        asked.kill()
        with suppress(subprocess.TimeoutExpired):  # a process inside a faulty driver may not even die
            asked.communicate(timeout=_REAP_S)
        return NvencAnswer(why_not=f"the driver took longer than {timeout_s:g} s")
    except msgspec.DecodeError:
        return NvencAnswer(why_not=f"its trial ended with {asked.returncode}")


def try_nvenc() -> NvencAnswer:
    """Encodes in this process; may block forever, and raises FFmpeg's log level."""
    av.logging.set_level(av.logging.VERBOSE)
    why_not = ""
    with av.logging.Capture(local=False) as lines:
        try:
            why_not = _faults_of(lone_encoder(SIZE, Quality(is_live=True), H264.NVENC))
        except EncoderRefused as refused:
            why_not = str(refused)
    names = list(dict.fromkeys(name for _, _, text in lines for name in _CARD.findall(text)))
    if not why_not:
        return NvencAnswer(card=names[-1] if names else "")  # it uses the first one with NVENC
    return NvencAnswer(card=", ".join(names), why_not=_reason(lines) or why_not)


def _faults_of(encoder: Encoder) -> str:
    """Faults that the sinks cannot handle; "" if none."""
    for number, is_key in enumerate(_KEYS):
        picture = np.full((SIZE[1], SIZE[0], 3), 40 * number, np.uint8)
        packets = encoder.encode(picture, number * KEY_EVERY_S / 2)
        if len(packets) != 1:
            return f"it gave {len(packets)} packets for picture {number}, not one"
        if packets[0].is_keyframe is not is_key:
            return f"picture {number} {'was to be a' if is_key else 'became a'} key frame"
    return ""


def _reason(lines: Iterable[tuple[int, str, str]]) -> str:
    """The errors that FFmpeg logged, without the last, which says only that there is no other GPU."""
    errors = [text.strip() for level, _, text in lines if level <= av.logging.ERROR]
    return "; ".join(dict.fromkeys(errors))


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(try_nvenc()).decode())
