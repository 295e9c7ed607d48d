"""Cameras with NVDEC decoders of the stand-in of the driver's library."""

import ctypes
from collections.abc import Callable

import av
import numpy as np

from penstock_video.decode.cuvid import Cuvid
from penstock_video.decode.nvcodec import NvdecOpener, Surface
from penstock_video.decode.pairing import DecoderPool
from penstock_video.decode.verification import nv12_of
from penstock_video.gpu.device import Device
from tests.deepstream_pipeline.decode.broken_clips import SIZE
from tests.deepstream_pipeline.decode.fake_cuvid import FakeCuvid


class Card:
    """A card with the library and decoders of one process."""

    def __init__(self, device: Device) -> None:
        self.library, self.device = FakeCuvid(), device
        self.opener = NvdecOpener(device, DecoderPool(Cuvid(self.library)))

    def camera(self, codec: str = "h264", size: tuple[int, int] = SIZE) -> "Camera":
        """One more."""
        return Camera(self.opener.for_camera(), codec, size)


class Camera:
    """A camera: what its decoder gave, as (stamp, picture in host memory)."""

    def __init__(self, opener: NvdecOpener, codec: str, size: tuple[int, int]) -> None:
        self.opener = opener
        self.reopen: Callable[[], None] = lambda: setattr(self, "decoder", opener(codec, 77, size))
        self.decoder = opener(codec, 77, size)
        self.shown: list[tuple[int, np.ndarray]] = []

    def give(self, packet: bytes, number: int) -> list[Surface]:
        """A packet; its pictures are copied at once."""
        surfaces = self.decoder.decode(packet, number)
        self.shown += [(one.stamp, on_host(one)) for one in surfaces]
        return surfaces


def on_host(one: Surface) -> np.ndarray:
    """(H * 3 / 2, W)."""
    luma, chroma = (
        np.frombuffer(ctypes.string_at(address, one.pitch * lines), np.uint8).reshape(lines, one.pitch)[:, : one.width]
        for address, lines in ((one.luma, one.height), (one.chroma, one.height // 2))
    )
    return np.concatenate([luma, chroma])


def expected(packets: list[bytes], codec: str = "h264") -> list[np.ndarray]:
    """FFmpeg's pictures."""
    context = av.CodecContext.create(codec, "r")
    frames = [frame for packet in packets for frame in context.decode(av.Packet(packet))]  # type: ignore[attr-defined]
    return [nv12_of(frame) for frame in [*frames, *context.decode(None)]]  # type: ignore[attr-defined]


def assert_right(camera: Camera, packets: list[bytes], codec: str = "h264") -> None:
    """All pictures, each in its place, equal FFmpeg's."""
    right = expected(packets, codec)
    assert [stamp for stamp, _ in camera.shown] == list(range(len(right)))
    assert all(np.array_equal(made, wanted) for (_, made), wanted in zip(camera.shown, right, strict=True))
