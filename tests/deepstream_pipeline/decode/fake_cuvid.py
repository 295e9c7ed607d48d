"""A stand-in of the driver's libnvcuvid, with FFmpeg underneath and NV12 in host memory.

It has the library's manners: the parser calls back within a call; a picture is decoded into the surface of its index
from the surfaces of its references, and is wrong if those hold other pictures by then; more mapped pictures than asked
for are an error; what is unmapped is over. It is no proof of what a card does: tests/gpu has the same tests on one.
"""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import av
import cv2
import numpy as np
import numpy.typing as npt
from av.codec.context import Flags
from av.error import FFmpegError
from av.video.codeccontext import VideoCodecContext

from penstock_video.decode import cuvid, cuvid_structures
from penstock_video.decode.verification import nv12_of
from tests.deepstream_pipeline.decode.fake_nvcodec import LIMITS

INVALID, FULL = 1, 2  # CUDA's error codes
_OVER = 0xEE
_NAMES = {number: name for name, number in cuvid.CODECS.items()}
_REFERENCES = {"h264": [72 + 7 * place for place in range(16)], "hevc": [109 + place for place in range(16)]}
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

Plane = npt.NDArray[np.uint8]


@dataclass(eq=False)
class Picture:
    """One that a parser found. before: the one that it refers to."""

    content: Plane
    before: "Picture | None"
    is_damaged: bool


