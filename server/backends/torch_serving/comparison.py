"""Whether a program answers by cuDNN's fused calls what it answers without them, tried on the GPU that is to run it."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from .config import IMAGE_RANK, EngineSpec
from .dtypes import network_type
from .fusing import copied, fuse_for_cudnn

MOST_DIFFERENCE = 0.02  # FP16 has 11 bits, and a residual network adds up dozens of roundings
_POISON_BYTES = 256 << 20  # more than the activations that a kernel might read before anybody wrote them
_MOST_OF_A_BYTE = 255


@dataclass(frozen=True)
class Compared:
    """The module to run, whether cuDNN's fused calls are in it, and why they are not where they were tried."""

    module: Any
    is_fused: bool = False
    note: str = ""


def fused_where_right(module: Any, spec: EngineSpec, device: Any) -> Compared:
    """Of a module on a GPU: with cuDNN's fused calls where there is something to fuse and they answer right, else as
    it is.

    Right: on the largest bucket no number is further off than MOST_DIFFERENCE of the largest. With inputs of free
    dimensions there is nothing to try it on, and the module stays as it is.
    """
    fused = copied(module)
    if not all(one.is_fixed for one in spec.inputs) or not fuse_for_cudnn(fused):
        return Compared(module)
    try:
        difference = _difference(module, fused, sample_of(spec, device))
    except Exception as error:  # noqa: BLE001  cuDNN has no engine for it on this card: the plain calls are there
        return _refused(module, (str(error) or repr(error)).splitlines()[0])
    finally:
        torch.cuda.empty_cache()
    if difference <= MOST_DIFFERENCE:  # never true of NaN
        return Compared(fused, is_fused=True)
    return _refused(
        module, "NaN is in an answer" if math.isnan(difference) else f"they answer {difference:.1%} otherwise"
    )


def _refused(module: Any, why: str) -> Compared:
    return Compared(module, note=f"cuDNN's fused convolutions are not used here: {why}")


def _difference(plain: Any, fused: Any, sample: list[Any]) -> float:
    """The largest over all outputs, as a share of each one's largest number; NaN where there is one in an answer."""
    with torch.inference_mode():
        expected = _answers(plain, sample)
        _poison(sample[0].device)
        answers = _answers(fused, sample)
    shares = [
        float((one - other).abs().max()) / max(float(one.abs().max()), 1e-12)
        for one, other in zip(expected, answers, strict=True)
    ]
    return math.nan if any(map(math.isnan, shares)) else max(shares)


def _answers(module: Any, sample: list[Any]) -> list[Any]:
    answer = module(*sample)
    return [one.float().cpu() for one in (answer if isinstance(answer, (tuple, list)) else (answer,))]


def _poison(device: Any) -> None:
    """Leaves NaN in the memory that the next run is given: a kernel that reads what nobody wrote is found out."""
    size_bytes = min(_POISON_BYTES, torch.cuda.mem_get_info(device)[0] // 8)  # a small card has other instances, too
    poison = torch.full((size_bytes // 2,), math.nan, dtype=torch.float16, device=device)
    del poison


def sample_of(spec: EngineSpec, device: Any) -> list[Any]:
    """The largest bucket of numbers that any program takes: floats between 0 and 1, pixels, else zeros."""
    rows = (spec.buckets[-1],) if spec.max_batch_size else ()
    generator = torch.Generator(device="cpu").manual_seed(0)
    sample = []
    for one in spec.inputs:
        dtype = network_type(one.data_type, spec.precision)
        values = torch.rand((*rows, *one.dims), generator=generator)
        is_image = len(one.dims) == IMAGE_RANK
        if not dtype.is_floating_point:
            values = values * (_MOST_OF_A_BYTE if dtype is torch.uint8 and is_image else 0)
        values = values.to(device, dtype)
        lies_channels_last = spec.is_channels_last and values.dim() == 4 and dtype.is_floating_point
        sample.append(values.to(memory_format=torch.channels_last) if lies_channels_last else values)
    return sample
