"""NVDEC: limits of the GPU, and one stream's decoder from bytes to picture addresses."""

import sys
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from penstock_video.decode.bitstream import headers_of
from penstock_video.decode.codec import PacketRefused
from penstock_video.decode.cuvid import OUT_OF_MEMORY, Cuvid, CuvidFailed, Parser, ParserEvents, PictureFormat, is_intra
from penstock_video.decode.pairing import OUTPUTS, DecoderPool, Lane
from penstock_video.decode.verification import HostPicture, PictureCheck, Verdict
from penstock_video.errors import GpuFull, NeedsCpu
from penstock_video.gpu.device import Device, DeviceBlock
from penstock_video.types import DecoderSharing

_NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED
_FULL = (
    "the GPU makes no more decoders (CUDA's error 2): it is out of memory, or of the driver's channels, as an H200 is "
    "after 288 decoders; give it fewer cameras, or with decoder: auto the CPU takes the rest"
)
MOST_UNCLEAR = 3  # checks in a row that the stream's damage ended
_MACROBLOCK = 16  # side in pixels; decoders count their limit in macroblocks


class Surface(NamedTuple):
    """A cropped NV12 picture in display order. luma, chroma: addresses; pitch: bytes per line. is_damaged: the decoder
    reports an error in it, concealed or not."""

    stamp: int
    luma: int
    chroma: int
    pitch: int
    width: int
    height: int
    is_damaged: bool = False


class NvCodec(Protocol):
    """One decoder. Its surfaces are valid until the next call."""

    def decode(self, data: bytes, stamp: int) -> list[Surface]:
        """data: Annex B. stamp: display order. Raises PacketRefused (fatal), NeedsCpu, GpuFull at the first packet."""

    def flush(self) -> list[Surface]:
        """The remaining pictures; decoding may continue at a keyframe."""

    def close(self) -> None:
        """Frees its memory."""


class OpenNvCodec(Protocol):
    """Opens decoders."""

    def __call__(
        self, codec: str, stream: int, size: tuple[int, int], scaled: tuple[int, int] | None = None
    ) -> NvCodec:
        """codec: h264 or hevc, 8 bit, 4:2:0. stream: CUDA stream. size: (width, height). scaled: of the surfaces, even;
        None for the same. Raises NeedsCpu, GpuFull."""


class NvdecOpener:
    """Opens decoders of one camera. is_alone: they are not shared with another camera, since its pictures were wrong in
    a shared one, or damaged whenever they were compared."""

    def __init__(self, device: Device, pool: DecoderPool | None = None) -> None:
        """pool: of the process. Raises NeedsCpu without the driver's library."""
        self.device, self.pool = device, DecoderPool(Cuvid()) if pool is None else pool
        self.is_alone = self.is_wrong = False
        self.lane: Lane | None = None

    @property
    def sharing(self) -> DecoderSharing:
        """How the camera uses its decoder now."""
        if self.is_wrong:
            return DecoderSharing.MISMATCH
        return DecoderSharing.SHARED if self.lane is not None and self.lane.is_shared else DecoderSharing.OWN

    def for_camera(self) -> "NvdecOpener":
        """One for another camera, with the same pool."""
        return NvdecOpener(self.device, self.pool)

    def may_join(self, codec: str, size: tuple[int, int]) -> bool:
        """Whether the camera probably shares a decoder that exists."""
        return not self.is_alone and self.pool.has_room(codec, size)

    def __call__(
        self, codec: str, stream: int, size: tuple[int, int], scaled: tuple[int, int] | None = None
    ) -> NvCodec:
        """A decoder on the GPU of the thread's context. Raises NeedsCpu."""
        refusal = refusal_of(codec, size, self.pool.cuvid.limits_of(codec))
        if refusal:
            raise NeedsCpu(refusal)
        return _Nvdec(self, codec, stream, size, scaled)


