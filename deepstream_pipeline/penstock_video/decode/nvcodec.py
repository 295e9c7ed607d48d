"""NVDEC through NVIDIA's PyNvVideoCodec: limits of the GPU, and one decoder from bytes to picture addresses."""

import ctypes
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from penstock_video.decode.codec import PacketRefused
from penstock_video.errors import GpuFull, NeedsCpu

_LIBRARY = "libnvcuvid.so.1"
_CODECS = {"h264": 4, "hevc": 8}  # cudaVideoCodec
_CHROMA_420 = 1  # cudaVideoChromaFormat_420


class _Caps(ctypes.Structure):
    """CUVIDDECODECAPS of cuviddec.h."""

    _fields_ = (
        ("codec", ctypes.c_int),
        ("chroma", ctypes.c_int),
        ("bit_depth_minus_8", ctypes.c_uint),
        ("reserved_1", ctypes.c_uint * 3),
        ("is_supported", ctypes.c_ubyte),
        ("engines", ctypes.c_ubyte),
        ("output_formats", ctypes.c_ushort),
        ("width_max", ctypes.c_uint),
        ("height_max", ctypes.c_uint),
        ("blocks_max", ctypes.c_uint),
        ("width_min", ctypes.c_ushort),
        ("height_min", ctypes.c_ushort),
        ("histogram", ctypes.c_ubyte * 2),
        ("bins", ctypes.c_ushort),
        ("reserved_3", ctypes.c_uint * 10),
    )


def limits_of(codec: str, library: Any = None) -> dict[str, int]:
    """Limits of h264 or hevc in 8 bit, 4:2:0: num_decoder_engines, width_min, height_min, width_max, height_max and
    mb_num_max (macroblocks). library: libnvcuvid; None to search for it. Raises NeedsCpu if the driver does not
    answer."""
    try:
        library = ctypes.CDLL(_LIBRARY) if library is None else library
    except OSError as error:
        raise NeedsCpu(f"NVIDIA's {_LIBRARY} is not here ({error})") from None
    caps = _Caps(codec=_CODECS[codec], chroma=_CHROMA_420)
    code = library.cuvidGetDecoderCaps(ctypes.byref(caps))
    if code:
        raise NeedsCpu(f"the card does not say what NVDEC takes (cuvidGetDecoderCaps answers {code})")
    return {
        "num_decoder_engines": caps.engines if caps.is_supported else 0,
        "width_min": caps.width_min,
        "height_min": caps.height_min,
        "width_max": caps.width_max,
        "height_max": caps.height_max,
        "mb_num_max": caps.blocks_max,
    }


_ERROR_TYPE = "Error Type :"
_IS_FULL = re.compile(r"Error code : 2\b|returned error 2\b|OUT_OF_MEMORY|out of memory")
_FULL = (
    "the GPU makes no more decoders (CUDA's error 2): it is out of memory, or of the driver's channels, as an H200 is "
    "after 288 decoders; give it fewer cameras, or with decoder: auto the CPU takes the rest"
)
_MACROBLOCK = 16  # side in pixels; decoders count their limit in macroblocks


class Surface(NamedTuple):
    """A cropped NV12 picture in display order. luma, chroma: addresses; pitch: bytes per line."""

    stamp: int
    luma: int
    chroma: int
    pitch: int
    width: int
    height: int


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

    def __call__(self, codec: str, stream: int, size: tuple[int, int]) -> NvCodec:
        """codec: h264 or hevc, 8 bit, 4:2:0. stream: CUDA stream. size: (width, height). Raises NeedsCpu, GpuFull."""


