"""Overload policy of a queue: which entries form the next batch, and which are dropped. Sans-IO.

As in Nexus, an entry whose deadline forces a small batch is dropped. Clients below half of an equal share are first.
"""

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

from penstock.gateway.batching.entries import Entry, Item, Lane
from penstock.gateway.batching.options import BatchOptions
from penstock.protocol.errors import DeadlineExceeded, Overloaded
from penstock.protocol.inference import CloseReason, EngineTimeFit


def deadline_passed(model_name: str, entry: Entry, now: float) -> DeadlineExceeded:
    """The deadline passed while the entry waited."""
    late_s = now - (entry.deadline or now)
    return DeadlineExceeded(
        f"the deadline passed {late_s * 1e3:.1f} ms ago, after {max(now - entry.arrived_at, 0.0) * 1e3:.1f} ms in "
        f"{model_name}'s queue; allow more time or send less"
    )


def deadline_unreachable(model_name: str, deadline: float | None, now: float, finish: float) -> Overloaded:
    """The deadline cannot be met. finish: earliest time of a response, monotonic seconds."""
    left_s = (deadline or now) - now
    return Overloaded(
        f"{model_name} would answer in {(finish - now) * 1e3:.1f} ms at the soonest and {left_s * 1e3:.1f} ms are "
        "left; allow more time or send less",
        reason="cannot_meet",
    )


def queue_full(model_name: str, options: BatchOptions, waiting: int) -> Overloaded:
    """The queue has too many requests, and no other client has more in it."""
    return Overloaded(
        f"{waiting} requests (limit {options.max_queue_size}) wait for {model_name}; send again later",
        reason="queue_full",
    )


def queue_bytes_full(model_name: str, options: BatchOptions, waiting_bytes: int) -> Overloaded:
    """The queue has too many bytes, and no other client has more rows in it."""
    return Overloaded(
        f"{waiting_bytes} bytes (limit {options.max_queue_bytes}) wait for {model_name}; send again later",
        reason="queue_bytes",
    )


def client_share_exceeded(model_name: str, rows: int) -> Overloaded:
    """The client has the most rows in a full queue, and another client needs the room."""
    return Overloaded(
        f"{model_name}'s queue is full and this caller has the most in it ({rows} rows); send less", reason="share"
    )


def gateway_draining(model_name: str) -> Overloaded:
    """The gateway is stopping."""
    return Overloaded(f"the gateway stops; {model_name} takes no more requests", reason="draining")


LIGHT_SHARE = 0.5  # of an equal share
MEMORY_ROWS = 1024.0  # rows after which earlier ones count half
LEAST_ROWS = 1.0  # clients with fewer are removed
OVERLOAD = 0.02  # share of the rows that is dropped
DEEP_OVERLOAD = 0.1
OVERLOAD_WEIGHT = 0.2  # of one batch in that share
LIGHT_CLIENT_BATCHES = 32  # without a light client's request, after which batches may be long again
DEFAULT_DEADLINE_S = 1.0  # assumed for requests without a deadline
FAR_DEADLINE_WEIGHT = (
    1 / 32
)  # weight of a deadline's time beyond that: 30 s away ranks one second after a request without a deadline


