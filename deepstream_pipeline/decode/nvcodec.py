"""NVDEC through NVIDIA's PyNvVideoCodec: one decoder, bytes in, addresses of pictures out.

What it does was measured (2.2.4, on an H200): a picture comes out with its packet, or as soon as the order of showing
lets it, with the lowest stamp of all that it holds; one that it had to mend comes out, too, and the library says so on
the process's C stdout only (`decode_errors`); of garbage, and of packets that are missing, nothing comes, in silence;
after a flush the same decoder goes on at a keyframe; pictures of another size than its first ones are scaled to that,
in silence, or fail. A decoder is made with its first packet; an H200 has 288 at once, of whatever size, since each
takes seven of the driver's channels, and what is beyond them is answered as memory that is full.
"""

import ctypes
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from deepstream_pipeline.decode.codec import PacketRefused
from deepstream_pipeline.decode.cuvid import limits_of
from deepstream_pipeline.errors import GpuFull, NeedsCpu

_WORDS = "Error Type :"
_IS_FULL = re.compile(r"Error code : 2\b|returned error 2\b|OUT_OF_MEMORY|out of memory")
_FULL = (
    "the GPU makes no more decoders (CUDA's error 2): it is out of memory, or of the driver's channels, as an H200 is "
    "after 288 decoders; give it fewer cameras, or with decoder: auto the CPU takes the rest"
)
_MACROBLOCK = 16  # its side, in which a decoder counts how much it can take


class Surface(NamedTuple):
    """A picture (NV12) in the order of showing, as its decoder cropped it. stamp: the lowest of those that were given
    with the pictures that the decoder held.

    luma, chroma: addresses; pitch: bytes from line to line.
    """

    stamp: int
    luma: int
    chroma: int
    pitch: int
    width: int
    height: int


class NvCodec(Protocol):
    """One decoder. Surfaces are over with its next call."""

    def decode(self, data: bytes, stamp: int) -> list[Surface]:
        """data: a packet, Annex B. stamp: its place in the order of showing. Raises PacketRefused, fatal, where the
        decoder fails; NeedsCpu where it says that its card does not take such a stream; GpuFull where the card has no
        room for it, which is found with its first packet."""

    def flush(self) -> list[Surface]:
        """All that is left; it may go on at a keyframe."""

    def close(self) -> None:
        """Give its memory back."""


class OpenNvCodec(Protocol):
    """Opens decoders."""

    def __call__(self, codec: str, stream: int, size: tuple[int, int]) -> NvCodec:
        """codec: h264 or hevc, 8 bit, 4:2:0. stream: the CUDA stream of its copies. size: (width, height).

        Raises NeedsCpu where it cannot be, GpuFull where it cannot be now.
        """


class NvdecOpener:
    """Opens decoders of one card. Every thread may use it."""

    def __init__(self, gpu: int = 0, limits_of: Callable[[str], dict[str, int]] = limits_of) -> None:
        """gpu: the card's number. limits_of: told h264 or hevc. Raises NeedsCpu where the library is not installed, or
        finds no driver."""
        try:
            import PyNvVideoCodec
        except (ImportError, OSError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise NeedsCpu(f"NVDEC needs the package PyNvVideoCodec and NVIDIA's driver ({reason})") from None
        self._library: ModuleType = PyNvVideoCodec
        self._gpu, self._limits_of = gpu, limits_of

    def __call__(self, codec: str, stream: int, size: tuple[int, int]) -> NvCodec:
        """A decoder, of the card whose context the thread has. Raises NeedsCpu, GpuFull."""
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
            raise NeedsCpu(f"NVDEC cannot decode {codec} of {size[0]}x{size[1]} ({_words_of(error)})") from None
        return _Nvdec(library, decoder)


def refusal_of(codec: str, size: tuple[int, int], limits: dict[str, int]) -> str:
    """Why a card with those limits (cuvid.limits_of) does not take pictures of that size; empty where it does."""
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
        self._frames: list[Any] = []  # borrowed

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
        except self._library.PyNvVCExceptionUnsupported as error:  # no kind of PyNvVCException
            raise NeedsCpu(f"NVDEC does not take this stream ({_words_of(error)})") from None
        except (self._library.PyNvVCException, RuntimeError) as error:
            if not self._layout[0] and _is_full(error):  # nothing came of it yet: it could not be made
                raise GpuFull(_FULL) from None
            raise PacketRefused(f"NVDEC: {_words_of(error)}", is_fatal=True) from None
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
    """Of its first byte; valid as long as the bytes are."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def _is_full(error: BaseException) -> bool:
    """Whether it is CUDA_ERROR_OUT_OF_MEMORY, 2, as the library words it here and there."""
    return _IS_FULL.search(str(error)) is not None


def _words_of(error: BaseException) -> str:
    """The library writes "HandleVideoSequence : ", the code, "Error Type : " and the words, and where it stands."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    words = next((line for line in lines if line.startswith(_WORDS)), lines[0])
    return words.removeprefix(_WORDS).strip()[:200]
