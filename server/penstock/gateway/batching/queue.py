"""The queue of one model: waiting requests, running batches, and which batch goes next. Sans-IO."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from penstock.gateway.batching import selection as refusals
from penstock.gateway.batching.entries import Batch, Entry, Lane, Stage, WaitingEntries
from penstock.gateway.batching.options import BatchOptions
from penstock.gateway.batching.schedule import NEVER, Schedule
from penstock.gateway.batching.selection import (
    BatchConstraints,
    ClientShares,
    EarlyRejection,
    choose_batch,
    is_favoured,
)
from penstock.gateway.batching.service_times import BatchSizeLimit
from penstock.protocol.errors import InferenceError, Overloaded
from penstock.protocol.inference import CloseReason, EngineTimeFit

_Key = TypeVar("_Key")
TICK_S = 1e-6  # added to wake-ups, so that they are not early


@dataclass(frozen=True, slots=True, eq=False)
class Dropped:
    """An entry that the queue dropped, and its error: Overloaded or DeadlineExceeded."""

    entry: Entry
    error: InferenceError


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """State of a queue, and counts since its creation.

    depth, rows, size_bytes: waiting. in_flight: engine calls. max_rows: current batch limit. wait_s: estimate for a new
    one-row request, not counting running calls.
    """

    depth: int
    rows: int
    size_bytes: int
    in_flight: int
    max_rows: int
    fit: EngineTimeFit | None
    wait_s: float | None
    batches_by_rows: dict[int, int] = field(default_factory=dict)
    closed_by: dict[CloseReason, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)

    def with_former(self, former: "QueueStatistics") -> "QueueStatistics":
        """The statistics with the counts of an earlier queue of the model added."""
        return replace(
            self,
            depth=self.depth + former.depth,
            rows=self.rows + former.rows,
            size_bytes=self.size_bytes + former.size_bytes,
            in_flight=self.in_flight + former.in_flight,
            batches_by_rows=_sum(self.batches_by_rows, former.batches_by_rows),
            closed_by=_sum(self.closed_by, former.closed_by),
            dropped=_sum(self.dropped, former.dropped),
        )


def joined_statistics(queues: Sequence[QueueStatistics]) -> QueueStatistics:
    """Of several queues of one model: sums, the fit with the most calls, and the longest predicted wait."""
    first, *others = sorted(queues, key=lambda queue: -queue.fit.samples if queue.fit is not None else 1)
    for other in others:
        first = first.with_former(other)
    waits = [queue.wait_s for queue in queues if queue.wait_s is not None]
    return replace(first, wait_s=max(waits, default=None))


class BatchQueue:
    """Queue of one model: its waiting requests, and its batches until the engine has answered them."""

    def __init__(self, model_name: str, options: BatchOptions) -> None:
        self.model_name = model_name
        self.options = options
        self._waiting = WaitingEntries()
        self._schedule = Schedule(options)
        self._early_rejection = EarlyRejection()
        self._shares = ClientShares()
        self._limit = BatchSizeLimit(options.max_batch_size)
        self._entries = 0
        self._last_deadline = -NEVER  # of all entries so far
        self._batches = 0
        self._lost: list[Dropped] = []
        self._by_rows: Counter[int] = Counter()
        self._closed_by: Counter[CloseReason] = Counter()
        self._dropped: Counter[str] = Counter()

    def push(self, entry: Entry, now: float) -> list[Dropped]:
        """Adds the entry. Returns entries displaced for it. Raises DeadlineExceeded or Overloaded."""
        client = self._waiting.clients.get(entry.client)
        self._schedule.came(entry.rows, now)
        self._shares.entered(entry, None if client is None else client.latest())
        try:
            self._refuse_hopeless(entry, now)
            lost = self._make_room(entry)
        except InferenceError as error:
            self._dropped[error.reason] += 1
            self._shares.refused(entry.rows)
            raise
        self._entries += 1
        if entry.deadline is not None and entry.deadline > self._last_deadline:
            self._last_deadline = entry.deadline
        entry.number = self._entries
        entry.ahead = self._waiting.entries
        self._waiting.add(entry)
        return lost

    def refuse_hopeless(self, rows: int, deadline: float, now: float) -> None:
        """Raises Overloaded if the waiting rows and these cannot be done by the deadline. For use before rows exist."""
        fit = self._schedule.trusted_fit(now)
        if fit is None:
            return
        finish = self._schedule.begin(now) + self._engine_s(fit, self._waiting.rows + rows)
        if finish > deadline:
            error = refusals.deadline_unreachable(self.model_name, deadline, now, finish)
            self._dropped[error.reason] += 1
            raise error

    def pop(self, now: float) -> Batch | None:
        """A batch to run now, or None. Call until it returns None."""
        due = self.due(now)
        return due if isinstance(due, Batch) else None

    def due(self, now: float) -> Batch | float:
        """A batch to run now, or when one may be due; NEVER if that depends on other events."""
        if not self._waiting.entries or self._schedule.is_full:
            return NEVER
        send_at = self._send_at(now)
        lane = self._waiting.first() if send_at <= now else None
        return send_at if lane is None else self._form(lane, now)

    def expire(self, now: float) -> list[Dropped]:
        """Drops and returns the entries whose deadline has passed or cannot be met any more."""
        lost, self._lost = self._lost, []
        entry = self._waiting.earliest()
        if entry is None:
            return lost
        fit = self._schedule.trusted_fit(now)
        begin = self._schedule.begin(now) if fit is not None else now
        while entry is not None:
            deadline = entry.deadline or 0.0
            if deadline <= now:
                error: InferenceError = refusals.deadline_passed(self.model_name, entry, now)
            elif fit is not None and begin + fit.delivered_s(entry.rows) > deadline:
                error = refusals.deadline_unreachable(
                    self.model_name, entry.deadline, now, begin + fit.delivered_s(entry.rows)
                )
            else:
                break
            lost.append(self._drop(entry, error))
            entry = self._waiting.earliest()
        return lost

    def cancel(self, entry: Entry, now: float) -> Stage:
        """Removes the entry if it is waiting. Returns its stage; in BATCH the batch runs unchanged."""
        stage = entry.stage
        if stage is Stage.QUEUE:
            self._waiting.remove(entry, Stage.GONE)
        return stage

    def done(self, batch: Batch, now: float) -> None:
        """Records that the engine answered the batch."""
        took_s = self._schedule.answered(batch, now)
        self._leave(batch)
        if took_s is not None:
            self._limit.answered(batch.rows, took_s, self._budget_s(batch))

    def delivered(self, batch: Batch, seconds: float) -> None:
        """Records how long after the engine's response all members had theirs. Optional."""
        self._schedule.delivered(batch, seconds)

    def failed(self, batch: Batch, now: float, *, out_of_memory: bool = False) -> None:
        self.released(batch, now)
        if out_of_memory:
            self._limit.out_of_memory(batch.rows)

    def released(self, batch: Batch, now: float) -> None:
        """Records that the call was abandoned: no client waits for it any longer."""
        self._schedule.lost(batch, now)
        self._leave(batch)

    def next_wakeup(self, now: float, send_at: float | None = None) -> float | None:
        """When pop or expire next has work if nothing else happens, or None. send_at: the result of `due`, if known."""
        if self._lost:
            return now
        if not self._waiting.entries:
            return None
        entry = self._waiting.earliest()
        give_up_at = NEVER
        if entry is not None:
            fit = self._schedule.trusted_fit(now)
            give_up_at = (entry.deadline or 0.0) - (0.0 if fit is None else fit.delivered_s(entry.rows)) + TICK_S
        if send_at is None:
            send_at = NEVER if self._schedule.is_full else self._send_at(now)
        wakeup_at = min(give_up_at, send_at)
        return None if wakeup_at == NEVER else wakeup_at

    def close(self, now: float) -> list[Dropped]:
        """Drops all waiting entries, because the gateway stops."""
        lost, self._lost = self._lost, []
        for entry in sorted(self._waiting, key=lambda one: one.number):
            error = refusals.gateway_draining(self.model_name)
            lost.append(self._drop(entry, error))
        return lost

    def statistics(self) -> QueueStatistics:
        """A snapshot. It copies the counts, so do not take one per request."""
        waiting, fit = self._waiting, self._schedule.fit
        return QueueStatistics(
            depth=waiting.entries,
            rows=waiting.rows,
            size_bytes=waiting.size_bytes,
            in_flight=self._schedule.in_flight,
            max_rows=self._limit.by_memory if fit is not None else self._limit.rows,
            fit=fit,
            wait_s=None if fit is None else self._wait_s(fit),
            batches_by_rows=dict(self._by_rows),
            closed_by=dict(self._closed_by),
            dropped=dict(self._dropped),
        )

    def _wait_s(self, fit: EngineTimeFit) -> float:
        """Engine time of the waiting rows and one more, in full batches."""
        max_rows = self._limit.by_memory
        full, rest = divmod(self._waiting.rows, max_rows)
        return (full * fit.seconds(max_rows)) / self.options.instances + fit.delivered_s(rest + 1)

    def _form(self, lane: Lane, now: float) -> Batch:
        fit = self._schedule.trusted_fit(now)
        terms = BatchConstraints(
            self._schedule.begin(now),
            fit,
            self._rows_now(lane, fit),
            self._schedule.rate,
            self._schedule.next_begin(now),
        )
        choice = choose_batch(lane, terms)
        for entry in choice.given_up:
            finish = terms.begin + (fit.delivered_s(choice.rows) if fit is not None else 0.0)
            self._lost.append(
                self._drop(entry, refusals.deadline_unreachable(self.model_name, entry.deadline, now, finish))
            )
        for entry in choice.entries:
            self._waiting.remove(entry, Stage.BATCH)
        given_up = choice.given_up
        self._early_rejection.formed(choice.least_s, min(one.priority for one in given_up) if given_up else None)
        reason = choice.reason
        if choice.rows >= self.options.max_batch_size:
            reason = CloseReason.FULL
        elif reason is CloseReason.SLOT_FREE and self._waiting.entries:
            reason = CloseReason.INCOMPATIBLE
        elif reason is CloseReason.SLOT_FREE and self._schedule.has_delayed(choice.entries, now):
            reason = CloseReason.DELAY
        return self._send(choice.entries, choice.rows, reason, now)

    def _send(self, chosen: list[Entry], rows: int, reason: CloseReason, now: float) -> Batch:
        self._batches += 1
        fit = self._schedule.fit
        batch = Batch(
            number=self._batches,
            entries=tuple(chosen),
            rows=rows,
            close_reason=reason,
            formed_at=now,
            busy=self._schedule.in_flight,
            fit=fit,
            expected_s=None if fit is None else fit.seconds(rows),
        )
        self._shares.formed(rows)
        self._schedule.sent(batch, now)
        self._by_rows[rows] += 1
        self._closed_by[reason] += 1
        return batch

    def _send_at(self, now: float) -> float:
        lane = self._waiting.first()
        head = None if lane is None else lane.head()
        if lane is None or head is None:
            return NEVER
        earliest = self._waiting.earliest()
        due = NEVER if earliest is None or earliest.deadline is None else earliest.deadline
        max_rows = self._limit.by_memory
        return self._schedule.send_at(now, rows=lane.rows, since=head[3].arrived_at, max_rows=max_rows, due=due)

    def _rows_now(self, lane: Lane, fit: EngineTimeFit | None) -> int:
        """Row limit of the next batch, so that requests arriving while it runs can be served in time."""
        max_rows = self._limit.by_memory
        if fit is None:
            head = lane.head()
            return self._limit.rows if head is not None and head[3].deadline is not None else max_rows
        max_rows = self._schedule.even_rows(fit, max_rows, lane.rows)
        longest_s = self._shares.longest_s()
        if longest_s is None or fit.beta_s <= 0.0:
            return max_rows
        return min(max(int((longest_s - fit.alpha_s) / fit.beta_s), 1), max_rows)

    def _refuse_hopeless(self, entry: Entry, now: float) -> None:
        if entry.deadline is None:
            return
        if entry.deadline <= now:
            raise refusals.deadline_passed(self.model_name, entry, now)
        fit = self._schedule.trusted_fit(now)
        if fit is not None:
            begin = self._schedule.begin(now)
            finish = begin + fit.delivered_s(entry.rows)
            if self._is_usual(entry):
                finish = max(finish, begin + self._after_those_ahead_s(entry, fit))
                if finish <= entry.deadline < begin + self._early_rejection.least_s:
                    self._early_rejection.rejected_early()
                    finish = begin + self._early_rejection.least_s
            if finish > entry.deadline:
                raise refusals.deadline_unreachable(self.model_name, entry.deadline, now, finish)
        elif now + self._schedule.least_s(entry.rows, now) > entry.deadline:
            finish = now + self._schedule.least_s(entry.rows, now)
            raise refusals.deadline_unreachable(self.model_name, entry.deadline, now, finish)

    def _after_those_ahead_s(self, entry: Entry, fit: EngineTimeFit) -> float:
        """Least seconds until the entry is delivered, if it is the last one in a deep overload; otherwise 0."""
        if not self._shares.is_deeply_overloaded or entry.deadline is None or entry.deadline < self._last_deadline:
            return 0.0
        return self._engine_s(fit, self._waiting.rows + entry.rows)

    def _engine_s(self, fit: EngineTimeFit, rows: int) -> float:
        """Seconds for these rows in the largest batches, including delivery."""
        most = self._limit.by_memory
        engine_s = (fit.alpha_s * math.ceil(rows / most) + fit.beta_s * rows) / self.options.instances
        return engine_s + fit.deliver_s * min(rows, most)

    def _is_usual(self, entry: Entry) -> bool:
        """Whether entries are being dropped and this one has no precedence over them."""
        is_crowded = self._early_rejection.least_s > 0.0 or self._shares.is_deeply_overloaded
        return is_crowded and entry.priority >= self._early_rejection.priority and not is_favoured(entry)

    def _make_room(self, entry: Entry) -> list[Dropped]:
        """Displaces entries to make room. If there is not enough, `expire` returns them next time."""
        waiting, options = self._waiting, self.options
        lost: list[Dropped] = []
        try:
            while waiting.entries >= options.max_queue_size:
                lost.append(self._displace(entry, refusals.queue_full(self.model_name, options, waiting.entries)))
            while waiting.entries and waiting.size_bytes + entry.size_bytes > options.max_queue_bytes:
                lost.append(
                    self._displace(entry, refusals.queue_bytes_full(self.model_name, options, waiting.size_bytes))
                )
        except Overloaded:
            self._lost += lost
            raise
        return lost

    def _displace(self, entry: Entry, full: Overloaded) -> Dropped:
        """Displaces the latest entry of the client with the most rows, if the new entry's client would have fewer."""
        heaviest = self._waiting.heaviest()
        own = self._waiting.clients.get(entry.client)
        latest = heaviest.latest() if heaviest is not None else None
        if heaviest is None or latest is None or heaviest.rows <= (own.rows if own else 0) + entry.rows:
            raise full
        return self._drop(latest, refusals.client_share_exceeded(self.model_name, heaviest.rows))

    def _drop(self, entry: Entry, error: InferenceError) -> Dropped:
        self._waiting.remove(entry, Stage.GONE)
        self._shares.refused(entry.rows)
        self._dropped[error.reason] += 1
        return Dropped(entry, error)

    def _leave(self, batch: Batch) -> None:
        for entry in batch.entries:
            entry.stage = Stage.GONE

    def _budget_s(self, batch: Batch) -> float | None:
        """Half of the shortest time to a member's deadline; the other half is for waiting."""
        given = [entry.deadline - entry.arrived_at for entry in batch.entries if entry.deadline is not None]
        return min(given) / 2 if given else self.options.slo_s


def _sum(counts: Mapping[_Key, int], more: Mapping[_Key, int]) -> dict[_Key, int]:
    return dict(Counter(counts) + Counter(more))
