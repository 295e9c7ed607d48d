"""Triton's classification extension: the largest values of an output as "value:index:label"."""

from collections.abc import Sequence

import numpy as np

from server.core.errors import InvalidRequest
from server.core.tensor import Array, Datatype, Tensor, tensor_from_bytes

_UNSUPPORTED = (Datatype.BOOL, Datatype.FP16, Datatype.BF16, Datatype.BYTES)


def classified(tensor: Tensor, *, classes: int, labels: Sequence[str], has_batch: bool) -> Tensor:
    """A BYTES tensor [rows, n], or [n] without a batch dimension; n is at most the values of a row.

    labels: by index; a class without one has none. Raises InvalidRequest for a datatype that has no order here.
    """
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
    """Indices of the largest values, falling; of equal ones the first comes first. Not a number comes last."""
    falling = -row if np.issubdtype(row.dtype, np.floating) else ~row  # of integers, ~ turns the order without overflow
    order: list[int] = np.argsort(falling, kind="stable")[:count].tolist()
    return order


def _item(row: Array, index: int, labels: Sequence[str]) -> bytes:
    value = row[index]
    number = f"{value:f}" if np.issubdtype(row.dtype, np.floating) else str(value)
    label = f":{labels[index]}" if index < len(labels) and labels[index] else ""
    return f"{number}:{index}{label}".encode()
