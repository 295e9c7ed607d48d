"""A stand-in of an NVDEC decoder where there is no card: FFmpeg underneath, NV12 in host memory.

It has the decoder's manners, as they were measured on an H200: garbage and lost packets give nothing, in silence; a
picture that was mended comes out, and is marked; pictures of another size than its first are an error; a flushed
decoder goes on at a keyframe; what it gave is over with its next call; the picture that is shown next has the lowest
stamp of all that the decoder holds; a decoder is made with its first packet, where the card has room. It is no proof of
what a card does: tests/gpu has the same tests on one.
"""

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import av
import numpy as np
from av.codec.context import Flags
from av.error import FFmpegError
from av.video.codeccontext import VideoCodecContext

from penstock_video.decode.codec import PacketRefused
from penstock_video.decode.nvcodec import NvCodec, Surface, refusal_of
from penstock_video.decode.verification import Plane, nv12_of
from penstock_video.errors import GpuFull, NeedsCpu
from penstock_video.types import DecoderSharing, DevicePicture

_MOST = {"width_max": 4096, "height_max": 4096, "mb_num_max": 65536}
LIMITS = {"h264": {"width_min": 48, "height_min": 16} | _MOST, "hevc": {"width_min": 144, "height_min": 144} | _MOST}
_OVER = 0xEE  # in the memory of a picture that is over


class FakeOpener:
    """Opens stand-ins. opened: all there were.

    are_broken: those opened from now on fail. room: how many the card has at once.
    """

    def __init__(self, room: int = sys.maxsize) -> None:
        self.opened: list[FakeNvCodec] = []
        self.are_broken = self.is_alone = False
        self.room = room

    def __call__(
        self, codec: str, stream: int, size: tuple[int, int], scaled: tuple[int, int] | None = None
    ) -> NvCodec:
        """One more; NeedsCpu as a card's limits would have it."""
        refusal = refusal_of(codec, size, LIMITS[codec])
        if refusal:
            raise NeedsCpu(refusal)
        self.opened.append(FakeNvCodec(codec, self._has_room, scaled))
        self.opened[-1].fails = self.are_broken
        return self.opened[-1]

    def for_camera(self) -> "FakeOpener":
        """The same: its decoders are counted together."""
        return self

    def may_join(self, codec: str, size: tuple[int, int]) -> bool:
        """None is shared."""
        return False

    @property
    def sharing(self) -> DecoderSharing:
        """None of its decoders is shared."""
        return DecoderSharing.OWN

    def _has_room(self) -> bool:
        return sum(one.is_made and not one.is_closed for one in self.opened) < self.room


class FakeNvCodec:
    """One decoder. fails: its next call raises. is_made: the card has it."""

    def __init__(
        self, codec: str, has_room: Callable[[], bool] = lambda: True, scaled: tuple[int, int] | None = None
    ) -> None:
        self.scaled = scaled
        context = av.CodecContext.create(codec, "r")
        assert isinstance(context, VideoCodecContext)
        context.thread_count, context.flags = 1, context.flags | Flags.output_corrupt
        self._context, self._has_room = context, has_room
        self._pictures = 0  # that were decoded
        self._held: dict[int, int] = {}  # stamps of pictures that were not shown yet, by their place
        self._size: tuple[int, int] | None = None
        self._memory: list[Plane] = []
        self.fails = self.is_made = self.is_closed = False

    def decode(self, data: bytes, stamp: int) -> list[Surface]:
        """What comes out with it."""
        self._let_go()
        if self.fails:
            raise PacketRefused("NVDEC: it fails", is_fatal=True)
        if not self.is_made and not self._has_room():
            raise GpuFull("the GPU makes no more decoders")
        self.is_made = True
        packet = av.Packet(data)
        packet.pts = self._pictures
        self._held[self._pictures] = stamp
        self._pictures += 1
        return self._surfaces(packet)

    def flush(self) -> list[Surface]:
        """What is left."""
        self._let_go()
        surfaces = self._surfaces(None)
        self._held.clear()
        self._context.flush_buffers()
        return surfaces

    def close(self) -> None:
        """Its memory is over."""
        self._let_go()
        self.is_closed = True

    def _surfaces(self, packet: "av.Packet[Any] | None") -> list[Surface]:
        try:
            frames = self._context.decode(packet)
        except FFmpegError:
            if packet is not None:
                self._pictures -= 1
                del self._held[self._pictures]
            return []
        return [self._surface(frame) for frame in frames]

    def _shown(self, frame: av.VideoFrame) -> int:
        """The picture's stamp."""
        if frame.key_frame or not self._context.has_b_frames:  # what FFmpeg swallowed before it is no picture
            self._held = {place: stamp for place, stamp in self._held.items() if place >= (frame.pts or 0)}
        place = min(self._held, key=self._held.__getitem__)
        return self._held.pop(place)

    def _surface(self, frame: av.VideoFrame) -> Surface:
        if self._size is None:
            self._size = (frame.width, frame.height)
        width, height = self._size
        if (frame.width, frame.height) != self._size:
            raise PacketRefused("NVDEC: the stream's format changed", is_fatal=True)
        shown, is_corrupt = self._shown(frame), frame.is_corrupt
        if self.scaled is not None:
            width, height = self.scaled
            frame = frame.reformat(width, height, interpolation="AREA")
        memory = nv12_of(frame)
        self._memory.append(memory)
        address = memory.ctypes.data
        return Surface(shown, address, address + width * height, width, width, height, is_corrupt)

    def _let_go(self) -> None:
        assert not self.is_closed
        for memory in self._memory:
            memory[:] = _OVER
        self._memory = self._memory[-64:]  # what is over may be read all the same, and is seen then


def frame_of(picture: DevicePicture, read: Callable[[int, int], bytes]) -> av.VideoFrame:
    """The picture as FFmpeg would have it in host memory, planar. read: so many bytes at an address of the card."""
    frame = av.VideoFrame(picture.width, picture.height, "yuv420p")
    luma, both = (
        np.frombuffer(read(address, picture.pitch * count), np.uint8).reshape(count, -1)[:, : picture.width]
        for address, count in ((picture.luma, picture.height), (picture.chroma, picture.height // 2))
    )
    for plane, pixels in zip(frame.planes, (luma, both[:, ::2], both[:, 1::2]), strict=True):
        padded = np.zeros((plane.height, plane.line_size), np.uint8)
        padded[:, : pixels.shape[1]] = pixels
        plane.update(padded.tobytes())
    frame.colorspace, frame.color_range = picture.matrix, 2 if picture.is_full_range else 1
    return frame


def read_host(address: int, size_bytes: int) -> bytes:
    """Of host memory, as a stand-in's pictures lie in it."""
    return ctypes.string_at(address, size_bytes)
