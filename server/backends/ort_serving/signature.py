"""The tensors of an ONNX file, in the words of Triton's configuration."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .errors import LoadError

TRITON_TYPES = {
    "tensor(bool)": "TYPE_BOOL",
    "tensor(uint8)": "TYPE_UINT8",
    "tensor(uint16)": "TYPE_UINT16",
    "tensor(uint32)": "TYPE_UINT32",
    "tensor(uint64)": "TYPE_UINT64",
    "tensor(int8)": "TYPE_INT8",
    "tensor(int16)": "TYPE_INT16",
    "tensor(int32)": "TYPE_INT32",
    "tensor(int64)": "TYPE_INT64",
    "tensor(float16)": "TYPE_FP16",
    "tensor(float)": "TYPE_FP32",
    "tensor(double)": "TYPE_FP64",
    "tensor(string)": "TYPE_STRING",
}  # the same thirteen as NGC's backend: bfloat16, float8, int4 and complex have no way through it either


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of the ONNX file. `dims` has -1 for a dynamic or symbolic dimension and is () for a scalar
    (and, as ONNX Runtime reports it, for a tensor of unknown rank). `data_type` is "" where Triton cannot carry it."""

    name: str
    onnx_type: str
    data_type: str
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Signature:
    """`overridable` are initializers that a request may replace: Triton's optional inputs."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    overridable: tuple[TensorSpec, ...]

    @property
    def is_batchable(self) -> bool:
        """Every input and output has a dynamic first dimension."""
        return all(spec.dims[:1] == (-1,) for spec in (*self.inputs, *self.outputs))


def read_signature(session: Any) -> Signature:
    """The tensors of an open session, in the file's order; LoadError for sequences, maps and optionals."""
    return Signature(
        inputs=_specs(session.get_inputs()),
        outputs=_specs(session.get_outputs()),
        overridable=_specs(session.get_overridable_initializers()),
    )


def _specs(node_args: Iterable[Any]) -> tuple[TensorSpec, ...]:
    return tuple(_spec(node.name, node.type, node.shape) for node in node_args)


def _spec(name: str, onnx_type: str, shape: Iterable[int | str | None]) -> TensorSpec:
    if not onnx_type.startswith("tensor("):
        raise LoadError(f"'{name}' is a {onnx_type}, and Triton carries tensors only: export the model without it")
    dims = tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in shape)
    return TensorSpec(name, onnx_type, TRITON_TYPES.get(onnx_type, ""), dims)
