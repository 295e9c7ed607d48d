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
from penstock_video.gpu.picture import UPRIGHT, DevicePicture, Orientation
from penstock_video.types import DecoderKind

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
        if is_plain and frame.planes[0].line_size > 0:  # negative where a picture is stored upside down
            return _plane(frame, 1)[:, :, 0]
        return _plane(self._greys.reformat(frame, format="gray", threads=1), 1)[:, :, 0]

    def _painted(self, frame: av.VideoFrame, pixel_format: str) -> Pixels:
        pixels = _plane(self._colours.reformat(frame, format=pixel_format, threads=1), 3)
        return upright(pixels, orientation_of(frame))


def upright_size(frame: av.VideoFrame) -> tuple[int, int]:
    """(width, height) of the upright picture."""
    return orientation_of(frame).size(frame.width, frame.height)


def orientation_of(frame: av.VideoFrame) -> Orientation:
    """The orientation by the frame's display matrix: rotations by quarter turns, and mirroring.

    Frames with another matrix, or without one, stay as stored.
    """
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
    """The display matrix in the frame's side data.

    frame.side_data would store the container in the frame: a reference cycle, so the frame's memory would not be freed
    until the garbage collector runs.
    """
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
_LINES = 36  # of a picture that are looked at, two for each of the thumbnail's
_BINS = 16
_LEAST_CHANGE = 24  # grey levels, on average: two dark pictures of one scene may differ in every bin
_NOISE = 1  # grey levels: what a codec changes of a picture that stands still


class PictureSimilarity:
    """Compares the pictures of one source, in their order."""

    def __init__(self, cut: float = DEFAULT_CUT) -> None:
        """cut: the share of a picture (0..1) that must change its brightness for a cut; 0 for no cuts."""
        self._cut = cut
        self._before: Plane | None = None
        self._shown: Plane | None = None  # of which the digest is
        self._digest = 0

    def begin(self) -> None:
        """Restarts: the next picture has no predecessor."""
        self._before = None

    def look(self, thumbnail: Plane) -> tuple[int, bool]:
        """(digest, whether it begins another scene) of the thumbnail (18, 64) of the next picture.

        digest: 64 bits, equal for equal pictures in a row, also where their codec adds a grey level of noise.
        """
        thumbnail = thumbnail.copy()  # it may be another picture's by the next call
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
    """(18, 64): means of the brightness (H, W) of a picture, of some of its lines."""
    lines = luma[:: max(luma.shape[0] // _LINES, 1)]
    small: Plane = cv2.resize(lines, _SIZE, interpolation=cv2.INTER_AREA)
    return small


def _largest_difference(first: Plane, second: Plane) -> int:
    return int(cv2.norm(first, second, cv2.NORM_INF))


def _histogram_difference(first: Plane, second: Plane) -> float:
    """0 for the same brightnesses, 1 for none in common."""
    bins = [np.bincount(picture.ravel() // (256 // _BINS), minlength=_BINS) for picture in (first, second)]
    return float(np.abs(bins[0] - bins[1]).sum()) / 2 / first.size


VideoPacket: TypeAlias = "av.Packet[VideoStream]"


class PacketRefused(DecodeError):
    """No picture comes of a packet: it is damaged, or of another codec. By a Codec; the stream goes on.

    is_fatal: of damage alone it would not happen; when it happens again, the codec is no use any more.
    """

    reason = "packet_refused"

    def __init__(self, message: str, *, is_fatal: bool = False) -> None:
        super().__init__(message)
        self.is_fatal = is_fatal


class Decoded(NamedTuple):
    """One picture, borrowed until its codec is given the next packet. width, height: upright.

    raw_s: the stream's own seconds. is_key: it builds on no other. is_corrupt: its decoder had to mend it, or its
    packet was damaged on its way. lost: so many packets before it, not reported yet, gave no picture.
    """

    frame: av.VideoFrame | DevicePicture
    raw_s: float | None
    width: int
    height: int
    is_key: bool
    is_corrupt: bool
    lost: int = 0


def seconds_of(ticks: int | None, time_base: Fraction | None) -> float | None:
    """float(ticks * time_base), to the bit, without the fraction in between; None if either is unknown."""
    return None if ticks is None or not time_base else ticks * time_base.numerator / time_base.denominator


class Codec(Protocol):
    """One stream's, used by one thread."""

    @property
    def kind(self) -> DecoderKind:
        """Who decodes: CPU or NVDEC."""

    def decode(self, packet: "VideoPacket | None") -> list[Decoded]:
        """What came out with this packet, in the order of showing; with None, all that is left.

        Raises PacketRefused; NeedsCpu where the stream is none for a GPU; GpuFull where that has no room for it.
        """

    def reset(self) -> None:
        """Forget what was given: the next packet is of another place of the stream."""

    def close(self) -> None:
        """Let go of what it holds; pictures that came of it are over."""


# Of a stream, and of FFmpeg's context for it, which is not opened yet and knows the codec, its extradata and its side
# data. Raises NeedsCpu.
MakeCodec: TypeAlias = Callable[[VideoStream, VideoCodecContext], Codec]


class SoftwareCodec:
    """A Codec: FFmpeg's own, in the threads that its context was given."""

    def __init__(self, stream: VideoStream, context: VideoCodecContext) -> None:
        """Every stream that FFmpeg knows is taken."""
        self._context, self._time_base = context, stream.time_base

    @property
    def kind(self) -> DecoderKind:
        """CPU."""
        return DecoderKind.CPU

    def decode(self, packet: "VideoPacket | None") -> list[Decoded]:
        """What came out with this packet, or is left. Raises PacketRefused."""
        try:
            return [_decoded(frame, self._time_base) for frame in self._context.decode(packet)]
        except EOFError:
            return []
        except InvalidDataError as error:
            raise PacketRefused(_reason(error)) from None
        except FFmpegError as error:
            raise PacketRefused(_reason(error), is_fatal=True) from None

    def reset(self) -> None:
        """Forget what was given."""
        self._context.flush_buffers()

    def close(self) -> None:
        """FFmpeg's memory goes with its context."""


def _decoded(frame: av.VideoFrame, time_base: Fraction | None) -> Decoded:
    width, height = upright_size(frame)
    raw_s = seconds_of(frame.pts, frame.time_base or time_base)  # PyAV does not set it on frames of a flush
    return Decoded(frame, raw_s, width, height, is_key=frame.key_frame, is_corrupt=frame.is_corrupt)


def _reason(error: FFmpegError) -> str:
    return error.strerror or type(error).__name__