class ClientShares:
    """Rows that each client sent recently, and the share of rows that was dropped."""

    def __init__(self) -> None:
        self._rows: dict[str, float] = {}
        self._total = 0.0
        self._given_up = 0.0
        self._refused_rows = 0
        self._budget_s: float | None = None
        self._batches_since = 0

    @property
    def is_overloaded(self) -> bool:
        """Whether requests are being dropped."""
        return self._given_up > OVERLOAD

    @property
    def is_deeply_overloaded(self) -> bool:
        """Whether so many are dropped that new requests are rejected on arrival."""
        return self._given_up > DEEP_OVERLOAD

    def longest_s(self) -> float | None:
        """Maximum duration of a batch, so that light clients get into the next one; None for no limit."""
        return self._budget_s / 2 if self._budget_s is not None and self.is_overloaded else None

    def entered(self, entry: Entry, latest: Entry | None) -> None:
        """Sets the new entry's rank. latest: its client's last waiting entry, which it must not overtake, or None."""
        self._rows[entry.client] = self._rows.get(entry.client, 0.0) + entry.rows
        self._total += entry.rows
        if self._total > 2 * MEMORY_ROWS:
            self._forget()
        is_light = self._is_light(entry) and (latest is None or is_favoured(latest))
        entry.rank = _usual_rank(entry)
        if entry.deadline is None:
            entry.rank = entry.arrived_at if is_light else entry.rank
        elif is_light and self.is_overloaded:
            entry.rank = entry.arrived_at
            self._budget_s = entry.deadline - entry.arrived_at
            self._batches_since = 0

    def refused(self, rows: int) -> None:
        self._refused_rows += rows

    def formed(self, rows: int) -> None:
        lost = self._refused_rows / (self._refused_rows + rows)
        self._given_up += (lost - self._given_up) * OVERLOAD_WEIGHT
        self._refused_rows = 0
        self._batches_since += 1
        if self._batches_since > LIGHT_CLIENT_BATCHES:
            self._budget_s = None

    def _is_light(self, entry: Entry) -> bool:
        clients = len(self._rows)
        return clients > 1 and self._rows.get(entry.client, 0.0) * clients <= self._total * LIGHT_SHARE

    def _forget(self) -> None:
        self._rows = {client: rows / 2 for client, rows in self._rows.items() if rows / 2 >= LEAST_ROWS}
        self._total = sum(self._rows.values())


def is_favoured(entry: Entry) -> bool:
    """Whether the entry goes before others with the same deadline."""
    return entry.rank < _usual_rank(entry)


def _usual_rank(entry: Entry) -> float:
    """The deadline (DEFAULT_DEADLINE_S after arrival if none). Time beyond the default counts little."""
    patient = entry.arrived_at + DEFAULT_DEADLINE_S
    if entry.deadline is None:
        return patient
    return entry.deadline if entry.deadline <= patient else patient + (entry.deadline - patient) * FAR_DEADLINE_WEIGHT


OVERLOAD_BATCHES = 8  # consecutive batches that dropped an entry are an overload
REJECTION_MARGIN = 0.95  # of the least time left of those batches: requests with less are rejected
REJECTION_DECAY = 0.9  # of the required time, per batch that dropped none


class EarlyRejection:
    """Rejects on arrival. least_s: required time from the next batch's begin to the deadline; 0 without overload."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, int]] = deque(maxlen=OVERLOAD_BATCHES)
        self._rejected_early = 0
        self.least_s = 0.0
        self.priority = 0  # entries of a higher priority than this are always accepted

    def rejected_early(self) -> None:
        """Records a request that was rejected only because of least_s."""
        self._rejected_early += 1

    def formed(self, least_s: float, priority: int | None) -> None:
        """Records a batch. least_s: of its members. priority: of the first entry that it dropped, or None."""
        rejected_early, self._rejected_early = self._rejected_early, 0
        if priority is None:
            if rejected_early:
                self.least_s *= REJECTION_DECAY
            else:
                self._recent.clear()
                self.least_s = 0.0
            return
        self._recent.append((least_s, priority))
        if len(self._recent) == OVERLOAD_BATCHES:
            self.least_s = min(least_s for least_s, _ in self._recent) * REJECTION_MARGIN
            self.priority = max(priority for _, priority in self._recent)


SKIPPED = 8  # entries of lower priority whose deadline is too near for this batch; they stay in the queue
FAVOURED_COST = 3  # a favoured entry is dropped if it makes the batch smaller by more than this factor


@dataclass(frozen=True, slots=True)
class BatchConstraints:
    """Limits of a batch formed now. begin, next_begin: when an instance, and another one, takes a call (monotonic)."""

    begin: float
    fit: EngineTimeFit | None
    max_rows: int
    rate: float
    next_begin: float = float("inf")


@dataclass(slots=True)
class BatchChoice:
    """Entries of the batch in order, and entries to drop (given_up). reason: why it took no more."""

    entries: list[Entry] = field(default_factory=list)
    given_up: list[Entry] = field(default_factory=list)
    rows: int = 0
    reason: CloseReason = CloseReason.SLOT_FREE
    least_s: float = float("inf")


def choose_batch(lane: Lane, terms: BatchConstraints) -> BatchChoice:
    """Takes the batch's entries, and those to drop, off the lane. Their stage is not set yet."""
    choice = BatchChoice()
    if terms.fit is not None:
        _give_up(lane, terms, choice)
    _fill(lane, terms, choice)
    return choice


