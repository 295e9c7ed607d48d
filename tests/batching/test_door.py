"""Who is refused on arrival, since the batches before gave up everybody with as little time."""

import pytest

from server.batching.door import BATCHES, MARGIN, OPENING, Door


def steady(least_s: float = 0.2) -> Door:
    """So many batches in a row gave up somebody."""
    door = Door()
    for _ in range(BATCHES):
        door.formed(least_s, 1)
    return door


def test_door_is_open_until_a_row_of_batches_gave_up_somebody() -> None:
    """One batch fewer says nothing."""
    door = Door()
    for _ in range(BATCHES - 1):
        door.formed(0.2, 1)
    assert door.least_s == 0.0

    door.formed(0.3, 1)

    assert (door.least_s, door.priority) == (pytest.approx(0.2 * MARGIN), 1)


def test_door_opens_at_once_when_the_overload_is_over() -> None:
    """A batch gave up nobody, and nobody was kept away from it."""
    door = steady()
    door.formed(0.4, None)
    assert door.least_s == 0.0


def test_door_that_keeps_all_of_them_away_opens_a_little_only() -> None:
    """That no batch has to give up anybody is its own doing; batch after batch less is needed, until somebody is."""
    door = steady()
    for times in (1, 2):
        door.kept_away()
        door.formed(0.4, None)
        assert door.least_s == pytest.approx(0.2 * MARGIN * OPENING**times)

    door.formed(0.25, 1)

    assert door.least_s == pytest.approx(0.2 * MARGIN)
