"""Simulates one batching policy and one engine under a manual clock, with seeded arrivals."""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import numpy as np

from penstock.gateway.batching.entries import Batch, Entry
from penstock.gateway.batching.queue import Dropped
from penstock.planning.profile import EngineProfile
from penstock.protocol.errors import DeadlineExceeded, InferenceError, Overloaded

FRAMES_PER_S = 30.0
JITTER_S = 0.002  # of a camera's frame, standard deviation
BURST, QUIET = 2.0, 0.5  # times the mean rate
BURST_S, QUIET_S = 0.05, 0.10  # mean durations; with them the weighted mean of BURST and QUIET is 1
PARETO_SHAPE = 1.5  # of on and off times: finite mean, infinite variance
SOURCES = 8


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests by time, in seconds from 0. clients: one per request; empty for a single client."""

    times: tuple[float, ...]
    clients: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.times)


Pattern = Callable[[float, int, int], Arrivals]  # (requests per second, count, seed)


def poisson(rate: float, count: int, seed: int) -> Arrivals:
    """Independent clients: exponential gaps."""
    gaps = np.random.default_rng(seed).exponential(1.0, count)
    return Arrivals(tuple((np.cumsum(gaps) / rate).tolist()))


def bursty(rate: float, count: int, seed: int) -> Arrivals:
    """Poisson arrivals whose rate switches between half and twice the mean, for 100 and 50 ms on average (MMPP)."""
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
    """SOURCES clients that send evenly while they are on. On and off times are Pareto distributed."""
    random = np.random.default_rng(seed)
    span_s = count / rate
    gap_s = SOURCES / (2 * rate)  # a client is on half of the time
    mean_s = 40 * gap_s
    times, owners = [], []
    for source in range(SOURCES):
        own = _on_off_source(random, span_s=span_s, gap_s=gap_s, mean_s=mean_s)
        times.append(own)
        owners.append(np.full(len(own), source))
    return _merged(np.concatenate(times), np.concatenate(owners), count, "caller")


def periodic(rate: float, count: int, seed: int) -> Arrivals:
    """Cameras at 30 frames per second, each with its own phase and a jitter of 2 ms; rate / 30 of them, rounded."""
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


class Policy(Protocol):
    """One model's queue. now: monotonic seconds."""

    def push(self, entry: Entry, now: float) -> Sequence[Dropped]:
        """Add the entry, or raise an InferenceError for it. Returns displaced entries."""
        ...

    def pop(self, now: float) -> Batch | None:
        """A batch to run now, or None; called until None."""
        ...

    def expire(self, now: float) -> Sequence[Dropped]:
        """Waiting entries to drop now."""
        ...

    def done(self, batch: Batch, now: float) -> None:
        """The engine answered the batch."""
        ...

    def next_wakeup(self, now: float) -> float | None:
        """When to call again if nothing else happens."""
        ...


@dataclass(frozen=True, slots=True)
class EngineModel:
    """The simulated engine."""

    profile: EngineProfile
    instances: int = 1  # concurrent calls; more wait at the engine, as in Triton
    before_s: float = 0.0  # transfer to the engine; overlaps with other calls
    after_s: float = 0.0  # transfer back; overlaps with other calls

    def call_s(self, rows: int, begin: float) -> float:
        """Duration of a call that begins then."""
        return self.profile.seconds(rows)


class SimulatedEngine:
    """The calls of one run. busy_s: sum over all instances."""

    def __init__(self, model: EngineModel) -> None:
        self.busy_s = 0.0
        self._model = model
        self._free_at = [0.0] * model.instances

    def start(self, rows: int, now: float) -> float:
        """When the gateway has the response of a call that it sends now."""
        begin = max(now + self._model.before_s, self._free_at[0])
        took_s = self._model.call_s(rows, begin)
        heapq.heapreplace(self._free_at, begin + took_s)
        self.busy_s += took_s
        return begin + took_s + self._model.after_s


IDLE_WAKEUPS = 1000  # so many wake-ups without an effect mean that the policy loops
KEY = "model"
ROW_BYTES = 1


class PolicyFault(RuntimeError):
    """The policy broke its contract: it lost an entry, or wakes up endlessly."""


@dataclass(slots=True)
class SimulationResult:
    """Results of the requests after the warm-up, in seconds. within_slo + late + refused + expired = offered."""

    offered: int = 0
    within_slo: int = 0
    late: int = 0  # answered after its deadline
    refused: int = 0  # on arrival, or displaced (503)
    expired: int = 0  # in the queue (504)
    measured_from_s: float = 0.0
    ended_at: float = 0.0  # includes the warm-up
    last_arrival_s: float = 0.0
    busy_s: float = 0.0  # includes the warm-up
    latencies_s: list[float] = field(default_factory=list)
    batch_rows: Counter[int] = field(default_factory=Counter)  # calls by size; includes the warm-up
    by_client: dict[str, list[int]] = field(default_factory=dict)  # [offered, within_slo]
    is_cut_short: bool = False  # stopped early, because it lost more than allowed

    @property
    def share(self) -> float:
        """Share of offered requests that were answered inside the SLO."""
        return self.within_slo / self.offered if self.offered else 1.0

    @property
    def goodput(self) -> float:
        """Requests per second that were answered inside the SLO."""
        return self.within_slo / max(self.last_arrival_s - self.measured_from_s, 1e-9)

    @property
    def mean_batch(self) -> float:
        """Mean rows of a call."""
        calls = sum(self.batch_rows.values())
        return sum(rows * times for rows, times in self.batch_rows.items()) / max(calls, 1)


