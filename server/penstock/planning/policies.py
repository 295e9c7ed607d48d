"""The compared batching policies (ours, Triton, Clipper, Nexus, …), and the settings tried for each."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from math import ceil, inf

from penstock.gateway.batching.entries import Batch, Entry
from penstock.gateway.batching.options import DEFAULT_MAX_QUEUE_SIZE, BatchOptions
from penstock.gateway.batching.queue import BatchQueue, Dropped
from penstock.planning.bounds import capacity
from penstock.planning.simulation import EngineModel, Policy
from penstock.protocol.errors import DeadlineExceeded, Overloaded
from penstock.protocol.inference import BatchOwner, CloseReason

Seconds = Callable[[int], float]


@dataclass(slots=True)
class FifoPolicy:
    """First come, first served, in batches as large as allowed. Base of the other policies."""

    max_batch_size: int
    slots: int = 1  # maximum calls in flight
    max_queue_size: float = inf
    max_wait_s: float = inf  # maximum queue time, then the request is dropped
    waiting: deque[Entry] = field(default_factory=deque)
    in_flight: int = 0
    formed: int = 0

    def push(self, entry: Entry, now: float) -> Sequence[Dropped]:
        """Raises Overloaded if the queue is full."""
        if len(self.waiting) >= self.max_queue_size:
            raise Overloaded(f"{len(self.waiting)} requests wait (limit {self.max_queue_size}); try again later")
        self.waiting.append(entry)
        return ()

    def pop(self, now: float) -> Batch | None:
        """The next batch by release_at() and size()."""
        if not self.waiting or self.in_flight >= self.slots or self.release_at() > now:
            return None
        return self.form(self.size(now), now)

    def release_at(self) -> float:
        """Earliest time of the next batch."""
        return -inf

    def size(self, now: float) -> int:
        """Rows of the next batch."""
        return min(len(self.waiting), self.max_batch_size)

    def form(self, size: int, now: float) -> Batch:
        """A batch of the first entries."""
        entries = tuple(self.waiting.popleft() for _ in range(size))
        self.formed += 1
        self.in_flight += 1
        return Batch(self.formed, entries, size, CloseReason.SLOT_FREE, now, self.in_flight - 1)

    def expire(self, now: float) -> Sequence[Dropped]:
        """Entries at the head that waited too long."""
        if not self.waiting or now - self.waiting[0].arrived_at <= self.max_wait_s:
            return ()
        lost = []
        while self.waiting and now - self.waiting[0].arrived_at > self.max_wait_s:
            lost.append(Dropped(self.waiting.popleft(), DeadlineExceeded("waited too long in the queue")))
        return lost

    def done(self, batch: Batch, now: float) -> None:
        """Frees a slot."""
        self.in_flight -= 1

    def next_wakeup(self, now: float) -> float | None:
        """When the head may go, if only its delay blocks it."""
        if not self.waiting or self.in_flight >= self.slots:
            return None
        at = self.release_at()
        return at if at > now else None


@dataclass(slots=True)
class TritonPolicy(FifoPolicy):
    """Triton's dynamic batcher. During the head's delay, only a batch of a preferred size, or a full one, runs."""

    delay_s: float = 0.0
    preferred: tuple[int, ...] = ()  # ascending

    def release_at(self) -> float:
        """Now for a preferred or full batch, else the end of the head's delay."""
        enough = self.preferred[0] if self.preferred else self.max_batch_size
        return -inf if len(self.waiting) >= enough else self.waiting[0].arrived_at + self.delay_s

    def size(self, now: float) -> int:
        """The largest preferred size before the delay has passed, then all."""
        most = min(len(self.waiting), self.max_batch_size)
        if now >= self.waiting[0].arrived_at + self.delay_s:
            return most
        return max((size for size in self.preferred if size <= most), default=most)


@dataclass(slots=True)
class AimdPolicy(FifoPolicy):
    """Clipper's adaptive batch size: grows by a step while calls are faster than target_s, else shrinks."""

    target_s: float = inf  # for one call
    step: float = 1.0
    back_off: float = 0.9
    delay_s: float = 0.0
    limit: float = 1.0
    free_at: float = 0.0

    def release_at(self) -> float:
        """Now for a batch of the current limit, else the end of the head's delay."""
        if not self.delay_s or len(self.waiting) >= int(self.limit):
            return -inf
        return self.waiting[0].arrived_at + self.delay_s

    def size(self, now: float) -> int:
        """At most the current limit."""
        return min(len(self.waiting), int(self.limit))

    def done(self, batch: Batch, now: float) -> None:
        """Adapts the limit to the call's time, without its wait for the previous call."""
        self.in_flight -= 1
        took_s = now - max(batch.formed_at, self.free_at)
        self.free_at = now
        if took_s > self.target_s:
            self.limit = max(1.0, self.limit * self.back_off)
        elif batch.rows >= int(self.limit):
            self.limit = min(self.limit + self.step, float(self.max_batch_size))


