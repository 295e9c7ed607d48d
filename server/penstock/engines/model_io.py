"""Validates tensors against a model's config; raw binary requests; classification. Uses Triton's error texts."""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tritonclient.grpc import model_config_pb2

from penstock.engines.config_pbtxt import config_from_proto
from penstock.protocol.engine import TensorSpec
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.inference import Array, Datatype, InferRequest, Tensor, tensor_from_bytes
from penstock.protocol.request_checks import MAX_ELEMENTS

_UNSUPPORTED = (Datatype.BOOL, Datatype.FP16, Datatype.BF16, Datatype.BYTES)


def classified(tensor: Tensor, *, classes: int, labels: Sequence[str], has_batch: bool) -> Tensor:
    """BYTES tensor of the n largest classes, [rows, n] or [n]. labels: by index. Raises InvalidRequest."""
    if tensor.datatype in _UNSUPPORTED:
        raise InvalidRequest(
            f"class result not available for output '{tensor.name}' due to unsupported type '{tensor.datatype}'"
        )
    rows = tensor.shape[0] if has_batch else 1
    values = tensor.to_numpy().reshape(rows, -1 if tensor.element_count else 0)
    count = min(classes, values.shape[1])
    items = [_item(row, index, labels) for row in values for index in _largest(row, count)]
    return tensor_from_bytes(tensor.name, items, (rows, count) if has_batch else (count,))


def _largest(row: Array, count: int) -> list[int]:
    """Indices of the largest values, descending; ties by index, NaN last."""
    falling = -row if np.issubdtype(row.dtype, np.floating) else ~row  # reverses integers without overflow
    order: list[int] = np.argsort(falling, kind="stable")[:count].tolist()
    return order


def _item(row: Array, index: int, labels: Sequence[str]) -> bytes:
    value = row[index]
    number = f"{value:f}" if np.issubdtype(row.dtype, np.floating) else str(value)
    label = f":{labels[index]}" if index < len(labels) and labels[index] else ""
    return f"{number}:{index}{label}".encode()


def raw_tensor(body: memoryview, proto: model_config_pb2.ModelConfig) -> Tensor:
    """The model's single input with these bytes; one row if it batches. Raises InvalidRequest with Triton's text."""
    config = config_from_proto(proto)
    if len(config.inputs) != 1:
        raise InvalidRequest(
            f"[request id: <id_unknown>] Raw request must only have 1 input (found 1) to be deduced but got "
            f"{len(config.inputs)} inputs in '{config.name}' model configuration"
        )
    spec = config.inputs[0]
    batch = (1,) if config.max_batch_size else ()
    if spec.datatype is Datatype.BYTES:
        data = memoryview(struct.pack("<I", len(body)) + bytes(body))
        return Tensor(spec.name, spec.datatype, batch + _one_element(spec), data)
    return Tensor(spec.name, spec.datatype, batch + _deduced(spec, len(body)), body)


def _one_element(spec: TensorSpec) -> tuple[int, ...]:
    if any(size != 1 for size in spec.shape):
        raise InvalidRequest(
            f"[request id: <id_unknown>] For BYTE datatype raw input '{spec.name}', the model must have input shape [1]"
        )
    return spec.shape


