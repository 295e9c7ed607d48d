"""JPEG encoding by libjpeg-turbo on the CPU or nvJPEG on the GPU."""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import simplejpeg
import structlog

from penstock_video.errors import GpuFailed, GpuUnavailable, SinkFailed
from penstock_video.gpu.device import Device, zeros_pinned
from penstock_video.types import ByteArray

_NAME = "libnvjpeg.so"
_VERSIONS = (13, 12)
_TOOLKITS = Path("/usr/local")
_CHROMA_420 = 2  # NVJPEG_CSS_420
_RGB_INTERLEAVED = 5  # NVJPEG_INPUT_RGBI
_STATUS = {
    1: "NOT_INITIALIZED", 2: "INVALID_PARAMETER", 3: "BAD_JPEG", 4: "JPEG_NOT_SUPPORTED", 5: "ALLOCATOR_FAILURE",
    6: "EXECUTION_FAILED", 7: "ARCH_MISMATCH", 8: "INTERNAL_ERROR", 9: "IMPLEMENTATION_NOT_SUPPORTED",
    10: "INCOMPLETE_BITSTREAM",
}  # fmt: skip


class _Image(ctypes.Structure):
    """nvjpegImage_t: addresses and line pitch of the planes."""

    _fields_ = (("channel", ctypes.c_void_p * 4), ("pitch", ctypes.c_size_t * 4))


class NvJpeg:
    """An encoder with its stream and memory, which grows to the largest picture. One thread at a time."""

    def __init__(self, device: Device, *, quality: int, library: Any = None) -> None:
        """quality: 1 to 100. library: libnvjpeg; None to search for it. Raises GpuUnavailable, GpuFailed."""
        self._library = _found_library() if library is None else library
        self._device = device
        self._handle, self._state, self._parameters = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._room_bytes = 0
        self._jpeg: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        device.bind()
        with ExitStack() as half_made:
            self._stream = device.new_stream()
            half_made.callback(self._stream.close)
            self._make("nvjpegCreateSimple", "nvjpegDestroy", self._handle, half_made)
            self._make("nvjpegEncoderStateCreate", "nvjpegEncoderStateDestroy", self._state, half_made)
            self._make("nvjpegEncoderParamsCreate", "nvjpegEncoderParamsDestroy", self._parameters, half_made)
            stream = ctypes.c_void_p(self._stream.handle)
            self._call("nvjpegEncoderParamsSetQuality", self._parameters, quality, stream)
            self._call("nvjpegEncoderParamsSetSamplingFactors", self._parameters, _CHROMA_420, stream)
            self._stream.synchronize()
            self._held = half_made.pop_all()
        self._memory = ExitStack()  # device block and staging, of equal size

    def encode(self, picture: npt.NDArray[np.uint8]) -> bytes:
        """The JPEG, 4:2:0, of an RGB picture (H, W, 3); waits for the GPU. Raises GpuFailed."""
        height, width = picture.shape[:2]
        self._device.bind()
        if picture.nbytes > self._room_bytes:
            self._make_room(picture.nbytes)
        np.copyto(self._staging[: picture.nbytes].reshape(picture.shape), picture)
        self._device.copy(self._block.address, self._staging.ctypes.data, picture.nbytes, self._stream.handle)
        image = _Image()
        image.channel[0], image.pitch[0] = self._block.address, width * 3
        stream = ctypes.c_void_p(self._stream.handle)
        self._call(
            "nvjpegEncodeImage", self._handle, self._state, self._parameters, ctypes.byref(image),
            _RGB_INTERLEAVED, width, height, stream,
        )  # fmt: skip
        return self._file(stream)

    def close(self) -> None:
        """Frees its resources. A second call does nothing."""
        self._device.bind()
        try:
            self._memory.close()
        finally:
            self._held.close()

    def _file(self, stream: ctypes.c_void_p) -> bytes:
        """The encoded bytes; the length first, then the data."""
        length = ctypes.c_size_t()
        retrieve, of = "nvjpegEncodeRetrieveBitstream", (self._handle, self._state)
        self._call(retrieve, *of, None, ctypes.byref(length), stream)
        self._stream.synchronize()
        if length.value > self._jpeg.size:
            self._jpeg = np.zeros(length.value, np.uint8)
        self._call(retrieve, *of, ctypes.c_void_p(self._jpeg.ctypes.data), ctypes.byref(length), stream)
        self._stream.synchronize()
        return self._jpeg[: length.value].tobytes()

    def _make_room(self, size_bytes: int) -> None:
        self._room_bytes = 0
        self._memory.close()
        with ExitStack() as half_made:
            self._block = self._device.allocate(size_bytes)
            half_made.callback(self._block.close)
            self._staging, pinned = zeros_pinned(self._device, (size_bytes,), np.uint8)
            half_made.callback(pinned.close)
            self._memory = half_made.pop_all()
        self._room_bytes = size_bytes

    def _make(self, create: str, destroy: str, what: ctypes.c_void_p, held: ExitStack) -> None:
        """A handle of the library; state and parameters are made of the first one, on the stream."""
        of = () if what is self._handle else (self._handle,)
        on = () if what is self._handle else (ctypes.c_void_p(self._stream.handle),)
        self._call(create, *of, ctypes.byref(what), *on)
        held.callback(self._call, destroy, what)

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise GpuFailed(f"{function}: nvJPEG answers {_STATUS.get(status, status)}")


