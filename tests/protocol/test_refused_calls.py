"""Which addresses are flooding, with a manual clock."""

from penstock.gateway.auth import rate_limiter as refused_calls
from penstock.gateway.auth.rate_limiter import BURST_CALLS, CALLS_PER_S, FLOOD_HOLD_S, RefusedCallCounter

BURST = int(BURST_CALLS)


def flood(counts: RefusedCallCounter, address: str, now: float) -> bool:
    """Makes one call more than a burst; returns whether a flood begins."""
    return [counts.note(address, now) for _ in range(BURST + 1)][-1]


def test_burst_is_no_flood_and_one_call_more_is() -> None:
    """A flood begins once, and only for its address."""
    counts = RefusedCallCounter()
    assert not any(counts.note("a", 0.0) for _ in range(BURST))
    assert not counts.has_floods
    assert counts.note("a", 0.0)
    assert not counts.note("a", 0.0)
    assert counts.flooding(0.0) == {"a"}


def test_calls_at_the_rate_are_no_flood_however_long() -> None:
    """A client that retries with a wrong key is answered each time."""
    counts = RefusedCallCounter()
    assert not any(counts.note("a", number / CALLS_PER_S) for number in range(10 * BURST))


def test_flood_lasts_until_some_time_after_its_last_call() -> None:
    """It begins again with the next call while the burst still counts."""
    counts = RefusedCallCounter()
    flood(counts, "a", 0.0)
    assert not counts.note("a", FLOOD_HOLD_S / 2)
    assert counts.is_flooding("a", 1.4 * FLOOD_HOLD_S)
    assert not counts.is_flooding("a", 1.6 * FLOOD_HOLD_S)
    assert not counts.has_floods
    assert flood(counts, "a", 100.0)


def test_addresses_are_forgotten_the_oldest_first() -> None:
    """The number of remembered addresses is bounded."""
    counts = RefusedCallCounter()
    for number in range(3 * refused_calls.MAX_ADDRESSES):
        counts.note(str(number), number / 1e6)
    flood(counts, "last", 0.1)
    assert len(counts._counts) <= refused_calls.MAX_ADDRESSES
    assert counts.flooding(0.1) == {"last"}
