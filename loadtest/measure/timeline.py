"""A phase second by second, by the moment at which each request was intended."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from loadtest.measure.columns import Columns
from loadtest.measure.percentiles import Floats, at_rank
from loadtest.results import Load, Second, Status

Counts = NDArray[np.intp]

LONGEST_S = 7 * 24 * 3600  # a week: beyond it a time is taken for an error, not for a second to list


def timeline_of(columns: Columns, loads: Sequence[Load], *, began_s: float, seconds: float) -> tuple[Second, ...]:
    """Every second of the phase, empty ones too, and past its schedule as long as requests were intended.

    at_s: when the second began, since the run's start. bad: what was intended in it and not answered well.
    in_flight: requests that were sent and unanswered as it ended. Loads are the means of what was read within it.
    """
    second_of = _second_of(columns.intended_s, began_s)
    count = max(int(np.ceil(seconds)), int(second_of.max()) + 1 if second_of.size else 0)
    count = min(count, LONGEST_S)
    is_ok = columns.has(Status.OK)
    offered = np.bincount(second_of, minlength=count)
    ok = np.bincount(second_of[is_ok], minlength=count)
    p50_ms, p99_ms = _percentiles_a_second(columns, second_of, count)
    in_flight = _in_flight(columns, began_s + np.arange(1, count + 1, dtype=np.float64))
    load_in = _loads_a_second(loads, began_s)
    return tuple(
        Second(
            at_s=began_s + place,
            offered=int(offered[place]),
            ok=int(ok[place]),
            bad=int(offered[place] - ok[place]),
            p50_ms=float(p50_ms[place]),
            p99_ms=float(p99_ms[place]),
            in_flight=int(in_flight[place]),
            **_load_fields(load_in.get(place, [])),
        )
        for place in range(count)
    )


def _second_of(times_s: Floats, began_s: float) -> Counts:
    return np.clip(np.floor(times_s - began_s), 0, LONGEST_S - 1).astype(np.intp)


def _percentiles_a_second(columns: Columns, second_of: Counts, count: int) -> tuple[Floats, Floats]:
    waited = columns.has(Status.OK, Status.TIMEOUT)
    latency_ms, where = columns.latency_ms[waited], second_of[waited]
    order = np.lexsort((latency_ms, where))
    edges = np.searchsorted(where[order], np.arange(count + 1))
    p50_ms, p99_ms = np.zeros(count), np.zeros(count)
    for place in np.flatnonzero(np.diff(edges)):
        ascending = latency_ms[order[edges[place] : edges[place + 1]]]
        p50_ms[place], p99_ms[place] = at_rank(ascending, 500), at_rank(ascending, 990)
    return p50_ms, p99_ms


def _in_flight(columns: Columns, at_s: Floats) -> Counts:
    was_sent = ~columns.has(Status.NOT_SENT)
    sent, done = np.sort(columns.sent_s[was_sent]), np.sort(columns.done_s[was_sent])
    return np.searchsorted(sent, at_s, side="right") - np.searchsorted(done, at_s, side="right")


def _loads_a_second(loads: Sequence[Load], began_s: float) -> dict[int, list[Load]]:
    seconds: dict[int, list[Load]] = {}
    for load in loads:
        seconds.setdefault(int(np.floor(load.at_s - began_s)), []).append(load)
    return seconds


def _load_fields(loads: Sequence[Load]) -> dict[str, float | None]:
    return {
        "server_cpu": _mean(loads, lambda load: load.server_cpu),
        "machine_cpu": _mean(loads, lambda load: load.machine_cpu),
        "gpu": _mean(loads, lambda load: load.gpu),
        "gpu_sm": _mean(loads, lambda load: load.gpu_sm),
        "rss_mib": _mean(loads, lambda load: load.rss_mib),
    }


def _mean(loads: Sequence[Load], pick: Callable[[Load], float | None]) -> float | None:
    values = [value for load in loads if (value := pick(load)) is not None]
    return sum(values) / len(values) if values else None
