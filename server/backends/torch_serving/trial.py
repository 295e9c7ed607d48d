"""Whether a program answers on a part of a GPU what it answers on the CPU.

cuDNN picks a kernel by how many SMs the process may use. Limited by MPS to 18, 20, 22, 24, 26, 28, 36, 42 or 98 of an
H200's 132 (torch 2.11, cuDNN 9.19), ResNet-50 was met to answer one image by more than half otherwise: kernels leave a
part of their answer unwritten, or write it wrong. With 8, 10, 12, 14, 16, 32, 66 and 132 it is right. So a limited
process tries each batch size, in memory that is full of NaN.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from .config import IMAGE_RANK, EngineSpec
from .dtypes import network_type
from .errors import LoadError
from .fusing import has_convolution

MOST_OFF = 0.1  # of the largest number: half precision is off by a hundredth of it, the kernels that err by much more
_ROWS = 2  # unlike ones, again and again in a larger batch
_MOST_OF_A_BYTE = 255
_LARGE_BYTES = 256 << 20  # more than the activations that a kernel might read before anybody wrote them
# Small tensors come from memory of their own, and of one image all are small: (bytes, how many).
_SMALL = ((512 << 10, 64), (64 << 10, 128), (4 << 10, 128))


@dataclass(frozen=True)
class Truth:
    """What a program answers in FP32 on the CPU to the rows of `sample_of`."""

    answers: list[Any]

    def to(self, rows: int, spec: EngineSpec) -> list[Any]:
        """To a batch."""
        return [_repeated(one, rows, spec) for one in self.answers]


def truth_of(module: Any, spec: EngineSpec) -> Truth | None:
    """module: in FP32 on the CPU. None where there is nothing that cuDNN could do wrong, or nothing to try it on."""
    if not has_convolution(module) or not all(one.is_fixed for one in spec.inputs):
        return None
    with torch.inference_mode():
        answers = as_floats(module(*_rows_of(spec, torch.float32)))
    has_nan = any(bool(one.isnan().any()) for one in answers)
    return None if has_nan else Truth(answers)


def check_right(module: Any, spec: EngineSpec, device: Any, truth: Truth, sms: tuple[int, int]) -> None:
    """LoadError where the program answers otherwise on the device. sms: those of this process, those of the card."""
    try:
        for rows in reversed(spec.buckets):
            answers = answers_of(module, sample_of(spec, device, rows))
            off = difference(truth.to(rows, spec), answers)
            if not off <= MOST_OFF:  # true of NaN
                raise LoadError(_why(off, rows if spec.max_batch_size else 1, sms))
    finally:
        torch.cuda.empty_cache()


def _why(off: float, rows: int, sms: tuple[int, int]) -> str:
    how = "with NaN" if math.isnan(off) else f"{off:.0%} off"
    return (
        f"with {sms[0]} of the card's {sms[1]} SMs, which MPS limits this process to, cuDNN answers {rows} row(s) "
        f"{how}: take another --mps-active-thread-percentage (100, 50, 25 and 12 are known to do on an H200), or say "
        "check-answers: 0 in config.pbtxt where the program's outputs are sorted or counted"
    )


def difference(expected: list[Any], answers: list[Any]) -> float:
    """The largest over all outputs, as a share of each one's largest number; NaN where there is one in an answer."""
    shares = [
        float((one - other).abs().max()) / max(float(one.abs().max()), 1e-12)
        for one, other in zip(expected, answers, strict=True)
    ]
    return math.nan if any(map(math.isnan, shares)) else max(shares)


def answers_of(module: Any, sample: list[Any]) -> list[Any]:
    """In FP32 on the CPU. A kernel that reads what nobody wrote, or leaves a part as it was, is found out by NaN."""
    with torch.inference_mode():
        _fill_free_memory(sample[0].device)
        return as_floats(module(*sample))


def as_floats(answer: Any) -> list[Any]:
    """A program's answer, a tensor or some, on the CPU."""
    return [one.float().cpu() for one in (answer if isinstance(answer, (tuple, list)) else (answer,))]


def _fill_free_memory(device: Any) -> None:
    large = min(_LARGE_BYTES, torch.cuda.mem_get_info(device)[0] // 8)  # a small card has other instances, too
    sizes = [large, *(size for size, many in _SMALL for _ in range(many))]
    filled = [torch.full((size // 2,), math.nan, dtype=torch.float16, device=device) for size in sizes]
    del filled


def sample_of(spec: EngineSpec, device: Any, rows: int) -> list[Any]:
    """So many rows of numbers that any program takes: floats between 0 and 1, pixels, else zeros."""
    sample = []
    for one, values in zip(spec.inputs, _rows_of(spec, None), strict=True):
        placed = _repeated(values, rows, spec).to(device, network_type(one.data_type, spec.precision))
        lies_channels_last = spec.is_channels_last and placed.dim() == 4 and placed.dtype.is_floating_point
        sample.append(placed.to(memory_format=torch.channels_last) if lies_channels_last else placed)
    return sample


def _rows_of(spec: EngineSpec, floats: Any) -> list[Any]:
    """The unlike rows, on the CPU. floats: the type of inputs of floats; None for FP32 as it is drawn."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    rows = []
    for one in spec.inputs:
        dtype = network_type(one.data_type, spec.precision)
        values = torch.rand(((_ROWS,) if spec.max_batch_size else ()) + tuple(one.dims), generator=generator)
        if not dtype.is_floating_point:
            is_pixels = dtype is torch.uint8 and len(one.dims) == IMAGE_RANK
            values = (values * (_MOST_OF_A_BYTE if is_pixels else 0)).to(dtype)
        rows.append(values if floats is None or not dtype.is_floating_point else values.to(floats))
    return rows


def _repeated(values: Any, rows: int, spec: EngineSpec) -> Any:
    return values[torch.arange(rows) % _ROWS] if spec.max_batch_size else values
