"""What can be said without a replay: how many requests a second an engine can answer inside an SLO."""

from server.planning.profile import Profile


def nexus_rate(profile: Profile, slo_s: float, *, instances: int = 1) -> float:
    """Requests a second with 2 t(b) <= SLO: a request that just missed a batch still makes the next one."""
    size = profile.largest_within(slo_s / 2)
    return instances * size / profile.seconds(size) if size else 0.0


def capacity(profile: Profile, slo_s: float, *, instances: int = 1) -> float:
    """Requests a second with t(b) <= SLO, as if each batch arrived whole when it starts: no policy exceeds it."""
    return instances * max((size / profile.seconds(size) for size in _sizes(profile, slo_s)), default=0.0)


def even_goodput(profile: Profile, slo_s: float, rate: float, *, instances: int = 1) -> float:
    """Requests a second inside the SLO when they come evenly (D/D) at that rate, and may be dropped.

    A call of b rows answers only what came in the last SLO - t(b) seconds before it starts; with 1 more for the one
    that comes at its start, b may not exceed rate * (SLO - t(b)) + 1.
    """
    fitting = (
        size / profile.seconds(size)
        for size in _sizes(profile, slo_s)
        if size <= rate * (slo_s - profile.seconds(size)) + 1
    )
    return min(rate, instances * max(fitting, default=0.0))


def even_rate(profile: Profile, slo_s: float, *, instances: int = 1) -> float:
    """The highest rate of evenly spaced requests that all are answered inside the SLO."""
    low, high = 0.0, capacity(profile, slo_s, instances=instances)
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        if even_goodput(profile, slo_s, middle, instances=instances) >= middle:
            low = middle
        else:
            high = middle
    return low


def _sizes(profile: Profile, slo_s: float) -> range:
    return range(1, profile.largest_within(slo_s) + 1)
