"""Where the labels of one picture's boxes stand, so that none covers another while there is room beside its box."""

from collections import defaultdict
from collections.abc import Iterator

from deepstream_pipeline.sinks.canvas import Pixel

_MOST_INNER = 6  # places further down inside a box that are looked at


class LabelPlaces:
    """Of a picture of that size, for labels of that height; whose place is asked for first gets the better one."""

    def __init__(self, picture: tuple[int, int], height: int) -> None:
        self._picture = picture
        self._height = max(height, 1)
        # (left, top, right) of labels by band, each as high as a label: one lies in its band and the two beside it.
        self._taken: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)

    def take(self, first: Pixel, second: Pixel, width: int) -> tuple[Pixel, bool]:
        """The upper left corner of a label of that width for the box between two corners; whether it is free there.

        Above the box; else inside at its top, below it, further down inside; from its left edge, else to its right one.
        Where all are taken, the first: to be drawn below those that have a place.
        """
        places = self._places(first, second, width)
        best = next(places)
        if self._took(best, width):
            return best, True
        other = next((place for place in places if self._took(place, width)), None)
        return (best, False) if other is None else (other, True)

    def keep_free(self, place: Pixel, width: int) -> None:
        """Something else of that width and a label's height stands there."""
        self._took(place, width)

    def _took(self, place: Pixel, width: int) -> bool:
        (left, top), height = place, self._height
        right, band = left + width, top // height
        for its_left, its_top, its_right in self._taken.get(band, ()):
            if its_left < right and left < its_right and -height < its_top - top < height:
                return False
        for near in (band - 1, band, band + 1):
            self._taken[near].append((left, top, right))
        return True

    def _places(self, first: Pixel, second: Pixel, width: int) -> Iterator[Pixel]:
        (left, top), (right, bottom), height = first, second, self._height
        most_left, most_top = max(self._picture[0] - width, 0), max(self._picture[1] - height, 0)
        above = (top - height,) if top >= height else ()
        inner = range(top + height, bottom - height, height)[:_MOST_INNER]
        tops = [0 if y < 0 else min(y, most_top) for y in (*above, top, bottom, *inner)]
        for edge in (left, right - width):
            at = 0 if edge < 0 else min(edge, most_left)
            for y in tops:
                yield at, y
