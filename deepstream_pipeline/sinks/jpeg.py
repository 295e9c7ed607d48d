"""JPEG of drawn pictures: libjpeg-turbo on the CPU, or nvJPEG on a card that the program has open.

A picture lies in host memory when it is drawn, so that nvJPEG costs a copy to the card and one of the JPEG back. On an
H200 and its host (medians, one thread; CPU in brackets): a preview of 640x360 0.37 ms (0.24) by nvJPEG and 0.78 (0.82)
by libjpeg-turbo, of 1280x720 0.61 (0.49) and 2.62 (2.74), of 1920x1080 1.00 (0.78) and 5.59 (5.85). Measured by
`python -m loadtest.bench.gpu.previews`. CUDA 13's nvJPEG and libjpeg-turbo are as far from the picture that they were
given, and no nearer to each other: a quantised coefficient falls to one side or the other. CUDA 12's nvJPEG drops the
fractions of luma and chroma, where CUDA 13's rounds: its previews are darker by 1.2 levels of 255 in red and 1.4 in
blue (tests/gpu/test_encoders_gpu.py states and measures it).
"""

from enum import StrEnum
from typing import Protocol

import simplejpeg
import structlog

from deepstream_pipeline.errors import GpuFailed, GpuUnavailable, SinkFailed
from deepstream_pipeline.gpu.device import Device
from deepstream_pipeline.gpu.nvjpeg import NvJpeg
from deepstream_pipeline.types import ByteArray

QUALITY = 80

log = structlog.get_logger(component="video")


class JpegKind(StrEnum):
    """What previews are to be encoded with. auto: nvJPEG where the program has a card open anyway, else the CPU."""

    AUTO = "auto"
    CPU = "cpu"
    NVJPEG = "nvjpeg"


class JpegEncoder(Protocol):
    """Makes a JPEG of an RGB picture (H, W, 3), 4:2:0. One thread at a time."""

    def encode(self, picture: ByteArray) -> bytes: ...

    def close(self) -> None:
        """Gives back what it holds. A second call does nothing; it may be used no more."""
        ...


def jpeg_encoder(kind: JpegKind, device: Device | None) -> JpegEncoder:
    """device: the card that the program has open, None where it has none. Raises SinkFailed where it must be nvJPEG and
    cannot; where it need not, the log says why it is not."""
    if kind is JpegKind.CPU or (kind is JpegKind.AUTO and device is None):
        return SoftwareJpeg()
    if device is None:
        raise SinkFailed(
            "the preview sink's jpeg is nvjpeg, and the program has no card open: no source is decoded by nvdec; "
            "say jpeg: auto, or cpu"
        )
    try:
        return GpuJpeg(NvJpeg(device, quality=QUALITY))
    except (GpuUnavailable, GpuFailed) as error:
        if kind is JpegKind.NVJPEG:
            raise SinkFailed(f"the preview sink's jpeg is nvjpeg: {error.message}; or say jpeg: auto") from error
        log.warning("previews are encoded on the cpu", why=error.message)
        return SoftwareJpeg()


class SoftwareJpeg:
    """libjpeg-turbo, on the CPU."""

    def encode(self, picture: ByteArray) -> bytes:
        """Of any thread."""
        jpeg: bytes = simplejpeg.encode_jpeg(
            picture, quality=QUALITY, colorspace="RGB", colorsubsampling="420", fastdct=True
        )
        return jpeg

    def close(self) -> None:
        """There is nothing to close."""


class GpuJpeg:
    """nvJPEG; after its first failure libjpeg-turbo for good, with one warning."""

    def __init__(self, nvjpeg: NvJpeg) -> None:
        """nvjpeg: closed with it."""
        self._nvjpeg: NvJpeg | None = nvjpeg
        self._software = SoftwareJpeg()

    def encode(self, picture: ByteArray) -> bytes:
        """Waits for the card."""
        if self._nvjpeg is not None:
            try:
                return self._nvjpeg.encode(picture)
            except GpuFailed as error:
                log.warning("previews are encoded on the cpu", why=error.message)
                self.close()
        return self._software.encode(picture)

    def close(self) -> None:
        """The card's memory is given back, as far as the card still answers."""
        nvjpeg, self._nvjpeg = self._nvjpeg, None
        if nvjpeg is None:
            return
        try:
            nvjpeg.close()
        except GpuFailed as error:
            log.debug("nvJPEG did not close", why=error.message)
