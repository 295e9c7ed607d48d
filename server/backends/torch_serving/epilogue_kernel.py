"""The kernel of epilogue.py, in Triton's language."""

from typing import Any

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types where these are checked
def bias_and_relu(  # noqa: PLR0913  a kernel takes pointers and sizes
    image: Any,
    bias: Any,
    other: Any,
    count: Any,
    channels: tl.constexpr,
    has_other: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """relu(image + bias [+ other]) into image, over count numbers that lie channels last. Computed in float32."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    is_in = at < count
    value = tl.load(image + at, mask=is_in).to(tl.float32) + tl.load(bias + at % channels).to(tl.float32)
    if has_other:
        value += tl.load(other + at, mask=is_in).to(tl.float32)
    tl.store(image + at, tl.maximum(value, 0.0).to(image.dtype.element_ty), mask=is_in)
