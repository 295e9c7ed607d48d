"""Fuses what follows convolutions where cuDNN has no call for it: other activations, sums, concatenations."""

from dataclasses import dataclass
from typing import Any

import torch

from .ending import Activation, empty_concatenation, end_convolution, joined
from .fusing import argument, clean, fuse_for_cudnn, is_sum

_aten = torch.ops.aten
_CONVOLUTIONS = (_aten.conv2d.default, _aten.conv2d.padding, _aten.convolution.default, _aten.conv_transpose2d.input)
_BIAS = 2  # its place among a convolution's arguments
_UNPLACED = 5  # arguments of end_convolution without a place
_ACTIVATIONS = {
    # operator → (activation, its parameters' defaults)
    _aten.relu.default: (Activation.RELU, ()),
    _aten.relu_.default: (Activation.RELU, ()),
    _aten.relu6.default: (Activation.CLAMP, (0.0, 6.0)),
    _aten.hardtanh.default: (Activation.CLAMP, (-1.0, 1.0)),
    _aten.hardtanh_.default: (Activation.CLAMP, (-1.0, 1.0)),
    _aten.clamp.default: (Activation.CLAMP, (None, None)),
    _aten.clamp_.default: (Activation.CLAMP, (None, None)),
    _aten.leaky_relu.default: (Activation.LEAKY_RELU, (0.01,)),
    _aten.leaky_relu_.default: (Activation.LEAKY_RELU, (0.01,)),
    _aten.silu.default: (Activation.SILU, ()),
    _aten.silu_.default: (Activation.SILU, ()),
    _aten.hardswish.default: (Activation.HARD_SWISH, ()),
    _aten.hardswish_.default: (Activation.HARD_SWISH, ()),
    _aten.hardsigmoid.default: (Activation.HARD_SIGMOID, ()),
    _aten.hardsigmoid_.default: (Activation.HARD_SIGMOID, ()),
    _aten.sigmoid.default: (Activation.SIGMOID, ()),
    _aten.sigmoid_.default: (Activation.SIGMOID, ()),
    _aten.mish.default: (Activation.MISH, ()),
    _aten.mish_.default: (Activation.MISH, ()),
    _aten.gelu.default: (Activation.GELU, ()),
    _aten.tanh.default: (Activation.TANH, ()),
    _aten.tanh_.default: (Activation.TANH, ()),
}
_PARAMETERS = ("min", "max", "min_val", "max_val", "negative_slope")
_GATES = {_aten.sigmoid.default: _aten.silu.default, _aten.hardsigmoid.default: _aten.hardswish.default}


def fuse_for_gpu(module: Any) -> int:
    """All fusions, cuDNN's first. Returns the number of replacements. Normalisation should be folded before."""
    _chain_pools(module)
    return fuse_for_cudnn(module) + end_convolutions(module)


