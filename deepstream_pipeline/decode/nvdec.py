"""Pictures made by a card's video engine, which stay in its memory: NV12, equal to FFmpeg's to the bit.

What NVDEC does not say, FFmpeg does: whenever the sequence parameter sets are others than before, it decodes that one
keyframe on the CPU, and so tells the size, the colours, the lines and how the picture was held; a decoder of that size
then begins there. So nothing is ever scaled in silence, and a stream that is none for NVDEC is known by its first
keyframe: NeedsCpu. A keyframe is a few milliseconds of one core.

Each packet gets a stamp, by which its picture is known when it comes out. One that did not come out when another after
it in the order of showing did is a packet lost (a leading picture is not: nothing after it builds on it).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import av
from av.bitstream import BitStreamFilterContext
from av.codec.context import Flags
from av.error import FFmpegError
from av.video.codeccontext import VideoCodecContext
from av.video.reformatter import ColorRange
from av.video.stream import VideoStream

from deepstream_pipeline.decode.codec import Decoded, PacketRefused, VideoPacket, seconds_of
from deepstream_pipeline.decode.cropping import is_cut_before
from deepstream_pipeline.decode.decode_errors import DecodeErrors
from deepstream_pipeline.decode.field_coding import may_hold_fields
from deepstream_pipeline.decode.nvcodec import NvCodec, OpenNvCodec, Surface
from deepstream_pipeline.decode.packet_numbers import PacketNumbers, Sent
from deepstream_pipeline.decode.parameter_sets import Headers, headers_of, is_annex_b
from deepstream_pipeline.decode.pictures import orientation_of
from deepstream_pipeline.errors import NeedsCpu
from deepstream_pipeline.gpu.picture import DevicePicture, Orientation
from deepstream_pipeline.types import DecoderKind

MOST_UNKEYED = 3000  # packets: a stream that refreshes bit by bit never sends a keyframe
_CODECS = ("h264", "hevc")
_PLAIN = ("yuv420p", "yuvj420p")


@dataclass(frozen=True, slots=True)
class NvdecCodecs:
    """Makes NvdecCodecs (a MakeCodec). stream: the CUDA stream in whose order their pictures are complete.

    errors: where the library says which pictures it mended; None where nobody listens, and none is marked for it.
    """

    open: OpenNvCodec
    stream: int = 0
    errors: DecodeErrors | None = None

    def __call__(self, stream: VideoStream, context: VideoCodecContext) -> "NvdecCodec":
        """Of a stream. Raises NeedsCpu."""
        return NvdecCodec(stream, context, self)


@dataclass(frozen=True, slots=True)
class _Look:
    """What FFmpeg says of a stream's pictures."""

    width: int
    height: int
    orientation: Orientation
    matrix: int
    is_full_range: bool


