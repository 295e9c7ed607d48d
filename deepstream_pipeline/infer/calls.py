"""Rows to as few engine calls as their model allows, each copied once, to where the engine reads it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from deepstream_pipeline.infer.line import Line
from deepstream_pipeline.infer.network import Network, datatype_of
from deepstream_pipeline.types import DeviceRow, RowArray
from server.batching.merge import alike, shape_as_declared
from server.core.infer import InferRequest
from server.core.slab import SLAB_FROM_BYTES, Lease
from server.core.tensor import Place, Tensor, tensor_from_numpy

Row = RowArray | DeviceRow
LEFT_OUT = memoryview(b"")  # of a tensor that lies on the card


class Held(Protocol):
    """What is given back when the engine has read it."""

    def release(self) -> None: ...

    def release_later(self) -> None:
        """For a call that was given up, whose engine may read it still."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """members: indices of the rows, in the call's order. shape: of its input, the batch axis too where there is one.

    is_on_card: whether its rows lie there.
    """

    members: tuple[int, ...]
    shape: tuple[int, ...]
    has_batch_axis: bool
    is_on_card: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A call whose rows are where the engine reads them. line: the way to ask it. lease: of memory that they share."""

    call: Call
    request: InferRequest
    line: Line
    lease: Held | None


def calls_of(network: Network, rows: Sequence[Row], most_bytes: int, most_card_bytes: int = 0) -> list[Call]:
    """most_bytes, most_card_bytes: of one call, by where its rows lie; a single row may have more. Rows of unlike
    shapes, or in unlike memories, never share one."""
    calls: list[Call] = []
    for is_on_card, most in ((False, most_bytes), (True, most_card_bytes)):
        indices = [index for index, row in enumerate(rows) if isinstance(row, DeviceRow) is is_on_card]
        if indices:
            calls += _calls_of(network, rows, indices, most)
    return calls


def _calls_of(network: Network, rows: Sequence[Row], indices: Sequence[int], most_bytes: int) -> list[Call]:
    is_on_card = isinstance(rows[indices[0]], DeviceRow)
    if network.max_batch_size == 0:
        declared = network.input_shape
        return [Call((i,), shape_as_declared(rows[i].shape, declared), False, is_on_card) for i in indices]
    largest_bytes = max(rows[index].nbytes for index in indices)
    most_rows = min(network.max_batch_size, max(most_bytes // max(largest_bytes, 1), 1))
    groups = alike([rows[index] for index in indices], most_rows)
    members = [tuple(indices[one] for one in group) for group in groups]
    return [Call(group, (len(group), *rows[group[0]].shape), True, is_on_card) for group in members]


def load(network: Network, rows: Sequence[Row], call: Call, line: Line, deadline: float) -> Loaded:
    """Copies the call's rows, of this machine's memory, into the line's slab where it has room; they may be written
    again after it."""
    members = [row for index in call.members if not isinstance(row := rows[index], DeviceRow)]
    slab = line.slab
    size_bytes = math.prod(call.shape) * network.row_dtype.itemsize
    lease = slab.lease(size_bytes) if slab is not None and size_bytes >= SLAB_FROM_BYTES else None
    try:
        tensor = _tensor(network, members, call, lease)
    except BaseException:
        if lease is not None:
            lease.release()
        raise
    return Loaded(call, _request(network, tensor, deadline), line, lease)


def gathered(network: Network, call: Call, line: Line, place: Place, lease: Held, deadline: float) -> Loaded:
    """The call whose rows were gathered at that place on the card."""
    tensor = Tensor(network.input_name, datatype_of(network), call.shape, LEFT_OUT, place)
    return Loaded(call, _request(network, tensor, deadline), line, lease)


def _request(network: Network, tensor: Tensor, deadline: float) -> InferRequest:
    return InferRequest(network.name, (tensor,), network.version, deadline=deadline)


def _tensor(network: Network, rows: Sequence[RowArray], call: Call, lease: Lease | None) -> Tensor:
    if lease is None:
        array = np.empty((len(rows), *rows[0].shape), network.row_dtype)
        _copy(rows, array)
        return tensor_from_numpy(network.input_name, array.reshape(call.shape))
    view = lease.view[: math.prod(call.shape) * network.row_dtype.itemsize]
    array = np.frombuffer(view, network.row_dtype).reshape(len(rows), *rows[0].shape)
    _copy(rows, array)
    return Tensor(network.input_name, datatype_of(network), call.shape, view, lease.place)


def _copy(rows: Sequence[RowArray], array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> None:
    """numpy lets other threads run meanwhile."""
    for index, row in enumerate(rows):
        np.copyto(array[index], row)
