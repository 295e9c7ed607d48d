"""Rewrites an exported convolutional program: folds normalisation, and fuses convolution, bias and ReLU by cuDNN."""

import copy
import operator
import warnings
from itertools import count
from typing import Any

import torch

_aten = torch.ops.aten
_CONVOLUTIONS = (_aten.conv2d.default, _aten.convolution.default)
_RELUS = (_aten.relu.default, _aten.relu_.default)
_ADDS = (_aten.add.Tensor, _aten.add_.Tensor)
_NORMALISATIONS = {
    # operator → index of (weight, bias, mean, variance, eps), and of its training flag
    _aten.batch_norm.default: ((1, 2, 3, 4, 7), 5),
    _aten._native_batch_norm_legit_no_training.default: ((1, 2, 3, 4, 6), None),
}


def fold_normalisation(module: Any) -> int:
    """Folds batch normalisation into the convolution before it, in float64. Returns the number of folds."""
    count = 0
    for node in list(module.graph.nodes):
        if _is_foldable(module, node):
            _fold(module, node.args[0], node)
            count += 1
    if count:
        clean(module)
    return count


def _is_foldable(module: Any, node: Any) -> bool:
    if node.op != "call_function" or node.target not in _NORMALISATIONS:
        return False
    places, training = _NORMALISATIONS[node.target]
    source = node.args[0]
    is_alone = source.op == "call_function" and source.target in _CONVOLUTIONS and len(source.users) == 1
    is_inference = training is None or node.args[training] is False
    if node.target is not _aten.batch_norm.default and any(_result_index(user) != 0 for user in node.users):
        return False
    return is_alone and is_inference and not _is_transposed(source) and _has_constants(module, source, node, places)


def _is_transposed(convolution: Any) -> bool:
    return convolution.target is _aten.convolution.default and bool(convolution.args[6])


def _has_constants(module: Any, convolution: Any, node: Any, places: tuple[int, ...]) -> bool:
    tensors = [convolution.args[1], argument(convolution, 2), *(node.args[place] for place in places[:4])]
    return all(one is None or one.op == "get_attr" for one in tensors) and tensors[0] is not None


def _fold(module: Any, convolution: Any, node: Any) -> None:
    places, _ = _NORMALISATIONS[node.target]
    weight, bias = _value(module, convolution.args[1]), _value(module, argument(convolution, 2))
    gamma, beta, mean, variance = (_value(module, node.args[place]) for place in places[:4])
    eps = float(node.args[places[4]])
    scale = (variance.double() + eps).rsqrt()
    scale = scale if gamma is None else scale * gamma.double()
    shift = -mean.double() if bias is None else bias.double() - mean.double()
    folded_bias = shift * scale + (0.0 if beta is None else beta.double())
    folded = weight.double() * scale.reshape(-1, *([1] * (weight.dim() - 1)))
    with module.graph.inserting_before(convolution):
        weight_node = _new_constant(module, folded.to(weight.dtype))
        bias_node = _new_constant(module, folded_bias.to(weight.dtype))
    rest = convolution.args[3:] if len(convolution.args) > 3 else ()
    convolution.args = (convolution.args[0], weight_node, bias_node, *rest)
    for user in [node, *node.users]:
        if user is node and node.target is _aten.batch_norm.default:
            node.replace_all_uses_with(convolution)
        elif user is not node and user.target is operator.getitem:
            user.replace_all_uses_with(convolution)


