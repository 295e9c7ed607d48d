"""An engine's answer for several requests, back into rows. Sans-IO, and without a copy."""

import struct
from collections.abc import Sequence

from server.batching.merge import MergedRequest
from server.core.errors import BackendFailed
from server.core.infer import InferResponse
from server.core.tensor import Datatype, Tensor

_LENGTH = struct.Struct("<I")


def split_outputs(response: InferResponse, merged: MergedRequest) -> list[tuple[Tensor, ...]]:
    """Each request's own rows of every output, in the order in which the requests were given to merge_requests.

    Views of the answer's bytes. Raises BackendFailed where an output has other rows than the call had, or BYTES whose
    lengths do not add up.
    """
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
        raise BackendFailed(
            f"model {response.model_name!r} answered output {tensor.name!r} of shape {list(tensor.shape)} for {rows} "
            "rows; its first dimension must be the batch, or the model must say max_batch_size: 0"
        )


def _parts(tensor: Tensor, counts: Sequence[int], rows: int, response: InferResponse) -> list[Tensor]:
    _check_rows(tensor, rows, response)
    name, datatype, tail, data = tensor.name, tensor.datatype, tensor.shape[1:], tensor.data
    if datatype is Datatype.BYTES:
        ends = _ends_of_bytes(tensor, counts, response)
    else:
        ends = _ends(counts, data.nbytes // rows if rows else 0)
    parts: list[Tensor] = []
    begin = 0
    for count, end in zip(counts, ends, strict=True):
        parts.append(Tensor(name, datatype, (count, *tail), data[begin:end]))
        begin = end
    return parts


def _ends(counts: Sequence[int], row_bytes: int) -> list[int]:
    ends: list[int] = []
    end = 0
    for count in counts:
        end += count * row_bytes
        ends.append(end)
    return ends


def _ends_of_bytes(tensor: Tensor, counts: Sequence[int], response: InferResponse) -> list[int]:
    """Where each request's elements end, by the length before each of them."""
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


def _bytes_do_not_fit(tensor: Tensor, response: InferResponse) -> BackendFailed:
    return BackendFailed(
        f"model {response.model_name!r} answered output {tensor.name!r} with {tensor.data.nbytes} bytes, which do not "
        f"hold the {tensor.element_count} elements of shape {list(tensor.shape)}"
    )
