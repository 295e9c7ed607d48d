"""Pictures decoded by NVDEC, which stay in GPU memory as NV12, bit-equal to FFmpeg's."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import av
from av.bitstream import BitStreamFilterContext
from av.codec.context import Flags
from av.error import FFmpegError
from av.video.codeccontext import VideoCodecContext
from av.video.reformatter import ColorRange
from av.video.stream import VideoStream

from penstock_video.decode.bitstream import Headers, headers_of, is_annex_b, is_cut_before, may_hold_fields
from penstock_video.decode.codec import Decoded, PacketRefused, VideoPacket, orientation_of, seconds_of
from penstock_video.decode.nvcodec import NvCodec, OpenNvCodec, Surface
from penstock_video.decode.timeline import PacketNumbers, Sent
from penstock_video.errors import NeedsCpu
from penstock_video.types import DecoderKind, DevicePicture, Orientation

MOST_UNKEYED = 3000  # packets: a stream with gradual refresh never sends a keyframe
_CODECS = ("h264", "hevc")
_PLAIN = ("yuv420p", "yuvj420p")


@dataclass(frozen=True, slots=True)
class NvdecCodecs:
    """Makes NvdecCodec objects (a MakeCodec). stream: CUDA stream of the pictures. output_size: to which a decoder
    scales pictures of (width, height), called at each keyframe; None for their own."""

    open: OpenNvCodec
    stream: int = 0
    output_size: Callable[[tuple[int, int]], tuple[int, int] | None] = lambda size: None

    def __call__(self, stream: VideoStream, context: VideoCodecContext) -> "NvdecCodec":
        """A codec for the stream. Raises NeedsCpu."""
        return NvdecCodec(stream, context, self)


@dataclass(frozen=True, slots=True)
class _Look:
    """A stream's picture properties from FFmpeg."""

    width: int
    height: int
    orientation: Orientation
    matrix: int
    is_full_range: bool


