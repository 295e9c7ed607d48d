"""Seconds of a stream's ticks."""

import random
from fractions import Fraction

from penstock_video.decode.codec import seconds_of


def test_seconds_are_the_fractions_to_the_bit() -> None:
    """Of every time base that containers have, forward and backward, far beyond what a float counts exactly."""
    chance = random.Random(7)
    for base in (Fraction(1, 90_000), Fraction(1, 15_360), Fraction(1001, 30_000), Fraction(1, 25), Fraction(3)):
        for ticks in (0, 1, -1, 2**33 - 1, *(chance.randrange(-(2**63), 2**63) for _ in range(200))):
            assert seconds_of(ticks, base) == float(ticks * base)


def test_what_has_no_time_has_no_seconds() -> None:
    """No ticks, no base, or one of zero."""
    assert (seconds_of(None, Fraction(1, 25)), seconds_of(1, None), seconds_of(1, Fraction(0))) == (None, None, None)
