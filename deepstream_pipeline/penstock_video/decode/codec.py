"""Protocol of a decoder, its implementation by FFmpeg on the CPU, and the pixels of a decoded frame."""

import struct
from collections.abc import Callable
from fractions import Fraction
from hashlib import blake2b
from typing import NamedTuple, Protocol, TypeAlias

import av
import cv2
import numpy as np
import numpy.typing as npt
from av.error import EOFError, FFmpegError, InvalidDataError
from av.sidedata.sidedata import SideDataContainer
from av.sidedata.sidedata import Type as SideDataType
from av.video.codeccontext import VideoCodecContext
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream

from penstock_video.errors import DecodeError
from penstock_video.types import UPRIGHT, DecoderKind, DevicePicture, Orientation

Pixels = npt.NDArray[np.uint8]

_MATRIX = struct.Struct("=9i")  # a b u c d v x y w of libavutil/display.h: x' = a x + c y, y' = b x + d y
_OFF_AXIS = 0.02  # relative to the larger factor: about a degree, which FFmpeg's players also ignore
_LUMA_FIRST = ("yuv4", "yuvj4", "nv12", "nv21", "nv16", "gray")


class Painter:
    """Converts the frames of one source. Single-threaded; its arrays are valid while the frame exists."""

    def __init__(self) -> None:
        self._colours = VideoReformatter()
        self._greys = VideoReformatter()

    def rgb(self, frame: av.VideoFrame) -> Pixels:
        """(H, W, 3), upright."""
        return self._painted(frame, "rgb24")

    def bgr(self, frame: av.VideoFrame) -> Pixels:
        """(H, W, 3), upright."""
        return self._painted(frame, "bgr24")

    def luma(self, frame: av.VideoFrame) -> Pixels:
        """(H, W), as stored: not rotated, in the stream's range; for comparisons within a source."""
        layout = frame.format
        is_plain = layout.name.startswith(_LUMA_FIRST) and layout.components[0].bits == 8
        if is_plain and frame.planes[0].line_size > 0:  # negative for a picture that is stored upside down
            return _plane(frame, 1)[:, :, 0]
        return _plane(self._greys.reformat(frame, format="gray", threads=1), 1)[:, :, 0]

    def _painted(self, frame: av.VideoFrame, pixel_format: str) -> Pixels:
        pixels = _plane(self._colours.reformat(frame, format=pixel_format, threads=1), 3)
        return upright(pixels, orientation_of(frame))


def upright_size(frame: av.VideoFrame) -> tuple[int, int]:
    """(width, height) of the upright picture."""
    return orientation_of(frame).size(frame.width, frame.height)


def orientation_of(frame: av.VideoFrame) -> Orientation:
    """Orientation by the frame's display matrix: quarter turns and mirroring; UPRIGHT for other matrices or none."""
    matrix = _display_matrix(frame)
    if matrix is None:
        return UPRIGHT
    a, b, _, c, d, *_ = _MATRIX.unpack(matrix)
    straight, crossed = sorted((abs(a), abs(d))), sorted((abs(b), abs(c)))
    if crossed[1] <= _OFF_AXIS * straight[0]:
        return Orientation(False, a < 0, d < 0)
    if straight[1] <= _OFF_AXIS * crossed[0]:
        return Orientation(True, c < 0, b < 0)
    return UPRIGHT


def _display_matrix(frame: av.VideoFrame) -> bytes | None:
    """The frame's display matrix, without frame.side_data, whose reference cycle would hold the frame's memory."""
    try:
        found = SideDataContainer(frame)  # type: ignore[call-arg]  # its stub lacks the constructor
    except ValueError:  # PyAV fails for side data types that are newer than its FFmpeg
        return None
    return next((bytes(one) for one in found if one.type is SideDataType.DISPLAYMATRIX), None)


def upright(pixels: Pixels, orientation: Orientation) -> Pixels:
    """The picture (H, W, channels), rotated and mirrored."""
    if orientation.is_transposed:
        pixels = cv2.transpose(pixels)
    if orientation.is_mirrored_x and orientation.is_mirrored_y:
        pixels = cv2.flip(pixels, -1)
    elif orientation.is_mirrored_x or orientation.is_mirrored_y:
        pixels = cv2.flip(pixels, 1 if orientation.is_mirrored_x else 0)
    return pixels


def _plane(frame: av.VideoFrame, channels: int) -> Pixels:
    """A view of the frame's first plane, (H, W, channels); lines may be padded."""
    plane = frame.planes[0]
    lines = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)
    pixels: Pixels = lines[: frame.height, : frame.width * channels].reshape(frame.height, frame.width, channels)
    return pixels


Plane = npt.NDArray[np.uint8]

DEFAULT_CUT = 0.5
_SIZE = (64, 18)
_LINES = 36  # sampled lines of a picture, two for each of the thumbnail's
_BINS = 16
_LEAST_CHANGE = 24  # grey levels, on average: two dark pictures of one scene may differ in every bin
_NOISE = 1  # grey levels by which a codec changes a still picture