class NvdecCodec:
    """NVDEC decoder of one stream."""

    def __init__(self, stream: VideoStream, context: VideoCodecContext, codecs: NvdecCodecs) -> None:
        """Raises NeedsCpu if NVDEC does not support the codec."""
        name = context.codec.canonical_name
        if name not in _CODECS:
            raise NeedsCpu(f"NVDEC decodes {' and '.join(_CODECS)} here, and this is {name}")
        self._name, self._stream, self._context, self._codecs = name, stream, context, codecs
        context.thread_count = 1
        context.flags |= Flags.output_corrupt  # a damaged keyframe has its size, too
        extradata = context.extradata
        has_lengths = not is_annex_b(extradata)
        self._filter = _filter_of(name, stream) if has_lengths else None
        self._held = Headers() if has_lengths or not extradata else headers_of(extradata, name)  # the newest sets
        self._sequence = b""  # of its decoder's pictures
        self._look: _Look | None = None
        self._scaled: tuple[int, int] | None = None  # size of its decoder's pictures
        self._nvdec: NvCodec | None = None
        self._retired: NvCodec | None = None  # its last pictures may still be in use
        self._numbers = PacketNumbers()
        self._is_flushed = True  # nothing is left in its decoder
        self._awaits_key, self._unkeyed = True, 0
        self._is_joining = False  # until the keyframe after the first one
        self._joined_s: float | None = None
        self._has_bad_keyframe = False  # whether NVDEC refused the last keyframe

    @property
    def kind(self) -> DecoderKind:
        return DecoderKind.NVDEC

    def decode(self, packet: "VideoPacket | None") -> list[Decoded]:
        """Pictures that this packet completed, and earlier ones. Raises PacketRefused, NeedsCpu, GpuFull."""
        self._let_retired_go()
        if packet is None:
            return self._drained()
        data = self._annex_b(packet)
        headers = headers_of(data, self._name)
        if not headers.has_picture or (packet.is_keyframe and not headers.may_be_key):
            raise PacketRefused(f"a packet without a picture of {self._name}")
        is_other = bool(headers.sequence) and headers.sequence != self._sequence
        is_other = is_other or (packet.is_keyframe and self._is_resized())
        if self._awaits_key and not packet.is_keyframe and not is_other:
            return self._await_key()
        raw_s = seconds_of(packet.pts, packet.time_base)
        if not is_other and self._is_before_joined(packet, headers, raw_s):
            return []
        before: list[Decoded] = []
        if self._nvdec is None or is_other:
            before = self._begin(packet, headers)
        if headers.sequence:
            self._held, self._has_bad_keyframe = headers, False
        elif self._awaits_key:
            data = self._held.sets + data
        if self._awaits_key:
            self._awaits_key, self._unkeyed = False, 0
            self._is_joining, self._joined_s = True, raw_s
        return before + self._given(data, Sent(raw_s, packet.is_keyframe, packet.is_corrupt))

    def reset(self) -> None:
        """Drops pending data. The decoder continues at the next keyframe."""
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
        """Frees GPU memory."""
        self._let_retired_go()
        self._retire()
        self._let_retired_go()

    def _is_before_joined(self, packet: VideoPacket, headers: Headers, raw_s: float | None) -> bool:
        """Whether it precedes the first keyframe and depends on earlier data; FFmpeg drops it, too."""
        if not self._is_joining or self._awaits_key:
            return False
        if packet.is_keyframe:
            self._is_joining = False
            return False
        if self._name == "hevc":
            return headers.is_skipped
        return raw_s is not None and self._joined_s is not None and raw_s < self._joined_s

    def _is_resized(self) -> bool:
        """Whether the next pictures are to have another size than its decoder's."""
        return self._nvdec is not None and self._look is not None and self._output_size(self._look) != self._scaled

    def _output_size(self, look: _Look) -> tuple[int, int] | None:
        """None for pictures that are turned by a quarter: the network's sides would be the wrong ones."""
        if look.orientation.is_transposed:
            return None
        return self._codecs.output_size((look.width, look.height))

    def _await_key(self) -> list[Decoded]:
        """Drops data before the first keyframe, as FFmpeg does."""
        self._unkeyed += 1
        if self._unkeyed > MOST_UNKEYED:
            raise NeedsCpu(f"NVDEC begins at a keyframe, and {MOST_UNKEYED} packets of this stream held none")
        return []

    def _begin(self, packet: VideoPacket, headers: Headers) -> list[Decoded]:
        """Starts a decoder at this packet; returns pictures left before. Raises GpuFull, NeedsCpu, PacketRefused."""
        sequence = headers.sequence or self._held.sequence
        try:
            look = self._looked_at(packet)
            if self._name == "h264" and may_hold_fields(sequence):
                raise NeedsCpu("NVDEC is used for whole pictures, and these may be interlaced")
            if is_cut_before(sequence, self._name):
                raise NeedsCpu("NVDEC shows of a picture what this stream says is cut off at its left or top")
            scaled = self._output_size(look)
            nvdec = self._codecs.open(self._name, self._codecs.stream, (look.width, look.height), scaled)
        except NeedsCpu as refusal:
            if self._nvdec is None or self._has_bad_keyframe:
                raise
            self._has_bad_keyframe = True
            raise PacketRefused(refusal.message) from None
        try:
            before = self._drained()
        except PacketRefused:  # the rest is lost with its decoder
            self._numbers.lose_all()
            before = []
        self._retire()
        if not before:  # a full GPU may need its memory for the next
            self._let_retired_go()
        self._nvdec, self._look, self._sequence, self._scaled = nvdec, look, sequence, scaled
        self._numbers, self._awaits_key = self._numbers.anew(), True
        return before

    def _looked_at(self, packet: VideoPacket) -> _Look:
        """The packet's properties from FFmpeg. Raises NeedsCpu, or PacketRefused if there are none."""
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
            self._numbers.report_lost()  # this packet
            self._retire()
            raise
        decoded = self._decoded(surfaces)
        if self._numbers.lose_oldest() and not decoded:
            self._numbers.report_lost()
            raise PacketRefused("NVDEC has made no picture of many packets")
        return decoded

    def _decoded(self, surfaces: Iterable[Surface]) -> list[Decoded]:
        return [self._one(surface, sent) for surface, sent in self._note(surfaces)]

    def _note(self, surfaces: Iterable[Surface]) -> list[tuple[Surface, Sent]]:
        """Pictures of known packets; a decoder repeats none."""
        found = []
        for surface in surfaces:
            sent = self._numbers.came_out(surface.stamp)
            if sent is not None:
                found.append((surface, sent))
        return found

    def _one(self, surface: Surface, sent: Sent) -> Decoded:
        look = self._look
        if look is None or (surface.width, surface.height) != (self._scaled or (look.width, look.height)):
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
            source_size=None if self._scaled is None else (look.width, look.height),
        )
        width, height = picture.upright_size
        is_corrupt = sent.is_corrupt or surface.is_damaged
        return Decoded(picture, sent.raw_s, width, height, sent.is_key, is_corrupt, sent.lost)

    def _annex_b(self, packet: VideoPacket) -> bytes:
        """The packet in Annex B format; keyframes get the container's parameter sets."""
        content = bytes(packet)
        if self._filter is None:
            return content
        copy = av.Packet(content)  # the filter keeps its input
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
        raise NeedsCpu(f"NVDEC cannot read this stream's damaged parameters ({error.strerror})") from None


def _look_of(frame: av.VideoFrame) -> _Look:
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
