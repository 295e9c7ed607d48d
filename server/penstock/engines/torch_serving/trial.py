"""Checks results on this GPU at load: against the CPU if MPS limits the SMs, and of cuDNN's fused calls.

cuDNN selects kernels by the number of SMs. With 18, 20, 22, 24, 26, 28, 36, 42 or 98 of an H200's 132 SMs (torch 2.11,
cuDNN 9.19), kernels left parts of ResNet-50's output unwritten; 8, 10, 12, 14, 16, 32, 66 and 132 were right. So each
batch size is run in memory filled with NaN.
"""

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from .config import IMAGE_RANK, EngineSpec
from .dtypes import network_type
from .end_fusing import fuse_for_gpu
from .fusing import copied
from .parameters import TorchLoadError

MAX_DIFFERENCE = 0.03  # of the largest value: FP16 differs by 0.001, BF16 by 0.005
_BRIGHTNESS = (1.0, 0.5, 0.1)  # of different rows, repeated in larger batches; not periodic in powers of two
_MIN_MAGNITUDE = 1e-3  # smaller values are indistinguishable from 0 in half precision
_MOST_OF_A_BYTE = 255
_ROWS_AT_ONCE = 8  # for comparisons: a batch of feature maps has a gigabyte
_LARGE_BYTES = 256 << 20  # more than the activations that a kernel may read uninitialised
# Small tensors have their own memory pool: (bytes, how many).
_SMALL = ((512 << 10, 64), (64 << 10, 128), (4 << 10, 128))


@dataclass(frozen=True)
class ReferenceAnswers:
    """FP32 results on the CPU. rows: the inputs, different rows; one without a batch dimension."""

    rows: list[Any]
    answers: list[Any]


def reference_answers(module: Any, spec: EngineSpec, device: Any) -> ReferenceAnswers:
    """FP32 results of some rows, or of one if the program was exported for one. module: in FP32 on the device."""
    if spec.max_batch_size > 1:
        with suppress(Exception):
            return _answers_in_fp32(module, drawn_rows(spec, len(_BRIGHTNESS)), device)
    return _answers_in_fp32(module, drawn_rows(spec, 1), device)


def _answers_in_fp32(module: Any, rows: list[Any], device: Any) -> ReferenceAnswers:
    with torch.inference_mode():
        return ReferenceAnswers(rows, [one.cpu() for one in _listed(module(*(row.to(device) for row in rows)))])


def compare_with_reference(
    module: Any, spec: EngineSpec, device: Any, truth: ReferenceAnswers, sms: tuple[int, int]
) -> bool:
    """Whether any float outputs could be compared. Raises TorchLoadError if they differ. sms: see _reference."""
    is_judged = False
    try:
        for rows in reversed(spec.buckets):
            answers = answers_of(module, sample_of(spec, device, truth.rows, rows))
            for expected, answer in zip(truth.answers, answers, strict=True):
                difference = (
                    largest_difference(_repeated(expected, rows, spec), answer)
                    if expected.dtype.is_floating_point
                    else None
                )
                is_judged |= difference is not None
                if difference is not None and not difference <= MAX_DIFFERENCE:  # also true of NaN
                    raise TorchLoadError(_error_text(difference, rows, sms))
    finally:
        torch.cuda.empty_cache()
    return is_judged


def _error_text(difference: float, rows: int, sms: tuple[int, int]) -> str:
    own, every = sms
    limit = f"{own} of the GPU's {every} SMs, the MPS limit" if every else f"{own} SMs"
    how = "with NaN" if math.isnan(difference) else f"{difference:.0%} off"
    return (
        f"with {limit}, this process answers {rows} row(s) {how} where the CPU does not, as cuDNN was met to do: give "
        "it another --mps-active-thread-percentage (8 to 16, 32, 66 and all of an H200's SMs are known to do); "
        "check-answers: 0 in config.pbtxt serves it all the same (a program that sorts, draws at random or overflows "
        "its precision)"
    )


def largest_difference(expected: Any, answer: Any) -> float | None:
    """The largest difference relative to the largest value; NaN if only the answer has one; None for other shapes."""
    if expected.shape != answer.shape or not expected.numel():
        return None
    worst, largest = 0.0, _MIN_MAGNITUDE
    halves = (torch.atleast_1d(one).split(_ROWS_AT_ONCE) for one in (expected, answer))
    for wanted, got in zip(*halves, strict=True):
        wanted, got = wanted.float().cpu(), got.float().cpu()
        gap = torch.where((wanted == got) | wanted.isnan(), 0.0, (got - wanted).abs())
        if bool(gap.isnan().any()):
            return math.nan
        worst = max(worst, float(gap.max()))
        largest = max(largest, float(torch.where(wanted.isfinite(), wanted, 0.0).abs().max()))
    return worst / largest


def answers_of(module: Any, sample: list[Any]) -> list[Any]:
    """Runs the sample. NaN in free memory reveals kernels that read or return uninitialised memory."""
    with torch.inference_mode():
        _fill_free_memory(sample[0].device)
        return _listed(module(*sample))


def _listed(answer: Any) -> list[Any]:
    return list(answer) if isinstance(answer, (tuple, list)) else [answer]