class PictureSimilarity:
    """Compares the pictures of one source, in order."""

    def __init__(self, cut: float = DEFAULT_CUT) -> None:
        """cut: share of a picture (0..1) whose brightness must change for a cut; 0 for no cuts."""
        self._cut = cut
        self._before: Plane | None = None
        self._shown: Plane | None = None  # the picture of the digest
        self._digest = 0

    def begin(self) -> None:
        """Restarts: the next picture has no predecessor."""
        self._before = None

    def look(self, thumbnail: Plane) -> tuple[int, bool]:
        """Digest (64 bits) of the thumbnail (18, 64), equal for equal consecutive pictures, and whether it is a cut."""
        thumbnail = thumbnail.copy()  # it may be overwritten by the next call
        is_cut = self._is_cut(thumbnail)
        self._before = thumbnail
        if self._shown is None or _largest_difference(thumbnail, self._shown) > _NOISE:
            self._shown = thumbnail
            self._digest = int.from_bytes(blake2b(thumbnail.tobytes(), digest_size=8).digest())
        return self._digest, is_cut

    def _is_cut(self, thumbnail: Plane) -> bool:
        if not self._cut or self._before is None:
            return False
        if cv2.norm(thumbnail, self._before, cv2.NORM_L1) < _LEAST_CHANGE * thumbnail.size:
            return False
        return _histogram_difference(thumbnail, self._before) >= self._cut


def thumbnail_of(luma: Plane) -> Plane:
    """(18, 64): means of the brightness (H, W) of some of the picture's lines."""
    lines = luma[:: max(luma.shape[0] // _LINES, 1)]
    small: Plane = cv2.resize(lines, _SIZE, interpolation=cv2.INTER_AREA)
    return small


def _largest_difference(first: Plane, second: Plane) -> int:
    return int(cv2.norm(first, second, cv2.NORM_INF))


def _histogram_difference(first: Plane, second: Plane) -> float:
    """Difference of the brightness histograms: 0 if equal, 1 if disjoint."""
    bins = [np.bincount(picture.ravel() // (256 // _BINS), minlength=_BINS) for picture in (first, second)]
    return float(np.abs(bins[0] - bins[1]).sum()) / 2 / first.size


VideoPacket: TypeAlias = "av.Packet[VideoStream]"


class PacketRefused(DecodeError):
    """A packet yields no picture. Raised by a Codec; the stream continues. is_fatal: not by damage alone."""

    reason = "packet_refused"

    def __init__(self, message: str, *, is_fatal: bool = False) -> None:
        super().__init__(message)
        self.is_fatal = is_fatal


class Decoded(NamedTuple):
    """One picture, valid until its codec's next packet. width, height: upright. raw_s: the stream's seconds. is_key: a
    keyframe. is_corrupt: repaired by the decoder, or from a damaged packet. lost: packets before it without a picture,
    not reported yet."""

    frame: av.VideoFrame | DevicePicture
    raw_s: float | None
    width: int
    height: int
    is_key: bool
    is_corrupt: bool
    lost: int = 0


def seconds_of(ticks: int | None, time_base: Fraction | None) -> float | None:
    """float(ticks * time_base), bit-exact but without creating a Fraction; None if either is unknown."""
    return None if ticks is None or not time_base else ticks * time_base.numerator / time_base.denominator


class Codec(Protocol):
    """Decoder of one stream, used by one thread."""

    @property
    def kind(self) -> DecoderKind:
        """CPU or NVDEC."""

    def decode(self, packet: "VideoPacket | None") -> list[Decoded]:
        """Pictures completed by this packet, or all that are left. Raises PacketRefused, NeedsCpu, GpuFull."""

    def reset(self) -> None:
        """Drops pending data: the next packet is from another position of the stream."""

    def close(self) -> None:
        """Frees its memory; its pictures become invalid."""


# Made of a stream, and FFmpeg's unopened context with its codec, extradata and side data. Raises NeedsCpu.
MakeCodec: TypeAlias = Callable[[VideoStream, VideoCodecContext], Codec]


class SoftwareCodec:
    """FFmpeg's decoder, with the threads of its context."""

    def __init__(self, stream: VideoStream, context: VideoCodecContext) -> None:
        self._context, self._time_base = context, stream.time_base

    @property
    def kind(self) -> DecoderKind:
        return DecoderKind.CPU

    def decode(self, packet: "VideoPacket | None") -> list[Decoded]:
        try:
            return [_decoded(frame, self._time_base) for frame in self._context.decode(packet)]
        except EOFError:
            return []
        except InvalidDataError as error:
            raise PacketRefused(_reason(error)) from None
        except FFmpegError as error:
            raise PacketRefused(_reason(error), is_fatal=True) from None

    def reset(self) -> None:
        self._context.flush_buffers()

    def close(self) -> None:
        """Does nothing: FFmpeg frees its memory with its context."""


def _decoded(frame: av.VideoFrame, time_base: Fraction | None) -> Decoded:
    width, height = upright_size(frame)
    raw_s = seconds_of(frame.pts, frame.time_base or time_base)  # PyAV does not set it on frames of a flush
    return Decoded(frame, raw_s, width, height, is_key=frame.key_frame, is_corrupt=frame.is_corrupt)


def _reason(error: FFmpegError) -> str:
    return error.strerror or type(error).__name__
