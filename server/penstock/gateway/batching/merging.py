"""Merges requests into one engine call, and splits its response or error by request. Sans-IO."""

import re
import struct
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np

from penstock.protocol.errors import EngineFailed
from penstock.protocol.inference import Array, Datatype, InferRequest, InferResponse, SlabAddress, Tensor
from penstock.protocol.shared_memory import SLAB_FROM_BYTES, Lease, Slab

_LENGTH = struct.Struct("<I")  # before an element of BYTES


@dataclass(frozen=True, slots=True, eq=False)
class MergedRequest:
    """One engine call. order: indices of its requests in row order. row_counts: rows of each. leases: of its inputs."""

    request: InferRequest
    order: Sequence[int]
    row_counts: Sequence[int]
    leases: Sequence[Lease] = ()

    @property
    def rows(self) -> int:
        return sum(self.row_counts)

    def release(self, *, is_answered: bool) -> None:
        """Releases the leases, once. If the call was abandoned, they are released later: the engine may still read."""
        for lease in self.leases:
            if is_answered:
                lease.release()
            else:
                lease.release_later()


def rows_of(request: InferRequest) -> int:
    """Rows along axis 0 of the first input of a validated request."""
    return request.inputs[0].shape[0]


def key_of(request: InferRequest) -> Hashable:
    """Key of the requests that may share a call: equal model, version, row shapes, outputs and parameters."""
    inputs = tuple([(tensor.name, tensor.datatype, tensor.shape[1:]) for tensor in request.inputs])
    parameters = request.parameters
    if not parameters:
        return request.model_name, request.model_version, request.outputs, inputs
    text = tuple(sorted((name, type(value).__name__, value) for name, value in parameters.items()))
    return request.model_name, request.model_version, request.outputs, inputs, text


def merge_requests(
    requests: Sequence[InferRequest], slab: Slab | None = None, *, reads_slab: bool = False
) -> MergedRequest:
    """Merges requests with equal keys into one call without id and deadline.

    slab: memory shared with the engine. Adjacent inputs are used in place, other large inputs are copied if there is
    room, except BYTES: Triton reads their lengths there, which a client could change meanwhile. reads_slab: the model
    takes references to pictures there instead of the pictures.
    """
    if len(requests) == 1 and slab is None and requests[0].deadline is None:
        return MergedRequest(requests[0], (0,), (rows_of(requests[0]),))
    order = _order(requests)
    ordered = requests if order is None else [requests[index] for index in order]
    leases: list[Lease] = []
    inputs = tuple(
        _one_tensor([request.inputs[number] for request in ordered], slab, leases, reads_slab=reads_slab)
        for number in range(len(requests[0].inputs))
    )
    row_counts = [request.inputs[0].shape[0] for request in ordered]
    first = requests[0]
    merged = InferRequest(
        first.model_name,
        inputs,
        first.model_version,
        first.id if len(requests) == 1 else "",
        first.outputs,
        first.parameters,
        None,
        first.metadata,
    )
    return MergedRequest(merged, order or range(len(requests)), row_counts, leases)


def _order(requests: Sequence[InferRequest]) -> list[int] | None:
    offsets: list[tuple[int, int]] = []
    for index, request in enumerate(requests):
        place = request.inputs[0].place
        if place is None:
            return None
        offsets.append((place.offset, index))
    return [index for _, index in sorted(offsets)]


def _one_tensor(tensors: Sequence[Tensor], slab: Slab | None, leases: list[Lease], *, reads_slab: bool) -> Tensor:
    first = tensors[0]
    if slab is None or (first.datatype is Datatype.BYTES and all(tensor.place is None for tensor in tensors)):
        return first if len(tensors) == 1 else _concatenated(tensors)
    if reads_slab and (references := _references(tensors, slab, leases)) is not None:
        return references
    found = _side_by_side(tensors, slab, leases)
    if found is not None:
        return found
    size_bytes = sum(tensor.data.nbytes for tensor in tensors)
    lease = slab.lease(size_bytes) if size_bytes >= SLAB_FROM_BYTES else None
    if lease is None:
        return first if len(tensors) == 1 else _concatenated(tensors)
    leases.append(lease)
    return _copied(tensors, lease, size_bytes)


