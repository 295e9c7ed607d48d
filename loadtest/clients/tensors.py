"""Tensors for a model's inputs by its own metadata, filled from a seed: the one place where they are made."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import triton_to_np_dtype

from loadtest.payloads import make_pictures, make_raw_tensor

FREE_DIMENSION = 256
MOST_BYTES = 256 << 20
BYTES_PICTURE_PX = (64, 48)


@dataclass(frozen=True, slots=True)
class InputSpec:
    """An input as the model's metadata has it; a dimension of -1 is free, and a free first one is the batch."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InputTensor:
    """An input with its content as the v2 protocol's raw bytes: little-endian, BYTES with a length before each."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    content: bytes


def make_tensors(
    specs: Iterable[InputSpec], *, batch: int = 1, sizes: Sequence[int] = (), seed: int
) -> list[InputTensor]:
    """One tensor an input. sizes: of the free dimensions after the batch, the last repeats; none: 256.

    A BYTES element is a small JPEG. Raises ValueError for a batch above 1 where an input has no batch dimension, for a
    tensor above 256 MiB, and for a datatype that nobody knows.
    """
    return [_make_tensor(spec, concrete_shape(spec, batch=batch, sizes=sizes), seed) for spec in specs]


def make_grpc_request(
    metadata: service_pb2.ModelMetadataResponse, *, batch: int = 1, sizes: Sequence[int] = (), seed: int
) -> service_pb2.ModelInferRequest:
    """A request with every input of the model, contents raw; sizes, batch, seed and errors as of `make_tensors`."""
    specs = [InputSpec(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in metadata.inputs]
    return grpc_request_of(metadata.name, make_tensors(specs, batch=batch, sizes=sizes, seed=seed))


def grpc_request_of(model: str, tensors: Iterable[InputTensor]) -> service_pb2.ModelInferRequest:
    """The tensors as a request, contents raw."""
    request = service_pb2.ModelInferRequest(model_name=model)
    for tensor in tensors:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(tensor.content)
    return request


def concrete_shape(spec: InputSpec, *, batch: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The spec's shape with every free dimension filled. Raises ValueError for a batch where there is no dimension."""
    has_batch = bool(spec.shape) and spec.shape[0] < 0
    if batch > 1 and not has_batch:
        raise ValueError(f"input {spec.name} has shape {list(spec.shape)}, so a batch of {batch} has no place: ask 1")
    wanted = iter(sizes)
    size = FREE_DIMENSION
    shape = []
    for axis, fixed in enumerate(spec.shape):
        if fixed < 0 and axis > 0:
            size = next(wanted, size)
        shape.append(fixed if fixed >= 0 else batch if axis == 0 else size)
    return tuple(shape)


def _make_tensor(spec: InputSpec, shape: tuple[int, ...], seed: int) -> InputTensor:
    if spec.datatype == "BYTES":
        element = _element(make_pictures(1, seed=seed, size=BYTES_PICTURE_PX)[0].content)
        _refuse_huge(spec, shape, len(element))
        return InputTensor(spec.name, spec.datatype, shape, element * math.prod(shape))
    dtype = triton_to_np_dtype(spec.datatype)
    if dtype is None:
        raise ValueError(f"input {spec.name} is of type {spec.datatype}, which nothing here can fill")
    _refuse_huge(spec, shape, np.dtype(dtype).itemsize)
    return InputTensor(spec.name, spec.datatype, shape, make_raw_tensor(shape, np.dtype(dtype).type, seed=seed))


def _refuse_huge(spec: InputSpec, shape: tuple[int, ...], element_bytes: int) -> None:
    if (size_bytes := math.prod(shape) * element_bytes) > MOST_BYTES:
        told = f"input {spec.name} of shape {list(shape)} is {size_bytes >> 20} MiB (limit {MOST_BYTES >> 20})"
        raise ValueError(f"{told}; ask a smaller batch or smaller sizes")


def _element(content: bytes) -> bytes:
    return len(content).to_bytes(4, "little") + content
