"""ONNX operators in PyTorch. Integers of shapes are lists here, not tensors, so that the batch stays dynamic.

Operators that are not in OPERATORS, and forms of them that are not supported, raise NotConverted.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional


class NotConverted(Exception):
    """The graph cannot be converted; the text is one sentence."""


Attributes = dict[str, Any]
Operator = Callable[[Attributes, list[Any]], Any]


def _tensor(value: Any, like: Any = None) -> Any:
    if isinstance(value, torch.Tensor):
        return value
    device = like.device if isinstance(like, torch.Tensor) else None
    return torch.tensor(value, device=device)


def _numbers(value: Any) -> list[Any]:
    """A list of whole numbers. Raises NotConverted for a tensor, whose numbers are known only at run time."""
    if isinstance(value, torch.Tensor):
        raise NotConverted("a shape, axis or size that is computed from the input")
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _pads(attributes: Attributes, rank: int, kernel: Sequence[int], strides: Sequence[int]) -> list[int]:
    """(begin…, end…). Raises NotConverted for auto_pad, which depends on the input's size."""
    if attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise NotConverted(f"auto_pad {attributes['auto_pad']} of a window of {list(kernel)} by {list(strides)}")
    return list(attributes.get("pads") or [0] * (2 * rank))


def _is_symmetric(pads: Sequence[int]) -> bool:
    return list(pads[: len(pads) // 2]) == list(pads[len(pads) // 2 :])


def _padded(x: Any, pads: Sequence[int], value: float, mode: str = "constant") -> Any:
    """x padded as ONNX says: (begin…, end…) of the last axes."""
    half = len(pads) // 2
    pairs = [number for axis in reversed(range(half)) for number in (pads[axis], pads[axis + half])]
    return functional.pad(x, pairs, mode, value) if mode == "constant" else functional.pad(x, pairs, mode)


def _conv(attributes: Attributes, values: list[Any]) -> Any:
    x, weight, bias = (*values, None)[:3]
    rank = weight.dim() - 2
    strides, dilations = (list(attributes.get(name) or [1] * rank) for name in ("strides", "dilations"))
    pads = _pads(attributes, rank, weight.shape[2:], strides)
    if not _is_symmetric(pads):
        x, pads = _padded(x, pads, 0.0), [0] * (2 * rank)
    call = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}[rank]
    return call(x, weight, bias, strides, pads[:rank], dilations, attributes.get("group", 1))


def _conv_transpose(attributes: Attributes, values: list[Any]) -> Any:
    x, weight, bias = (*values, None)[:3]
    rank = weight.dim() - 2
    strides, dilations = (list(attributes.get(name) or [1] * rank) for name in ("strides", "dilations"))
    pads = _pads(attributes, rank, weight.shape[2:], strides)
    if not _is_symmetric(pads) or attributes.get("output_shape") or rank != 2:
        raise NotConverted("a ConvTranspose with unequal pads, an output_shape, or not of two dimensions")
    more = list(attributes.get("output_padding") or [0] * rank)
    group = attributes.get("group", 1)
    return functional.conv_transpose2d(x, weight, bias, strides, pads[:rank], more, group, dilations)


def _batch_norm(attributes: Attributes, values: list[Any]) -> Any:
    x, scale, bias, mean, variance = values
    return functional.batch_norm(x, mean, variance, scale, bias, eps=attributes.get("epsilon", 1e-5))


def _max_pool(attributes: Attributes, values: list[Any]) -> Any:
    kernel = list(attributes["kernel_shape"])
    strides = list(attributes.get("strides") or [1] * len(kernel))
    pads = _pads(attributes, len(kernel), kernel, strides)
    x = values[0]
    if not _is_symmetric(pads) or any(pad > size // 2 for pad, size in zip(pads, kernel, strict=False)):
        x, pads = _padded(x, pads, -math.inf), [0] * len(pads)
    call = {1: functional.max_pool1d, 2: functional.max_pool2d}[len(kernel)]
    dilations = list(attributes.get("dilations") or [1] * len(kernel))
    return call(x, kernel, strides, pads[: len(kernel)], dilations, bool(attributes.get("ceil_mode", 0)))


def _average_pool(attributes: Attributes, values: list[Any]) -> Any:
    kernel = list(attributes["kernel_shape"])
    strides = list(attributes.get("strides") or [1] * len(kernel))
    pads = _pads(attributes, len(kernel), kernel, strides)
    if not _is_symmetric(pads) or len(kernel) != 2:
        raise NotConverted("an AveragePool with unequal pads, or not of two dimensions")
    counts = bool(attributes.get("count_include_pad", 0))
    return functional.avg_pool2d(values[0], kernel, strides, pads[:2], bool(attributes.get("ceil_mode", 0)), counts)


def _clip(attributes: Attributes, values: list[Any]) -> Any:
    low, high = (*values[1:], None, None)[:2]
    low = attributes.get("min") if low is None else _scalar(low)
    high = attributes.get("max") if high is None else _scalar(high)
    return values[0].clamp(low, high)


def _scalar(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        raise NotConverted("a limit or exponent that is computed from the input")
    return value[0] if isinstance(value, list) else value


def _hard_sigmoid(attributes: Attributes, values: list[Any]) -> Any:
    slope, shift = attributes.get("alpha", 0.2), attributes.get("beta", 0.5)
    if abs(slope - 1 / 6) < 1e-4 and shift == 0.5:
        return functional.hardsigmoid(values[0])
    return (values[0] * slope + shift).clamp(0.0, 1.0)


def _arithmetic(by_tensors: Callable[[Any, Any], Any], by_numbers: Callable[[Any, Any], Any]) -> Operator:
    """On lists of numbers by Python, else by torch."""

    def run(_: Attributes, values: list[Any]) -> Any:
        one, other = values
        if not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor):
            return _each(by_numbers, one, other)
        if isinstance(one, list) or isinstance(other, list):
            one, other = _tensor(one, other), _tensor(other, one)
        return by_tensors(one, other)

    return run


def _each(call: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    if not isinstance(one, list) and not isinstance(other, list):
        return call(one, other)
    count = max(len(value) for value in (one, other) if isinstance(value, list))
    wide = [value * count if isinstance(value, list) and len(value) == 1 else value for value in (one, other)]
    columns = [value if isinstance(value, list) else [value] * count for value in wide]
    return [call(left, right) for left, right in zip(*columns, strict=True)]


def _divided(one: Any, other: Any) -> Any:
    return one / other if isinstance(one, float) or isinstance(other, float) else one // other


def _concat(attributes: Attributes, values: list[Any]) -> Any:
    if not any(isinstance(value, torch.Tensor) for value in values):
        return [number for value in values for number in _numbers(value)]
    return torch.cat([_tensor(value) for value in values], attributes["axis"])


def _reshape(attributes: Attributes, values: list[Any]) -> Any:
    x, shape = values[0], _numbers(values[1])
    keeps = not attributes.get("allowzero", 0)
    return x.reshape([x.shape[place] if size == 0 and keeps else size for place, size in enumerate(shape)])


def _axes(attributes: Attributes, values: list[Any]) -> list[int]:
    given = values[1] if len(values) > 1 and values[1] is not None else attributes.get("axes")
    return [] if given is None else _numbers(given)


def _unsqueeze(attributes: Attributes, values: list[Any]) -> Any:
    x = values[0]
    if not isinstance(x, torch.Tensor):
        return _numbers(x)
    axes = _axes(attributes, values)
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _squeeze(attributes: Attributes, values: list[Any]) -> Any:
    x = values[0]
    if not isinstance(x, torch.Tensor):
        return x[0] if isinstance(x, list) and len(x) == 1 else x
    axes = _axes(attributes, values)
    return x.squeeze(tuple(axes)) if axes else x.squeeze()


def _slice(attributes: Attributes, values: list[Any]) -> Any:
    x = values[0]
    if len(values) > 1:
        starts, ends = _numbers(values[1]), _numbers(values[2])
        axes = _numbers(values[3]) if len(values) > 3 and values[3] is not None else list(range(len(starts)))
        steps = _numbers(values[4]) if len(values) > 4 and values[4] is not None else [1] * len(starts)
    else:
        starts, ends = attributes["starts"], attributes["ends"]
        axes, steps = attributes.get("axes") or list(range(len(starts))), [1] * len(starts)
    if not isinstance(x, torch.Tensor):
        return _numbers(x)[slice(starts[0], ends[0], steps[0])]
    if min(steps) < 1:
        raise NotConverted("a Slice that reverses an axis")
    parts = [slice(None)] * x.dim()
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        parts[axis % x.dim()] = slice(start, None if isinstance(end, int) and end > 1 << 30 else end, step)
    return x[tuple(parts)]


def _split(attributes: Attributes, values: list[Any]) -> Any:
    x, axis = values[0], attributes.get("axis", 0)
    sizes = values[1] if len(values) > 1 and values[1] is not None else attributes.get("split")
    if sizes is None:
        count = attributes.get("num_outputs", attributes["outputs"])
        return list(x.split(-(-x.shape[axis] // count), axis))
    return list(x.split(_numbers(sizes), axis))


def _gather(attributes: Attributes, values: list[Any]) -> Any:
    x, index, axis = values[0], values[1], attributes.get("axis", 0)
    if not isinstance(x, torch.Tensor):
        return [_numbers(x)[place] for place in index] if isinstance(index, list) else _numbers(x)[index]
    if isinstance(index, int):
        return x.select(axis, index)
    index = _tensor(index, x)
    return x.index_select(axis, index) if index.dim() == 1 else x[(*[slice(None)] * (axis % x.dim()), index)]


def _resize(attributes: Attributes, values: list[Any]) -> Any:
    """Of the last two axes, by nearest or linear, in the forms that torch.nn.functional.interpolate has."""
    x = values[0]
    scales, sizes = (*values[2:], None, None)[:2] if len(values) != 2 else (values[1], None)
    mode, rule = attributes.get("mode", "nearest"), attributes.get("coordinate_transformation_mode", "half_pixel")
    is_nearest = mode == "nearest" and (rule == "asymmetric" or _is_whole(scales, sizes, x))
    is_linear = mode == "linear" and rule in ("half_pixel", "pytorch_half_pixel", "align_corners")
    if x.dim() != 4 or not (is_nearest or is_linear):
        raise NotConverted(f"a Resize of mode {mode} by {rule} of {x.dim()} dimensions")
    if sizes:
        size = [int(number) for number in _numbers(sizes)[2:]]
    else:
        size = [int(side * scale) for side, scale in zip(x.shape[2:], _numbers(scales)[2:], strict=True)]
    if is_nearest:
        return functional.interpolate(x, size, mode="nearest")
    return functional.interpolate(x, size, mode="bilinear", align_corners=rule == "align_corners")


def _is_whole(scales: Any, sizes: Any, x: Any) -> bool:
    """Whether each pixel becomes a block of whole pixels: all rules of rounding agree then."""
    factors = _numbers(scales)[2:] if scales else [n / s for n, s in zip(_numbers(sizes)[2:], x.shape[2:], strict=True)]
    return all(float(factor) == int(factor) for factor in factors)


def _reduce(call: Callable[..., Any]) -> Operator:
    def run(attributes: Attributes, values: list[Any]) -> Any:
        axes = _axes(attributes, values) or list(range(values[0].dim()))
        return call(values[0], axes, keepdim=bool(attributes.get("keepdims", 1)))

    return run


def _gemm(attributes: Attributes, values: list[Any]) -> Any:
    one, other, bias = (*values, None)[:3]
    one = one.t() if attributes.get("transA", 0) else one
    weight = other if attributes.get("transB", 0) else other.t()
    if attributes.get("alpha", 1.0) != 1.0 or attributes.get("beta", 1.0) != 1.0:
        raise NotConverted("a Gemm with factors")
    return functional.linear(one, weight, bias)


def _cast(attributes: Attributes, values: list[Any]) -> Any:
    x, name = values[0], attributes["to"]
    if isinstance(x, torch.Tensor):
        return x.to(getattr(torch, name))
    kind = float if name.startswith("float") else int
    return [kind(one) for one in x] if isinstance(x, list) else kind(x)


def _expand(_: Attributes, values: list[Any]) -> Any:
    x, shape = _tensor(values[0]), _numbers(values[1])
    ones = [1] * (len(shape) - x.dim()) + list(x.shape)
    return x.expand([have if want == 1 else want for have, want in zip(ones, shape, strict=True)])


def _pad(attributes: Attributes, values: list[Any]) -> Any:
    pads = _numbers(attributes["pads"] if len(values) < 2 else values[1])
    value = attributes.get("value", 0.0) if len(values) < 3 or values[2] is None else _scalar(values[2])
    mode, half = str(attributes.get("mode", "constant")), len(pads) // 2
    first = next((axis for axis in range(half) if pads[axis] or pads[axis + half]), half - 1)
    shown = [*pads[first:half], *pads[half + first :]]
    return _padded(values[0], shown, float(value), "replicate" if mode == "edge" else mode)


def _unary(call: Callable[[Any], Any]) -> Operator:
    return lambda _, values: call(values[0])


def _softmax(attributes: Attributes, values: list[Any]) -> Any:
    return values[0].softmax(attributes.get("axis", -1))


def _top_k(attributes: Attributes, values: list[Any]) -> Any:
    largest = bool(attributes.get("largest", 1))
    return list(values[0].topk(int(_numbers(values[1])[0]), attributes.get("axis", -1), largest))


OPERATORS: dict[str, Operator] = {
    "Add": _arithmetic(lambda a, b: a + b, lambda a, b: a + b),
    "ArgMax": lambda a, v: v[0].argmax(a.get("axis", 0), bool(a.get("keepdims", 1))),
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": _concat,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Div": _arithmetic(lambda a, b: a / b, _divided),
    "Dropout": _unary(lambda x: x),
    "Exp": _unary(torch.exp),
    "Expand": _expand,
    "Flatten": lambda a, v: v[0].flatten(a.get("axis", 1)) if a.get("axis", 1) else v[0].reshape(1, -1),
    "Floor": _unary(lambda x: x.floor() if isinstance(x, torch.Tensor) else [math.floor(one) for one in _numbers(x)]),
    "Gather": _gather,
    "Gelu": lambda a, v: functional.gelu(v[0], approximate=a.get("approximate", "none")),
    "Gemm": _gemm,
    "GlobalAveragePool": _unary(lambda x: x.mean(tuple(range(2, x.dim())), keepdim=True)),
    "GlobalMaxPool": _unary(lambda x: x.amax(tuple(range(2, x.dim())), keepdim=True)),
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _unary(functional.hardswish),
    "Identity": _unary(lambda x: x),
    "LeakyRelu": lambda a, v: functional.leaky_relu(v[0], a.get("alpha", 0.01)),
    "Log": _unary(torch.log),
    "MatMul": lambda _, v: v[0] @ v[1],
    "Max": _arithmetic(torch.maximum, max),
    "MaxPool": _max_pool,
    "Min": _arithmetic(torch.minimum, min),
    "Mish": _unary(functional.mish),
    "Mul": _arithmetic(lambda a, b: a * b, lambda a, b: a * b),
    "Neg": _unary(lambda x: -x),
    "Pad": _pad,
    "Pow": lambda _, v: v[0] ** _scalar(v[1]),
    "PRelu": lambda _, v: torch.where(v[0] > 0, v[0], v[0] * v[1]),
    "ReduceL2": _reduce(lambda x, axes, keepdim: torch.linalg.vector_norm(x, dim=axes, keepdim=keepdim)),
    "ReduceMax": _reduce(torch.amax),
    "ReduceMean": _reduce(torch.mean),
    "ReduceMin": _reduce(torch.amin),
    "ReduceSum": _reduce(torch.sum),
    "Relu": _unary(functional.relu),
    "Reshape": _reshape,
    "Resize": _resize,
    "Shape": _unary(lambda x: list(x.shape)),
    "Sigmoid": _unary(torch.sigmoid),
    "Slice": _slice,
    "Softmax": _softmax,
    "Softplus": _unary(functional.softplus),
    "Split": _split,
    "Sqrt": _unary(torch.sqrt),
    "Squeeze": _squeeze,
    "Sub": _arithmetic(lambda a, b: a - b, lambda a, b: a - b),
    "Tanh": _unary(torch.tanh),
    "TopK": _top_k,
    "Transpose": lambda a, v: v[0].permute(a.get("perm") or list(reversed(range(v[0].dim())))),
    "Unsqueeze": _unsqueeze,
    "Upsample": _resize,
}
