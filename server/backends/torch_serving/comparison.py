"""Whether a program answers by cuDNN's fused calls what it answers without them, tried on the GPU that is to run it."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from .config import EngineSpec
from .fusing import copied, fuse_for_cudnn
from .trial import answers_of, drawn_rows, most_off, sample_of

MOST_DIFFERENCE = 0.02  # FP16 has 11 bits, and a residual network adds up dozens of roundings


@dataclass(frozen=True)
class Compared:
    """The module to run, whether cuDNN's fused calls are in it, and why they are not where they were tried."""

    module: Any
    is_fused: bool = False
    note: str = ""


def fused_where_right(module: Any, spec: EngineSpec, device: Any) -> Compared:
    """Of a module on a GPU: with cuDNN's fused calls where there is something to fuse and they answer right, else as
    it is.

    Right: in no bucket, for each of which cuDNN may pick another kernel, a number is further off than MOST_DIFFERENCE
    of the largest. With inputs of free dimensions there is nothing to try it on, and the module stays as it is.
    """
    fused = copied(module)
    if not all(one.is_fixed for one in spec.inputs) or not fuse_for_cudnn(fused):
        return Compared(module)
    try:
        for rows in reversed(spec.buckets):
            sample = sample_of(spec, device, drawn_rows(spec, rows), rows)
            for expected, answer in zip(answers_of(module, sample), answers_of(fused, sample), strict=True):
                if why := _wrong(expected, answer):
                    return _refused(module, why)
    except Exception as error:  # noqa: BLE001  cuDNN has no engine for it on this card: the plain calls are there
        return _refused(module, (str(error) or repr(error)).splitlines()[0])
    finally:
        torch.cuda.empty_cache()
    return Compared(fused, is_fused=True)


def _wrong(expected: Any, answer: Any) -> str:
    """Of one output; empty where it is right."""
    off = most_off(expected, answer)
    if off is None:
        return "" if expected.shape == answer.shape else "they answer another shape"
    if math.isnan(off) or bool(expected.isnan().any()):
        return "NaN is in an answer"
    return f"they answer {off:.1%} otherwise" if off > MOST_DIFFERENCE else ""


def _refused(module: Any, why: str) -> Compared:
    return Compared(module, note=f"cuDNN's fused convolutions are not used here: {why}")