def _references(tensors: Sequence[Tensor], slab: Slab, leases: list[Lease]) -> Tensor | None:
    """References to the pictures in the slab, with their leases held; None if one can only be sent."""
    held: list[Lease] = []
    parts: list[bytes | memoryview] = []
    for tensor in tensors:
        place = tensor.place
        if place is None:
            parts.append(tensor.data)
            continue
        lease = slab.lease_of(place) if tensor.datatype is Datatype.BYTES and tensor.element_count == 1 else None
        after_length = SlabAddress(place.region, place.generation, place.offset + _LENGTH.size)
        reference = slab.reference(after_length, tensor.data.nbytes - _LENGTH.size)
        if lease is None or reference is None:
            return None
        held.append(lease)
        parts += (_LENGTH.pack(len(reference)), reference)
    for lease in held:
        lease.hold()
    leases += held
    first = tensors[0]
    return Tensor(first.name, first.datatype, _merged_shape(tensors), memoryview(b"".join(parts)))


def _concatenated(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    data = memoryview(b"".join([tensor.data for tensor in tensors]))
    return Tensor(first.name, first.datatype, _merged_shape(tensors), data)


def _copied(tensors: Sequence[Tensor], lease: Lease, size_bytes: int) -> Tensor:
    first, view, position = tensors[0], lease.view, 0
    for tensor in tensors:
        end = position + tensor.data.nbytes
        view[position:end] = tensor.data
        position = end
    return Tensor(first.name, first.datatype, _merged_shape(tensors), view[:size_bytes], lease.place)


def _side_by_side(tensors: Sequence[Tensor], slab: Slab, leases: list[Lease]) -> Tensor | None:
    """One tensor over adjacent tensors, with their leases held; None if they are not adjacent."""
    leases_held: list[Lease] = []
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
        leases_held.append(lease)
        offset += tensor.data.nbytes
    for lease in leases_held:
        lease.hold()
    leases += leases_held
    data = first.data if len(tensors) == 1 else slab.window(first.place, offset - first.place.offset)
    return Tensor(first.name, first.datatype, _merged_shape(tensors), data, first.place)


def _merged_shape(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    rows = sum([tensor.shape[0] for tensor in tensors])
    return (rows, *tensors[0].shape[1:])


@dataclass(frozen=True, slots=True)
class MergedRows:
    """One engine call. members: indices in row order; without has_batch_axis, the output belongs to members[0]."""

    array: Array
    members: tuple[int, ...]
    has_batch_axis: bool


def merge_rows(arrays: Sequence[Array], *, declared_shape: tuple[int, ...], max_batch_size: int) -> list[MergedRows]:
    """Engine calls for arrays without a batch axis: one per array if max_batch_size is 0, else merged by shape."""
    if max_batch_size == 0:
        return [
            MergedRows(array.reshape(shape_as_declared(array.shape, declared_shape)), (i,), False)
            for i, array in enumerate(arrays)
        ]
    calls: list[MergedRows] = []
    for members in group_by_shape(arrays, max_batch_size):
        stacked = arrays[members[0]][np.newaxis] if len(members) == 1 else np.stack([arrays[i] for i in members])
        calls.append(MergedRows(stacked, members, True))
    return calls


class Shaped(Protocol):
    """An object with a shape, such as an array."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def group_by_shape(arrays: Sequence[Shaped], max_rows: int) -> list[tuple[int, ...]]:
    """Indices of the arrays of each call: equal shapes, at most max_rows."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for index, array in enumerate(arrays):
        by_shape.setdefault(array.shape, []).append(index)
    return [tuple(group[i : i + max_rows]) for group in by_shape.values() for i in range(0, len(group), max_rows)]


def shape_as_declared(shape: tuple[int, ...], declared_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape, with leading ones added to match the declared shape."""
    leading = len(declared_shape) - len(shape)
    if leading <= 0 or any(size not in (1, -1) for size in declared_shape[:leading]):
        return shape
    return (1,) * leading + shape


def split_outputs(response: InferResponse, merged: MergedRequest) -> list[tuple[Tensor, ...]]:
    """Each request's rows of every output, as views. Raises EngineFailed for wrong rows or BYTES lengths."""
    counts = merged.row_counts
    if len(counts) == 1:
        for tensor in response.outputs:
            _check_rows(tensor, counts[0], response)
        return [response.outputs]
    rows = merged.rows
    parts = [_parts(tensor, counts, rows, response) for tensor in response.outputs]
    found: list[tuple[Tensor, ...]] = [()] * len(counts)
    for position, index in enumerate(merged.order):
        found[index] = tuple([part[position] for part in parts])
    return found


def _check_rows(tensor: Tensor, rows: int, response: InferResponse) -> None:
    if not tensor.shape or tensor.shape[0] != rows:
        raise EngineFailed(
            f"model {response.model_name!r} answered output {tensor.name!r} of shape {list(tensor.shape)} for {rows} "
            "rows; its first dimension must be the batch, or the model must say max_batch_size: 0"
        )


def _parts(tensor: Tensor, counts: Sequence[int], rows: int, response: InferResponse) -> list[Tensor]:
    _check_rows(tensor, rows, response)
    name, datatype, tail, data = tensor.name, tensor.datatype, tensor.shape[1:], tensor.data
    if datatype is Datatype.BYTES:
        ends = _ends_of_bytes(tensor, counts, response)
    else:
        row_bytes = data.nbytes // rows if rows else 0
        ends = [count * row_bytes for count in accumulate(counts)]
    parts: list[Tensor] = []
    begin = 0
    for count, end in zip(counts, ends, strict=True):
        parts.append(Tensor(name, datatype, (count, *tail), data[begin:end]))
        begin = end
    return parts


def _ends_of_bytes(tensor: Tensor, counts: Sequence[int], response: InferResponse) -> list[int]:
    """End offset of each request's elements, by their length prefixes."""
    data, size_bytes = tensor.data, tensor.data.nbytes
    elements_a_row = tensor.element_count // tensor.shape[0] if tensor.shape[0] else 0
    unpack = _LENGTH.unpack_from
    ends: list[int] = []
    position = 0
    for count in counts:
        for _ in range(count * elements_a_row):
            if position + 4 > size_bytes:
                raise _bytes_do_not_fit(tensor, response)
            position += 4 + unpack(data, position)[0]
        ends.append(position)
    if position != size_bytes:
        raise _bytes_do_not_fit(tensor, response)
    return ends


def _bytes_do_not_fit(tensor: Tensor, response: InferResponse) -> EngineFailed:
    return EngineFailed(
        f"model {response.model_name!r} answered output {tensor.name!r} with {tensor.data.nbytes} bytes, which do not "
        f"hold the {tensor.element_count} elements of shape {list(tensor.shape)}"
    )


_NAMED_ROWS = re.compile(r"(?:^|; )rows? ([0-9]{1,6}(?:, [0-9]{1,6})*) of ([0-9]{1,6}): ")


def refused_rows(text: str, rows: int, model_name: str) -> dict[int, str]:
    """Error messages by row, from an error text that names rows; empty if it names none."""
    begin = f"model '{model_name}': "
    begin = begin if text.startswith(begin) else ""
    text = text[len(begin) :]
    found = [match for match in _NAMED_ROWS.finditer(text) if int(match[2]) == rows]
    if not found or found[0].start():
        return {}
    ends = [*[match.start() for match in found[1:]], len(text)]
    refusals = {
        int(number): begin + text[match.end() : end]
        for match, end in zip(found, ends, strict=True)
        for number in match[1].split(", ")
    }
    return refusals if max(refusals) < rows else {}


def refused_requests(refusals: dict[int, str], order: Sequence[int], row_counts: Sequence[int]) -> dict[int, str]:
    """Error message of each request: that of its first rejected row. order, row_counts: as in MergedRequest."""
    refused: dict[int, str] = {}
    if not refusals:
        return refused
    owners = [request for request, count in zip(order, row_counts, strict=True) for _ in range(count)]
    for row in sorted(refusals):
        refused.setdefault(owners[row], refusals[row])
    return refused
