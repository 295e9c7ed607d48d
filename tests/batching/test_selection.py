"""Overload policy: shares of clients, and early rejection."""

import pytest

from penstock.gateway.batching.entries import Entry
from penstock.gateway.batching.selection import (
    MEMORY_ROWS,
    OVERLOAD_BATCHES,
    REJECTION_DECAY,
    REJECTION_MARGIN,
    ClientShares,
    EarlyRejection,
)


def test_newcomers_are_served_when_what_is_remembered_is_halved() -> None:
    """Beside two that ask often, thousands of one row each: who comes as the small are forgotten is light, too."""
    shares = ClientShares()
    for number in range(int(5 * MEMORY_ROWS)):
        client = f"often {number % 2}" if number % 4 else f"once {number}"
        entry = Entry(key=1, rows=1, size_bytes=1, arrived_at=float(number), client=client)
        shares.entered(entry, None)
        assert number < 100 or (entry.rank == entry.arrived_at) == client.startswith("once")


def steady(least_s: float = 0.2) -> EarlyRejection:
    """So many batches in a row gave up an entry."""
    door = EarlyRejection()
    for _ in range(OVERLOAD_BATCHES):
        door.formed(least_s, 1)
    return door


def test_all_are_accepted_until_a_row_of_batches_gave_up_entries() -> None:
    """One batch fewer says nothing."""
    door = EarlyRejection()
    for _ in range(OVERLOAD_BATCHES - 1):
        door.formed(0.2, 1)
    assert door.least_s == 0.0

    door.formed(0.3, 1)

    assert (door.least_s, door.priority) == (pytest.approx(0.2 * REJECTION_MARGIN), 1)


def test_early_rejection_ends_at_once_when_the_overload_is_over() -> None:
    """The batch gave up no entry, and none was rejected early."""
    door = steady()
    door.formed(0.4, None)
    assert door.least_s == 0.0


def test_early_rejection_of_every_call_is_relaxed_a_little_only() -> None:
    """Early rejection itself may be why a batch gives up none; batch after batch less is needed, until one does."""
    door = steady()
    for times in (1, 2):
        door.rejected_early()
        door.formed(0.4, None)
        assert door.least_s == pytest.approx(0.2 * REJECTION_MARGIN * REJECTION_DECAY**times)

    door.formed(0.25, 1)

    assert door.least_s == pytest.approx(0.2 * REJECTION_MARGIN)