class NvdecOpener:
    """Opens decoders of one GPU. Thread-safe."""

    def __init__(self, gpu: int = 0, limits_of: Callable[[str], dict[str, int]] = limits_of) -> None:
        """gpu: its index. limits_of: called with h264 or hevc. Raises NeedsCpu without the library or a driver."""
        try:
            import PyNvVideoCodec
        except (ImportError, OSError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise NeedsCpu(f"NVDEC needs the package PyNvVideoCodec and NVIDIA's driver ({reason})") from None
        self._library: ModuleType = PyNvVideoCodec
        self._gpu, self._limits_of = gpu, limits_of

    def __call__(self, codec: str, stream: int, size: tuple[int, int]) -> NvCodec:
        """A decoder on the GPU of the thread's context. Raises NeedsCpu, GpuFull."""
        refusal = refusal_of(codec, size, self._limits_of(codec))
        if refusal:
            raise NeedsCpu(refusal)
        library = self._library
        codec_id = library.cudaVideoCodec.HEVC if codec == "hevc" else library.cudaVideoCodec.H264
        try:
            decoder = library.CreateDecoder(
                gpuid=self._gpu,
                codec=codec_id,
                cudacontext=0,
                cudastream=stream,
                usedevicememory=True,
                latency=library.DisplayDecodeLatencyType.LOW,
            )
        except (library.PyNvVCException, library.PyNvVCExceptionUnsupported, RuntimeError) as error:
            if _is_full(error):
                raise GpuFull(_FULL) from None
            raise NeedsCpu(f"NVDEC cannot decode {codec} of {size[0]}x{size[1]} ({_error_text(error)})") from None
        return _Nvdec(library, decoder)


def refusal_of(codec: str, size: tuple[int, int], limits: dict[str, int]) -> str:
    """Why a GPU with these limits cannot decode this size; empty if it can."""
    width, height = size
    if not limits.get("num_decoder_engines", 1):
        return "the card has no video engine"
    least = (limits.get("width_min", 0), limits.get("height_min", 0))
    most = (limits.get("width_max", width), limits.get("height_max", height))
    blocks = -(-width // _MACROBLOCK) * -(-height // _MACROBLOCK)
    if width < least[0] or height < least[1]:
        return f"NVDEC takes {codec} of {least[0]}x{least[1]} and more, and this is {width}x{height}"
    if width > most[0] or height > most[1] or blocks > limits.get("mb_num_max", blocks):
        return f"NVDEC takes {codec} of {most[0]}x{most[1]} at most, and this is {width}x{height}"
    return ""


class _Nvdec:
    """An NvCodec: PyNvVideoCodec's decoder."""

    def __init__(self, library: ModuleType, decoder: Any) -> None:
        self._library, self._decoder = library, decoder
        self._packet = library.PacketData()
        self._packet.decode_flag = library.VideoPacketFlag.ENDOFPICTURE
        self._end = library.PacketData()
        self._layout: tuple[tuple[int, ...], int, int] = ((), 0, 0)  # (shape, pitch, from luma to chroma)
        self._frames: list[Any] = []  # borrowed from the decoder

    def decode(self, data: bytes, stamp: int) -> list[Surface]:
        packet = self._packet
        packet.bsl_data, packet.bsl, packet.pts = _address_of(data), len(data), stamp
        return self._given(packet)

    def flush(self) -> list[Surface]:
        return self._given(self._end)

    def close(self) -> None:
        self._frames, self._decoder = [], None

    def _given(self, packet: Any) -> list[Surface]:
        try:
            self._frames = self._decoder.Decode(packet)
        except self._library.PyNvVCExceptionUnsupported as error:  # not a PyNvVCException
            raise NeedsCpu(f"NVDEC does not take this stream ({_error_text(error)})") from None
        except (self._library.PyNvVCException, RuntimeError) as error:
            if not self._layout[0] and _is_full(error):  # no picture yet: the decoder could not be created
                raise GpuFull(_FULL) from None
            raise PacketRefused(f"NVDEC: {_error_text(error)}", is_fatal=True) from None
        return [self._surface(frame) for frame in self._frames]

    def _surface(self, frame: Any) -> Surface:
        shape = tuple(frame.shape)
        if shape != self._layout[0]:
            luma, chroma = (view.__cuda_array_interface__ for view in frame.cuda())
            self._layout = shape, int(luma["strides"][0]), int(chroma["data"][0]) - int(luma["data"][0])
        _, pitch, apart = self._layout
        address = int(frame.GetPtrToPlane(0))
        return Surface(int(frame.getPTS()), address, address + apart, pitch, shape[1], shape[0] * 2 // 3)


def _address_of(data: bytes) -> int:
    """Address of its first byte; valid while the bytes exist."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def _is_full(error: BaseException) -> bool:
    """Whether the library's text reports CUDA_ERROR_OUT_OF_MEMORY, 2."""
    return _IS_FULL.search(str(error)) is not None


def _error_text(error: BaseException) -> str:
    """The reason in the library's text, which also has a function, a code and a location."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    words = next((line for line in lines if line.startswith(_ERROR_TYPE)), lines[0])
    return words.removeprefix(_ERROR_TYPE).strip()[:200]
