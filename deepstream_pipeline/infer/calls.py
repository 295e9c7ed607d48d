"""Rows to as few engine calls as their model allows, each copied once, to where the engine reads it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepstream_pipeline.infer.network import Network, datatype_of
from deepstream_pipeline.types import RowArray
from server.batching.merge import alike, as_declared
from server.core.infer import InferRequest
from server.core.slab import SLAB_FROM_BYTES, Lease, Slab
from server.core.tensor import Tensor, tensor_from_numpy


@dataclass(frozen=True, slots=True)
class Call:
    """members: indices of the rows, in the call's order. shape: of its input, the batch axis too where there is one."""

    members: tuple[int, ...]
    shape: tuple[int, ...]
    has_batch_axis: bool


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A call whose rows are where the engine reads them. lease: of the slab, where they lie there."""

    call: Call
    request: InferRequest
    lease: Lease | None


def calls_of(network: Network, rows: Sequence[RowArray], most_bytes: int) -> list[Call]:
    """most_bytes: of one call; a single row may have more. Rows of unlike shapes never share one."""
    if network.max_batch_size == 0:
        return [Call((i,), as_declared(row, network.input_shape).shape, False) for i, row in enumerate(rows)]
    most_rows = min(network.max_batch_size, max(most_bytes // max(row.nbytes for row in rows), 1))
    return [Call(members, (len(members), *rows[members[0]].shape), True) for members in alike(rows, most_rows)]


def load(network: Network, rows: Sequence[RowArray], call: Call, slab: Slab | None, deadline: float) -> Loaded:
    """Copies the call's rows, into the slab where it has room; they may be written again after it."""
    size_bytes = math.prod(call.shape) * network.row_dtype.itemsize
    lease = slab.lease(size_bytes) if slab is not None and size_bytes >= SLAB_FROM_BYTES else None
    try:
        tensor = _tensor(network, rows, call, lease)
    except BaseException:
        if lease is not None:
            lease.release()
        raise
    return Loaded(call, InferRequest(network.name, (tensor,), network.version, deadline=deadline), lease)


def _tensor(network: Network, rows: Sequence[RowArray], call: Call, lease: Lease | None) -> Tensor:
    members = [rows[index] for index in call.members]
    if lease is None:
        array = np.empty((len(members), *members[0].shape), network.row_dtype)
        _copy(members, array)
        return tensor_from_numpy(network.input_name, array.reshape(call.shape))
    view = lease.view[: math.prod(call.shape) * network.row_dtype.itemsize]
    array = np.frombuffer(view, network.row_dtype).reshape(len(members), *members[0].shape)
    _copy(members, array)
    return Tensor(network.input_name, datatype_of(network), call.shape, view, lease.place)


def _copy(rows: Sequence[RowArray], array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> None:
    """numpy lets other threads run meanwhile."""
    for index, row in enumerate(rows):
        np.copyto(array[index], row)
