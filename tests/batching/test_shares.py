"""Who is light among the clients of a queue, and how long it is remembered what they asked for."""

from server.batching.entry import Entry
from server.batching.shares import MEMORY_ROWS, Shares


def test_newcomers_are_served_when_what_is_remembered_is_halved() -> None:
    """Beside two that ask often, thousands of one row each: who comes as the small are forgotten is light, too."""
    shares = Shares()
    for number in range(int(5 * MEMORY_ROWS)):
        client = f"often {number % 2}" if number % 4 else f"once {number}"
        entry = Entry(key=1, rows=1, size_bytes=1, arrived_at=float(number), client=client)
        shares.asked(entry, None)
        assert number < 100 or (entry.rank == entry.arrived_at) == client.startswith("once")