def refusal_of(codec: str, size: tuple[int, int], limits: dict[str, int]) -> str:
    """Why a GPU with these limits cannot decode this size; empty if it can."""
    width, height = size
    if not limits.get("num_decoder_engines", 1):
        return "the GPU has no video engine"
    least = (limits.get("width_min", 0), limits.get("height_min", 0))
    most = (limits.get("width_max", width), limits.get("height_max", height))
    blocks = -(-width // _MACROBLOCK) * -(-height // _MACROBLOCK)
    if width < least[0] or height < least[1]:
        return f"NVDEC takes {codec} of {least[0]}x{least[1]} and more, and this is {width}x{height}"
    if width > most[0] or height > most[1] or blocks > limits.get("mb_num_max", blocks):
        return f"NVDEC takes {codec} of {most[0]}x{most[1]} at most, and this is {width}x{height}"
    return ""


class _Nvdec:
    """An NvCodec. The decoder is made, or shared, with the first packet."""

    def __init__(
        self, opener: NvdecOpener, codec: str, stream: int, size: tuple[int, int], scaled: tuple[int, int] | None
    ) -> None:
        """size: of its pictures by FFmpeg, which was compared with the GPU's limits."""
        self._scaled = scaled
        self._opener, self._device, self._pool = opener, opener.device, opener.pool
        self._codec, self._stream, self._size = codec, stream, size
        self._parser: Parser | None = None
        self._lane: Lane | None = None
        self._format: PictureFormat | None = None
        self._surfaces: list[Surface] = []
        self._mapped: list[int] = []
        self._copies: list[DeviceBlock] = []
        self._sets, self._is_intra = b"", False  # of its stream; of its last picture
        self._check: PictureCheck | None = None
        self._checked = 0  # company with which its pictures were right
        self._company = self._unclear = 0  # of the check; checks in a row without a result

    def decode(self, data: bytes, stamp: int) -> list[Surface]:
        if self._parser is None:
            self._sets = headers_of(data, self._codec).sets
            events = ParserEvents(self._on_format, self._on_picture, self._on_display)
            self._parser = Parser(self._pool.cuvid, self._codec, events)
        parser = self._parser
        surfaces = self._given(lambda: parser.parse(data, stamp))
        lane = self._lane
        if lane is None or not lane.is_shared or self._checked == lane.company:
            self._check = None
        else:
            self._verify(lane, data, stamp, surfaces)
        return surfaces

    def flush(self) -> list[Surface]:
        parser, self._check = self._parser, None
        return self._given(parser.finish) if parser is not None else []

    def close(self) -> None:
        try:
            self._let_go()
            if self._parser is not None:
                self._parser.close()
        except CuvidFailed:  # the card is lost: nothing can be given back
            pass
        finally:
            self._parser = None
            if self._lane is not None:
                self._lane.end_turn()
                self._lane.close()
                if self._opener.lane is self._lane:  # not of a decoder that was opened meanwhile
                    self._opener.lane = None
                self._lane = None

    def _given(self, parse: Callable[[], None]) -> list[Surface]:
        self._surfaces = []
        try:
            self._let_go()
            parse()
        except CuvidFailed as error:
            if self._lane is None and error.code == OUT_OF_MEMORY:
                raise GpuFull(_FULL) from None
            if self._lane is None and error.code == _NOT_SUPPORTED:
                raise NeedsCpu(f"NVDEC does not take this stream ({error})") from None
            self._opener.is_alone = True  # it may be this stream's fault: its next decoder has no other stream
            raise PacketRefused(f"NVDEC: {error}", is_fatal=True) from None
        finally:
            if self._lane is not None:
                self._lane.end_turn()
        return self._surfaces

    def _on_format(self, found: PictureFormat) -> int:
        if found.size != self._size:
            sizes = [f"{width}x{height}" for width, height in (found.size, self._size)]
            raise NeedsCpu(f"NVDEC reads pictures of {sizes[0]} in a stream of {sizes[1]}")
        found = found._replace(scaled=self._scaled)
        if self._lane is None:
            self._lane = self._opener.lane = self._pool.lane(found, is_alone=self._opener.is_alone)
            self._format = found
        elif found != self._format:
            raise PacketRefused("NVDEC: the stream's format changed", is_fatal=True)
        return self._lane.surfaces

    def _on_picture(self, picture: int) -> None:
        if self._lane is None:
            raise PacketRefused("NVDEC: a picture arrived before its sequence parameter set", is_fatal=True)
        self._is_intra = is_intra(picture)
        self._lane.decode(picture)

    def _on_display(self, index: int, stamp: int) -> None:
        lane, found = self._lane, self._format
        if lane is None or found is None:
            return
        if len(self._surfaces) > lane.surfaces:  # each beyond OUTPUTS takes memory of the GPU
            raise PacketRefused(f"NVDEC: a packet shows more than {lane.surfaces} pictures", is_fatal=True)
        picture = lane.map(index, self._stream)
        lines = (found.output[1] + 1) & ~1  # of luma
        if len(self._mapped) < OUTPUTS:
            address = picture.address
            self._mapped.append(address)
        else:
            address = self._copied(lane, picture.address, picture.pitch * lines * 3 // 2)
        chroma = address + picture.pitch * lines
        size = found.scaled or found.size
        self._surfaces.append(Surface(stamp, address, chroma, picture.pitch, *size, picture.is_damaged))

    def _verify(self, lane: Lane, data: bytes, stamp: int, surfaces: list[Surface]) -> None:
        """Compares the first pictures beside another stream with software decoding. Raises PacketRefused if they
        differ; the next decoder is not shared."""
        if self._check is None:
            if not self._is_intra:
                return
            self._check, self._company = PictureCheck(self._codec), lane.company
            data = self._sets + data
        verdict = self._check.look(data, stamp, [self._on_host(one) for one in surfaces])
        if verdict is Verdict.OPEN:
            return
        self._check = None
        if verdict is Verdict.RIGHT:
            self._checked, self._unclear = self._company, 0
            return
        self._unclear += 1
        if verdict is Verdict.WRONG or self._unclear == MOST_UNCLEAR:
            self._leave(lane, is_wrong=verdict is Verdict.WRONG)

    def _leave(self, lane: Lane, *, is_wrong: bool) -> None:
        self._opener.is_alone = True
        if is_wrong:
            self._opener.is_wrong = True
            self._pool.refuse(lane.like)
        reason = "differ from FFmpeg's" if is_wrong else "are too damaged to be compared with FFmpeg's"
        width, height = lane.like.coded
        what = f"pictures of a camera ({self._codec} of {width}x{height}) that shares a decoder {reason}"
        sys.stderr.write(f"{what}: it gets a decoder of its own at its next keyframe\n")
        sys.stderr.flush()
        raise PacketRefused(f"NVDEC: {what}", is_fatal=True)

    def _on_host(self, surface: Surface) -> HostPicture:
        device, width, height = self._device, surface.width, surface.height
        lines = np.empty((height * 3 // 2, surface.pitch), np.uint8)
        chroma = lines[height:]
        device.copy(lines.ctypes.data, surface.luma, surface.pitch * height, self._stream)
        device.copy(chroma.ctypes.data, surface.chroma, chroma.nbytes, self._stream)
        device.wait(self._stream)
        return HostPicture(surface.stamp, lines[:, :width], surface.is_damaged)

    def _copied(self, lane: Lane, address: int, size_bytes: int) -> int:
        """A copy of a mapped picture, which is then unmapped: a flush shows more pictures than can be mapped."""
        block = self._device.allocate(size_bytes)
        self._copies.append(block)
        try:
            self._device.copy(block.address, address, size_bytes, self._stream)
            self._device.wait(self._stream)
        finally:
            lane.unmap(address)
        return block.address

    def _let_go(self) -> None:
        """The pictures of the last call are over."""
        mapped, self._mapped, copies, self._copies = self._mapped, [], self._copies, []
        for block in copies:
            block.close()
        if self._lane is not None:
            for address in mapped:
                self._lane.unmap(address)
