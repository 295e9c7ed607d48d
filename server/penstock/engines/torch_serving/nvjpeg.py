"""Decodes JPEGs on the GPU with nvJPEG: the hardware decoder of Ampere+ data centre cards, else torchvision.

The hardware decoder is only queued on the current stream. torchvision's decode_jpeg blocks, allocates per picture, and
does not interpolate chroma as libjpeg-turbo does.
"""

import ctypes
import struct
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchvision.io  # noqa: F401  loads libnvjpeg
from torchvision.io import ImageReadMode, decode_jpeg, encode_jpeg

_HARDWARE, _INTERPOLATED_CHROMA = 3, 32  # NVJPEG_BACKEND_HARDWARE, NVJPEG_FLAGS_UPSAMPLING_WITH_INTERPOLATION
_LUMA, _RGB = 2, 3  # NVJPEG_OUTPUT_Y, NVJPEG_OUTPUT_RGB
_IMAGE = struct.Struct("<4Q4Q")  # nvjpegImage_t: four planes' addresses, four pitches
_MOST_COMPONENTS = 4
_ALIGNMENT = 256
_MAPS = Path("/proc/self/maps")


class NoHardwareDecoder(Exception):
    """The card has none, or nvJPEG is too old. The text has nvJPEG's error."""


class HardwareJpegs:
    """nvJPEG's handle and state. One thread at a time."""

    def __init__(self, *, is_grey: bool, library: Any = None) -> None:
        """On the current CUDA device. library: libnvjpeg, by default the loaded one. Raises NoHardwareDecoder."""
        self._nvjpeg = _loaded_library() if library is None else library
        self._planes, self._format = (1, _LUMA) if is_grey else (3, _RGB)
        self._handle, self._state = ctypes.c_void_p(), ctypes.c_void_p()
        self._widths, self._heights = (ctypes.c_int * _MOST_COMPONENTS)(), (ctypes.c_int * _MOST_COMPONENTS)()
        self._being_read: tuple[Any, ...] = ()
        flags = ctypes.c_uint(_INTERPOLATED_CHROMA)
        code = self._nvjpeg.nvjpegCreateEx(_HARDWARE, None, None, flags, ctypes.byref(self._handle))
        code = code or self._nvjpeg.nvjpegJpegStateCreate(self._handle, ctypes.byref(self._state))
        if code:
            raise NoHardwareDecoder(f"nvJPEG answers {code} where its hardware decoder is asked for")

    def decode(
        self, encoded: Sequence[bytes], sizes: Sequence[tuple[int, int]], device: torch.device
    ) -> tuple[torch.Tensor, list[int]] | None:
        """Queues the decoding. Returns the memory and each picture's address: planes of RGB, or one of luma.

        sizes: (width, height) from the headers. None if nvJPEG rejects the batch. Call again only after the stream has
        passed here.
        """
        if not all(map(self._is_of_size, encoded, sizes)):
            return None
        offsets, total = [], 0
        for width, height in sizes:
            offsets.append(total)
            total += -(-self._planes * width * height // _ALIGNMENT) * _ALIGNMENT
        memory = torch.empty(total, dtype=torch.uint8, device=device)
        addresses = [memory.data_ptr() + offset for offset in offsets]
        images = b"".join(map(self._image, addresses, sizes))
        count = len(encoded)
        sources, lengths = (ctypes.c_char_p * count)(*encoded), (ctypes.c_size_t * count)(*map(len, encoded))
        destinations = ctypes.create_string_buffer(images, len(images))
        self._being_read = (sources, lengths, destinations)
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        nvjpeg, handle, state = self._nvjpeg, self._handle, self._state
        code = nvjpeg.nvjpegDecodeBatchedInitialize(handle, state, count, 1, self._format)
        code = code or nvjpeg.nvjpegDecodeBatched(handle, state, sources, lengths, destinations, stream)
        return None if code else (memory, addresses)

    def _is_of_size(self, encoded: bytes, size: tuple[int, int]) -> bool:
        """Whether nvJPEG reads the same size, so that it writes within the memory."""
        count, sampling = ctypes.c_int(), ctypes.c_int()
        widths, heights = self._widths, self._heights
        given = (encoded, ctypes.c_size_t(len(encoded)), ctypes.byref(count), ctypes.byref(sampling), widths, heights)
        code = self._nvjpeg.nvjpegGetImageInfo(self._handle, *given)
        return not code and (widths[0], heights[0]) == size

    def _image(self, address: int, size: tuple[int, int]) -> bytes:
        width, height = size
        if self._planes == 1:
            return _IMAGE.pack(address, 0, 0, 0, width, 0, 0, 0)
        plane = width * height
        return _IMAGE.pack(address, address + plane, address + 2 * plane, 0, width, width, width, 0)


def _loaded_library() -> Any:
    found = next((line.split()[-1] for line in _MAPS.read_text().splitlines() if "/libnvjpeg" in line), None)
    if found is None:
        raise NoHardwareDecoder("this torchvision comes without nvJPEG")
    return ctypes.CDLL(found)


_SAMPLE_SIDE = 64
_MAX_DIFFERENCE = 12  # levels of 255 between two decoders for one smooth JPEG

with warnings.catch_warnings():  # torch warns once per process about a read-only buffer; nvJPEG only reads it
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


class Planes(NamedTuple):
    """Pixels on the GPU, (channels, height, width) uint8, contiguous."""

    address: int
    width: int
    height: int
    memory: torch.Tensor  # owns the pixels


class GpuJpegs:
    """Decodes batches of JPEGs. One thread at a time."""

    def __init__(self, device: torch.device, *, is_grey: bool) -> None:
        """On the current device. The hardware decoder is compared with the CPU's, and not used if they differ."""
        self._device, self._is_grey = device, is_grey
        self._hardware = self._tried_hardware()

    @property
    def name(self) -> str:
        """The decoder's name for logs."""
        return "nvjpeg" if self._hardware is None else "nvjpeg-hardware"

    def decode(self, encoded: Sequence[bytes], sizes: Sequence[tuple[int, int]]) -> list[Planes | None]:
        """RGB or luma of each picture, or None if rejected. Valid, and callable again, once the stream gets here."""
        answer = self._hardware.decode(encoded, sizes, self._device) if self._hardware is not None else None
        if answer is not None:
            memory, addresses = answer
            pairs = zip(addresses, sizes, strict=True)
            return [Planes(address, width, height, memory) for address, (width, height) in pairs]
        found = decode_jpegs(encoded, self._device, is_grey=self._is_grey)
        return [None if one is None else Planes(one.data_ptr(), one.shape[2], one.shape[1], one) for one in found]

    def _tried_hardware(self) -> HardwareJpegs | None:
        smooth = torch.arange(3 * _SAMPLE_SIDE**2).mul(256).div(3 * _SAMPLE_SIDE**2, rounding_mode="floor").byte()
        sample = encode_jpeg(smooth.reshape(3, _SAMPLE_SIDE, _SAMPLE_SIDE))
        expected = decode_jpeg(sample, ImageReadMode.GRAY if self._is_grey else ImageReadMode.RGB)
        try:
            hardware = HardwareJpegs(is_grey=self._is_grey)
        except NoHardwareDecoder:
            return None
        answer = hardware.decode([sample.numpy().tobytes()], [(_SAMPLE_SIDE, _SAMPLE_SIDE)], self._device)
        if answer is None:
            return None
        found = answer[0][: expected.numel()].cpu().view(expected.shape)
        return hardware if int((found.int() - expected.int()).abs().max()) <= _MAX_DIFFERENCE else None


def decode_jpegs(encoded: Sequence[bytes], device: torch.device, *, is_grey: bool) -> list[torch.Tensor | None]:
    """uint8 pixels of each picture, (3, height, width) or (1, …) if is_grey; None if nvJPEG rejects it. Blocks."""
    mode = ImageReadMode.GRAY if is_grey else ImageReadMode.RGB
    return _decode([torch.frombuffer(one, dtype=torch.uint8) for one in encoded], device, mode)


def _decode(encoded: list[torch.Tensor], device: torch.device, mode: ImageReadMode) -> list[torch.Tensor | None]:
    try:
        found: list[torch.Tensor | None] = decode_jpeg(encoded, mode=mode, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        if len(encoded) == 1:
            return [None]
        half = len(encoded) // 2
        return _decode(encoded[:half], device, mode) + _decode(encoded[half:], device, mode)
    return found
