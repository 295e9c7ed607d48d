"""When the next batch is formed: what is known of the engine's calls, and of who asks. Sans-IO."""

from collections.abc import Sequence

from server.batching.entry import Batch, Entry
from server.batching.fit import ServiceTimes
from server.batching.options import BatchOptions
from server.batching.overlap import Overlap
from server.batching.returns import Returns
from server.batching.running import Running
from server.core.batching import Fit

TRUST_S = 0.25  # so long after the last call an idle engine is tried, whatever the fit says
RATE_WEIGHT = 0.2  # of the time since the last batch, in the rate of arrivals
USUAL_RATE_WEIGHT = 0.03  # of that in the usual one
LIGHT_LOAD = 0.7  # of what the instances could serve one by one: below it none waits for another
EVEN_AT_MOST = 0.95  # of what an instance can do with batches of any size: beyond it there is no even share
EVEN_MARGIN = 1.15  # times an even share: what comes is not even
EVEN_MORE = 2  # rows beyond that
COMPANY_SHARE = 0.15  # of a call is what rows save that share it; where it is less, waiting for company costs more
TOO_MUCH = 1.1  # times what the instances can do is an overload
FAR_CALLS = 4.0  # calls that a deadline must be away, so that a batch may as well wait at the engine
NEVER = float("inf")


class Schedule:
    """The calls that run, what they take, and from when on a further one may be sent."""

    def __init__(self, options: BatchOptions) -> None:
        self._options = options
        self._slots = options.slots
        self._running = Running(options.instances)
        self._times = ServiceTimes()
        self._overlap = Overlap()
        self._returns = Returns()
        self._ended_at = -NEVER
        self._freed_at = -NEVER  # when a call ended, answered or not
        self._sent = 0
        self._sent_at = -NEVER
        self._came = 0
        self._usual_rate = 0.0
        self.rate = 0.0  # rows that come in a second

    @property
    def in_flight(self) -> int:
        """Calls at the engine."""
        return self._running.calls

    @property
    def is_full(self) -> bool:
        """Whether the engine has as many calls as it may: nothing is sent before one has ended."""
        return self._running.calls >= self._slots

    @property
    def fit(self) -> Fit | None:
        """As it was learned, whether the engine is still the same or not."""
        return self._times.fit

    def trusted_fit(self, now: float) -> Fit | None:
        """The fit, unless nothing runs and the last call is long ago: then the engine may be another by now."""
        times = self._times
        if times.is_doubted or (not self._running.calls and now - self._ended_at >= TRUST_S):
            return None
        return times.fit

    def least_s(self, rows: int, now: float) -> float:
        """What a call of so many rows takes at least, where no fit tells; 0 where nothing does."""
        is_old = not self._running.calls and now - self._ended_at >= TRUST_S
        return 0.0 if is_old else self._times.least_s(rows)

    def begin(self, now: float) -> float:
        """When a call that is sent as early as may be would have begun, had it been sent to an idle engine."""
        running = self._running
        return now if running.is_free else max(running.free_at(now) - self._overlap.overhead_s, now)

    def even_rows(self, fit: Fit, max_rows: int, waiting: int) -> int:
        """Rows of a batch where all instances share the load evenly, and some more; max_rows for a single instance.

        waiting: rows. Of many, each instance's part, whatever the load is usually: else a queue that has grown stays,
        since small batches cost the gateway more time than they save the engine.
        """
        instances = self._options.instances
        share = self._usual_rate / instances
        if instances == 1 or share * fit.beta_s >= EVEN_AT_MOST:
            return max_rows
        even = int(EVEN_MARGIN * share * fit.alpha_s / (1.0 - share * fit.beta_s)) + EVEN_MORE
        return min(max(even, -(-waiting // instances)), max_rows)

    def next_begin(self, now: float) -> float:
        """When another instance takes a call, beside the one that is sent now."""
        return self._running.second_free_at(now)

    def send_at(self, now: float, *, rows: int, since: float, max_rows: int, due: float) -> float:
        """From when on a batch may be sent: now or before for at once, NEVER for not before a call has ended.

        rows: that wait for it, the first of them since then. due: the earliest deadline among them, NEVER without.
        """
        running = self._running
        if running.calls >= self._slots:
            return NEVER
        due_at = running.due_at
        fit = self._times.fit
        if fit is not None and self._is_company_dear(fit, rows, due - now):
            return now
        if due_at is not None:
            return self._at_the_door(due_at, rows=rows, max_rows=max_rows)
        if rows >= max_rows:
            return now
        until = since + self._options.max_queue_delay_s
        if not running.calls and self._returns.are_quick(self._times.empty_call_s):
            until = max(until, self._returns.until(rows, max_rows=max_rows))
        if fit is not None and running.calls:
            until = max(until, self._sent_at + self._spacing_s(fit, self.even_rows(fit, rows, rows)))
        if until <= now:
            return now
        latest = due if fit is None else due - fit.told_s(rows + 1) - fit.guard_s
        return min(until, latest)

    def _is_company_dear(self, fit: Fit, rows: int, left_s: float) -> bool:
        """Whether rows save so little by sharing a call that an instance had better never wait for one.

        Not where deadlines are near: a batch that is formed late is then worth an instance's idle moment. Nor where
        there are deadlines and more comes than batches of that size could serve: then what they save is all there is.
        """
        options = self._options
        is_asked_to_wait = options.max_queue_delay_s > 0.0
        call_s = fit.seconds(max(rows, 1))
        if is_asked_to_wait or fit.alpha_s > COMPANY_SHARE * call_s or left_s < FAR_CALLS * call_s:
            return False
        return left_s == NEVER or self.rate * call_s <= TOO_MUCH * rows * options.instances

    def _spacing_s(self, fit: Fit, rows: int) -> float:
        """Between two batches of so many rows where several instances share the load: evenly, so that none gets the
        leavings only."""
        instances = self._options.instances
        is_light = self.rate * fit.seconds(1) < instances * LIGHT_LOAD
        return 0.0 if is_light else fit.seconds(rows) / instances

    def _at_the_door(self, due_at: float, *, rows: int, max_rows: int) -> float:
        """Just before the engine is due; not at all where those whose call runs are about to join who waits."""
        fit = self._times.fit
        if fit is None or (self._running.rows + rows <= max_rows and self._returns.are_quick(fit.alpha_s)):
            return NEVER
        lead_s = self._overlap.lead_s(fit.alpha_s + fit.beta_s, self._sent)
        return due_at - lead_s if lead_s > 0.0 else NEVER

    def has_delayed(self, chosen: Sequence[Entry], now: float) -> bool:
        """Whether those that are sent now waited until the delay had passed, and the engine for them, idle."""
        if not chosen or not self._options.max_queue_delay_s or self._running.calls:
            return False
        until = chosen[0].arrived_at + self._options.max_queue_delay_s
        return self._freed_at < until <= now

    def came(self, rows: int, now: float) -> None:
        """So many rows were asked for."""
        self._came += rows
        self._returns.came(rows, now)

    def sent(self, batch: Batch, now: float) -> None:
        """The batch goes to the engine."""
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
        """What the call would have taken by itself; None for a batch that did not run."""
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
        """All members have their answers, so long after the engine's."""
        self._times.delivered(batch.rows, seconds)

    def lost(self, batch: Batch, now: float) -> None:
        """The call ended without an answer; nothing is learned of it."""
        self._running.finish(batch, now)
        self._freed_at = now
