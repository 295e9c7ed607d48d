"""Rows of several arrays into engine calls, and rows of an answer back. Sans-IO."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from server.core.tensor import Array


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
        return [Merged(_as_declared(array, declared_shape), (i,), False) for i, array in enumerate(arrays)]
    calls: list[Merged] = []
    for members in _alike(arrays, max_batch_size):
        stacked = arrays[members[0]][np.newaxis] if len(members) == 1 else np.stack([arrays[i] for i in members])
        calls.append(Merged(stacked, members, True))
    return calls


def _alike(arrays: Sequence[Array], max_rows: int) -> list[tuple[int, ...]]:
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for index, array in enumerate(arrays):
        by_shape.setdefault(array.shape, []).append(index)
    return [tuple(group[i : i + max_rows]) for group in by_shape.values() for i in range(0, len(group), max_rows)]


def _as_declared(array: Array, declared_shape: tuple[int, ...]) -> Array:
    leading = len(declared_shape) - array.ndim
    if leading <= 0 or any(size not in (1, -1) for size in declared_shape[:leading]):
        return array
    return array.reshape((1,) * leading + array.shape)
