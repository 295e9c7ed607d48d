"""When to come back, so that those who were sent away together do not come back together."""

import math
import random

MAX_SPREAD_S = 5.0


def spread_s(known_s: float) -> float:
    """Somewhere from the known wait to twice it, though at most MAX_SPREAD_S later; milliseconds are enough."""
    return round(known_s + random.uniform(0.0, min(known_s, MAX_SPREAD_S)), 3)


def spread_whole_s(known_s: float) -> int:
    """The same in whole seconds, of which HTTP's Retry-After is: at least 1."""
    least = max(1, math.ceil(known_s))
    return random.randint(least, least + min(least, int(MAX_SPREAD_S)))
