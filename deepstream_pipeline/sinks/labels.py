"""Where the labels of one picture's boxes stand: none covers another, or somebody else, while there is room."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from deepstream_pipeline.sinks.canvas import Pixel

Box = tuple[Pixel, Pixel]  # upper left and lower right corner
Side = tuple[str, str]  # of a box: above or below it, from its left or its right edge
_MOST_INNER = 6  # places further down inside a box that are looked at
_MOST_NEAR = 16  # other boxes that a label is kept off
_MOST_TRIED = 64  # boxes to the right of one that are looked at for them
_LITTLE = 0.1  # of a label: over the edge of another box it hides nobody


class Place(NamedTuple):
    """at: the upper left corner of a label. side: None inside its box, and where there is no room beside it. is_free:
    whether no other label is there."""

    at: Pixel
    side: Side | None
    is_free: bool = True


class LabelPlaces:
    """Of a picture of that size, for labels of that height; whose place is asked for first gets the better one."""

    def __init__(self, picture: tuple[int, int], height: int) -> None:
        self._picture = picture
        self.height = max(height, 1)
        # (left, top, right) of labels by band, each as high as a label: one lies in its band and the two beside it.
        self._taken: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)

    def take(self, box: Box, width: int, others: Sequence[Box] = (), *, former: Side | None = None) -> Place:
        """A label of that width for the box. former: where it stood in the picture before; there it stays while it can.

        Above the box; else below it, inside at its top, further down inside; from its left edge, else to its right one:
        the first that covers no other box, else the one that covers least of them. Where all are taken by labels, the
        first: to be drawn below those that have a place.
        """
        best, least = None, float("inf")
        little = _LITTLE * width * self.height
        kept = (place for place in self._places(box, width) if place.side == former) if former else ()
        for place in chain(kept, self._places(box, width)):
            if not self._is_free(place.at, width):
                continue
            covered = self._covered(place.at, width, others, least)
            if covered < least:
                best, least = place, covered
            if covered <= little:
                break
        if best is None:
            return next(self._places(box, width))._replace(is_free=False)
        self.keep_free(best.at, width)
        return best

    def keep_free(self, place: Pixel, width: int) -> None:
        """Something of that width and a label's height stands there."""
        (left, top), band = place, place[1] // self.height
        for near in (band - 1, band, band + 1):
            self._taken[near].append((left, top, left + width))

    def _is_free(self, place: Pixel, width: int) -> bool:
        (left, top), height = place, self.height
        right = left + width
        for its_left, its_top, its_right in self._taken.get(top // height, ()):
            if its_left < right and left < its_right and -height < its_top - top < height:
                return False
        return True

    def _covered(self, place: Pixel, width: int, others: Sequence[Box], enough: float) -> int:
        """Pixels of other boxes under a label there; not counted beyond what is enough to refuse it."""
        (left, top), covered = place, 0
        right, bottom = left + width, top + self.height
        for (its_left, its_top), (its_right, its_bottom) in others:
            across = min(right, its_right) - max(left, its_left)
            down = min(bottom, its_bottom) - max(top, its_top)
            if across > 0 and down > 0:
                covered += across * down
                if covered >= enough:
                    break
        return covered

    def _places(self, box: Box, width: int) -> Iterator[Place]:
        ((left, top), (right, bottom)), height = box, self.height
        most_left, most_top = max(self._picture[0] - width, 0), max(self._picture[1] - height, 0)
        rows = [("above", top - height)] if top >= height else []
        rows += [("below", bottom), *(("", y) for y in range(top, bottom - height, height)[: _MOST_INNER + 1])]
        for row, y in rows:
            for edge, x in (("left", left), ("right", right - width)):
                at = min(max(x, 0), most_left), min(max(y, 0), most_top)
                yield Place(at, (row, edge) if row and y == at[1] else None)


def neighbours(boxes: Sequence[Box], width: int, height: int) -> list[list[Box]]:
    """Of each box others that a label of it could cover, which has that size at most: not all of a dense crowd."""
    order = sorted(range(len(boxes)), key=lambda index: boxes[index][0][0])
    near: list[list[Box]] = [[] for _ in boxes]
    for rank, one in enumerate(order, 1):
        (_, top), (right, bottom) = boxes[one]
        for other in order[rank : rank + _MOST_TRIED]:
            (its_left, its_top), (_, its_bottom) = boxes[other]
            if its_left >= right + width:
                break
            if its_top < bottom + height and top < its_bottom + height:
                near[one].append(boxes[other])
                near[other].append(boxes[one])
    return [some[:_MOST_NEAR] for some in near]
