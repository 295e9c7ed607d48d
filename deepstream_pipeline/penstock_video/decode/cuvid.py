"""NVIDIA's libnvcuvid by ctypes: a parser of one stream's packets, and decoders of the card.

No I/O beyond the driver.
"""

import ctypes
from collections.abc import Callable
from ctypes import c_int, c_uint, c_void_p
from typing import Any, NamedTuple

from penstock_video.decode.cuvid_structures import (
    Caps,
    CreateInfo,
    DecodeStatus,
    DisplayInfo,
    ParserParams,
    ProcessParams,
    SourcePacket,
    VideoFormat,
)
from penstock_video.errors import NeedsCpu

LIBRARY = "libnvcuvid.so.1"
CODECS = {"h264": 4, "hevc": 8}  # cudaVideoCodec
CHROMA_420 = 1  # cudaVideoChromaFormat_420
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_PREFER_CUVID = 4  # the card's video engines
_END_OF_STREAM, _TIMESTAMP, _END_OF_PICTURE = 1, 2, 8
_CLOCK_HZ = 1000
_UNDER_WAY, _DAMAGED = 1, (8, 9)  # cuvidDecodeStatus; an error, concealed or not

PICTURE_BYTES = 4280  # CUVIDPICPARAMS, of whose 4-byte integers:
CURRENT = 2  # CurrPicIdx
_INTRA = 15  # intra_pic_flag
REFERENCES = {"h264": slice(72, 72 + 16 * 7, 7), "hevc": slice(109, 109 + 16)}  # dpb[].PicIdx; RefPicIdx[]


class PictureFormat(NamedTuple):
    """A sequence's pictures. surfaces: least number to decode it. coded: (width, height) in pixels. area: (left, top,
    right, bottom) that is displayed. chroma: 1 for 4:2:0. scaled: (width, height) to which the decoder scales the area,
    even; None for whole pictures of the coded size."""

    codec: str
    chroma: int
    bit_depth: int
    coded: tuple[int, int]
    area: tuple[int, int, int, int]
    surfaces: int
    scaled: tuple[int, int] | None = None

    @property
    def output(self) -> tuple[int, int]:
        """(width, height) of the decoder's output, before cropping."""
        return self.scaled or self.coded

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of the displayed area."""
        left, top, right, bottom = self.area
        return right - left, bottom - top


class CuvidFailed(Exception):
    """A call of the driver's video library failed with a CUDA error code."""

    def __init__(self, function: str, code: int | str) -> None:
        super().__init__(f"{function} answers {code}")
        self.code = code


_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuvidGetDecoderCaps": (c_void_p,),
    "cuvidCreateVideoParser": (c_void_p, c_void_p),
    "cuvidParseVideoData": (c_void_p, c_void_p),
    "cuvidDestroyVideoParser": (c_void_p,),
    "cuvidCreateDecoder": (c_void_p, c_void_p),
    "cuvidDestroyDecoder": (c_void_p,),
    "cuvidDecodePicture": (c_void_p, c_void_p),
    "cuvidGetDecodeStatus": (c_void_p, c_int, c_void_p),
    "cuvidMapVideoFrame64": (c_void_p, c_int, c_void_p, c_void_p, c_void_p),
    "cuvidUnmapVideoFrame64": (c_void_p, ctypes.c_ulonglong),
}
# Called for every picture, for microseconds: to release the GIL and take it again costs more with many cameras.
_WITH_GIL = ("cuvidParseVideoData", "cuvidDecodePicture", "cuvidGetDecodeStatus", "cuvidUnmapVideoFrame64")
_CALLBACK = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p)


