"""Rows of several requests, or of several arrays, as one engine call. Sans-IO."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from server.core.infer import InferRequest
from server.core.slab import SLAB_FROM_BYTES, Lease, Slab
from server.core.tensor import Array, Datatype, Tensor


@dataclass(frozen=True, slots=True, eq=False)
class MergedRequest:
    """One engine call. order: whose rows come when, as indices of the requests; row_counts: rows of each, in order.

    leases: of what the call's inputs lie in; release() gives them back.
    """

    request: InferRequest
    order: Sequence[int]
    row_counts: Sequence[int]
    leases: Sequence[Lease] = ()

    @property
    def rows(self) -> int:
        """Of the whole call."""
        return sum(self.row_counts)

    def release(self, *, is_answered: bool) -> None:
        """Call it once, when the call is over. Where it was given up, the engine may still read its inputs."""
        for lease in self.leases:
            if is_answered:
                lease.release()
            else:
                lease.release_later()


def rows_of(request: InferRequest) -> int:
    """Rows along axis 0, by the first input. The request was found good for its model, which has such an axis."""
    return request.inputs[0].shape[0]


def key_of(request: InferRequest) -> Hashable:
    """Equal for requests that may share a call: model, version, inputs but for their rows, outputs, parameters."""
    inputs = tuple([(tensor.name, tensor.datatype, tensor.shape[1:]) for tensor in request.inputs])
    parameters = request.parameters
    if not parameters:
        return request.model_name, request.model_version, request.outputs, inputs
    said = tuple(sorted((name, type(value).__name__, value) for name, value in parameters.items()))
    return request.model_name, request.model_version, request.outputs, inputs, said


def merge_requests(requests: Sequence[InferRequest], slab: Slab | None = None) -> MergedRequest:
    """One call for requests of equal keys. Everything but the rows is the first request's; it carries no id.

    slab: what the engine reads from without being sent the bytes. Inputs that lie there side by side stay where they
    are, which is what order is for; others that are large enough are copied into it, where it has room. Of BYTES only
    what the gateway laid there itself, pictures that the engine decodes: Triton reads lengths there, and clients' words
    go to backends of which nobody knows what they make of a length that changes meanwhile.
    It has no deadline: each request's own is the caller's to keep, and the call's end is worth knowing after it.
    """
    if len(requests) == 1 and slab is None and requests[0].deadline is None:
        return MergedRequest(requests[0], (0,), (rows_of(requests[0]),))
    order = _order(requests)
    ordered = requests if order is None else [requests[index] for index in order]
    leases: list[Lease] = []
    inputs = tuple(
        _one_tensor([request.inputs[number] for request in ordered], slab, leases)
        for number in range(len(requests[0].inputs))
    )
    row_counts = [request.inputs[0].shape[0] for request in ordered]
    return MergedRequest(_one_request(requests, inputs), order or range(len(requests)), row_counts, leases)


def _order(requests: Sequence[InferRequest]) -> list[int] | None:
    """By where the first input lies; None for the order that they have."""
    offsets: list[tuple[int, int]] = []
    for index, request in enumerate(requests):
        place = request.inputs[0].place
        if place is None:
            return None
        offsets.append((place.offset, index))
    return [index for _, index in sorted(offsets)]


def _one_request(requests: Sequence[InferRequest], inputs: tuple[Tensor, ...]) -> InferRequest:
    first = requests[0]
    return InferRequest(
        first.model_name,
        inputs,
        first.model_version,
        first.id if len(requests) == 1 else "",
        first.outputs,
        first.parameters,
        None,
        first.metadata,
    )


def _one_tensor(tensors: Sequence[Tensor], slab: Slab | None, leases: list[Lease]) -> Tensor:
    first = tensors[0]
    if slab is None or (first.datatype is Datatype.BYTES and all(tensor.place is None for tensor in tensors)):
        return first if len(tensors) == 1 else _concatenated(tensors)
    found = _side_by_side(tensors, slab, leases)
    if found is not None:
        return found
    size_bytes = sum(tensor.data.nbytes for tensor in tensors)
    lease = slab.lease(size_bytes) if size_bytes >= SLAB_FROM_BYTES else None
    if lease is None:
        return first if len(tensors) == 1 else _concatenated(tensors)
    leases.append(lease)
    return _copied(tensors, lease, size_bytes)


def _concatenated(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    data = memoryview(b"".join([tensor.data for tensor in tensors]))
    return Tensor(first.name, first.datatype, _shape(tensors), data)


def _copied(tensors: Sequence[Tensor], lease: Lease, size_bytes: int) -> Tensor:
    first, view, position = tensors[0], lease.view, 0
    for tensor in tensors:
        end = position + tensor.data.nbytes
        view[position:end] = tensor.data
        position = end
    return Tensor(first.name, first.datatype, _shape(tensors), view[:size_bytes], lease.place)


def _side_by_side(tensors: Sequence[Tensor], slab: Slab, leases: list[Lease]) -> Tensor | None:
    """The tensors as one, where each begins where the one before it ends; all of them are held then."""
    held: list[Lease] = []
    first = tensors[0]
    if first.place is None:
        return None
    region, generation, offset = first.place.region, first.place.generation, first.place.offset
    for tensor in tensors:
        place = tensor.place
        if place is None or place.offset != offset or place.region != region or place.generation != generation:
            return None
        lease = slab.lease_of(place)
        if lease is None:
            return None
        held.append(lease)
        offset += tensor.data.nbytes
    for lease in held:
        lease.hold()
    leases += held
    data = first.data if len(tensors) == 1 else slab.window(first.place, offset - first.place.offset)
    return Tensor(first.name, first.datatype, _shape(tensors), data, first.place)


def _shape(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    rows = sum([tensor.shape[0] for tensor in tensors])
    return (rows, *tensors[0].shape[1:])


@dataclass(frozen=True, slots=True)
class Merged:
    """One engine call's worth of rows. array: what the engine gets; members: indices of the arrays, in row order.

    has_batch_axis: whether row i of the answer belongs to members[i]; else the whole answer belongs to members[0].
    """

    array: Array
    members: tuple[int, ...]
    has_batch_axis: bool


def merge(arrays: Sequence[Array], *, declared_shape: tuple[int, ...], max_batch_size: int) -> list[Merged]:
    """Engine calls for the arrays, each without a batch axis: as few as max_batch_size and unlike shapes allow.

    declared_shape: the model's input without batch axis, -1 where it varies. max_batch_size 0 means that the model
    has no batch axis: one call an array, given the leading ones that the declared shape has and the array has not.
    """
    if max_batch_size == 0:
        return [
            Merged(array.reshape(shape_as_declared(array.shape, declared_shape)), (i,), False)
            for i, array in enumerate(arrays)
        ]
    calls: list[Merged] = []
    for members in alike(arrays, max_batch_size):
        stacked = arrays[members[0]][np.newaxis] if len(members) == 1 else np.stack([arrays[i] for i in members])
        calls.append(Merged(stacked, members, True))
    return calls


class Shaped(Protocol):
    """What rows are told apart by: an array, or what stands for one."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def alike(arrays: Sequence[Shaped], max_rows: int) -> list[tuple[int, ...]]:
    """Indices of the arrays whose rows one call may hold: of one shape, at most so many."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for index, array in enumerate(arrays):
        by_shape.setdefault(array.shape, []).append(index)
    return [tuple(group[i : i + max_rows]) for group in by_shape.values() for i in range(0, len(group), max_rows)]


def shape_as_declared(shape: tuple[int, ...], declared_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with the leading ones that the declared shape has and it has not."""
    leading = len(declared_shape) - len(shape)
    if leading <= 0 or any(size not in (1, -1) for size in declared_shape[:leading]):
        return shape
    return (1,) * leading + shape
