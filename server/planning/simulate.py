"""One policy before one engine, under a manual clock: every request is answered, refused or given up."""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from server.batching.entry import Batch, Entry
from server.core.errors import DeadlineExceeded, InferenceError, Overloaded
from server.planning.arrivals import Arrivals
from server.planning.engine import Engine, EngineModel
from server.planning.policy import GivenUp, Policy

IDLE_WAKEUPS = 1000  # without anything that happens: the policy's clock runs in a circle
KEY = "model"
ROW_BYTES = 1


class PolicyFault(RuntimeError):
    """The policy broke its contract: it lost an entry, or wakes for ever."""


@dataclass(slots=True)
class Outcome:
    """What became of the requests that came after the warm-up. Times in seconds.

    within_slo + late + refused + expired = offered. refused: at the door or displaced (503); expired: told that its
    time passed (504); late: answered after its deadline. by_client: (offered, within_slo) of each. batch_rows: calls by
    size, warm-up included, as are busy_s and ended_at. is_cut_short: stopped early, for it lost more than allowed.
    """

    offered: int = 0
    within_slo: int = 0
    late: int = 0
    refused: int = 0
    expired: int = 0
    measured_from_s: float = 0.0
    ended_at: float = 0.0
    last_arrival_s: float = 0.0
    busy_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    batch_rows: Counter[int] = field(default_factory=Counter)
    by_client: dict[str, list[int]] = field(default_factory=dict)
    is_cut_short: bool = False

    @property
    def share(self) -> float:
        """Answered inside the SLO, of all that were offered."""
        return self.within_slo / self.offered if self.offered else 1.0

    @property
    def goodput(self) -> float:
        """Requests a second that were answered inside the SLO."""
        return self.within_slo / max(self.last_arrival_s - self.measured_from_s, 1e-9)

    @property
    def mean_batch(self) -> float:
        """Rows of a call in the mean."""
        calls = sum(self.batch_rows.values())
        return sum(rows * times for rows, times in self.batch_rows.items()) / max(calls, 1)


def simulate(
    policy: Policy,
    engine: EngineModel,
    arrivals: Arrivals,
    *,
    slo_s: float,
    warm_up: float = 0.05,
    lost_at_most: int | None = None,
) -> Outcome:
    """Run the policy, which must be a fresh one, until all is answered.

    warm_up: the share of the arrivals that only teach the policy. lost_at_most: stop once more than so many were not
    answered inside the SLO, where only that matters. Raises PolicyFault.
    """
    return _Replay(policy, engine, arrivals, slo_s).run(warm_up, lost_at_most)


class _Replay:
    def __init__(self, policy: Policy, engine: EngineModel, arrivals: Arrivals, slo_s: float) -> None:
        self._policy = policy
        self._engine = Engine(engine)
        self._arrivals = arrivals
        self._slo_s = slo_s
        self._running: list[tuple[float, int, Batch]] = []
        self._open = 0
        self._calls = 0
        self._wakeup = inf
        self.outcome = Outcome()

    def run(self, warm_up: float, lost_at_most: int | None) -> Outcome:
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
        """Everything that happens before the time: ends of calls first, then the policy's own wake-ups."""
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
        """Whether anything happened."""
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

    def _lose_all(self, lost: Sequence[GivenUp]) -> None:
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
