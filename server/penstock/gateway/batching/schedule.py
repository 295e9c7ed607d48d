"""Decides when to send the next batch, from running calls and the arrival rate. Sans-IO.

Batches are sent slightly before the engine is free. Clients that return quickly are waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.gateway.batching.entries import Batch, Entry
from penstock.gateway.batching.options import BatchOptions
from penstock.gateway.batching.service_times import ServiceTimes
from penstock.protocol.inference import EngineTimeFit


@dataclass(slots=True)
class RunningCall:
    """One call. began: when an instance was free for it, or None. expected_s: from then on. lead_s: sent that early."""

    batch: Batch
    expected_s: float
    began: float | None
    lead_s: float = 0.0


class RunningCalls:
    """Calls in the order sent; the first ones run, one per instance. due_at: expected end, None while one is idle."""

    __slots__ = ("_calls", "_ends", "_instances", "_waiting_calls_s", "calls", "due_at", "is_free", "rows")

    def __init__(self, instances: int) -> None:
        self._instances = instances
        self._calls: dict[int, RunningCall] = {}
        self._ends: list[float] = []  # expected ends of the running calls
        self._waiting_calls_s: list[float] = []  # expected seconds of the waiting calls
        self.calls = 0
        self.rows = 0
        self.is_free = instances > 0
        self.due_at: float | None = None

    def start(self, batch: Batch, now: float, expected_s: float) -> None:
        self._calls[batch.number] = RunningCall(batch, expected_s, now if self.is_free else None)
        self._count()

    def finish(self, batch: Batch, now: float) -> RunningCall | None:
        """Ends the call and begins the next waiting one. None if the batch did not run."""
        call = self._calls.pop(batch.number, None)
        has_run = call is not None and call.began is not None
        following = next((waiting for waiting in self._calls.values() if waiting.began is None), None)
        if has_run and following is not None:
            following.began, following.lead_s = now, now - following.batch.formed_at
        self._count()
        return call if has_run else None

    def _count(self) -> None:
        calls = self._calls.values()
        self.calls = len(calls)
        self.rows = sum([call.batch.rows for call in calls])
        self.is_free = self.calls < self._instances
        self._ends = [call.began + call.expected_s for call in calls if call.began is not None]
        self._waiting_calls_s = [call.expected_s for call in calls if call.began is None]
        self.due_at = None if self.is_free else min(self._ends)

    def free_at(self, now: float) -> float:
        """When an instance can take one more call. A late call is expected to be late by as much again."""
        if self.is_free:
            return now
        ends = [end if end >= now else now + (now - end) for end in self._ends]
        for expected_s in self._waiting_calls_s:
            first = min(range(len(ends)), key=ends.__getitem__)
            ends[first] += expected_s
        return min(ends)

    def second_free_at(self, now: float) -> float:
        """When a second instance is free; NEVER with a single instance."""
        free = self._instances - self.calls
        if free >= 2:
            return now
        ends = sorted(self._ends)
        after = 0 if free == 1 else 1
        return ends[after] if after < len(ends) else float("inf")


PROBE_PERIOD = 16
LEAD_MARGIN = 1.25  # of the overhead: how early a batch is sent
TOO_EARLY = 2.0
TOO_EARLY_SHARE = 0.05  # of a call of no rows
LEAD_WEIGHT = 0.3
MIN_OVERHEAD_SHARE = 0.02  # of a call of no rows; less is noise


class Overlap:
    """Learns overhead_s: seconds of a call to an idle engine beyond the engine's own work."""

    def __init__(self) -> None:
        self._measured_s = 0.0
        self.overhead_s = 0.0

    def lead_s(self, call_s: float, number: int) -> float:
        """How early to send the batch of this number. call_s: of a call of no rows."""
        turn = number % PROBE_PERIOD
        if turn == 0:  # measures a whole call
            return 0.0
        if turn == PROBE_PERIOD // 2:  # measures what a lead saves
            return self.overhead_s * TOO_EARLY + call_s * TOO_EARLY_SHARE
        return self.overhead_s * LEAD_MARGIN if self.overhead_s > call_s * MIN_OVERHEAD_SHARE else 0.0

    def whole_s(self, took_s: float, lead_s: float) -> float:
        """Duration without the lead of a call that was sent lead_s early."""
        return took_s + min(self.overhead_s, lead_s)

    def learn(self, expected_s: float, took_s: float, lead_s: float) -> None:
        """Records a call sent lead_s early. took_s: from when the engine was free. expected_s: without lead."""
        if lead_s < self.overhead_s or lead_s <= 0.0:
            return
        saved_s = min(max(expected_s - took_s, -lead_s), lead_s)
        self._measured_s += (saved_s - self._measured_s) * LEAD_WEIGHT
        self.overhead_s = max(self._measured_s, 0.0)