class FakeParser:
    """Parser of one stream."""

    def __init__(self, library: "FakeCuvid", params: cuvid_structures.ParserParams) -> None:
        self.codec = _NAMES[params.codec]
        self._library = library
        self._on_format, self._on_picture, self._on_display = (
            _CALLBACK(address) for address in (params.on_format, params.on_picture, params.on_display)
        )
        context = av.CodecContext.create(self.codec, "r")
        assert isinstance(context, VideoCodecContext)
        context.thread_count, context.flags = 1, context.flags | Flags.output_corrupt
        self._context = context
        self._size: tuple[int, int] | None = None
        self._indices, self._next = 0, 0
        self._before: tuple[Picture, int] | None = None

    def parse(self, packet: cuvid_structures.SourcePacket) -> int:
        """What comes of a packet, or of the stream's end."""
        is_end = bool(packet.flags & 1)
        sent = None
        if not is_end:
            assert packet.flags == 2 | 8
            sent = av.Packet(ctypes.string_at(packet.content, packet.size))
            sent.pts = packet.timestamp
        try:
            frames = self._context.decode(sent)
        except FFmpegError:
            return 0
        finally:
            if is_end:
                self._context.flush_buffers()
        return 0 if all(self._show(frame) for frame in frames) else INVALID

    def _show(self, frame: av.VideoFrame) -> bool:
        size = frame.width, frame.height
        if size != self._size:
            self._size = size
            coded = [-(-side // 16) * 16 for side in size]
            found = cuvid_structures.VideoFormat(
                codec=cuvid.CODECS[self.codec],
                surfaces=self._library.surfaces,
                coded_width=coded[0],
                coded_height=coded[1],
                display_area=(0, 0, *size),
                chroma=1,
            )
            self._indices = self._on_format(None, ctypes.addressof(found))
            if not self._indices:
                return False
        index, self._next = self._next, (self._next + 1) % self._indices
        before = None if frame.key_frame else self._before
        picture = Picture(nv12_of(frame), before[0] if before else None, frame.is_corrupt)
        self._before = picture, index
        params = np.zeros(cuvid.PICTURE_BYTES // 4, np.int32)
        params[2], params[15] = index, frame.key_frame
        params[_REFERENCES[self.codec]] = -1
        if before:
            params[_REFERENCES[self.codec][3]] = before[1]
        params[6] = self._library.add(picture)
        if not self._on_picture(None, params.ctypes.data):
            return False
        shown = cuvid_structures.DisplayInfo(index=index, timestamp=frame.pts or 0)
        return all(self._on_display(None, ctypes.addressof(shown)) for _ in range(self._library.repeats))


@dataclass(eq=False)
class FakeDecoder:
    """A decoder. info: what it was made of."""

    info: dict[str, int]
    surfaces: list[Picture | None]
    mapped: dict[int, Plane] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)


def _scaled(nv12: Plane, width: int, height: int) -> Plane:
    """(H * 3 / 2, W) of another size."""
    lines = nv12.shape[0] * 2 // 3
    chroma = nv12[lines:].reshape(lines // 2, -1, 2)
    luma = cv2.resize(nv12[:lines], (width, height), interpolation=cv2.INTER_AREA)
    small = cv2.resize(chroma, (width // 2, height // 2), interpolation=cv2.INTER_AREA)
    return np.concatenate([luma, small.reshape(height // 2, width)])


class FakeCuvid:
    """The library. surfaces: that a stream needs. room: decoders that the card makes. repeats: of a picture that is
    shown. fails: functions that answer an error code from now on. made: of all decoders that there were."""

    def __init__(self, surfaces: int = 4, room: int = 100) -> None:
        self.surfaces, self.room, self.repeats = surfaces, room, 1
        self.fails: dict[str, int] = {}
        self.made: list[dict[str, int]] = []
        self.decoders: dict[int, FakeDecoder] = {}
        self.parsers: dict[int, FakeParser] = {}
        self._pictures: list[Picture] = []
        self._memory: list[Plane] = []  # what is over may be read all the same, and is seen then
        self._handles = 0

    def __getattr__(self, name: str) -> Any:
        """A function of the library, or what it answers now."""
        if not name.startswith("cuvid"):
            raise AttributeError(name)
        return lambda *arguments: self.fails.get(name) or getattr(self, f"_{name[5:]}")(*arguments)

    def add(self, picture: Picture) -> int:
        """Its number, in a picture's parameters."""
        self._pictures.append(picture)
        return len(self._pictures) - 1

    def _handle(self, address: int) -> int:
        self._handles += 1
        ctypes.c_void_p.from_address(address).value = self._handles
        return self._handles

    def _GetDecoderCaps(self, address: int) -> int:
        caps = cuvid_structures.Caps.from_address(address)
        limits = LIMITS[_NAMES[caps.codec]]
        caps.is_supported, caps.engines = 1, 7
        caps.width_min, caps.height_min = limits["width_min"], limits["height_min"]
        caps.width_max, caps.height_max, caps.blocks_max = 4096, 4080, 65280
        return 0

    def _CreateVideoParser(self, handle: int, params: int) -> int:
        self.parsers[self._handle(handle)] = FakeParser(self, cuvid_structures.ParserParams.from_address(params))
        return 0

    def _ParseVideoData(self, handle: ctypes.c_void_p, packet: int) -> int:
        return self.parsers[handle.value or 0].parse(cuvid_structures.SourcePacket.from_address(packet))

    def _DestroyVideoParser(self, handle: ctypes.c_void_p) -> int:
        del self.parsers[handle.value or 0]
        return 0

    def _CreateDecoder(self, handle: int, address: int) -> int:
        if len(self.decoders) >= self.room:
            return FULL
        info = cuvid_structures.CreateInfo.from_address(address)
        numbers = {name: getattr(info, name) for name, kind in info._fields_ if isinstance(getattr(info, name), int)}
        self.made.append(numbers)
        self.decoders[self._handle(handle)] = FakeDecoder(numbers, [None] * info.surfaces)
        return 0

    def _DestroyDecoder(self, handle: ctypes.c_void_p) -> int:
        assert not self.decoders.pop(handle.value or 0).mapped
        return 0

    def _DecodePicture(self, handle: ctypes.c_void_p, address: int) -> int:
        decoder = self.decoders[handle.value or 0]
        params = np.ctypeslib.as_array((ctypes.c_int32 * (cuvid.PICTURE_BYTES // 4)).from_address(address))
        picture = self._pictures[params[6]]
        codec, index = _NAMES[decoder.info["codec"]], int(params[2])
        named = {int(params[place]) for place in _REFERENCES[codec] if params[place] >= 0}
        usable = named & decoder.known if codec == "hevc" else named  # it forgets what a picture does not name
        if picture.before is not None and picture.before not in [decoder.surfaces[one] for one in usable]:
            picture.content = 255 - picture.content
        decoder.known = (decoder.known & named) | {index}
        decoder.surfaces[index] = picture
        return 0

    def _MapVideoFrame64(self, handle: ctypes.c_void_p, index: int, address: int, pitch: int, params: int) -> int:
        decoder = self.decoders[handle.value or 0]
        picture = decoder.surfaces[index]
        if picture is None or len(decoder.mapped) >= decoder.info["output_surfaces"]:
            return INVALID
        assert cuvid_structures.ProcessParams.from_address(params).is_progressive
        width, height = decoder.info["target_width"], decoder.info["target_height"]
        content = picture.content
        if (width, height) != (decoder.info["width"], decoder.info["height"]):
            content = _scaled(content, width, height)
        lines, pixels = content.shape[0] * 2 // 3, content.shape[1]
        memory = np.zeros((height * 3 // 2, width + 64), np.uint8)
        memory[:lines, :pixels] = content[:lines]
        memory[height : height + lines // 2, :pixels] = content[lines:]
        self._memory = [*self._memory[-64:], memory]
        decoder.mapped[memory.ctypes.data] = memory
        ctypes.c_ulonglong.from_address(address).value = memory.ctypes.data
        ctypes.c_uint.from_address(pitch).value = width + 64
        return 0

    def _UnmapVideoFrame64(self, handle: ctypes.c_void_p, address: int) -> int:
        self.decoders[handle.value or 0].mapped.pop(address)[:] = _OVER
        return 0

    def _GetDecodeStatus(self, handle: ctypes.c_void_p, index: int, address: int) -> int:
        picture = self.decoders[handle.value or 0].surfaces[index]
        status = 9 if picture is not None and picture.is_damaged else 2
        cuvid_structures.DecodeStatus.from_address(address).status = status
        return 0
