"""A stand-in of the package PyNvVideoCodec, as far as `nvcodec` calls it; its pictures are FakeNvCodec's."""

import ctypes
from types import SimpleNamespace
from typing import Any

from penstock_video.decode.codec import PacketRefused
from penstock_video.decode.nvcodec import Surface
from tests.deepstream_pipeline.decode.fake_nvcodec import FakeNvCodec


class PyNvVCException(Exception):
    """The library's."""


class PyNvVCExceptionUnsupported(Exception):
    """Its other one, which is no kind of the first: what a card does not decode."""


class PacketData:
    """What is decoded."""

    bsl_data = bsl = pts = decode_flag = 0


class Frame:
    """A decoded picture."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface
        self.shape = (surface.height * 3 // 2, surface.width)

    def getPTS(self) -> int:
        """Its stamp."""
        return self._surface.stamp

    def GetPtrToPlane(self, plane: int) -> int:
        """An address."""
        return (self._surface.luma, self._surface.chroma)[plane]

    def cuda(self) -> list[Any]:
        """Views of its planes."""
        one = self._surface
        return [
            view(one.luma, (one.height, one.width, 1), (one.pitch, 1, 1)),
            view(one.chroma, (one.height // 2, one.width // 2, 2), (one.pitch, 2, 1)),
        ]


def view(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """As CUDA's array interface has it."""
    interface = {"data": (address, False), "shape": shape, "strides": strides, "typestr": "|u1", "version": 3}
    return SimpleNamespace(__cuda_array_interface__=interface)


NOT_MADE = "m_api.cuvidCreateDecoder(&m_hDecoder, &videoDecodeCreateInfo) returned error 2"


def text_of(code: int, words: str) -> str:
    """As the library words an error (2.2.4)."""
    return f"HandleVideoSequence : \nError code : {code}\nError Type : {words}\nat /project/NvDecoder.cpp:430\n"


class FakeLibrary:
    """The module. asked: the arguments of each decoder; refusal: what all that are asked for from now on end with."""

    cudaVideoCodec = SimpleNamespace(H264="h264", HEVC="hevc")
    DisplayDecodeLatencyType = SimpleNamespace(LOW="low")
    VideoPacketFlag = SimpleNamespace(ENDOFPICTURE=8)
    PyNvVCException = PyNvVCException
    PyNvVCExceptionUnsupported = PyNvVCExceptionUnsupported
    PacketData = PacketData

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.decoders: list[FakeDecoder] = []
        self.refusal: Exception | None = None

    def CreateDecoder(self, **asked: Any) -> "FakeDecoder":
        """One."""
        if self.refusal is not None:
            raise self.refusal
        self.asked.append(asked)
        self.decoders.append(FakeDecoder(asked["codec"]))
        return self.decoders[-1]


class FakeDecoder:
    """The library's decoder. refuses: its card takes no such stream, as it finds with the first packet. is_full: the
    card has no room: for it, as it finds then, too, or for another picture."""

    def __init__(self, codec: str) -> None:
        self.inner = FakeNvCodec(codec, lambda line: None)
        self.refuses = self.is_full = False

    def Decode(self, packet: PacketData) -> list[Frame]:
        """Of a packet, or what is left."""
        if self.refuses:
            raise PyNvVCExceptionUnsupported(text_of(801, "Codec not supported on this GPU"))
        if self.is_full:
            raise PyNvVCException(text_of(2, NOT_MADE))
        try:
            if not packet.bsl:
                return [Frame(one) for one in self.inner.flush()]
            assert packet.decode_flag == FakeLibrary.VideoPacketFlag.ENDOFPICTURE
            data = ctypes.string_at(packet.bsl_data, packet.bsl)
            return [Frame(one) for one in self.inner.decode(data, packet.pts)]
        except PacketRefused as refused:
            raise PyNvVCException(text_of(801, refused.message)) from None