RETURNED_SHARE = 0.95  # of the answered rows have returned: stop waiting
RETURN_WEIGHT = 0.2  # of one batch in the usual return time
RETURN_MARGIN = 1.25  # of the usual return time: how long to wait
MAX_RETURN_WAIT = 0.5  # of a call of no rows


class ReturningClients:
    """Learns how soon closed-loop clients send again after a response."""

    def __init__(self) -> None:
        self._usual_s = float("inf")
        self._from = 0.0
        self._rows = 0
        self._came = 0
        self._wanted = 0.0

    def answered(self, rows: int, now: float) -> None:
        """Records that a batch was answered: its clients may send again."""
        if self._came < self._wanted:
            self._learn((now - self._from) * 2)
        self._rows, self._wanted, self._came, self._from = rows, rows * RETURNED_SHARE, 0, now

    def came(self, rows: int, now: float) -> None:
        if self._came < self._wanted:
            self._came += rows
            if self._came >= self._wanted:
                self._learn(now - self._from)

    def are_quick(self, call_s: float) -> bool:
        """Whether waiting for returning clients costs less than it saves. call_s: of a call of no rows."""
        return self._usual_s * RETURN_MARGIN <= call_s * MAX_RETURN_WAIT

    def until(self, waiting: int, *, max_rows: int) -> float:
        """When the last answered clients should return; 0 if most did, or not all would fit."""
        if self._came >= self._wanted or waiting + self._rows - self._came > max_rows:
            return 0.0
        return self._from + self._usual_s * RETURN_MARGIN

    def _learn(self, seconds: float) -> None:
        if self._usual_s == float("inf"):
            self._usual_s = seconds
        self._usual_s += (seconds - self._usual_s) * RETURN_WEIGHT


TRUST_S = 0.25  # idle time after which the fit may be outdated
RATE_WEIGHT = 0.2  # of the time since the last batch, in the arrival rate
USUAL_RATE_WEIGHT = 0.03  # of the same in the usual rate
LIGHT_LOAD = 0.7  # of the capacity at one row per call; below it, no row waits for another
EVEN_AT_MOST = 0.95  # of the capacity at any batch size; above it, no batch size keeps up
FULL_LOAD_SHARE = 0.95  # of the largest batch's rows per second, which smaller batches must reach at full load
EVEN_MARGIN = 1.15  # times an even share, because arrivals are uneven
EVEN_MORE = 2  # additional rows
SHARING_GAIN = 0.15  # of a call's time that shared rows must save to be worth waiting for
OVERLOAD_RATIO = 1.1  # of the capacity
FAR_CALLS = 4.0  # calls of time left before a deadline, so that a batch may wait at the engine
NEVER = float("inf")