def _chain_pools(module: Any) -> None:
    """Computes maxima in several windows of an image from one another: 9x9 is 5x5 of 5x5, with a third of the reads."""
    sides = {node: side for node in module.graph.nodes if (side := _window_side(node))}
    sources = {node: node.args[0] for node in sides}
    earlier: list[Any] = []
    for pool, side in sides.items():
        smaller = [one for one in earlier if sources[one] is sources[pool] and sides[one] < side]
        if smaller:
            inner = max(smaller, key=sides.__getitem__)
            rest = side - sides[inner] + 1
            pool.args = (inner, [rest, rest], [1, 1], [rest // 2, rest // 2])
        earlier.append(pool)
    module.recompile()


def _window_side(node: Any) -> int:
    """Of a pool of maxima that keeps the image's size; 0 for all other nodes."""
    if node.op != "call_function" or node.target is not _aten.max_pool2d.default or node.kwargs:
        return 0
    window, stride, padding, *rest = (*node.args[1:], *([None] * 4))[:5]
    side = int(window[0])
    is_plain = all(one in (None, [1, 1], False) for one in rest) and side % 2 == 1
    keeps_size = list(stride or window) == [1, 1] and list(padding or ()) == [side // 2] * 2
    return side if is_plain and keeps_size and list(window) == [side, side] else 0


def end_convolutions(module: Any) -> int:
    """Replaces bias, activation and sums after a convolution by one call each. Returns the number of replacements."""
    for node in list(module.graph.nodes):
        _name_gate(module, node)
    count = 0
    for convolution in [node for node in module.graph.nodes if _is_convolution(node)]:
        end = _end_of(convolution)  # now, because the one before may have the same sum
        if end is not None:
            _replace(module, convolution, end)
            count += 1
    if count:
        for node in list(module.graph.nodes):
            _join(module, node)
        clean(module)
    return count


def _name_gate(module: Any, node: Any) -> None:
    """x * sigmoid(x) is SiLU and x * hardsigmoid(x) is HardSwish, which ONNX files have as two nodes."""
    if node.target is not _aten.mul.Tensor or not all(isinstance(one, torch.fx.Node) for one in node.args):
        return
    for x, gate in (node.args, node.args[::-1]):
        if gate.target in _GATES and gate.args[0] is x:
            with module.graph.inserting_before(node):
                named = module.graph.call_function(_GATES[gate.target], (x,))
            _take_place(module, node, named)
            if not gate.users:
                module.graph.erase_node(gate)
            return


def _is_convolution(node: Any) -> bool:
    if node.op != "call_function" or node.target not in _CONVOLUTIONS:
        return False
    return node.target is not _aten.convolution.default or _rank(node) == 4


@dataclass(frozen=True)
class _End:
    """What follows a convolution: activation(convolution + before) + after, up to the node `last`."""

    last: Any
    activation: Activation = Activation.IDENTITY
    parameters: tuple[float, ...] = ()
    before: Any = None
    after: Any = None


def _end_of(convolution: Any) -> _End | None:
    """None if there is nothing to fuse."""
    summand = _other_summand(convolution)
    if summand is not None:
        added = _only_user(convolution)
        found = _activation(_only_user(added))
        if found is None:
            return _End(added, after=summand)
        return _End(_only_user(added), *found, before=summand)
    found = _activation(_only_user(convolution))
    if found is None:
        return None if argument(convolution, _BIAS) is None else _End(convolution)
    activated = _only_user(convolution)
    summand = _other_summand(activated)
    return _End(activated if summand is None else _only_user(activated), *found, after=summand)


def _activation(node: Any) -> tuple[Activation, tuple[float, ...]] | None:
    """The activation and its parameters, if the node is one."""
    if node is None or node.op != "call_function" or node.target not in _ACTIVATIONS:
        return None
    activation, defaults = _ACTIVATIONS[node.target]
    if node.target is _aten.gelu.default and node.kwargs.get("approximate", "none") != "none":
        return None
    given = [*node.args[1:], *(node.kwargs.get(name) for name in _PARAMETERS)]
    values = tuple(value for value in given if value is not None)[: len(defaults)] or defaults
    numbers = tuple(float(value) for value in values if isinstance(value, (int, float)))
    return (activation, numbers) if len(numbers) == len(defaults) else None


def _other_summand(node: Any) -> Any:
    """What is added to the node by its only user; None if that is no sum of two tensors of one shape."""
    added = _only_user(node)
    if added is None or added.op != "call_function" or not is_sum(added):
        return None
    one, other = added.args[:2]
    summand = other if one is node else one
    return summand if summand is not node and _shape(summand) == _shape(node) is not None else None


def _only_user(node: Any) -> Any:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _replace(module: Any, convolution: Any, end: _End) -> None:
    bias = argument(convolution, _BIAS)
    arguments = (convolution, bias, _activation_argument(end.activation, *end.parameters), end.before, end.after)
    if end.last is convolution:
        with module.graph.inserting_after(convolution):
            ended = module.graph.call_function(end_convolution, arguments)
        convolution.replace_all_uses_with(ended, delete_user_cb=lambda user: user is not ended)
    else:
        with module.graph.inserting_before(end.last):
            ended = module.graph.call_function(end_convolution, arguments)
        _take_place(module, end.last, ended)
    ended.meta.update(end.last.meta)
    if bias is not None and len(convolution.args) > _BIAS:
        convolution.args = (*convolution.args[:_BIAS], None, *convolution.args[_BIAS + 1 :])
    elif bias is not None:
        convolution.kwargs = {name: value for name, value in convolution.kwargs.items() if name != "bias"}


def _activation_argument(activation: Activation, first: float = 0.0, second: float = 0.0) -> tuple[int, float, float]:
    return int(activation), first, second


def _take_place(module: Any, old: Any, new: Any) -> None:
    new.meta.update(old.meta)
    old.replace_all_uses_with(new)
    module.graph.erase_node(old)


def _join(module: Any, node: Any) -> None:
    """Lets parts of a concatenation of channels write into it, where the concatenation is their only user."""
    if node.op != "call_function" or node.target is not _aten.cat.default:
        return
    parts = list(node.args[0])
    axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    shapes = [_shape(part) for part in parts]
    if axis not in (1, -3) or any(shape is None or len(shape) != 4 or not shape[1].isdigit() for shape in shapes):
        return
    own = [part for part in parts if part.target is end_convolution and len(part.users) == 1 and parts.count(part) == 1]
    own = [part for part in own if len(part.args) == _UNPLACED]
    if not own or len({str(part.meta["val"].dtype) for part in parts}) > 1:
        return
    channels = [int(shape[1]) for shape in shapes if shape is not None]
    order = {each: place for place, each in enumerate(module.graph.nodes)}
    first = min(own, key=order.__getitem__)
    with module.graph.inserting_before(first):
        target = module.graph.call_function(empty_concatenation, (first.args[0], sum(channels)))
    placed = []
    with module.graph.inserting_before(node):
        for number, part in enumerate(parts):
            channel = sum(channels[:number])
            if part in own:
                part.args = (*part.args, (target, channel))
                placed.append(part)
            else:
                copy = (part, None, _activation_argument(Activation.IDENTITY), None, None, (target, channel))
                placed.append(module.graph.call_function(end_convolution, copy))
        whole = module.graph.call_function(joined, (target, *placed))
    _take_place(module, node, whole)


def _shape(node: Any) -> tuple[str, ...] | None:
    """As text, which symbolic dimensions have too; None if unknown."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return tuple(map(str, value.shape)) if isinstance(value, torch.Tensor) else None


def _rank(node: Any) -> int:
    shape = _shape(node)
    return 0 if shape is None else len(shape)