def _deduced(spec: TensorSpec, size_bytes: int) -> tuple[int, ...]:
    if spec.shape.count(-1) > 1:
        raise InvalidRequest(
            f"[request id: <id_unknown>] The shape of the raw input '{spec.name}' can not be deduced because there are "
            "more than one variable-sized dimension"
        )
    known = spec.datatype.size_bytes or 1
    for size in spec.shape:
        known *= max(size, 1)
    return tuple(size_bytes // known if size == -1 else size for size in spec.shape)


Shape = tuple[int, ...]
_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


@dataclass(frozen=True, slots=True)
class TensorRule:
    """An input or output of the config. dims: without the batch dimension. reshape: the model's own shape."""

    name: str
    datatype: Datatype
    dims: Shape
    reshape: Shape | None = None
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class RequestRules:
    """Validates requests for one model. Raises InvalidRequest."""

    model_name: str
    max_batch_size: int
    inputs: Mapping[str, TensorRule]
    outputs: Mapping[str, TensorRule]

    def check(self, request: InferRequest) -> int:
        """The request's rows; 1 without batching. Does not check the lengths inside BYTES."""
        who = f"[request id: {request.id or '<id_unknown>'}] "
        self._check_names(who, request)
        rows = self._rows(who, request.inputs) if self.max_batch_size else 1
        for tensor in request.inputs:
            self._check_tensor(who, tensor)
        for tensor in request.inputs:
            self._check_size(who, tensor)
        return rows

    def wanted(self, request: InferRequest) -> tuple[str, ...]:
        """The requested outputs, or all."""
        return tuple(dict.fromkeys(request.outputs)) or tuple(self.outputs)

    def arrays_of(self, request: InferRequest) -> dict[str, Array]:
        """The model's input arrays; views of the tensors' bytes if possible."""
        who = f"[request id: {request.id or '<id_unknown>'}] "
        arrays = {}
        for tensor in request.inputs:
            array = self._array_of_strings(who, tensor) if tensor.datatype is Datatype.BYTES else tensor.to_numpy()
            rule = self.inputs[tensor.name]
            if rule.reshape is not None:
                array = array.reshape(self._other_shape(tensor.shape, rule.dims, rule.reshape))
            arrays[tensor.name] = array if array.flags.aligned else array.copy()
        return arrays

    def shape_of_output(self, name: str, shape: Shape) -> Shape:
        """The client's shape of an output of this shape."""
        rule = self.outputs[name]
        return shape if rule.reshape is None else self._other_shape(shape, rule.reshape, rule.dims)

    def _check_names(self, who: str, request: InferRequest) -> None:
        names = [tensor.name for tensor in request.inputs]
        twins = [name for index, name in enumerate(names) if name in names[:index]]
        if twins:
            raise InvalidRequest(f"{who}input '{twins[0]}' already exists in request")
        for name in request.outputs:
            if name not in self.outputs:
                raise InvalidRequest(f"unexpected inference output '{name}' for model '{self.model_name}'")
        required = [name for name, rule in self.inputs.items() if not rule.is_optional]
        if not len(required) <= len(names) <= len(self.inputs):
            raise InvalidRequest(who + self._wrong_count(required, names))
        for name in names:
            if name not in self.inputs:
                raise InvalidRequest(f"unexpected inference input '{name}' for model '{self.model_name}'")

    def _wrong_count(self, required: Sequence[str], names: Sequence[str]) -> str:
        most = len(self.inputs)
        expected = (
            f"expected {most} inputs"
            if len(required) == most
            else f"expected number of inputs between {len(required)} and {most}"
        )
        missing = _quoted([name for name in required if name not in names])
        return (
            f"{expected} but got {len(names)} inputs for model '{self.model_name}'. Got input(s) {_quoted(names)}, but "
            f"missing required input(s) {missing}. Please provide all required input(s)."
        )

    def _rows(self, who: str, inputs: Sequence[Tensor]) -> int:
        rows = inputs[0].shape[0] if inputs and inputs[0].shape else 0
        for tensor in inputs:
            what = f"{who}input '{tensor.name}'"
            if not tensor.shape:
                raise InvalidRequest(f"{what} has no shape but model requires batch dimension for '{self.model_name}'")
            if tensor.shape[0] != rows:
                raise InvalidRequest(f"{what} batch size does not match other inputs for '{self.model_name}'")
        if rows > self.max_batch_size:
            raise InvalidRequest(
                f"{who}inference request batch-size must be <= {self.max_batch_size} for '{self.model_name}'"
            )
        return max(1, rows)

    def _check_tensor(self, who: str, tensor: Tensor) -> None:
        rule = self.inputs[tensor.name]
        if tensor.datatype is not rule.datatype:
            raise InvalidRequest(
                f"{who}inference input '{tensor.name}' data-type is '{tensor.datatype}', but model "
                f"'{self.model_name}' expects '{rule.datatype}'"
            )
        batch = (-1,) if self.max_batch_size else ()
        expected = (*batch, *rule.dims)
        if not _fits(tensor.shape, expected):
            note = _BATCH_NOTE if self.max_batch_size else ""
            raise InvalidRequest(
                f"{who}unexpected shape for input '{tensor.name}' for model '{self.model_name}'. Expected "
                f"{_shape_text(expected)}, got {_shape_text(tensor.shape)}. {note}"
            )

    def _check_size(self, who: str, tensor: Tensor) -> None:
        """A batch of 0 rows counts as 1 row without bytes, as in Triton."""
        size_bytes = tensor.datatype.size_bytes
        is_empty_batch = self.max_batch_size > 0 and tensor.shape[0] == 0
        count = int(np.prod(tensor.shape[1:], dtype=object)) if is_empty_batch else tensor.element_count
        if size_bytes is None or tensor.data.nbytes == count * size_bytes:
            if is_empty_batch:
                raise InvalidRequest(f"{who}input '{tensor.name}' of model '{self.model_name}' has a batch of 0 rows")
            return
        raise InvalidRequest(
            f"{who}input byte size mismatch for input '{tensor.name}' for model '{self.model_name}'. Expected "
            f"{count * size_bytes}, got {tensor.data.nbytes}"
        )

    def check_strings(self, request: InferRequest) -> None:
        """Checks that the lengths inside BYTES match the shapes."""
        for tensor in request.inputs:
            if tensor.datatype is Datatype.BYTES:
                self._strings(f"[request id: {request.id or '<id_unknown>'}] ", tensor)

    def _strings(self, who: str, tensor: Tensor) -> list[memoryview]:
        what = f"for inference input '{tensor.name}'"
        items: list[memoryview] = []
        data, position = tensor.data, 0
        while position < data.nbytes:
            left = data.nbytes - position - 4
            if left < 0:
                raise InvalidRequest(
                    f"{who}incomplete string length indicator {what} for model '{self.model_name}', expecting 4 bytes "
                    f"but only {left + 4} bytes available. Please make sure the string length indicator is in one "
                    "buffer."
                )
            (length,) = struct.unpack_from("<I", data, position)
            if length > left:
                raise InvalidRequest(
                    f"incomplete string data {what}, expecting string of length {length} but only {left} bytes "
                    "available"
                )
            items.append(data[position + 4 : position + 4 + length])
            position += 4 + length
        self._check_count(f"{what} for model '{self.model_name}'", who, len(items), tensor.element_count)
        return items

    def _array_of_strings(self, who: str, tensor: Tensor) -> Array:
        items = self._strings(who, tensor)
        array = np.empty(len(items), np.object_)
        array[:] = [bytes(item) for item in items]
        return array.reshape(tensor.shape)

    @staticmethod
    def _check_count(what: str, who: str, count: int, wanted: int) -> None:
        if count < wanted:
            raise InvalidRequest(f"{who}expected {wanted} string elements {what}, got {count}")
        if count > wanted:
            raise InvalidRequest(f"{who}unexpected number of string elements {count} {what}, expecting {wanted}")

    def _other_shape(self, shape: Shape, own: Shape, other: Shape) -> Shape:
        """Converts a shape from layout `own` to layout `other`; variable sizes stay in order."""
        batch = shape[:1] if self.max_batch_size else ()
        varying = iter([size for size, dim in zip(shape[len(batch) :], own, strict=True) if dim == -1])
        return (*batch, *(next(varying) if dim == -1 else dim for dim in other))


def rules_of(proto: model_config_pb2.ModelConfig) -> RequestRules:
    """The rules of a completed config."""
    config = config_from_proto(proto)
    inputs = [
        TensorRule(spec.name, spec.datatype, spec.shape, _reshape(entry), entry.optional)
        for spec, entry in zip(config.inputs, proto.input, strict=True)
    ]
    outputs = [
        TensorRule(spec.name, spec.datatype, spec.shape, _reshape(entry))
        for spec, entry in zip(config.outputs, proto.output, strict=True)
    ]
    return RequestRules(
        config.name, config.max_batch_size, {rule.name: rule for rule in inputs}, {rule.name: rule for rule in outputs}
    )


def _reshape(entry: "model_config_pb2.ModelInput | model_config_pb2.ModelOutput") -> Shape | None:
    return tuple(entry.reshape.shape) if entry.HasField("reshape") else None


def _fits(shape: Shape, expected: Shape) -> bool:
    """Also rejects shapes that are too large for any array, which are possible beside a 0."""
    is_sane = all(size >= 0 for size in shape) and math.prod(max(1, size) for size in shape) <= MAX_ELEMENTS
    return (
        is_sane
        and len(shape) == len(expected)
        and all(wanted in (-1, size) for size, wanted in zip(shape, expected, strict=True))
    )


def _shape_text(shape: Shape) -> str:
    return f"[{','.join(map(str, shape))}]"


def _quoted(names: Sequence[str]) -> str:
    return f"[{','.join(repr(name) for name in names)}]"