class Schedule:
    """Running calls, their expected times, and when the next one may be sent."""

    def __init__(self, options: BatchOptions) -> None:
        self._options = options
        self._slots = options.slots
        self._running = RunningCalls(options.instances)
        self._times = ServiceTimes()
        self._overlap = Overlap()
        self._returns = ReturningClients()
        self._ended_at = -NEVER
        self._freed_at = -NEVER  # when a call ended, answered or not
        self._sent = 0
        self._sent_at = -NEVER
        self._came = 0
        self._usual_rate = 0.0
        self.rate = 0.0  # arriving rows a second

    @property
    def in_flight(self) -> int:
        return self._running.calls

    @property
    def is_full(self) -> bool:
        """Whether a call must end before the next one may be sent."""
        return self._running.calls >= self._slots

    @property
    def fit(self) -> EngineTimeFit | None:
        """The learned fit, even if it may be outdated."""
        return self._times.fit

    def trusted_fit(self, now: float) -> EngineTimeFit | None:
        """The fit, or None if the engine may have changed because it was idle."""
        times = self._times
        if times.may_be_outdated or (not self._running.calls and now - self._ended_at >= TRUST_S):
            return None
        return times.fit

    def least_s(self, rows: int, now: float) -> float:
        """Least seconds of a call of this size without a fit; 0 if unknown."""
        is_old = not self._running.calls and now - self._ended_at >= TRUST_S
        return 0.0 if is_old else self._times.least_s(rows)

    def begin(self, now: float) -> float:
        """When a call sent as early as possible would begin."""
        running = self._running
        return now if running.is_free else max(running.free_at(now) - self._overlap.overhead_s, now)

    def even_rows(self, fit: EngineTimeFit, max_rows: int, waiting: int) -> int:
        """Batch size that shares the load (or `waiting` rows) evenly among instances; max_rows for one instance."""
        instances = self._options.instances
        share = self._usual_rate / instances
        if instances == 1:
            return max_rows
        if share * fit.beta_s >= EVEN_AT_MOST:
            required = FULL_LOAD_SHARE * max_rows / (fit.alpha_s + max_rows * fit.beta_s)  # rows per second
            even = int(required * fit.alpha_s / (1.0 - required * fit.beta_s)) + 1
        else:
            even = int(EVEN_MARGIN * share * fit.alpha_s / (1.0 - share * fit.beta_s)) + EVEN_MORE
        return min(max(even, -(-waiting // instances)), max_rows)

    def next_begin(self, now: float) -> float:
        """When another instance is free, besides the one that takes the batch sent now."""
        return self._running.second_free_at(now)

    def send_at(self, now: float, *, rows: int, since: float, max_rows: int, due: float) -> float:
        """When a batch may be sent: up to `now` for at once, NEVER for after a call. due: a deadline or NEVER."""
        running = self._running
        if running.calls >= self._slots:
            return NEVER
        due_at = running.due_at
        fit = self._times.fit
        if fit is not None and self._is_company_dear(fit, rows, due - now):
            return now
        if due_at is not None:
            return self._just_before_free(due_at, rows=rows, max_rows=max_rows)
        if rows >= max_rows:
            return now
        until = since + self._options.max_queue_delay_s
        if not running.calls and self._returns.are_quick(self._times.empty_call_s):
            until = max(until, self._returns.until(rows, max_rows=max_rows))
        if fit is not None and running.calls:
            until = max(until, self._sent_at + self._spacing_s(fit, self.even_rows(fit, rows, rows)))
        if until <= now:
            return now
        latest = due if fit is None else due - fit.delivered_s(rows + 1) - fit.guard_s
        return min(until, latest)

    def _is_company_dear(self, fit: EngineTimeFit, rows: int, left_s: float) -> bool:
        """Whether an idle instance should not wait for rows: sharing saves little, and no deadline is near."""
        options = self._options
        has_queue_delay = options.max_queue_delay_s > 0.0
        call_s = fit.seconds(max(rows, 1))
        if has_queue_delay or fit.alpha_s > SHARING_GAIN * call_s or left_s < FAR_CALLS * call_s:
            return False
        return left_s == NEVER or self.rate * call_s <= OVERLOAD_RATIO * rows * options.instances

    def _spacing_s(self, fit: EngineTimeFit, rows: int) -> float:
        instances = self._options.instances
        is_light = self.rate * fit.seconds(1) < instances * LIGHT_LOAD
        return 0.0 if is_light else fit.seconds(rows) / instances

    def _just_before_free(self, due_at: float, *, rows: int, max_rows: int) -> float:
        """Just before the engine is due; NEVER if the clients of the running calls are about to send again."""
        fit = self._times.fit
        if fit is None or (self._running.rows + rows <= max_rows and self._returns.are_quick(fit.alpha_s)):
            return NEVER
        lead_s = self._overlap.lead_s(fit.alpha_s + fit.beta_s, self._sent)
        return due_at - lead_s if lead_s > 0.0 else NEVER

    def has_delayed(self, chosen: Sequence[Entry], now: float) -> bool:
        """Whether the entries waited for the whole delay while an instance was idle."""
        if not chosen or not self._options.max_queue_delay_s or self._running.calls:
            return False
        until = chosen[0].arrived_at + self._options.max_queue_delay_s
        return self._freed_at < until <= now

    def came(self, rows: int, now: float) -> None:
        self._came += rows
        self._returns.came(rows, now)

    def sent(self, batch: Batch, now: float) -> None:
        self._sent += 1
        since_s = now - self._sent_at
        if since_s > 0.0:
            self.rate += (self._came / since_s - self.rate) * RATE_WEIGHT
            self._usual_rate += (self.rate - self._usual_rate) * USUAL_RATE_WEIGHT
            self._came, self._sent_at = 0, now
        expected_s = batch.expected_s or 0.0
        if not self._running.is_free:
            expected_s = max(expected_s - self._overlap.overhead_s, 0.0)
        self._running.start(batch, now, expected_s)

    def answered(self, batch: Batch, now: float) -> float | None:
        """The call's duration without its lead; None for a batch that did not run."""
        call = self._running.finish(batch, now)
        self._freed_at = now
        if call is None or call.began is None:
            return None
        self._ended_at = now
        self._returns.answered(batch.rows, now)
        took_s = now - call.began
        if call.lead_s and batch.fit is not None:
            self._overlap.learn(batch.fit.seconds(batch.rows), took_s, call.lead_s)
        took_s = self._overlap.whole_s(took_s, call.lead_s)
        self._times.learn(batch.rows, took_s)
        return took_s

    def delivered(self, batch: Batch, seconds: float) -> None:
        """Records how long after the engine's response all members had theirs."""
        self._times.delivered(batch.rows, seconds)

    def lost(self, batch: Batch, now: float) -> None:
        """Records that the call ended without a response. Nothing is learned from it."""
        self._running.finish(batch, now)
        self._freed_at = now
