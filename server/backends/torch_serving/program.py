"""An exported program (`torch.export.save`, 1/model.pt2) as a callable on a device, in its precision and layout."""

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .config import EngineSpec, Precision
from .errors import LoadError
from .fusing import fold_normalisation, fuse_activations

# Network inputs (rows, *dims), floats in the spec's precision, on the device → outputs in config.pbtxt's order.
Program = Callable[[Sequence[Any]], tuple[Any, ...]]

_FLOATS = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16, Precision.FP32: torch.float32}
_MOST_FUSED_DIFFERENCE = 0.02  # FP16 has 11 bits, and a residual network adds up dozens of roundings
WIRE_TYPES = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}


def network_type(wire_type: str, precision: Precision) -> Any:
    """The torch.dtype in which the program takes an input that travels as wire_type: floats in its precision.

    UINT8 stays what it is: the program that was exported for it casts by itself.
    """
    dtype = WIRE_TYPES[wire_type]
    return _FLOATS[precision] if dtype.is_floating_point else dtype


@dataclass(frozen=True)
class Loaded:
    """A program, and what its user should know about it."""

    program: Program
    notes: tuple[str, ...] = ()


def load_program(path: Path, spec: EngineSpec, device: Any) -> Loaded:
    """The program, ready to run on the device: its floats in the spec's precision, normalisation folded.

    Raises LoadError for a file that is not there, not an exported program, or does not fit the configuration.
    """
    exported = _read(path)
    count = len(exported.graph_signature.user_inputs)
    if count != len(spec.inputs):
        raise LoadError(f"{path.name} takes {count} inputs and config.pbtxt names {len(spec.inputs)}")
    module = exported.module(check_guards=False)
    if spec.is_fused:
        fold_normalisation(module)
    module = in_precision(module, _FLOATS[spec.precision]).to(device)
    if spec.is_channels_last:
        module = module.to(memory_format=torch.channels_last)
    if not spec.is_fused or device.type != "cuda":
        return Loaded(_Called(module, len(spec.outputs)))
    return _fused(module, spec, device)


def _read(path: Path) -> Any:
    if not path.is_file():
        raise LoadError(f"there is no {path.name} in {path.parent}: export one by torch.export.save")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of weights in read-only memory, which nobody writes
            return torch.export.load(path)
    except Exception as error:  # noqa: BLE001  zip, pickle and schema errors of every kind
        raise LoadError(f"{path} is not a program of torch.export.save: {_first_line(error)}") from None


def in_precision(module: Any, dtype: Any) -> Any:
    """The module with its floats, and the casts to float32 that its graph spells out, in another type of floats."""
    if dtype is torch.float32:
        return module
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            module.graph.erase_node(node)
            continue
        node.args = torch.fx.node.map_aggregate(node.args, lambda one: dtype if one is torch.float32 else one)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, lambda one: dtype if one is torch.float32 else one)
    module.recompile()
    return module.to(dtype)


def _fused(module: Any, spec: EngineSpec, device: Any) -> Loaded:
    """With cuDNN's fused calls where they are right on this device: the same answer as without, to its precision."""
    plain = _Called(module, len(spec.outputs))
    fused_module = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
    if not all(one.is_fixed for one in spec.inputs) or not fuse_activations(fused_module):
        return Loaded(plain)
    fused = _Called(fused_module, len(spec.outputs))
    try:
        with torch.inference_mode():
            sample = _sample(spec, device)
            pairs = list(zip(plain(sample), fused(sample), strict=True))
            worst = max(_relative_difference(one, other) for one, other in pairs)
    except RuntimeError as error:
        return Loaded(plain, (f"cuDNN's fused convolutions are not used here: {_first_line(error)}",))
    if worst > _MOST_FUSED_DIFFERENCE:
        return Loaded(plain, (f"cuDNN's fused convolutions are not used here: they answer {worst:.1%} otherwise",))
    return Loaded(fused)


def _sample(spec: EngineSpec, device: Any) -> list[Any]:
    """Two rows of numbers that any program takes: floats between 0 and 1, or zeros."""
    rows = (min(2, spec.max_batch_size),) if spec.max_batch_size else ()
    generator = torch.Generator(device="cpu").manual_seed(0)
    sample = []
    for one in spec.inputs:
        dtype = network_type(one.data_type, spec.precision)
        shape = (*rows, *one.dims)
        values = torch.rand(shape, generator=generator) if dtype.is_floating_point else torch.zeros(shape)
        values = values.to(device, dtype)
        is_image = spec.is_channels_last and values.dim() == 4
        sample.append(values.to(memory_format=torch.channels_last) if is_image else values)
    return sample


def _relative_difference(one: Any, other: Any) -> float:
    """The largest difference as a share of the largest value."""
    largest = float(one.float().abs().max())
    return float((one.float() - other.float()).abs().max()) / max(largest, 1e-12)


class _Called:
    """A module that answers in a tuple, whatever it returns."""

    def __init__(self, module: Any, output_count: int) -> None:
        self.module = module
        self._output_count = output_count

    def __call__(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        answer = self.module(*inputs)
        outputs = tuple(answer) if isinstance(answer, (tuple, list)) else (answer,)
        if len(outputs) != self._output_count:
            raise LoadError(f"the program returns {len(outputs)} tensors and config.pbtxt names {self._output_count}")
        return outputs


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
