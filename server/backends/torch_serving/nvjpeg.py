"""JPEGs to pixels on the GPU by nvJPEG: its hardware decoder where the card has one, else by torchvision."""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torchvision.io import ImageReadMode, decode_jpeg, encode_jpeg

from .hardware_jpeg import HardwareJpegs, NoHardwareDecoder

_SAMPLE_SIDE = 64
_ALIKE = 12  # levels of 255 between two ways of decoding one smooth JPEG

with warnings.catch_warnings():  # torch warns once a process that it might write into bytes; nvJPEG reads only
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


class Planes(NamedTuple):
    """Pixels on the GPU, (channels, height, width) uint8 without gaps: their address, and what owns the memory."""

    address: int
    width: int
    height: int
    memory: torch.Tensor


class GpuJpegs:
    """Decodes batches of JPEGs. One thread at a time."""

    def __init__(self, device: torch.device, *, is_grey: bool, is_hardware_wanted: bool = True) -> None:
        """On the current device. The hardware decoder is first tried against the CPU's, and left where they differ."""
        self._device, self._is_grey = device, is_grey
        self._hardware = self._tried_hardware() if is_hardware_wanted else None

    @property
    def name(self) -> str:
        """For a log."""
        return "nvjpeg" if self._hardware is None else "nvjpeg-hardware"

    def decode(self, encoded: Sequence[bytes], sizes: Sequence[tuple[int, int]]) -> list[Planes | None]:
        """RGB of each, luma alone where is_grey, when the current stream has come there; None for a refused one.

        sizes: (width, height) of each as its header says. Must not be called again before the stream has come there.
        """
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
        return hardware if int((found.int() - expected.int()).abs().max()) <= _ALIKE else None


def decode_jpegs(encoded: Sequence[bytes], device: torch.device, *, is_grey: bool) -> list[torch.Tensor | None]:
    """(3, height, width) uint8 RGB of each, (1, height, width) where is_grey; None for one that nvJPEG refuses.

    By torchvision, and blocks until the pixels are there. nvJPEG says only that a batch failed: the one to blame is
    found by halves. Raises torch.OutOfMemoryError.
    """
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
