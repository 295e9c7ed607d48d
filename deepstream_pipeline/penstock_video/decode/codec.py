"""Protocol of a decoder, and its implementation by FFmpeg on the CPU."""

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple, Protocol, TypeAlias

import av
from av.error import EOFError, FFmpegError, InvalidDataError
from av.video.codeccontext import VideoCodecContext
from av.video.stream import VideoStream

from penstock_video.decode.pictures import upright_size
from penstock_video.errors import DecodeError
from penstock_video.gpu.picture import DevicePicture
from penstock_video.types import DecoderKind

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