def _found_library() -> Any:
    for path in _candidates():
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise GpuUnavailable(
        "libnvjpeg is not here: run make gpu in a checkout, else pip install 'penstock[gpu]'; or say cpu"
    )


def _candidates() -> Iterator[str]:
    """Paths of pip's libraries, which fit more drivers, then the linker's paths and CUDA toolkits."""
    package = find_spec("nvidia")
    for root in list(package.submodule_search_locations or ()) if package else []:
        yield f"{root}/cu13/lib/{_NAME}.13"
        yield f"{root}/nvjpeg/lib/{_NAME}.12"
    yield from (f"{_NAME}.{version}" for version in _VERSIONS)
    for version in _VERSIONS:
        for pattern in (f"cuda-{version}*", "cuda"):
            for place in ("lib64", "targets/*/lib"):
                yield from sorted(map(str, _TOOLKITS.glob(f"{pattern}/{place}/{_NAME}.{version}")), reverse=True)


QUALITY = 80

log = structlog.get_logger(component="video")


class JpegKind(StrEnum):
    """JPEG encoder of previews. auto: nvJPEG if the program has a GPU open, else the CPU."""

    AUTO = "auto"
    CPU = "cpu"
    NVJPEG = "nvjpeg"


class JpegEncoder(Protocol):
    """Encodes RGB pictures (H, W, 3) as JPEG, 4:2:0. One thread at a time."""

    def encode(self, picture: ByteArray) -> bytes: ...

    def close(self) -> None:
        """Frees its resources; it cannot be used afterwards. A second call does nothing."""
        ...


def jpeg_encoder(kind: JpegKind, device: Device | None) -> JpegEncoder:
    """The encoder. device: the open GPU, or None. Raises SinkFailed if nvJPEG is required and unavailable."""
    if kind is JpegKind.CPU or (kind is JpegKind.AUTO and device is None):
        return SoftwareJpeg()
    if device is None:
        raise SinkFailed(
            "the preview sink's jpeg is nvjpeg, and the program has no GPU open: no source is decoded by nvdec; "
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
        """Thread-safe."""
        jpeg: bytes = simplejpeg.encode_jpeg(
            picture, quality=QUALITY, colorspace="RGB", colorsubsampling="420", fastdct=True
        )
        return jpeg

    def close(self) -> None:
        """Does nothing."""


class GpuJpeg:
    """nvJPEG; after its first failure libjpeg-turbo, with one warning."""

    def __init__(self, nvjpeg: NvJpeg) -> None:
        """nvjpeg: closed with it."""
        self._nvjpeg: NvJpeg | None = nvjpeg
        self._software = SoftwareJpeg()

    def encode(self, picture: ByteArray) -> bytes:
        """Waits for the GPU."""
        if self._nvjpeg is not None:
            try:
                return self._nvjpeg.encode(picture)
            except GpuFailed as error:
                log.warning("previews are encoded on the cpu", why=error.message)
                self.close()
        return self._software.encode(picture)

    def close(self) -> None:
        """Frees GPU memory, as far as the GPU answers."""
        nvjpeg, self._nvjpeg = self._nvjpeg, None
        if nvjpeg is None:
            return
        try:
            nvjpeg.close()
        except GpuFailed as error:
            log.debug("nvJPEG did not close", why=error.message)
