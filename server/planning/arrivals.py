"""When requests come: seeded, so that every policy meets the same ones."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

FRAMES_PER_S = 30.0
JITTER_S = 0.002  # of a camera's frame, standard deviation
BURST, QUIET = 2.0, 0.5  # times the mean rate
BURST_S, QUIET_S = 0.05, 0.10  # mean lengths; BURST and QUIET weighed with them give 1
PARETO_SHAPE = 1.5  # of on and off times: finite mean, no finite variance
SOURCES = 8


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests in the order of their times, seconds from 0 on. clients: whose each is, one for all where empty."""

    times: tuple[float, ...]
    clients: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.times)


Pattern = Callable[[float, int, int], Arrivals]  # (requests a second, count, seed)


def poisson(rate: float, count: int, seed: int) -> Arrivals:
    """Independent callers: exponential gaps."""
    gaps = np.random.default_rng(seed).exponential(1.0, count)
    return Arrivals(tuple((np.cumsum(gaps) / rate).tolist()))


def bursty(rate: float, count: int, seed: int) -> Arrivals:
    """Poisson whose rate jumps between half and twice the mean, for 100 and 50 ms in the mean (an MMPP)."""
    random = np.random.default_rng(seed)
    times: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = []
    now, made, is_burst = 0.0, 0, False
    while made < count:
        length = random.exponential(BURST_S if is_burst else QUIET_S)
        number = random.poisson(rate * (BURST if is_burst else QUIET) * length)
        times.append(now + np.sort(random.random(number)) * length)
        now, made, is_burst = now + length, made + number, not is_burst
    return Arrivals(tuple(np.concatenate(times)[:count].tolist()))


def on_off(rate: float, count: int, seed: int) -> Arrivals:
    """Eight callers that send evenly while they are on; on and off times are Pareto's: bursts come in all sizes."""
    random = np.random.default_rng(seed)
    span_s = count / rate
    gap_s = SOURCES / (2 * rate)  # a caller is on half of the time
    mean_s = 40 * gap_s
    times, owners = [], []
    for source in range(SOURCES):
        own = _on_off_source(random, span_s=span_s, gap_s=gap_s, mean_s=mean_s)
        times.append(own)
        owners.append(np.full(len(own), source))
    return _merged(np.concatenate(times), np.concatenate(owners), count, "caller")


def periodic(rate: float, count: int, seed: int) -> Arrivals:
    """Cameras at 30 frames a second, each with its own phase and a jitter of 2 ms; rate / 30 of them, rounded."""
    random = np.random.default_rng(seed)
    streams = max(1, round(rate / FRAMES_PER_S))
    frames = -(-count // streams)
    phases = random.random(streams) / FRAMES_PER_S
    times = phases[:, None] + np.arange(frames)[None, :] / FRAMES_PER_S
    times = np.maximum(times + random.normal(0.0, JITTER_S, times.shape), 0.0)
    owners = np.repeat(np.arange(streams), frames)
    return _merged(times.ravel(), owners, count, "camera")


PATTERNS: dict[str, Pattern] = {"poisson": poisson, "bursty": bursty, "on-off": on_off, "periodic": periodic}


def _on_off_source(
    random: np.random.Generator, *, span_s: float, gap_s: float, mean_s: float
) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    scale_s = mean_s * (PARETO_SHAPE - 1) / PARETO_SHAPE
    now = -random.random() * 4 * mean_s
    pieces = [np.empty(0)]
    while now < span_s * 1.2:
        on_s = scale_s * (1 + random.pareto(PARETO_SHAPE))
        pieces.append(now + np.arange(0.0, on_s, gap_s))
        now += on_s + scale_s * (1 + random.pareto(PARETO_SHAPE))
    own = np.concatenate(pieces)
    return own[own >= 0.0]


def _merged(
    times: "np.ndarray[tuple[int], np.dtype[np.float64]]",
    owners: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    count: int,
    kind: str,
) -> Arrivals:
    order = np.argsort(times, kind="stable")[:count]
    names = [f"{kind} {number}" for number in range(int(owners.max()) + 1)]
    return Arrivals(tuple(times[order].tolist()), tuple(names[owner] for owner in owners[order].tolist()))
