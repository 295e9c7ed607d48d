"""Which requests share a run. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Requests of one run. places: of the requests, in their order; rows: how many each has."""

    places: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def row_count(self) -> int:
        return sum(self.rows)


def groups(shapes: Sequence[tuple[Shape, ...]], most_rows: int) -> list[Group]:
    """Runs that answer all requests: those of a group agree in every dimension but the first and are most_rows at most.

    shapes: of each request the shapes of its inputs, with the batch dimension. most_rows: 0 for a model without a
    batch dimension, whose requests each run alone and count as one row.
    """
    if not most_rows:
        return [Group((place,), (1,)) for place in range(len(shapes))]
    open_groups: dict[tuple[Shape, ...], list[list[int]]] = {}
    for place, shape in enumerate(shapes):
        alike = open_groups.setdefault(tuple(one[1:] for one in shape), [[]])
        if alike[-1] and sum(shapes[other][0][0] for other in alike[-1]) + shape[0][0] > most_rows:
            alike.append([])
        alike[-1].append(place)
    members = [places for alike in open_groups.values() for places in alike]
    return [Group(tuple(places), tuple(shapes[place][0][0] for place in places)) for places in members]