class Cuvid:
    """The library. Its calls need the thread's CUDA context, and raise CuvidFailed. Those that wait release the GIL."""

    def __init__(self, library: Any = None) -> None:
        """library: an object with the functions; None for the driver's. Raises NeedsCpu if there is none."""
        if library is None:
            self._functions = _functions()
        else:
            self._functions = {name: getattr(library, name) for name in _FUNCTIONS}

    def call(self, name: str, *arguments: Any) -> None:
        """Calls one function."""
        code = self._functions[name](*arguments)
        if code:
            raise CuvidFailed(name, code)

    def limits_of(self, codec: str) -> dict[str, int]:
        """Limits of h264 or hevc in 8 bit, 4:2:0: num_decoder_engines, width_min, height_min, width_max, height_max
        and mb_num_max (macroblocks). Raises NeedsCpu if the driver does not answer."""
        caps = Caps(codec=CODECS[codec], chroma=CHROMA_420)
        try:
            self.call("cuvidGetDecoderCaps", ctypes.addressof(caps))
        except CuvidFailed as error:
            raise NeedsCpu(f"the driver does not report what NVDEC supports ({error})") from None
        return {
            "num_decoder_engines": caps.engines if caps.is_supported else 0,
            "width_min": caps.width_min,
            "height_min": caps.height_min,
            "width_max": caps.width_max,
            "height_max": caps.height_max,
            "mb_num_max": caps.blocks_max,
        }


def _functions() -> dict[str, Any]:
    try:
        waiting, quick = ctypes.CDLL(LIBRARY), ctypes.PyDLL(LIBRARY)
    except OSError as error:
        raise NeedsCpu(f"NVIDIA's {LIBRARY} was not found ({error}): install the driver's video libraries") from None
    found: dict[str, Any] = {}
    for name, arguments in _FUNCTIONS.items():
        found[name] = function = getattr(quick if name in _WITH_GIL else waiting, name)
        function.argtypes, function.restype = arguments, c_int
    return found


class ParserEvents(NamedTuple):
    """Called within `Parser.parse`. format: returns the number of decode surfaces. picture: gets the address of a
    CUVIDPICPARAMS, to be decoded now. display: gets the picture index and the timestamp."""

    format: Callable[[PictureFormat], int]
    picture: Callable[[int], None]
    display: Callable[[int, int], None]


class Parser:
    """Parser of one stream, without display delay. For one thread at a time."""

    def __init__(self, cuvid: Cuvid, codec: str, events: ParserEvents) -> None:
        """codec: h264 or hevc. Raises CuvidFailed."""
        self._cuvid, self._codec, self._events = cuvid, codec, events
        self._fault: BaseException | None = None
        self._callbacks = [_CALLBACK(one) for one in (self._on_format, self._on_picture, self._on_display)]
        addresses = [ctypes.cast(one, c_void_p).value for one in self._callbacks]
        params = ParserParams(
            codec=CODECS[codec],
            surfaces=1,  # until the format is known
            clock_hz=_CLOCK_HZ,
            on_format=addresses[0],
            on_picture=addresses[1],
            on_display=addresses[2],
        )
        self._handle = c_void_p()
        cuvid.call("cuvidCreateVideoParser", ctypes.addressof(self._handle), ctypes.addressof(params))
        self._packet = SourcePacket()

    def parse(self, data: bytes, stamp: int) -> None:
        """One picture in Annex B. Raises CuvidFailed, and what a callback raised."""
        content = ctypes.cast(ctypes.c_char_p(data), c_void_p).value or 0
        self._send(_END_OF_PICTURE | _TIMESTAMP, content, len(data), stamp)

    def finish(self) -> None:
        """Displays what is left. Raises as parse does."""
        self._send(_END_OF_STREAM, 0, 0, 0)

    def close(self) -> None:
        """A second call does nothing."""
        if self._callbacks:
            self._callbacks = []  # they refer to this object
            self._cuvid.call("cuvidDestroyVideoParser", self._handle)

    def _send(self, flags: int, content: int, size: int, stamp: int) -> None:
        packet = self._packet
        packet.flags, packet.content, packet.size, packet.timestamp = flags, content, size, stamp
        self._fault = None
        try:
            self._cuvid.call("cuvidParseVideoData", self._handle, ctypes.addressof(packet))
        except CuvidFailed:
            if self._fault is None:
                raise
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault

    def _on_format(self, _: int, address: int) -> int:
        found = VideoFormat.from_address(address)
        left, top, right, bottom = found.display_area
        size = found.coded_width, found.coded_height
        depth = 8 + max(found.luma_bits_minus_8, found.chroma_bits_minus_8)
        seen = PictureFormat(self._codec, found.chroma, depth, size, (left, top, right, bottom), found.surfaces)
        return self._attempt(lambda: self._events.format(seen))

    def _on_picture(self, _: int, address: int) -> int:
        return self._attempt(lambda: self._events.picture(address))

    def _on_display(self, _: int, address: int | None) -> int:
        if not address:
            return 1
        shown = DisplayInfo.from_address(address)
        return self._attempt(lambda: self._events.display(shown.index, shown.timestamp))

    def _attempt(self, action: Callable[[], int | None]) -> int:
        """Return value for the library: 0 after an exception, which `parse` then raises."""
        if self._fault is not None:
            return 0
        try:
            return action() or 1
        except BaseException as fault:  # noqa: BLE001 - it must not pass through the library; parse raises it
            self._fault = fault
            return 0


