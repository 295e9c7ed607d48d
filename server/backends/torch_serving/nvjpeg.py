"""JPEGs to pixels on the GPU: nvJPEG by torchvision, many in one call. Blocks until they are decoded."""

import warnings
from collections.abc import Sequence

import torch
from torchvision.io import ImageReadMode, decode_jpeg

with warnings.catch_warnings():  # torch warns once a process that it might write into bytes; nvJPEG reads only
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def decode_jpegs(encoded: Sequence[bytes], device: torch.device, *, is_grey: bool) -> list[torch.Tensor | None]:
    """(3, height, width) uint8 RGB of each, (1, height, width) where is_grey; None for one that nvJPEG refuses.

    nvJPEG says only that a batch failed: the one to blame is found by halves. Raises torch.OutOfMemoryError.
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
