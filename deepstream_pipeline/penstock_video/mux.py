"""The stream mux, the per-source order of results and the limit of frames in flight. Sans-IO: `now` is monotonic."""

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock_video.types import CloseReason, DropPolicy, DropReason, FrameBatch, PreparedFrame

MAX_PENDING = 2  # waiting frames of a source that drops
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class MuxOptions:
    """batch_size: maximum frames (batch-size). push_timeout_s: how long a batch waits to be full
    (batched-push-timeout); 0: until the engine has room. max_same_source: maximum frames of one source in a batch
    (max-same-source-frames); 0: any. max_latency_s: older frames of a source that drops are discarded, from the
    packet's arrival."""

    batch_size: int
    push_timeout_s: float = 0.0
    max_same_source: int = 0
    max_latency_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Drop:
    """A frame that will not be inferred, and why. The receiver releases it."""

    prepared: PreparedFrame
    reason: DropReason


@dataclass(slots=True)
class _Waiting:
    """since: when it, or the frame that it replaced, came, so that replacement does not prolong a batch's wait."""

    prepared: PreparedFrame
    since: float


@dataclass(slots=True)
class _Lane:
    """One source's frames, oldest first."""

    policy: DropPolicy
    frames: deque[_Waiting]

    def deadline(self, options: MuxOptions, refresh_s: float) -> tuple[float, DropReason] | None:
        """When the oldest frame is dropped, and why."""
        if self.policy is DropPolicy.BLOCK or not self.frames:
            return None
        captured_at = self.frames[0].prepared.frame.captured_at
        is_full = self.policy is DropPolicy.DROP_OLDEST and len(self.frames) >= MAX_PENDING
        if is_full and refresh_s < options.max_latency_s:
            return captured_at + refresh_s, DropReason.QUEUE_FULL
        return captured_at + options.max_latency_s, DropReason.TOO_OLD

    def lose(self, reason: DropReason) -> Drop:
        lost = self.frames.popleft()
        if self.frames:
            self.frames[0].since = lost.since
        return Drop(lost.prepared, reason)


class StreamMux:
    """Frames in by `push`, batches out by `pop`. Every frame comes out once: in a batch or in a Drop. refresh_s: how
    long the oldest of MAX_PENDING frames may wait before it is dropped for newer ones."""

    def __init__(self, options: MuxOptions) -> None:
        self.options = options
        self._refresh_s = options.max_latency_s
        self._lanes: OrderedDict[str, _Lane] = OrderedDict()  # the least recently served is first
        self._waiting = 0
        # Cached, so that most calls look at none of a hundred lanes:
        self._due_at = _NEVER  # lower bound of the lanes' deadlines
        self._first_at: float | None = None  # since when the oldest frame waits; None: unknown

    def __len__(self) -> int:
        return self._waiting

    def __repr__(self) -> str:
        waiting = ", ".join(f"{source_id}: {len(lane.frames)}" for source_id, lane in self._lanes.items())
        return f"StreamMux({waiting})"

    @property
    def refresh_s(self) -> float:
        """See the class; may be changed at any time."""
        return self._refresh_s

    @refresh_s.setter
    def refresh_s(self, seconds: float) -> None:
        self._due_at -= max(self._refresh_s - seconds, 0.0)  # a deadline is sooner by at most this
        self._refresh_s = seconds

    def add(self, source_id: str, policy: DropPolicy) -> None:
        """Adds a source. block: its frames are never dropped here; the sender waits."""
        self._lanes[source_id] = _Lane(policy, deque())

    def remove(self, source_id: str) -> list[Drop]:
        """Removes a source; returns its waiting frames."""
        lane = self._lanes.pop(source_id, None)
        if lane is None:
            return []
        self._waiting -= len(lane.frames)
        self._first_at = None
        return [Drop(waiting.prepared, DropReason.STOPPED) for waiting in lane.frames]

    def push(self, prepared: PreparedFrame, now: float) -> list[Drop]:
        """Queues a frame with a row. Returns frames dropped for it, by its source's policy."""
        lane = self._lanes.get(prepared.frame.source_id)
        if lane is None:
            return [Drop(prepared, DropReason.STOPPED)]
        is_full = lane.policy is not DropPolicy.BLOCK and len(lane.frames) >= MAX_PENDING
        if is_full and lane.policy is DropPolicy.DROP_NEWEST:
            return [Drop(prepared, DropReason.QUEUE_FULL)]
        lane.frames.append(_Waiting(prepared, now))
        self._waiting += 1
        if self._waiting == 1:
            self._first_at = now
        lost = [self._lose(lane, DropReason.QUEUE_FULL)] if is_full else []
        due = lane.deadline(self.options, self._refresh_s)
        if due is not None and due[0] < self._due_at:
            self._due_at = due[0]
        return lost

    def expire(self, now: float) -> list[Drop]:
        """Drops frames that are too old, or that block newer ones for too long."""
        if now < self._due_at:
            return []
        lost: list[Drop] = []
        self._due_at = _NEVER
        for lane in self._lanes.values():
            while (due := lane.deadline(self.options, self._refresh_s)) is not None and now >= due[0]:
                lost.append(self._lose(lane, due[1]))
            if due is not None:
                self._due_at = min(self._due_at, due[0])
        return lost

    def pop(self, now: float, most: int | None = None) -> FrameBatch | None:
        """The batch that is due, for an engine with room; None if none is due yet. most: a smaller batch size."""
        oldest_at = self._oldest_at()
        if oldest_at is None:
            return None
        size = self.options.batch_size if most is None else min(most, self.options.batch_size)
        reason = self._why_now(oldest_at, now, size)
        return FrameBatch(tuple(self._take(size)), reason, oldest_at) if reason is not None else None

    def next_wakeup(self, *, has_room: bool = True) -> float | None:
        """When `expire`, or `pop` for an engine with room, may next return something; or None."""
        if not self._waiting:
            return None
        times = [self._due_at] if self._due_at < _NEVER else []
        oldest_at = self._oldest_at() if self.options.push_timeout_s and has_room else None
        if oldest_at is not None:
            times.append(oldest_at + self.options.push_timeout_s)
        return min(times, default=None)

    def _lose(self, lane: _Lane, reason: DropReason) -> Drop:
        self._waiting -= 1
        lost = lane.lose(reason)
        if not lane.frames:  # otherwise the next frame takes over its wait
            self._first_at = None
        return lost

    def _oldest_at(self) -> float | None:
        if not self._waiting:
            return None
        if self._first_at is None:
            self._first_at = min(lane.frames[0].since for lane in self._lanes.values() if lane.frames)
        return self._first_at

    def _why_now(self, oldest_at: float, now: float, size: int) -> CloseReason | None:
        """Three cases: it is full / it waited long enough / no wait is configured."""
        if self._waiting >= size and self._is_full(size):
            return CloseReason.FULL
        if not self.options.push_timeout_s:
            return CloseReason.SLOT_FREE
        return CloseReason.TIMEOUT if now >= oldest_at + self.options.push_timeout_s else None

    def _is_full(self, size: int) -> bool:
        """Whether this many waiting frames may share a batch."""
        most = self.options.max_same_source
        return not most or sum(min(len(lane.frames), most) for lane in self._lanes.values()) >= size

    def _take(self, size: int) -> list[PreparedFrame]:
        taken: list[PreparedFrame] = []
        most = min(size, self._waiting)
        for _ in range(self.options.max_same_source or size):
            if len(taken) == most:
                break
            turn = [source_id for source_id, lane in self._lanes.items() if lane.frames]
            for source_id in turn[: most - len(taken)]:
                taken.append(self._lanes[source_id].frames.popleft().prepared)
                self._lanes.move_to_end(source_id)
        self._waiting -= len(taken)
        self._first_at = None
        return taken


