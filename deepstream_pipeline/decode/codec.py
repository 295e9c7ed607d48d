"""What makes pictures of packets, whoever does it: FFmpeg on the CPU, or a GPU's decoder."""

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple, Protocol, TypeAlias

import av
from av.video.codeccontext import VideoCodecContext
from av.video.stream import VideoStream

from deepstream_pipeline.errors import DecodeError
from deepstream_pipeline.gpu.picture import DevicePicture
from deepstream_pipeline.types import DecoderKind

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
    packet was damaged on its way. lost: so many packets before it, not told yet, gave no picture.
    """

    frame: av.VideoFrame | DevicePicture
    raw_s: float | None
    width: int
    height: int
    is_key: bool
    is_corrupt: bool
    lost: int = 0


def seconds_of(ticks: int | None, time_base: Fraction | None) -> float | None:
    """float(ticks * time_base), to the bit, without the fraction in between; None where either is not known."""
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