@dataclass(slots=True)
class NexusPolicy(FifoPolicy):
    """Nexus' early drop: with the known profile, drops heads that would force a batch below its window."""

    seconds: Seconds = field(kw_only=True)
    window: int = 1

    def expire(self, now: float) -> Sequence[Dropped]:
        """Heads whose deadline does not allow a call of a full window now."""
        if self.in_flight >= self.slots:
            return ()
        lost: list[Dropped] = []
        window = min(self.window, self.max_batch_size)
        while self.waiting:
            deadline = self.waiting[0].deadline
            if deadline is None or now + self.seconds(min(window, len(self.waiting))) <= deadline:
                break
            lost.append(Dropped(self.waiting.popleft(), Overloaded("dropped early for a full batch")))
        return lost

    def size(self, now: float) -> int:
        """The window, or more if the head's deadline allows it."""
        most, head = min(len(self.waiting), self.max_batch_size), self.waiting[0]
        size = min(most, self.window)
        while size < most and head.deadline is not None and now + self.seconds(size + 1) <= head.deadline:
            size += 1
        return size


@dataclass(slots=True)
class DeferredPolicy(NexusPolicy):
    """Symphony's deferred batching on one queue: a batch starts when one more row would make its head late."""

    margin_s: float = 0.0

    def release_at(self) -> float:
        """The head's deadline minus the call of one more row; now for a full batch."""
        deadline = self.waiting[0].deadline
        rows = len(self.waiting)
        if deadline is None or rows >= self.max_batch_size:
            return -inf
        return deadline - self.seconds(rows + 1) - self.margin_s


DELAY_SHARES = (0.0, 0.1, 0.25, 0.4)  # shares of the SLO
TIMEOUT_SHARES = (0.6, 0.5, 0.7, 0.8, 1.0, 0.4, 0.3, inf)  # likely ones first, so that the others cost one probe
TARGET_SHARES = (0.5, 0.6, 0.7, 0.4)
WINDOW_SHARES = (1.2, 1.1, 1.0, 1.3, 1.45, 0.85, 1.6, 0.7, 2.0)  # of the batch of Nexus' bound


class Contender(StrEnum):
    """A batching policy in the comparison."""

    OURS = "penstock"
    TRITON = "triton"
    AIMD = "aimd"
    CLIPPER = "clipper"
    BATCH_1 = "batch 1"
    NEXUS = "nexus"
    DEFERRED = "deferred"


@dataclass(frozen=True, slots=True)
class PolicySetting:
    """One setting of a policy, with a description and a factory."""

    label: str
    make: Callable[[], Policy]


@dataclass(frozen=True, slots=True)
class PolicyProblem:
    """The engine and the SLO in seconds, the same for all contenders."""

    engine: EngineModel
    slo_s: float

    @property
    def max_batch_size(self) -> int:
        """Maximum rows of one call."""
        return self.engine.profile.max_batch_size

    @property
    def slots(self) -> tuple[int, ...]:
        """Calls in flight to try: instances, and one more if the transfer to the engine takes time."""
        instances = self.engine.instances
        has_transfer = self.engine.before_s + self.engine.after_s > 0
        return (instances, instances + 1) if has_transfer else (instances,)

    @property
    def nexus_batch(self) -> int:
        """The largest batch with 2 t(b) <= SLO, at least 1."""
        return max(self.engine.profile.largest_within(self.slo_s / 2), 1)


def settings_of(contender: Contender, problem: PolicyProblem) -> list[PolicySetting]:
    """All settings to try; for our policy only the defaults."""
    return list(_GRIDS[contender](problem))