def is_intra(picture: int) -> bool:
    """Whether the picture refers to no other one. picture: address of a CUVIDPICPARAMS."""
    return bool(c_int.from_address(picture + 4 * _INTRA).value)


class MappedPicture(NamedTuple):
    """A picture in GPU memory, NV12. pitch: bytes per line. is_damaged: the decoder reports an error in it."""

    address: int
    pitch: int
    is_damaged: bool


class HardwareDecoder:
    """A decoder of the card. Its pictures have the size `like.output`."""

    def __init__(self, cuvid: Cuvid, like: PictureFormat, surfaces: int, outputs: int) -> None:
        """surfaces: for decoding. outputs: pictures mapped at the same time. Raises CuvidFailed."""
        width, height = like.coded
        info = CreateInfo(
            width=width,
            height=height,
            surfaces=surfaces,
            codec=CODECS[like.codec],
            chroma=like.chroma,
            flags=_PREFER_CUVID,
            bit_depth_minus_8=like.bit_depth - 8,
            width_max=width,
            height_max=height,
            target_width=like.output[0],
            target_height=like.output[1],
            output_surfaces=outputs,
        )
        if like.scaled is not None:  # else the whole coded picture, of which the caller takes a part
            info.display_area[:] = like.area
        self._cuvid, self._handle, self._is_open = cuvid, c_void_p(), True
        cuvid.call("cuvidCreateDecoder", ctypes.addressof(self._handle), ctypes.addressof(info))

    def decode(self, picture: int) -> None:
        """picture: address of a CUVIDPICPARAMS. Raises CuvidFailed."""
        self._cuvid.call("cuvidDecodePicture", self._handle, picture)

    def map(self, index: int, stream: int) -> MappedPicture:
        """Waits for the picture and maps it, in the order of a CUDA stream. Raises CuvidFailed."""
        address, pitch = ctypes.c_ulonglong(), c_uint()
        params = ProcessParams(is_progressive=1, stream=stream)
        pointers = (ctypes.addressof(one) for one in (address, pitch, params))
        self._cuvid.call("cuvidMapVideoFrame64", self._handle, index, *pointers)
        return MappedPicture(address.value, pitch.value, self._status(index) in _DAMAGED)

    def is_under_way(self, index: int) -> bool:
        """Whether the picture is being decoded."""
        return self._status(index) == _UNDER_WAY

    def unmap(self, address: int) -> None:
        """Call it when the picture is no longer read. Raises CuvidFailed."""
        self._cuvid.call("cuvidUnmapVideoFrame64", self._handle, address)

    def close(self) -> None:
        """A second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._cuvid.call("cuvidDestroyDecoder", self._handle)

    def _status(self, index: int) -> int:
        """cuvidDecodeStatus; 0 if it is not known."""
        status = DecodeStatus()
        try:
            self._cuvid.call("cuvidGetDecodeStatus", self._handle, index, ctypes.addressof(status))
        except CuvidFailed:  # not every card answers
            return 0
        return int(status.status)