def copied(module: Any) -> Any:
    """A copy of the graph with the same weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch copies its own deprecated classes
        return torch.fx.GraphModule(module, copy.deepcopy(module.graph))


def fuse_for_cudnn(module: Any) -> int:
    """Replaces convolution + bias [+ sum] + ReLU by one call each. Returns the number of replacements."""
    count = 0
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in _RELUS:
            count += _fuse_relu(module, node)
    if count:
        clean(module)
    return count


def _fuse_relu(module: Any, relu: Any) -> bool:
    source = relu.args[0]
    if _is_fusible(source):
        _replace(module, relu, source, None)
        return True
    if not is_sum(source) or len(source.users) != 1:
        return False
    branches = source.args[:2]
    fusible = [one for one in branches if _is_fusible(one)]
    if not fusible or branches[0] is branches[1]:
        return False
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    last = max(fusible, key=order.__getitem__)
    other = branches[1] if branches[0] is last else branches[0]
    _join_biases(module, last, other)
    _replace(module, relu, last, other)
    module.graph.erase_node(source)
    return True


def _join_biases(module: Any, convolution: Any, other: Any) -> None:
    """Moves the bias of another convolution in the sum into this one's: PyTorch adds it by a call of its own."""
    if not _is_fusible(other):
        return
    biases = [argument(one, 2) for one in (convolution, other)]
    if any(bias.op != "get_attr" for bias in biases):
        return
    one, another = (_value(module, bias) for bias in biases)
    with module.graph.inserting_before(convolution):
        total = _new_constant(module, (one.double() + another.double()).to(one.dtype))
    convolution.args = (*convolution.args[:2], total, *convolution.args[3:])
    other.args = (*other.args[:2], None, *other.args[3:])


def is_sum(node: Any) -> bool:
    """Whether it is a sum of two tensors, which modifies no tensor with other users."""
    if node.op != "call_function" or node.target not in _ADDS or node.kwargs:
        return False
    if not all(isinstance(one, torch.fx.Node) for one in node.args[:2]):
        return False
    return node.target is _aten.add.Tensor or len(node.args[0].users) == 1


def _is_fusible(node: Any) -> bool:
    return (
        node.op == "call_function"
        and node.target is _aten.conv2d.default
        and len(node.users) == 1
        and argument(node, 2) is not None
        and not isinstance(argument(node, 4), str)
        and argument(node, 6) in (None, 1)
    )


def _replace(module: Any, relu: Any, convolution: Any, other: Any) -> None:
    """Inserts the call at the ReLU's position, where the other operand of the sum is available."""
    image, weight, bias = convolution.args[:3]
    stride, padding, dilation = (_pair(argument(convolution, place), only) for place, only in ((3, 1), (4, 0), (5, 1)))
    geometry = (stride, padding, dilation, argument(convolution, 6) or 1)
    with module.graph.inserting_before(relu):
        call = module.graph.call_function
        if other is None:
            fused = call(_aten.cudnn_convolution_relu.default, (image, weight, bias, *geometry))
        else:
            target = _aten.cudnn_convolution_add_relu.default
            fused = call(target, (image, weight, other, 1.0, bias, *geometry))
    fused.meta.update(relu.meta)
    relu.replace_all_uses_with(fused)
    module.graph.erase_node(relu)


def _pair(value: Any, default: int) -> list[int]:
    values = list(value) if isinstance(value, (list, tuple)) else [default if value is None else value]
    return values * 2 if len(values) == 1 else values


def argument(node: Any, place: int) -> Any:
    """A convolution's argument, positional or by name."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    return node.args[place] if len(node.args) > place else node.kwargs.get(names[place])


def _value(module: Any, node: Any) -> Any:
    if node is None:
        return None
    value = module
    for word in node.target.split("."):
        value = getattr(value, word)
    return value.detach()


def _new_constant(module: Any, value: Any) -> Any:
    used = {name for name, _ in module.named_buffers()}
    name = next(name for number in count() if (name := f"_folded_{number}") not in used)
    module.register_buffer(name, value)
    return module.graph.get_attr(name)


def _result_index(user: Any) -> Any:
    return user.args[1] if user.target is operator.getitem else None


def clean(module: Any) -> None:
    """Removes unused nodes and parameters, which would occupy GPU memory."""
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.delete_all_unused_submodules()
    used = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    _drop_unused(module, "", used)
    module.recompile()


def _drop_unused(module: Any, prefix: str, used: set[str]) -> None:
    for tensors in (module._parameters, module._buffers):
        for name in [name for name in tensors if prefix + name not in used]:
            del tensors[name]
    for name, child in module.named_children():
        _drop_unused(child, f"{prefix}{name}.", used)
