"""Other people's ways to form batches, with their knobs; each keeps the contract of the gateway's own queue."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from server.batching.entry import Batch, Entry
from server.core.batching import CloseReason
from server.core.errors import DeadlineExceeded, Overloaded
from server.planning.policy import Lost

Seconds = Callable[[int], float]


@dataclass(slots=True)
class Fifo:
    """First come, first served, as many as may go. What every rival is made of.

    slots: calls in flight at most. max_queue_size: that may wait. patience_s: after so long in the queue a request is
    given up, as by Triton's queue policy.
    """

    max_batch_size: int
    slots: int = 1
    max_queue_size: float = inf
    patience_s: float = inf
    waiting: deque[Entry] = field(default_factory=deque)
    in_flight: int = 0
    formed: int = 0

    def push(self, entry: Entry, now: float) -> Sequence[Lost]:
        """Raises Overloaded where too many wait."""
        if len(self.waiting) >= self.max_queue_size:
            raise Overloaded(f"{len(self.waiting)} requests wait (limit {self.max_queue_size}); try again later")
        self.waiting.append(entry)
        return ()

    def pop(self, now: float) -> Batch | None:
        """What wait() and size() let go."""
        if not self.waiting or self.in_flight >= self.slots or self.release_at() > now:
            return None
        return self.form(self.size(now), now)

    def release_at(self) -> float:
        """When the head may go at the earliest, given what waits."""
        return -inf

    def size(self, now: float) -> int:
        """How many go."""
        return min(len(self.waiting), self.max_batch_size)

    def form(self, size: int, now: float) -> Batch:
        """The batch of the first ones."""
        entries = tuple(self.waiting.popleft() for _ in range(size))
        self.formed += 1
        self.in_flight += 1
        return Batch(self.formed, entries, size, CloseReason.SLOT_FREE, now, self.in_flight - 1)

    def expire(self, now: float) -> Sequence[Lost]:
        """Those at the head that waited for too long."""
        if not self.waiting or now - self.waiting[0].arrived_at <= self.patience_s:
            return ()
        lost = []
        while self.waiting and now - self.waiting[0].arrived_at > self.patience_s:
            lost.append(Lost(self.waiting.popleft(), DeadlineExceeded("waited too long in the queue")))
        return lost

    def done(self, batch: Batch, now: float) -> None:
        """A slot is free."""
        self.in_flight -= 1

    def next_wakeup(self, now: float) -> float | None:
        """When the head may go, if it waits for that alone."""
        if not self.waiting or self.in_flight >= self.slots:
            return None
        at = self.release_at()
        return at if at > now else None


@dataclass(slots=True)
class Triton(Fifo):
    """Triton's dynamic batcher: max_queue_delay, preferred_batch_size, max_queue_size, default_timeout.

    preferred: sizes, growing. While the head waited for less than the delay, a batch goes when one of them is reached
    (without any: when it is full); after that whatever waits goes.
    """

    delay_s: float = 0.0
    preferred: tuple[int, ...] = ()

    def release_at(self) -> float:
        """At once for a preferred or full batch, else when the head's delay passed."""
        enough = self.preferred[0] if self.preferred else self.max_batch_size
        return -inf if len(self.waiting) >= enough else self.waiting[0].arrived_at + self.delay_s

    def size(self, now: float) -> int:
        """The largest preferred size before the delay has passed, all afterwards."""
        most = min(len(self.waiting), self.max_batch_size)
        if now >= self.waiting[0].arrived_at + self.delay_s:
            return most
        return max((size for size in self.preferred if size <= most), default=most)


@dataclass(slots=True)
class Aimd(Fifo):
    """Clipper's adaptive batch size: it grows by a step while calls are quicker than the target, else shrinks.

    target_s: what a call may take. delay_s: how long the head waits for the batch to fill, Clipper's delayed batching.
    """

    target_s: float = inf
    step: float = 1.0
    back_off: float = 0.9
    delay_s: float = 0.0
    limit: float = 1.0
    free_at: float = 0.0

    def release_at(self) -> float:
        """At once for a batch of the present limit, else when the head's delay passed."""
        if not self.delay_s or len(self.waiting) >= int(self.limit):
            return -inf
        return self.waiting[0].arrived_at + self.delay_s

    def size(self, now: float) -> int:
        """The present limit at most."""
        return min(len(self.waiting), int(self.limit))

    def done(self, batch: Batch, now: float) -> None:
        """The limit learns from what the call took, without its wait for the call before."""
        self.in_flight -= 1
        took_s = now - max(batch.formed_at, self.free_at)
        self.free_at = now
        if took_s > self.target_s:
            self.limit = max(1.0, self.limit * self.back_off)
        elif batch.rows >= int(self.limit):
            self.limit = min(self.limit + self.step, float(self.max_batch_size))


@dataclass(slots=True)
class Nexus(Fifo):
    """Nexus' early drop: it knows the profile, and drops heads that would force a batch below its window.

    seconds: the profile. window: the batch that it wants.
    """

    seconds: Seconds = field(kw_only=True)
    window: int = 1

    def expire(self, now: float) -> Sequence[Lost]:
        """Heads that cannot wait for a whole window's call, when a call may go."""
        if self.in_flight >= self.slots:
            return ()
        lost: list[Lost] = []
        window = min(self.window, self.max_batch_size)
        while self.waiting:
            deadline = self.waiting[0].deadline
            if deadline is None or now + self.seconds(min(window, len(self.waiting))) <= deadline:
                break
            lost.append(Lost(self.waiting.popleft(), Overloaded("dropped early for a full batch")))
        return lost

    def size(self, now: float) -> int:
        """The window, or more where the head's deadline has room."""
        most, head = min(len(self.waiting), self.max_batch_size), self.waiting[0]
        size = min(most, self.window)
        while size < most and head.deadline is not None and now + self.seconds(size + 1) <= head.deadline:
            size += 1
        return size


@dataclass(slots=True)
class Deferred(Nexus):
    """Symphony's deferred batching on one queue: a batch goes as late as one more row would make its head late."""

    margin_s: float = 0.0

    def release_at(self) -> float:
        """The head's deadline less the call of one row more; at once for a full batch."""
        deadline = self.waiting[0].deadline
        rows = len(self.waiting)
        if deadline is None or rows >= self.max_batch_size:
            return -inf
        return deadline - self.seconds(rows + 1) - self.margin_s