def _fill_free_memory(device: Any) -> None:
    large = min(_LARGE_BYTES, torch.cuda.mem_get_info(device)[0] // 8)  # other instances may share a small card
    sizes = [large, *(size for size, many in _SMALL for _ in range(many))]
    filled = [torch.full((size,), _MOST_OF_A_BYTE, dtype=torch.uint8, device=device) for size in sizes]
    del filled


def sample_of(spec: EngineSpec, device: Any, drawn: list[Any], rows: int) -> list[Any]:
    """That many rows for the network, in its types and layout, from the drawn ones."""
    sample = []
    for one, values in zip(spec.inputs, drawn, strict=True):
        placed = _repeated(values, rows, spec).to(device, network_type(one.data_type, spec.precision))
        lies_channels_last = spec.is_channels_last and placed.dim() == 4 and placed.dtype.is_floating_point
        sample.append(placed.to(memory_format=torch.channels_last) if lies_channels_last else placed)
    return sample


def drawn_rows(spec: EngineSpec, count: int) -> list[Any]:
    """Different rows that any program accepts, on the CPU: FP32 in [0, 1), pixels, else zeros."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    rows = []
    for one in spec.inputs:
        values = torch.rand((count, *one.dims), generator=generator)
        brightness = torch.tensor([_BRIGHTNESS[number % len(_BRIGHTNESS)] for number in range(count)])
        values *= brightness.reshape(count, *[1] * len(one.dims))
        dtype = network_type(one.data_type, spec.precision)
        if not dtype.is_floating_point:
            is_pixels = dtype is torch.uint8 and len(one.dims) >= IMAGE_RANK
            values = (values * (_MOST_OF_A_BYTE if is_pixels else 0)).to(dtype)
        rows.append(values if spec.max_batch_size else values[0])
    return rows


def _repeated(values: Any, rows: int, spec: EngineSpec) -> Any:
    return values[torch.arange(rows) % len(values)] if spec.max_batch_size and values.dim() else values


MAX_FUSED_DIFFERENCE = 0.02  # FP16 has 11 bits, and a residual network accumulates dozens of roundings
_MAX_WORSE = 1.5  # times the difference that the same precision has without fusing
_MAX_PRECISION_DIFFERENCE = 0.1


@dataclass(frozen=True)
class FusionResult:
    """The module to run, whether it is the fused or compiled one, and why not if that was tried."""

    module: Any
    is_fused: bool = False
    note: str = ""


def fused_where_right(module: Any, spec: EngineSpec, device: Any, truth: ReferenceAnswers | None) -> FusionResult:
    """The module with fused convolutions if all buckets' results are right, else the module itself.

    truth: FP32 results, or None if there are none.
    """
    fused = copied(module)
    if not all(one.is_fixed for one in spec.inputs) or not fuse_for_gpu(fused):
        return FusionResult(module)
    why = why_not_right(module, fused, spec, device, truth)
    if why:
        return FusionResult(module, note=f"cuDNN's fused convolutions are not used here: {why}")
    return FusionResult(fused, is_fused=True)


def precision_remark(module: Any, spec: EngineSpec, device: Any, truth: ReferenceAnswers) -> str:
    """For the user, if the unfused program in its precision is far from FP32; else empty."""
    rows = len(truth.rows[0]) if spec.max_batch_size else 1
    answers = answers_of(module, sample_of(spec, device, truth.rows, rows))
    for one, right, answer in zip(spec.outputs, truth.answers, answers, strict=True):
        difference = largest_difference(right, answer) if right.dtype.is_floating_point else None
        if difference is None or difference <= _MAX_PRECISION_DIFFERENCE:
            continue
        if math.isnan(difference) or _order_free_difference(right, answer.cpu()) > MAX_FUSED_DIFFERENCE:
            how = "with NaN" if math.isnan(difference) else f"{difference:.0%} otherwise"
            return (
                f"output '{one.name}' in {spec.precision.value} answers noise {how} than in FP32: compare its answers "
                "to pictures, or say precision: fp32 or bf16"
            )
    return ""


def why_not_right(module: Any, candidate: Any, spec: EngineSpec, device: Any, truth: ReferenceAnswers | None) -> str:
    """Why the candidate does not compute what the module computes, at some bucket; empty if it does."""
    try:
        for rows in reversed(spec.buckets):
            drawn = drawn_rows(spec, rows) if truth is None else truth.rows
            sample = sample_of(spec, device, drawn, rows)
            references = [None] * len(spec.outputs) if truth is None else truth.answers
            answers = zip(answers_of(module, sample), answers_of(candidate, sample), references, strict=True)
            for expected, answer, reference in answers:
                right = None if reference is None else _repeated(reference, rows, spec)
                if why := _fused_error(expected, answer, right):
                    return why
    except Exception as error:  # noqa: BLE001  cuDNN has no engine for it on this card
        return (str(error) or repr(error)).splitlines()[0]
    finally:
        torch.cuda.empty_cache()
    return ""


def _fused_error(expected: Any, answer: Any, right: Any = None) -> str:
    """expected: of the same precision, unfused. right: of FP32, or None."""
    difference = largest_difference(expected if right is None else right, answer)
    if difference is None:
        return "" if expected.shape == answer.shape else "they answer another shape"
    if math.isnan(difference) or bool(expected.isnan().any()):
        return "NaN is in an answer"
    own = 0.0 if right is None else largest_difference(right, expected) or 0.0
    if difference <= max(MAX_FUSED_DIFFERENCE, _MAX_WORSE * min(own, _MAX_PRECISION_DIFFERENCE)):
        return ""
    if own > MAX_FUSED_DIFFERENCE and _order_free_difference(expected, answer) <= MAX_FUSED_DIFFERENCE:
        return ""  # the best rows of nearly equal scores: this precision has some others, or in another order
    return f"they answer {difference:.1%} otherwise"


def _order_free_difference(expected: Any, answer: Any) -> float:
    """The mean difference relative to the largest value, whatever the order of rows (N, rows, …)."""
    if expected.dim() < 3:
        return math.inf
    wanted, got = (one.float().sort(1).values for one in (expected, answer))
    return float((wanted - got).abs().mean() / wanted.abs().max().clamp(min=_MIN_MAGNITUDE))
