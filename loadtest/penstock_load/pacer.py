"""When requests are sent: pure arithmetic from an arrival process to moments, the same for the same seed.

Every shape but Poisson and replay is a rate that is linear in pieces. Request i is sent when the integral of the
rate reaches i, so after any time the count is the integral's within one. Moments are seconds since the phase began.
"""

import itertools
import math
import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock_load.scenario import Arrivals, Shape, Unit

_REPLAY_WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch in which the rate goes in a straight line from from_rate to to_rate (requests a second)."""

    begin_s: float
    end_s: float
    from_rate: float
    to_rate: float

    @property
    def count(self) -> float:
        """The integral of the rate: how many requests it asks."""
        return (self.end_s - self.begin_s) * (self.from_rate + self.to_rate) / 2

    def rate_at(self, at_s: float) -> float:
        """The rate at that moment."""
        share = (at_s - self.begin_s) / (self.end_s - self.begin_s)
        return self.from_rate + share * (self.to_rate - self.from_rate)

    def moment_of(self, count: float) -> float:
        """When the integral from the piece's begin reaches the count: the root of r·t + a·t²/2 = count."""
        slope = (self.to_rate - self.from_rate) / (self.end_s - self.begin_s)
        root = math.sqrt(max(self.from_rate**2 + 2 * slope * count, 0.0))
        return self.begin_s + (2 * count / (self.from_rate + root) if count > 0 else 0.0)


def send_times(
    arrivals: Arrivals,
    seconds: float,
    *,
    seed: int,
    capacity_per_s: float | None = None,
    recording: Sequence[float] = (),
) -> Iterator[float]:
    """The moments to send at: not decreasing, from 0, all before seconds.

    seed: of poisson. capacity_per_s: what of_capacity means. recording: a replay's moments; with seconds 0 it is
    replayed to its end. Raises ValueError, at once, where the arrivals cannot be had.
    """
    length_s = schedule_seconds(arrivals, seconds, recording=recording)
    if arrivals.shape is Shape.REPLAY:
        return itertools.takewhile(lambda at_s: at_s < length_s, (at_s / arrivals.speed for at_s in recording))
    pieces = _pieces(arrivals, length_s, _unit(arrivals, capacity_per_s))
    if arrivals.shape is Shape.POISSON:
        return _poisson(pieces[0].from_rate, length_s, seed)
    return _times_of_pieces(pieces, length_s)


def offered_rate(
    arrivals: Arrivals,
    at_s: float,
    *,
    seconds: float,
    capacity_per_s: float | None = None,
    recording: Sequence[float] = (),
) -> float:
    """What the schedule asks at that moment, in requests a second (a replay: in the second around it).

    0 outside the phase. Raises ValueError as send_times does.
    """
    length_s = schedule_seconds(arrivals, seconds, recording=recording)
    if arrivals.shape is Shape.REPLAY:
        low = max(0.0, at_s - _REPLAY_WINDOW_S / 2)
        high = min(length_s, at_s + _REPLAY_WINDOW_S / 2)
        if not 0 <= at_s < length_s or low >= high:
            return 0.0
        inside = bisect_left(recording, high * arrivals.speed) - bisect_left(recording, low * arrivals.speed)
        return inside / (high - low)
    pieces = _pieces(arrivals, length_s, _unit(arrivals, capacity_per_s))
    return next((piece.rate_at(at_s) for piece in pieces if piece.begin_s <= at_s < piece.end_s), 0.0)


def schedule_seconds(arrivals: Arrivals, seconds: float, *, recording: Sequence[float] = ()) -> float:
    """How long the schedule lasts: as long as was said, or where that is 0, as long as the recording.

    A recording lasts one mean gap longer than to its last request, so that its rate is its count by its length.
    Raises ValueError where there is no length.
    """
    if arrivals.shape is Shape.REPLAY:
        _check_replay(arrivals, recording)
        if seconds == 0:
            last_s, gaps = recording[-1], len(recording) - 1
            return (last_s + last_s / gaps if last_s else 1.0) / arrivals.speed
    if not 0 < seconds < math.inf:
        raise ValueError(f"a schedule of {seconds:g} s sends nothing; give a finite time above 0")
    return seconds


