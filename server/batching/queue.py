"""One model's queue: what waits, what runs, and which batch goes next. Sans-IO: every member takes now."""

from collections import Counter
from dataclasses import dataclass, field

from server.batching.door import Door
from server.batching.entry import Batch, Entry, Stage
from server.batching.fit import ServiceTimes
from server.batching.forming import Terms, choose
from server.batching.limit import SizeLimit
from server.batching.options import BatchOptions
from server.batching.overlap import Overlap
from server.batching.running import Running
from server.batching.shares import Shares, is_favoured
from server.batching.waiting import Lane, Waiting
from server.core.batching import CloseReason, Fit
from server.core.errors import DeadlineExceeded, InferenceError, Overloaded

TRUST_S = 0.25  # so long after the last call an idle engine is tried, whatever the fit says
RATE_WEIGHT = 0.2  # of the time since the last batch, in the rate of arrivals
TICK_S = 1e-6  # what a wake-up comes later than the moment that it is for


@dataclass(frozen=True, slots=True, eq=False)
class Dropped:
    """An entry that the queue gave up, and what its caller is told: Overloaded or DeadlineExceeded."""

    entry: Entry
    error: InferenceError


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """A queue at one moment, and what it did since it was made.

    depth, rows, size_bytes: of what waits. in_flight: calls at the engine. max_rows: of a batch, now. batches_by_rows,
    closed_by: batches formed. dropped: by the reason word of the error that its caller got. wait_s: until a request
    of one row that came now would be answered, None where that is not known.
    """

    depth: int
    rows: int
    size_bytes: int
    in_flight: int
    max_rows: int
    fit: Fit | None
    wait_s: float | None
    batches_by_rows: dict[int, int] = field(default_factory=dict)
    closed_by: dict[CloseReason, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)


