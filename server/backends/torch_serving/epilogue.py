"""What follows a convolution, in one pass over its output: bias, the sum with another branch, ReLU."""

from typing import Any

import torch

_BLOCK = 1024


def add_bias_and_relu(image: Any, bias: Any, other: Any = None) -> Any:
    """relu(image + bias [+ other]), in image's own memory. image, other: (N, C, H, W); bias: (C,).

    On a GPU, images that lie channels last go through one kernel; all else takes PyTorch's operators one by one.
    """
    if image.is_cuda and _lies_channels_last(image) and (other is None or _lies_channels_last(other)):
        return _by_kernel(image, bias, other)
    image.add_(bias.reshape(1, -1, 1, 1))
    if other is not None:
        image.add_(other)
    return torch.relu_(image)


def _lies_channels_last(image: Any) -> bool:
    return bool(image.is_contiguous(memory_format=torch.channels_last))


def _by_kernel(image: Any, bias: Any, other: Any) -> Any:
    import triton  # compiles with the machine's C compiler: only where it is used

    from .epilogue_kernel import bias_and_relu

    count = image.numel()
    bias_and_relu[(triton.cdiv(count, _BLOCK),)](
        image, bias, image if other is None else other, count, image.shape[1], other is not None, _BLOCK
    )
    return image