def _ours(problem: PolicyProblem) -> Iterator[PolicySetting]:
    """The defaults, with a larger queue if the engine can answer more inside the SLO."""
    engine = problem.engine
    capacity_requests = ceil(capacity(engine.profile, problem.slo_s, instances=engine.instances) * problem.slo_s)
    options = BatchOptions(
        owner=BatchOwner.GATEWAY,
        max_batch_size=problem.max_batch_size,
        instances=engine.instances,
        slo_s=problem.slo_s,
        max_queue_size=max(capacity_requests, DEFAULT_MAX_QUEUE_SIZE),
    )
    label = "defaults" if options.max_queue_size == DEFAULT_MAX_QUEUE_SIZE else f"max_queue_size {capacity_requests}"
    yield PolicySetting(label, partial(BatchQueue, "model", options))


def _triton(problem: PolicyProblem) -> Iterator[PolicySetting]:
    slo_s = problem.slo_s
    caps = _distinct(problem, 1.0, 1.5)
    for slots, delay, timeouts, cap in itertools.product(problem.slots, DELAY_SHARES, TIMEOUT_SHARES, caps):
        for preferred in ((), (min(problem.nexus_batch, cap),)) if delay else ((),):
            label = f"delay {delay * slo_s * 1e3:g} ms, {_timeout_text(timeouts, slo_s)}, max batch {cap}"
            label += f", preferred {preferred[0]}" if preferred else ""
            yield PolicySetting(
                label,
                partial(
                    TritonPolicy, cap, slots, max_wait_s=timeouts * slo_s, delay_s=delay * slo_s, preferred=preferred
                ),
            )


def _adaptive(problem: PolicyProblem, delays: tuple[float, ...]) -> Iterator[PolicySetting]:
    slo_s, most = problem.slo_s, problem.max_batch_size
    steps = (1.0,) if delays[-1] else (1.0, 4.0)  # with a delay the step made no difference
    knobs = itertools.product(problem.slots, delays, TIMEOUT_SHARES[:-1], TARGET_SHARES, steps)
    for slots, delay, timeouts, target, step in knobs:
        label = f"call {target * slo_s * 1e3:g} ms, {_timeout_text(timeouts, slo_s)}, step {step:g}"
        label += f", delay {delay * slo_s * 1e3:g} ms" if delay else ""
        yield PolicySetting(
            label,
            partial(
                AimdPolicy,
                most,
                slots,
                max_wait_s=timeouts * slo_s,
                target_s=target * slo_s,
                step=step,
                delay_s=delay * slo_s,
            ),
        )


def _batch_1(problem: PolicyProblem) -> Iterator[PolicySetting]:
    for slots, timeouts in itertools.product(problem.slots, TIMEOUT_SHARES):
        yield PolicySetting(
            _timeout_text(timeouts, problem.slo_s), partial(TritonPolicy, 1, slots, max_wait_s=timeouts * problem.slo_s)
        )


def _nexus(problem: PolicyProblem) -> Iterator[PolicySetting]:
    for slots, window in itertools.product(problem.slots, _distinct(problem, *WINDOW_SHARES)):
        yield PolicySetting(
            f"window {window}, profile known",
            partial(NexusPolicy, problem.max_batch_size, slots, seconds=problem.engine.profile.seconds, window=window),
        )


def _deferred(problem: PolicyProblem) -> Iterator[PolicySetting]:
    windows = _distinct(problem, *WINDOW_SHARES)
    for slots, window, margin in itertools.product(problem.slots, windows, (0.0, 0.1, 0.25)):
        yield PolicySetting(
            f"window {window}, margin {margin * problem.slo_s * 1e3:g} ms, profile known",
            partial(
                DeferredPolicy,
                problem.max_batch_size,
                slots,
                seconds=problem.engine.profile.seconds,
                window=window,
                margin_s=margin * problem.slo_s,
            ),
        )


_GRIDS: dict[Contender, Callable[[PolicyProblem], Iterator[PolicySetting]]] = {
    Contender.OURS: _ours,
    Contender.TRITON: _triton,
    Contender.AIMD: partial(_adaptive, delays=(0.0,)),
    Contender.CLIPPER: partial(_adaptive, delays=DELAY_SHARES[1:]),
    Contender.BATCH_1: _batch_1,
    Contender.NEXUS: _nexus,
    Contender.DEFERRED: _deferred,
}


def _distinct(problem: PolicyProblem, *shares: float) -> list[int]:
    most = problem.max_batch_size
    return list(dict.fromkeys([*(min(max(int(share * problem.nexus_batch), 1), most) for share in shares), most]))


def _timeout_text(share: float, slo_s: float) -> str:
    return "no timeout" if share == inf else f"timeout {share * slo_s * 1e3:g} ms"
