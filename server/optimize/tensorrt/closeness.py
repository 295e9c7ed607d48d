"""How close an engine computes to the float model, number by number, whatever the numbers mean. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from server.core.tensor import Array


@dataclass(frozen=True, slots=True)
class Closeness:
    """Of one output over several pictures. cosine: the lowest of a picture, 1 for the same direction.

    not_numbers: pictures whose answer holds infinity or NaN where the float model's does not: FP16 overflowed.
    """

    output: str
    cosine: float
    not_numbers: int


def closeness(
    names: Sequence[str], one: Sequence[Sequence[Array]], other: Sequence[Sequence[Array]]
) -> list[Closeness]:
    """one, other: a row of outputs a picture, in the order of names; one is the float model's."""
    found = []
    for number, name in enumerate(names):
        pairs = [(mine[number], yours[number]) for mine, yours in zip(one, other, strict=True)]
        bad = sum(bool(np.isfinite(mine).all() and not np.isfinite(yours).all()) for mine, yours in pairs)
        found.append(Closeness(name, min((cosine(*pair) for pair in pairs), default=1.0), bad))
    return found


def cosine(one: Array, other: Array) -> float:
    """Of the two as vectors: 1 where both are zero, 0 where one is or holds no numbers."""
    mine, yours = (np.asarray(array, np.float64).ravel() for array in (one, other))
    if mine.shape != yours.shape or not (np.isfinite(mine).all() and np.isfinite(yours).all()):
        return 0.0
    lengths = float(np.linalg.norm(mine)), float(np.linalg.norm(yours))
    if 0.0 in lengths:
        return float(lengths[0] == lengths[1])
    return float(np.dot(mine, yours) / (lengths[0] * lengths[1]))
