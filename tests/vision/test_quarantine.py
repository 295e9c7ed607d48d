"""Poison is remembered by content, for a while, in bounded number."""

from penstock.vision.fair_queue import Quarantine


def test_quarantine_holds_what_was_added_until_its_time_is_over() -> None:
    """By content, not by size; expired entries are forgotten."""
    quarantine = Quarantine(retention_s=10.0)
    quarantine.add(b"poison", now=100.0)
    assert quarantine.holds(b"poison", now=109.9)
    assert quarantine.holds(memoryview(b"poison"), now=109.9)
    assert not quarantine.holds(b"honest", now=109.9)
    assert not quarantine.holds(b"other size", now=109.9)
    assert not quarantine.holds(b"poison", now=110.0)
    assert len(quarantine) == 0


def test_quarantine_that_is_full_forgets_the_oldest() -> None:
    """Its memory is bounded whatever is thrown at it; adding again renews."""
    quarantine = Quarantine(max_entries=2)
    for data in (b"first", b"second", b"first", b"third"):
        quarantine.add(data, now=0.0)
    assert len(quarantine) == 2
    assert [quarantine.holds(data, now=1.0) for data in (b"first", b"second", b"third")] == [True, False, True]