class NvdecCodec:
    """A Codec: NVDEC's, of one stream."""

    def __init__(self, stream: VideoStream, context: VideoCodecContext, codecs: NvdecCodecs) -> None:
        """Raises NeedsCpu where the stream's codec is none of NVDEC's."""
        name = context.codec.canonical_name
        if name not in _CODECS:
            raise NeedsCpu(f"NVDEC decodes {' and '.join(_CODECS)} here, and this is {name}")
        self._name, self._stream, self._context, self._codecs = name, stream, context, codecs
        context.thread_count = 1
        context.flags |= Flags.output_corrupt  # a damaged keyframe tells its size, too
        extradata = context.extradata
        has_lengths = not is_annex_b(extradata)
        self._filter = _filter_of(name, stream) if has_lengths else None
        self._held = Headers() if has_lengths or not extradata else headers_of(extradata, name)  # the newest sets
        self._sequence = b""  # of the pictures that its decoder is for
        self._look: _Look | None = None
        self._nvdec: NvCodec | None = None
        self._retired: NvCodec | None = None  # whose last pictures may still be looked at
        self._numbers = PacketNumbers()
        self._is_flushed = True  # nothing is left in its decoder
        self._awaits_key, self._unkeyed = True, 0
        self._is_joining = False  # until the keyframe after the one that it began with
        self._joined_s: float | None = None
        self._is_doubted = False  # whether the last keyframe was none for NVDEC

    @property
    def kind(self) -> DecoderKind:
        """NVDEC."""
        return DecoderKind.NVDEC

    def decode(self, packet: "VideoPacket | None") -> list[Decoded]:
        """What came out with this packet, or is left. Raises PacketRefused, NeedsCpu, GpuFull."""
        self._let_retired_go()
        if packet is None:
            return self._drained()
        data = self._annex_b(packet)
        headers = headers_of(data, self._name)
        if not headers.has_picture or (packet.is_keyframe and not headers.may_be_key):
            raise PacketRefused(f"a packet without a picture of {self._name}")
        is_other = bool(headers.sequence) and headers.sequence != self._sequence
        if self._awaits_key and not packet.is_keyframe and not is_other:
            return self._await_key()
        raw_s = seconds_of(packet.pts, packet.time_base)
        if not is_other and self._is_before_joined(packet, headers, raw_s):
            return []
        before: list[Decoded] = []
        if self._nvdec is None or is_other:
            before = self._begin(packet, headers)
        if headers.sequence:
            self._held, self._is_doubted = headers, False
        elif self._awaits_key:
            data = self._held.sets + data
        if self._awaits_key:
            self._awaits_key, self._unkeyed = False, 0
            self._is_joining, self._joined_s = True, raw_s
        return before + self._given(data, Sent(raw_s, packet.is_keyframe, packet.is_corrupt))

    def reset(self) -> None:
        """Forget what was given. The decoder stays: it goes on at the next keyframe."""
        self._let_retired_go()
        if self._nvdec is not None and not self._is_flushed:
            try:
                self._note(self._nvdec.flush())
            except PacketRefused:
                self._retire()
        if self._filter is not None:
            self._filter.flush()
        self._numbers.forget()
        self._awaits_key, self._unkeyed = True, 0

    def close(self) -> None:
        """Give the card's memory back."""
        self._let_retired_go()
        self._retire()
        self._let_retired_go()

    def _is_before_joined(self, packet: VideoPacket, headers: Headers, raw_s: float | None) -> bool:
        """Whether it is shown before the keyframe that a decoder began with, and builds on what that one never saw.

        FFmpeg drops it, too.
        """
        if not self._is_joining or self._awaits_key:
            return False
        if packet.is_keyframe:
            self._is_joining = False
            return False
        if self._name == "hevc":
            return headers.is_skipped
        return raw_s is not None and self._joined_s is not None and raw_s < self._joined_s

    def _await_key(self) -> list[Decoded]:
        """Nothing can be made of what comes before the first keyframe; FFmpeg drops it, too."""
        self._unkeyed += 1
        if self._unkeyed > MOST_UNKEYED:
            raise NeedsCpu(f"NVDEC begins at a keyframe, and {MOST_UNKEYED} packets of this stream held none")
        return []

    def _begin(self, packet: VideoPacket, headers: Headers) -> list[Decoded]:
        """Another decoder, for the pictures from this packet on; what was left in the one before.

        Raises GpuFull; NeedsCpu, within a stream that NVDEC took PacketRefused the first time, since it may be damage.
        """
        sequence = headers.sequence or self._held.sequence
        try:
            look = self._looked_at(packet)
            if self._name == "h264" and may_hold_fields(sequence):
                raise NeedsCpu("NVDEC is used for whole pictures, and these may be interlaced")
            if is_cut_before(sequence, self._name):
                raise NeedsCpu("NVDEC shows of a picture what this stream says is cut off at its left or top")
            nvdec = self._codecs.open(self._name, self._codecs.stream, (look.width, look.height))
        except NeedsCpu as refusal:
            if self._nvdec is None or self._is_doubted:
                raise
            self._is_doubted = True
            raise PacketRefused(refusal.message) from None
        try:
            before = self._drained()
        except PacketRefused:  # what was left is lost with its decoder
            self._numbers.lose_all()
            before = []
        self._retire()
        if not before:  # its place may be the only one that a full card has for the other
            self._let_retired_go()
        self._nvdec, self._look, self._sequence = nvdec, look, sequence
        self._numbers, self._awaits_key = self._numbers.anew(), True
        return before

    def _looked_at(self, packet: VideoPacket) -> _Look:
        """As FFmpeg sees it. Raises NeedsCpu, or PacketRefused where it sees nothing."""
        context = self._context
        try:
            frames = [*context.decode(packet), *context.decode(None)]
        except FFmpegError as error:
            raise PacketRefused(f"a keyframe that cannot be decoded ({error.strerror})") from None
        finally:
            context.flush_buffers()
        if not frames:
            raise PacketRefused("a keyframe of which no picture comes")
        return _look_of(frames[0])

    def _drained(self) -> list[Decoded]:
        if self._nvdec is None:
            return []
        decoded = self._decoded(self._nvdec.flush())
        self._is_flushed = True
        self._numbers.lose_all()
        return decoded

    def _given(self, data: bytes, sent: Sent) -> list[Decoded]:
        nvdec = self._nvdec
        if nvdec is None:  # it failed
            return self._await_key()
        stamp = self._numbers.next(sent)
        self._is_flushed = False
        try:
            surfaces = nvdec.decode(data, stamp)
        except PacketRefused:
            self._numbers.lose_all()
            self._numbers.told_lost()  # this one
            self._retire()
            raise
        decoded = self._decoded(surfaces)
        if self._numbers.lose_oldest() and not decoded:
            self._numbers.told_lost()
            raise PacketRefused("NVDEC has made no picture of many packets")
        return decoded

    def _decoded(self, surfaces: Iterable[Surface]) -> list[Decoded]:
        found = self._note(surfaces)
        errors = self._codecs.errors
        mended: set[int] = set()
        if found and errors is not None:
            mended = errors.take({name for _, sent in found for name in sent.names})
        return [self._one(surface, sent, mended) for surface, sent in found]

    def _note(self, surfaces: Iterable[Surface]) -> list[tuple[Surface, Sent]]:
        """Those of packets that are known: a decoder gives no picture twice."""
        found = []
        for surface in surfaces:
            sent = self._numbers.came_out(surface.stamp)
            if sent is not None:
                found.append((surface, sent))
        return found

    def _one(self, surface: Surface, sent: Sent, mended: set[int]) -> Decoded:
        look = self._look
        if look is None or (surface.width, surface.height) != (look.width, look.height):
            size = "nothing" if look is None else f"{look.width}x{look.height}"
            raise NeedsCpu(f"NVDEC makes pictures of {surface.width}x{surface.height} of a stream of {size}")
        picture = DevicePicture(
            luma=surface.luma,
            chroma=surface.chroma,
            pitch=surface.pitch,
            width=surface.width,
            height=surface.height,
            stream=self._codecs.stream,
            orientation=look.orientation,
            matrix=look.matrix,
            is_full_range=look.is_full_range,
        )
        width, height = picture.upright_size
        is_corrupt = sent.is_corrupt or not mended.isdisjoint(sent.names)
        return Decoded(picture, sent.raw_s, width, height, sent.is_key, is_corrupt, sent.lost)

    def _annex_b(self, packet: VideoPacket) -> bytes:
        """Its bytes with start codes, and before a keyframe the parameter sets that its container holds."""
        content = bytes(packet)
        if self._filter is None:
            return content
        copy = av.Packet(content)  # the filter keeps what it is given
        if packet.has_sidedata("new_extradata"):
            packet.get_sidedata("new_extradata").to_packet(copy)
        try:
            return b"".join(bytes(one) for one in self._filter.filter(copy))
        except FFmpegError as error:
            self._filter.flush()
            raise PacketRefused(f"a damaged packet ({error.strerror})") from None

    def _retire(self) -> None:
        if self._nvdec is not None:
            self._let_retired_go()
            self._retired, self._nvdec = self._nvdec, None
        self._sequence, self._awaits_key = b"", True

    def _let_retired_go(self) -> None:
        if self._retired is not None:
            self._retired.close()
            self._retired = None


def _filter_of(name: str, stream: VideoStream) -> BitStreamFilterContext:
    try:
        return BitStreamFilterContext(f"{name}_mp4toannexb", stream)
    except FFmpegError as error:
        raise NeedsCpu(f"NVDEC is told nothing by this stream's damaged parameters ({error.strerror})") from None


def _look_of(frame: av.VideoFrame) -> _Look:
    """Raises NeedsCpu."""
    layout = frame.format.name
    if layout not in _PLAIN:
        raise NeedsCpu(f"NVDEC is used for pictures of 8 bit and 4:2:0, and these are {layout}")
    if frame.interlaced_frame:
        raise NeedsCpu("NVDEC is used for whole pictures, and these are interlaced")
    return _Look(
        width=frame.width,
        height=frame.height,
        orientation=orientation_of(frame),
        matrix=int(frame.colorspace),
        is_full_range=layout == "yuvj420p" or frame.color_range == ColorRange.JPEG,
    )
