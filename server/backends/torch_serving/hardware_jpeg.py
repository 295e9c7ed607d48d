"""nvJPEG's hardware decoder, called directly: a batch is queued on the current stream, and nothing waits for it.

torchvision's decode_jpeg (nvjpeg.py) waits for the pixels on the host, allocates for each picture, and repeats chroma
where libjpeg-turbo interpolates it. This asks for interpolation, so that a picture's colours are nearer to what the
gateway's decoder makes of it. It needs the decoder that Ampere's and later data centre cards have.
"""

import ctypes
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision.io  # noqa: F401  brings libnvjpeg into the process

_HARDWARE, _INTERPOLATED_CHROMA = 3, 32  # NVJPEG_BACKEND_HARDWARE, NVJPEG_FLAGS_UPSAMPLING_WITH_INTERPOLATION
_LUMA, _RGB = 2, 3  # NVJPEG_OUTPUT_Y, NVJPEG_OUTPUT_RGB
_IMAGE = struct.Struct("<4Q4Q")  # nvjpegImage_t: four planes' addresses, four pitches
_MOST_COMPONENTS = 4
_ALIGNMENT = 256
_MAPS = Path("/proc/self/maps")


class NoHardwareDecoder(Exception):
    """There is none here, or nvJPEG is too old. Its text says what nvJPEG answered."""


class HardwareJpegs:
    """nvJPEG's handle and state. One thread at a time."""

    def __init__(self, *, is_grey: bool, library: Any = None) -> None:
        """On the current CUDA device. library: libnvjpeg, found in the process by default. Raises NoHardwareDecoder."""
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
        """(the memory of all, each one's address in it): planes of RGB or one of luma, when the stream has come there.

        sizes: (width, height) of each as its header says. None where nvJPEG refuses the batch, not saying which one,
        or reads another size. Must not be called again before then.
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
        """Whether nvJPEG means to write as many pixels as there will be room for."""
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
    """The libnvjpeg that torchvision has loaded, wherever it came from."""
    found = next((line.split()[-1] for line in _MAPS.read_text().splitlines() if "/libnvjpeg" in line), None)
    if found is None:
        raise NoHardwareDecoder("this torchvision comes without nvJPEG")
    return ctypes.CDLL(found)
