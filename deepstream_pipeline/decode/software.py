"""Pictures made by FFmpeg on the CPU."""

from fractions import Fraction

import av
from av.error import EOFError, FFmpegError, InvalidDataError
from av.video.codeccontext import VideoCodecContext
from av.video.stream import VideoStream

from deepstream_pipeline.decode.codec import Decoded, PacketRefused, VideoPacket, seconds_of
from deepstream_pipeline.decode.pictures import upright_size
from deepstream_pipeline.types import DecoderKind


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