def _check_replay(arrivals: Arrivals, recording: Sequence[float]) -> None:
    if not recording:
        raise ValueError(f"the recording {arrivals.file or '(none named)'} holds no request to replay")
    if not 0 < arrivals.speed < math.inf:
        raise ValueError(f"speed = {arrivals.speed:g}: a replay needs a finite speed above 0")
    if recording[0] < 0 or any(later < earlier for earlier, later in itertools.pairwise(recording)):
        raise ValueError(f"the recording {arrivals.file or '(none named)'} is not sorted from 0 upwards")


def _unit(arrivals: Arrivals, capacity_per_s: float | None) -> float:
    """What a rate of 1 means in requests a second."""
    if arrivals.unit is Unit.PER_S:
        return 1.0
    if capacity_per_s is None or not 0 < capacity_per_s < math.inf:
        raise ValueError(
            f"unit = of_capacity needs a capacity, and it is {capacity_per_s}; "
            "put a phase with is_capacity = true before, or give rates per_s"
        )
    return capacity_per_s


def _pieces(arrivals: Arrivals, seconds: float, unit: float) -> list[Piece]:
    """The rate over the phase. Bursts: the first begins with the phase."""
    _check_rates(arrivals)
    low, high = arrivals.rate * unit, arrivals.to_rate * unit
    match arrivals.shape:
        case Shape.RAMP:
            return [Piece(0.0, seconds, low, high)]
        case Shape.STEP:
            edges = [seconds * step / len(arrivals.rates) for step in range(len(arrivals.rates) + 1)]
            rates = (rate * unit for rate in arrivals.rates)
            return [Piece(*edge, rate, rate) for edge, rate in zip(itertools.pairwise(edges), rates, strict=True)]
        case Shape.BURST:
            return _bursts(arrivals, seconds, low, high)
        case _:
            return [Piece(0.0, seconds, low, low)]


def _bursts(arrivals: Arrivals, seconds: float, low: float, high: float) -> list[Piece]:
    pieces: list[Piece] = []
    for period in range(math.ceil(seconds / arrivals.every_s)):
        begin_s = period * arrivals.every_s
        calm_s, end_s = begin_s + arrivals.burst_s, min(begin_s + arrivals.every_s, seconds)
        pieces.append(Piece(begin_s, min(calm_s, end_s), high, high))
        if calm_s < end_s:
            pieces.append(Piece(calm_s, end_s, low, low))
    return [piece for piece in pieces if piece.begin_s < piece.end_s]


def _check_rates(arrivals: Arrivals) -> None:
    rates = {
        Shape.RAMP: (arrivals.rate, arrivals.to_rate),
        Shape.BURST: (arrivals.rate, arrivals.to_rate),
        Shape.STEP: arrivals.rates,
    }.get(arrivals.shape, (arrivals.rate,))
    if not all(0 <= rate < math.inf for rate in rates) or not any(rates):
        shown = ", ".join(f"{rate:g}" for rate in rates) or "none"
        raise ValueError(f"rates of shape {arrivals.shape}: {shown}; give finite rates, one of them above 0")
    if arrivals.shape is Shape.BURST and not 0 < arrivals.burst_s <= arrivals.every_s < math.inf:
        raise ValueError(
            f"burst_s = {arrivals.burst_s:g} and every_s = {arrivals.every_s:g}: a burst lasts longer than 0 "
            "and at most until the next one"
        )


def _times_of_pieces(pieces: Sequence[Piece], seconds: float) -> Iterator[float]:
    number, before = 0, 0.0
    for piece in pieces:
        after = before + piece.count
        while number < after:
            at_s = min(piece.moment_of(max(number - before, 0.0)), piece.end_s)
            if at_s >= seconds:  # rounding at the very end
                return
            yield at_s
            number += 1
        before = after


def _poisson(rate: float, seconds: float, seed: int) -> Iterator[float]:
    gaps = random.Random(seed)
    at_s = gaps.expovariate(rate)
    while at_s < seconds:
        yield at_s
        at_s += gaps.expovariate(rate)