T = TypeVar("T")
END = 1 << 62  # greater than every frame number


class ResultSequencer(Generic[T]):
    """Puts results in the order in which their numbers were expected, each once."""

    def __init__(self) -> None:
        self._open: OrderedDict[int, T | None] = OrderedDict()
        self._gone: set[int] = set()

    def __len__(self) -> int:
        return len(self._open)

    def __repr__(self) -> str:
        first = next(iter(self._open), None)
        return f"Sequencer({len(self._open)} open, first {first})"

    def expect(self, number: int) -> None:
        """Expects a number, after all expected ones."""
        self._open[number] = None

    def resolve(self, number: int, outcome: T) -> list[T]:
        """Results that may be delivered now, in order. An unexpected number is ignored."""
        if number in self._open:
            self._open[number] = outcome
        return self._ready()

    def forget(self, number: int) -> list[T]:
        """Stops expecting a number; returns what may be delivered now."""
        if number in self._open:
            self._gone.add(number)
        return self._ready()

    def _ready(self) -> list[T]:
        ready: list[T] = []
        while self._open:
            number = next(iter(self._open))
            outcome = self._open[number]
            if number in self._gone:
                self._gone.discard(number)
            elif outcome is None:
                break
            else:
                ready.append(outcome)
            del self._open[number]
        return ready


LATE, SOON = 0.5, 0.25  # of the allowed latency; between them the limit stays
GROWTH = 1.25
ANSWERED = 0.75  # of the allowed latency: a frame should be answered by then
FRESH = 0.05  # of the allowed latency: any frame may wait this long
FORGET = 0.9  # of the stored duration, with each faster answer


class InFlightLimit:
    """Limit of frames at the engine. most: if it is fast. max_latency_s: of a frame, from its packet's arrival."""

    def __init__(self, most: int, max_latency_s: float) -> None:
        self._most = most
        self._max_latency_s = max_latency_s
        self._frames = float(most)
        self._took_s: float | None = None

    def begin(self) -> None:
        """Begins with droppable frames: an unknown engine is tried with one frame."""
        if self._took_s is None:
            self._frames, self._took_s = 1.0, self._max_latency_s / 2

    @property
    def frames(self) -> int:
        return int(self._frames)

    @property
    def max_wait_s(self) -> float:
        """The maximum age of a frame that is sent."""
        took_s = self._took_s if self._took_s is not None else self._max_latency_s / 2
        return max(ANSWERED * self._max_latency_s - took_s, FRESH * self._max_latency_s)

    def of_batch(self, at_engine: int) -> int:
        """Size limit of the next batch, 0 for none now; half of a reduced limit. at_engine: frames in flight."""
        at_most = self.frames if self.frames >= self._most else (self.frames + 1) // 2
        return max(min(self.frames - at_engine, at_most), 0)

    def answered(self, took_s: float, *, is_refused: bool) -> None:
        """Adapts the limit to an answered batch. is_refused: the engine had no room or no time for it."""
        self._took_s = max(took_s, FORGET * (self._took_s or 0.0))
        if is_refused or took_s > LATE * self._max_latency_s:
            self._frames = max(self._frames / 2, 1.0)
        elif took_s < SOON * self._max_latency_s:
            self._frames = min(max(self._frames * GROWTH, self._frames + 1.0), float(self._most))
