"""The stream mux: which frames of which sources make a batch, and when. Sans-IO: `now` is monotonic seconds.

Named after DeepStream's nvstreammux. A batch takes one frame of each source in turn, the source that was served longest
ago first, then a second of each, and so on: at overload every source gets its share. What comes of it waits next in the
gate's queue, which knows deadlines; a frame that is too old already is dropped here and never inferred.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass

from deepstream_pipeline.types import CloseReason, DropPolicy, DropReason, FrameBatch, PreparedFrame

MAX_PENDING = 2
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class MuxOptions:
    """batch_size: frames at most (batch-size).

    push_timeout_s: how long a batch waits to be full (batched-push-timeout); 0: it goes as soon as the engine has room,
    as the gate does it. max_same_source: frames of one source in a batch at most (max-same-source-frames); 0: any.
    max_latency_s: a frame of a source that drops is too old then, counted from its packet's coming.
    max_pending: frames of such a source that wait here at most.
    """

    batch_size: int
    push_timeout_s: float = 0.0
    max_same_source: int = 0
    max_latency_s: float = 1.0
    max_pending: int = MAX_PENDING


@dataclass(frozen=True, slots=True)
class Drop:
    """A frame that will not be inferred, and why. Whoever gets it releases it."""

    prepared: PreparedFrame
    reason: DropReason


@dataclass(slots=True)
class _Waiting:
    """since: when it came, or the frame whose place it has: a batch waits no longer because its frames are replaced."""

    prepared: PreparedFrame
    since: float


@dataclass(slots=True)
class _Lane:
    """One source's frames, the oldest first."""

    policy: DropPolicy
    frames: deque[_Waiting]

    def deadline(self, options: MuxOptions, refresh_s: float) -> tuple[float, DropReason] | None:
        """When the oldest frame loses its place, and why."""
        if self.policy is DropPolicy.BLOCK or not self.frames:
            return None
        captured_at = self.frames[0].prepared.frame.captured_at
        is_full = self.policy is DropPolicy.DROP_OLDEST and len(self.frames) >= options.max_pending
        if is_full and refresh_s < options.max_latency_s:
            return captured_at + refresh_s, DropReason.QUEUE_FULL
        return captured_at + options.max_latency_s, DropReason.TOO_OLD

    def lose(self, reason: DropReason) -> Drop:
        """The oldest; the next has its place."""
        lost = self.frames.popleft()
        if self.frames:
            self.frames[0].since = lost.since
        return Drop(lost.prepared, reason)


class StreamMux:
    """Frames in by `push`, batches out by `pop`. Every frame that goes in comes out once: in a batch or in a Drop.

    refresh_s: how long the oldest of max_pending frames may wait where its source would rather have newer ones here. A
    decode process makes nothing ready while so many wait, so that nothing is made ready in vain; what waits must not
    come too late for it.
    """

    def __init__(self, options: MuxOptions) -> None:
        self.options = options
        self._refresh_s = options.max_latency_s
        self._lanes: OrderedDict[str, _Lane] = OrderedDict()  # the one that was served longest ago is first
        self._waiting = 0
        # So that most calls look at none of a hundred lanes:
        self._due_at = _NEVER  # no lane's deadline is before it
        self._first_at: float | None = None  # since when the oldest frame waits; None: to be looked for

    def __len__(self) -> int:
        return self._waiting

    def __repr__(self) -> str:
        waiting = ", ".join(f"{source_id}: {len(lane.frames)}" for source_id, lane in self._lanes.items())
        return f"StreamMux({waiting})"

    @property
    def refresh_s(self) -> float:
        """See above; it may be changed at any time."""
        return self._refresh_s

    @refresh_s.setter
    def refresh_s(self, seconds: float) -> None:
        self._due_at -= max(self._refresh_s - seconds, 0.0)  # by so much a deadline comes sooner, at most
        self._refresh_s = seconds

    def add(self, source_id: str, policy: DropPolicy) -> None:
        """A source whose frames will come. block: never dropped here, whoever sends them waits."""
        self._lanes[source_id] = _Lane(policy, deque())

    def remove(self, source_id: str) -> list[Drop]:
        """The source is gone, with what waits of it."""
        lane = self._lanes.pop(source_id, None)
        if lane is None:
            return []
        self._waiting -= len(lane.frames)
        self._first_at = None
        return [Drop(waiting.prepared, DropReason.STOPPED) for waiting in lane.frames]

    def push(self, prepared: PreparedFrame, now: float) -> list[Drop]:
        """A frame with a row waits from now on. What lost its place for it, by its source's policy."""
        lane = self._lanes.get(prepared.frame.source_id)
        if lane is None:
            return [Drop(prepared, DropReason.STOPPED)]
        is_full = lane.policy is not DropPolicy.BLOCK and len(lane.frames) >= self.options.max_pending
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
        """Frames that are too old by now, or keep newer ones out for too long."""
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
        """The batch that is due, for an engine that has room; None where none is due yet. most: fewer than usual."""
        oldest_at = self._oldest_at()
        if oldest_at is None:
            return None
        size = self.options.batch_size if most is None else min(most, self.options.batch_size)
        reason = self._why_now(oldest_at, now, size)
        return FrameBatch(tuple(self._take(size)), reason, oldest_at) if reason is not None else None

    def next_wakeup(self, *, has_room: bool = True) -> float | None:
        """When `expire`, or `pop` for an engine with room, may have something that they have not now; or None."""
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
        if not lane.frames:  # else the next has its place
            self._first_at = None
        return lost

    def _oldest_at(self) -> float | None:
        if not self._waiting:
            return None
        if self._first_at is None:
            self._first_at = min(lane.frames[0].since for lane in self._lanes.values() if lane.frames)
        return self._first_at

    def _why_now(self, oldest_at: float, now: float, size: int) -> CloseReason | None:
        """Three cases: it is full / it waited long enough / nobody asked that it should wait."""
        if self._waiting >= size and self._is_full(size):
            return CloseReason.FULL
        if not self.options.push_timeout_s:
            return CloseReason.SLOT_FREE
        return CloseReason.TIMEOUT if now >= oldest_at + self.options.push_timeout_s else None

    def _is_full(self, size: int) -> bool:
        """Whether so many of the frames that wait may share a batch."""
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