def _give_up(lane: Lane, terms: BatchConstraints, choice: BatchChoice) -> None:
    """Drops entries at the head until the first one leaves time for all others, or for a full batch."""
    picked: list[Item] = []
    left, cap = lane.rows, terms.max_rows
    last: Item | None = None
    last_rows = 0
    while (item := lane.head()) is not None:
        entry = item[3]
        if entry.deadline is None:
            break
        allowed = _rows_allowed(terms, entry.deadline)
        wanted = min(left, cap)
        if is_favoured(entry) and allowed * FAVOURED_COST >= wanted:
            picked.append(heappop(lane.items))
            cap = min(cap, allowed)
            continue
        if allowed >= wanted or (last is None and not picked and _rest_can_wait(lane, terms, allowed, left)):
            break
        heappop(lane.items)
        if last is not None:
            choice.given_up.append(last[3])
        last, last_rows = item, allowed
        left -= entry.rows
    if last is not None:
        if last_rows >= min(left, cap):  # it would have allowed as many
            picked.append(last)
        else:
            choice.given_up.append(last[3])
    for item in picked:
        heappush(lane.items, item)


def _rest_can_wait(lane: Lane, terms: BatchConstraints, allowed: int, left: int) -> bool:
    """Whether the other entries, and those that arrive meanwhile, can be served together after the head."""
    fit = terms.fit
    if fit is None or not 0 < allowed < left:
        return False
    after = min(terms.begin + fit.seconds(allowed), max(terms.next_begin, terms.begin))
    rest = min(left - allowed + int(terms.rate * (after - terms.begin)) + 1, terms.max_rows)
    taken: list[Item] = []
    rows = 0
    while (item := lane.head()) is not None and rows < allowed:
        rows += item[3].rows
        taken.append(heappop(lane.items))
    for one in taken:
        heappush(lane.items, one)
    deadline = None if item is None else item[3].deadline
    return deadline is None or after + fit.delivered_s(rest) + fit.guard_s <= deadline


def _rows_allowed(terms: BatchConstraints, deadline: float) -> int:
    """Rows of the largest batch whose responses are delivered before the deadline."""
    fit = terms.fit
    if fit is None:
        return terms.max_rows
    left_for_rows_s = deadline - terms.begin - fit.guard_s - fit.alpha_s
    row_s = fit.beta_s + fit.deliver_s
    if left_for_rows_s < row_s:
        return 0
    if row_s <= 0.0:
        return terms.max_rows
    return min(int(left_for_rows_s / row_s + 1e-6), terms.max_rows)


def _fill(lane: Lane, terms: BatchConstraints, choice: BatchChoice) -> None:
    max_rows, due = terms.max_rows, float("inf")
    entries, rows = choice.entries, 0
    skipped: list[Item] = []
    while (item := lane.head()) is not None:
        entry = item[3]
        own = float("inf") if entry.deadline is None else entry.deadline
        total = rows + entry.rows
        if entries:
            if total > max_rows:
                choice.reason = CloseReason.FULL
                break
            if terms.fit is not None:
                end = terms.begin + terms.fit.delivered_s(total) + terms.fit.guard_s - 1e-9
                if end > due or (end > own and len(skipped) == SKIPPED):
                    choice.reason = CloseReason.DEADLINE
                    break
                if end > own:
                    skipped.append(heappop(lane.items))
                    continue
        heappop(lane.items)
        entries.append(entry)
        rows, due = total, min(due, own)
    for item in skipped:
        heappush(lane.items, item)
    choice.rows, choice.least_s = rows, due - terms.begin
    if rows >= max_rows and lane.head() is not None:
        choice.reason = CloseReason.FULL