def simulate(
    policy: Policy,
    engine: EngineModel,
    arrivals: Arrivals,
    *,
    slo_s: float,
    warm_up: float = 0.05,  # share of the arrivals that are not counted
    lost_at_most: int | None = None,
) -> SimulationResult:
    """Runs a fresh policy until all requests have ended, or lost_at_most missed the SLO. Raises PolicyFault."""
    return _Replay(policy, engine, arrivals, slo_s).run(warm_up, lost_at_most)


class _Replay:
    def __init__(self, policy: Policy, engine: EngineModel, arrivals: Arrivals, slo_s: float) -> None:
        self._policy = policy
        self._engine = SimulatedEngine(engine)
        self._arrivals = arrivals
        self._slo_s = slo_s
        self._running: list[tuple[float, int, Batch]] = []
        self._open = 0
        self._calls = 0
        self._wakeup = inf
        self.outcome = SimulationResult()

    def run(self, warm_up: float, lost_at_most: int | None) -> SimulationResult:
        outcome, times = self.outcome, self._arrivals.times
        first = int(len(times) * warm_up)
        outcome.measured_from_s = times[first] if first < len(times) else inf
        outcome.last_arrival_s = times[-1] if times else 0.0
        for index, at in enumerate(times):
            self._until(at)
            self._arrive(index, at)
            if lost_at_most is not None and outcome.late + outcome.refused + outcome.expired > lost_at_most:
                outcome.is_cut_short = True
                break
        else:
            self._until(inf)
            if self._open:
                raise PolicyFault(f"{self._open} requests wait, nothing runs, and the policy asks for no wake-up")
        outcome.busy_s = self._engine.busy_s
        return outcome

    def _until(self, at: float) -> None:
        """Processes all events before that time: ends of calls first, then the policy's wake-ups."""
        idle = 0
        while True:
            end = self._running[0][0] if self._running else inf
            now = min(end, self._wakeup)
            if now > at or now == inf:
                return
            if end <= self._wakeup:
                self._end(*heapq.heappop(self._running))
                idle = 0
            else:
                idle += 1
                if idle > IDLE_WAKEUPS:
                    raise PolicyFault(f"the policy was woken {IDLE_WAKEUPS} times up to {now:.6f} s and did nothing")
            if self._pump(now):
                idle = 0

    def _arrive(self, index: int, now: float) -> None:
        clients = self._arrivals.clients
        client = clients[index] if clients else ""
        entry = Entry(KEY, 1, ROW_BYTES, now, now + self._slo_s, 0, client)
        if now >= self.outcome.measured_from_s:
            self.outcome.offered += 1
            self.outcome.by_client.setdefault(client, [0, 0])[0] += 1
        self._open += 1
        try:
            lost = self._policy.push(entry, now)
        except InferenceError as error:
            self._lose(entry, error)
        else:
            self._lose_all(lost)
        self._pump(now)

    def _pump(self, now: float) -> bool:
        policy, before = self._policy, self._open
        self._lose_all(policy.expire(now))
        is_any = self._open != before
        while (batch := policy.pop(now)) is not None:
            self.outcome.batch_rows[batch.rows] += 1
            self._calls += 1
            heapq.heappush(self._running, (self._engine.start(batch.rows, now), self._calls, batch))
            is_any = True
        wakeup = policy.next_wakeup(now)
        self._wakeup = inf if wakeup is None else max(wakeup, now)
        return is_any

    def _end(self, now: float, _: int, batch: Batch) -> None:
        outcome = self.outcome
        outcome.ended_at = now
        measured_from_s = outcome.measured_from_s
        for entry in batch.entries:
            if entry.arrived_at < measured_from_s:
                continue
            took_s = now - entry.arrived_at
            outcome.latencies_s.append(took_s)
            if took_s <= self._slo_s + 1e-9:
                outcome.within_slo += 1
                outcome.by_client[entry.client][1] += 1
            else:
                outcome.late += 1
        self._open -= len(batch.entries)
        self._policy.done(batch, now)

    def _lose_all(self, lost: Sequence[Dropped]) -> None:
        for one in lost:
            self._lose(one.entry, one.error)

    def _lose(self, entry: Entry, error: InferenceError) -> None:
        self._open -= 1
        if entry.arrived_at < self.outcome.measured_from_s:
            return
        if isinstance(error, Overloaded):
            self.outcome.refused += 1
        elif isinstance(error, DeadlineExceeded):
            self.outcome.expired += 1
        else:
            raise PolicyFault(f"given up with {type(error).__name__}: {error}") from error