class BatchQueue:
    """The requests of one model until they are in a batch, and its batches until the engine is through with them."""

    def __init__(self, model_name: str, options: BatchOptions) -> None:
        self.model_name = model_name
        self.options = options
        self._waiting = Waiting()
        self._running = Running(options.instances)
        self._times = ServiceTimes()
        self._overlap = Overlap()
        self._door = Door()
        self._shares = Shares()
        self._limit = SizeLimit(options.max_batch_size)
        self._entries = 0
        self._batches = 0
        self._ended_at = float("-inf")
        self._formed_at = float("-inf")
        self._arrived_rows = 0
        self._rate = 0.0
        self._lost: list[Dropped] = []
        self._by_rows: Counter[int] = Counter()
        self._closed_by: Counter[CloseReason] = Counter()
        self._dropped: Counter[str] = Counter()

    def push(self, entry: Entry, now: float) -> list[Dropped]:
        """Take the entry; what is returned waited and had to make room for it.

        Raises DeadlineExceeded where its time has passed, Overloaded where the queue is full or its deadline cannot
        be met.
        """
        client = self._waiting.clients.get(entry.client)
        self._shares.asked(entry, None if client is None else client.latest())
        try:
            self._refuse_hopeless(entry, now)
            lost = self._make_room(entry, now)
        except InferenceError as error:
            self._dropped[error.reason] += 1
            self._shares.refused(entry.rows)
            raise
        self._entries += 1
        entry.number = self._entries
        entry.ahead = self._waiting.entries
        self._waiting.add(entry)
        self._arrived_rows += entry.rows
        return lost

    def pop(self, now: float) -> Batch | None:
        """A batch that is to run now, or None. Call it until it returns None."""
        if not self._waiting.entries or len(self._running) >= self.options.slots or now < self._held_until(now):
            return None
        lane = self._waiting.first()
        if lane is None:
            return None
        return self._form(lane, now)

    def expire(self, now: float) -> list[Dropped]:
        """Those that are given up now: their time has passed, or is too short for the engine to answer in it."""
        lost, self._lost = self._lost, []
        fit = self._trusted_fit(now)
        begin = self._begin(now) if fit is not None else now
        while (entry := self._waiting.earliest()) is not None:
            deadline = entry.deadline or 0.0
            if deadline <= now:
                error: InferenceError = self._passed(entry, now)
            elif fit is not None and begin + fit.seconds(entry.rows) > deadline:
                error = self._cannot_meet(entry, now, begin + fit.seconds(entry.rows))
            else:
                break
            lost.append(self._drop(entry, error))
        return lost

    def cancel(self, entry: Entry, now: float) -> Stage:
        """Where the entry was: QUEUE: it is gone without a trace; BATCH: it runs, and its batch is not touched."""
        stage = entry.stage
        if stage is Stage.QUEUE:
            self._waiting.remove(entry, Stage.GONE)
        return stage

    def done(self, batch: Batch, now: float) -> None:
        """The engine answered the batch."""
        call = self._running.finish(batch, now)
        self._leave(batch)
        if call is None or call.began is None:
            return
        took_s = now - call.began
        self._ended_at = now
        if call.lead_s and batch.fit is not None:
            self._overlap.learn(batch.fit.seconds(batch.rows), took_s, call.lead_s)
        took_s = self._overlap.whole_s(took_s, call.lead_s)
        self._times.learn(batch.rows, took_s)
        self._limit.answered(batch.rows, took_s, self._budget_s(batch))

    def failed(self, batch: Batch, now: float, *, out_of_memory: bool = False) -> None:
        """The engine did not answer the batch."""
        self.released(batch, now)
        if out_of_memory:
            self._limit.out_of_memory(batch.rows)

    def released(self, batch: Batch, now: float) -> None:
        """Nobody waits for the batch any more: its call was given up."""
        self._running.finish(batch, now)
        self._leave(batch)

    def next_wakeup(self, now: float) -> float | None:
        """When pop or expire may have something, if nothing else happens; None for not before something happens."""
        if self._lost:
            return now
        if not self._waiting.entries:
            return None
        entry = self._waiting.earliest()
        wakeup_at = float("inf") if entry is None else self._give_up_at(entry, now) + TICK_S
        if len(self._running) < self.options.slots:
            wakeup_at = min(wakeup_at, self._held_until(now))
        return None if wakeup_at == float("inf") else wakeup_at

    def close(self, now: float) -> list[Dropped]:
        """Everything that still waits, given up: the gateway stops."""
        lost, self._lost = self._lost, []
        for entry in sorted(self._waiting, key=lambda one: one.number):
            error = Overloaded(f"the gateway stops; {self.model_name} takes no more requests", reason="draining")
            lost.append(self._drop(entry, error))
        return lost

    def statistics(self) -> QueueStatistics:
        """The queue now. Copies; for people and metrics, not for each request."""
        waiting, fit = self._waiting, self._times.fit
        return QueueStatistics(
            depth=waiting.entries,
            rows=waiting.rows,
            size_bytes=waiting.size_bytes,
            in_flight=len(self._running),
            max_rows=self._limit.by_memory if fit is not None else self._limit.rows,
            fit=fit,
            wait_s=None if fit is None else fit.seconds(1),
            batches_by_rows=dict(self._by_rows),
            closed_by=dict(self._closed_by),
            dropped=dict(self._dropped),
        )

    def _form(self, lane: Lane, now: float) -> Batch | None:
        fit = self._trusted_fit(now)
        terms = Terms(self._begin(now), fit, self._rows_now(lane, fit), self._rows_a_second(now))
        choice = choose(lane, terms)
        for entry in choice.given_up:
            finish = terms.begin + (fit.seconds(choice.rows) if fit is not None else 0.0)
            self._lost.append(self._drop(entry, self._cannot_meet(entry, now, finish)))
        for entry in choice.entries:
            self._waiting.remove(entry, Stage.BATCH)
        given_up = choice.given_up
        self._door.formed(choice.least_s, min(one.priority for one in given_up) if given_up else None)
        reason = choice.reason
        if choice.rows >= self.options.max_batch_size:
            reason = CloseReason.FULL
        elif reason is CloseReason.SLOT_FREE and self._waiting.entries:
            reason = CloseReason.INCOMPATIBLE
        return self._send(choice.entries, choice.rows, reason, now)

    def _send(self, chosen: list[Entry], rows: int, reason: CloseReason, now: float) -> Batch:
        self._batches += 1
        fit = self._times.fit
        batch = Batch(
            number=self._batches,
            entries=tuple(chosen),
            rows=rows,
            close_reason=reason,
            formed_at=now,
            busy=len(self._running),
            fit=fit,
            expected_s=None if fit is None else fit.seconds(rows),
        )
        self._shares.formed(rows)
        self._running.start(batch, now, self._expected_s(batch))
        self._by_rows[rows] += 1
        self._closed_by[reason] += 1
        return batch

    def _rows_a_second(self, now: float) -> float:
        """What came since the last few batches."""
        since_s = now - self._formed_at
        if since_s > 0.0:
            self._rate += (min(self._arrived_rows / since_s, 1e9) - self._rate) * RATE_WEIGHT
            self._arrived_rows, self._formed_at = 0, now
        return self._rate

    def _held_until(self, now: float) -> float:
        """When a slot may be filled: one at the engine's door just before the engine is due."""
        due_at = self._running.due_at()
        if due_at is None:
            return now
        fit = self._times.fit
        lead_s = 0.0 if fit is None else self._overlap.lead_s(fit.alpha_s + fit.beta_s, self._batches)
        return due_at - lead_s if lead_s > 0.0 else float("inf")

    def _begin(self, now: float) -> float:
        """When a call that is sent as early as may be would have begun, had it been sent to an idle engine."""
        return max(self._running.free_at(now) - self._overlap.overhead_s, now)

    def _expected_s(self, batch: Batch) -> float:
        """From when an instance is free for the call."""
        whole_s = batch.expected_s or 0.0
        return whole_s if self._running.is_free else max(whole_s - self._overlap.overhead_s, 0.0)

    def _rows_now(self, lane: Lane, fit: Fit | None) -> int:
        """At most so many in the next batch, for the sake of those who come while it runs too."""
        max_rows = self._limit.by_memory
        if fit is None:
            head = lane.head()
            return self._limit.rows if head is not None and head[3].deadline is not None else max_rows
        longest_s = self._shares.longest_s()
        if longest_s is None or fit.beta_s <= 0.0:
            return max_rows
        return min(max(int((longest_s - fit.alpha_s) / fit.beta_s), 1), max_rows)

    def _trusted_fit(self, now: float) -> Fit | None:
        """The fit, unless nothing runs and its last call is long ago: then the engine may be another by now."""
        times = self._times
        if times.is_doubted or (not len(self._running) and now - self._ended_at >= TRUST_S):
            return None
        return times.fit

    def _give_up_at(self, entry: Entry, now: float) -> float:
        deadline = entry.deadline or 0.0
        fit = self._trusted_fit(now)
        return deadline if fit is None else deadline - fit.seconds(entry.rows)

    def _refuse_hopeless(self, entry: Entry, now: float) -> None:
        if entry.deadline is None:
            return
        if entry.deadline <= now:
            raise self._passed(entry, now)
        fit = self._trusted_fit(now)
        if fit is not None:
            begin = self._begin(now)
            least_s = fit.seconds(entry.rows)
            if self._door.least_s > least_s and self._is_usual(entry):
                least_s = self._door.least_s
            if begin + least_s > entry.deadline:
                raise self._cannot_meet(entry, now, begin + least_s)

    def _is_usual(self, entry: Entry) -> bool:
        """Whether nothing puts it before those that are given up."""
        return entry.priority >= self._door.priority and not is_favoured(entry)

    def _make_room(self, entry: Entry, now: float) -> list[Dropped]:
        """Those who made room. Where there is not enough of it, they are told with the next expire."""
        waiting, options = self._waiting, self.options
        lost: list[Dropped] = []
        try:
            while waiting.entries >= options.max_queue_size:
                lost.append(self._displace(entry, now, "queue_full"))
            while waiting.entries and waiting.size_bytes + entry.size_bytes > options.max_queue_bytes:
                lost.append(self._displace(entry, now, "queue_bytes"))
        except Overloaded:
            self._lost += lost
            raise
        return lost

    def _displace(self, entry: Entry, now: float, reason: str) -> Dropped:
        """The latest entry of the client that has most, where that is more than the newcomer's client would have."""
        heaviest = self._waiting.heaviest()
        own = self._waiting.clients.get(entry.client)
        latest = heaviest.latest() if heaviest is not None else None
        if heaviest is None or latest is None or heaviest.rows <= (own.rows if own else 0) + entry.rows:
            raise self._full(reason)
        error = Overloaded(
            f"{self.model_name}'s queue is full and this caller has the most in it ({heaviest.rows} rows); send less",
            reason="share",
        )
        return self._drop(latest, error)

    def _drop(self, entry: Entry, error: InferenceError) -> Dropped:
        self._waiting.remove(entry, Stage.GONE)
        self._shares.refused(entry.rows)
        self._dropped[error.reason] += 1
        return Dropped(entry, error)

    def _leave(self, batch: Batch) -> None:
        for entry in batch.entries:
            entry.stage = Stage.GONE

    def _budget_s(self, batch: Batch) -> float | None:
        """Half of the shortest time that a member was given: the other half is for waiting."""
        given = [entry.deadline - entry.arrived_at for entry in batch.entries if entry.deadline is not None]
        return min(given) / 2 if given else self.options.slo_s

    def _full(self, reason: str) -> Overloaded:
        waiting, options = self._waiting, self.options
        held = (
            f"{waiting.entries} requests (limit {options.max_queue_size})"
            if reason == "queue_full"
            else f"{waiting.size_bytes} bytes (limit {options.max_queue_bytes})"
        )
        return Overloaded(f"{held} wait for {self.model_name}; send again later", reason=reason)

    def _passed(self, entry: Entry, now: float) -> DeadlineExceeded:
        late_s = now - (entry.deadline or now)
        return DeadlineExceeded(
            f"the deadline passed {late_s * 1e3:.1f} ms ago, after {max(now - entry.arrived_at, 0.0) * 1e3:.1f} ms in "
            f"{self.model_name}'s queue; allow more time or send less"
        )

    def _cannot_meet(self, entry: Entry, now: float, finish: float) -> Overloaded:
        left_s = (entry.deadline or now) - now
        return Overloaded(
            f"{self.model_name} would answer in {(finish - now) * 1e3:.1f} ms at the soonest and "
            f"{left_s * 1e3:.1f} ms are left; allow more time or send less",
            reason="cannot_meet",
        )
