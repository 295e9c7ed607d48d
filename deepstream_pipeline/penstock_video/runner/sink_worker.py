"""The bounded queue and the thread of one sink. A slow or failing sink does not stop the pipeline."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from penstock_video.errors import SinkFailed
from penstock_video.interfaces import Sink
from penstock_video.metrics import VideoMetrics
from penstock_video.types import DropPolicy, FrameResult

T = TypeVar("T")
MAX_REQUIRED_ITEMS = 4096  # items that must not be lost, while nothing takes them


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """depth, size_bytes: of queued items. dropped: lost so far, because the channel was full or closed."""

    depth: int
    dropped: int
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Queued(Generic[T]):
    item: T
    size_bytes: int
    is_kept: bool


class Channel(Generic[T]):
    """A thread-safe bounded FIFO queue. policy: for a full queue; block waits for room, at most max_wait_s since the
    consumer's last `take`, then drops the oldest item. capacity_bytes: limit by size_of; a single item may be
    larger."""

    def __init__(
        self,
        capacity: int,
        policy: DropPolicy,
        *,
        max_wait_s: float = math.inf,
        size_of: Callable[[T], int] = lambda _: 0,
        capacity_bytes: int = 1,
    ) -> None:
        self._items: deque[_Queued[T]] = deque()
        self._capacity = max(capacity, 1)
        self._capacity_bytes = capacity_bytes
        self._size_of = size_of
        self._policy = policy
        self._max_wait_s = max_wait_s
        self._dropped = self._kept = self._size_bytes = 0
        self._is_closed = False
        self._taker_came_at = time.monotonic()
        self._changed = threading.Condition()

    def put(self, item: T, policy: DropPolicy | None = None, *, is_kept: bool = False) -> bool:
        """Returns whether the item was queued; always with drop-oldest and an open channel. policy: for this item.
        is_kept: never dropped, and queued beyond the capacity (up to MAX_REQUIRED_ITEMS)."""
        policy = policy or self._policy
        held = _Queued(item, self._size_of(item), is_kept)
        with self._changed:
            if policy is DropPolicy.BLOCK and not is_kept:
                self._await_room(held)
            if self._is_closed or not self._has_place(held, policy):
                self._dropped += 1
                return False
            while not is_kept and self._is_full(held):
                self._drop_oldest()
            self._items.append(held)
            self._count(held, 1)
            self._changed.notify_all()
            return True

    def take(self, timeout_s: float) -> T | None:
        """The oldest item; None on timeout, or if the channel is closed and empty."""
        until = time.monotonic() + timeout_s
        with self._changed:
            self._taker_came_at = time.monotonic()
            while not self._items:
                left = until - time.monotonic()
                if self._is_closed or left <= 0:
                    return None
                self._changed.wait(left)
            self._taker_came_at = time.monotonic()
            held = self._items.popleft()
            self._count(held, -1)
            self._changed.notify_all()
            return held.item

    def close(self, *, is_hurried: bool = False) -> None:
        """Refuses new items. Queued items can still be taken, unless it is hurried."""
        with self._changed:
            self._is_closed = True
            if is_hurried:
                self._dropped += len(self._items)
                self._items.clear()
                self._kept = self._size_bytes = 0
            self._changed.notify_all()

    @property
    def is_over(self) -> bool:
        """Whether it is closed and empty."""
        with self._changed:
            return self._is_closed and not self._items

    def statistics(self) -> ChannelStatistics:
        with self._changed:
            return ChannelStatistics(len(self._items), self._dropped, self._size_bytes)

    # with the lock

    def _await_room(self, held: _Queued[T]) -> None:
        while self._is_full(held) and not self._is_closed:
            left = self._taker_came_at + self._max_wait_s - time.monotonic()
            if left <= 0:
                return
            self._changed.wait(left if math.isfinite(left) else None)

    def _has_place(self, held: _Queued[T], policy: DropPolicy) -> bool:
        if held.is_kept:
            return self._kept < MAX_REQUIRED_ITEMS
        return policy is not DropPolicy.DROP_NEWEST or not self._is_full(held)

    def _is_full(self, held: _Queued[T]) -> bool:
        """Whether droppable items leave no room for it."""
        count = len(self._items) - self._kept
        is_heavy = bool(held.size_bytes) and self._size_bytes + held.size_bytes > self._capacity_bytes
        return bool(count) and (count >= self._capacity or is_heavy)

    def _drop_oldest(self) -> None:
        index = next(number for number, held in enumerate(self._items) if not held.is_kept)
        self._count(self._items[index], -1)
        del self._items[index]
        self._dropped += 1

    def _count(self, held: _Queued[T], sign: int) -> None:
        self._kept += sign * held.is_kept
        self._size_bytes += sign * held.size_bytes


log = structlog.get_logger(component="video")
LOOK_S = 0.5
SINK_TIMEOUT_S = 30.0  # for a sink that takes nothing, if nothing should be lost
LOG_EVERY_S = 60.0
PICTURES_BYTES = 128 << 20  # limit of pictures waiting for one sink: twenty of 1080p, five of 4K


@dataclass(frozen=True, slots=True)
class SinkWorkerOptions:
    """capacity: maximum waiting results. draws: the sink uses pictures; always_draws: of all frames. has_spool: the
    sink has its own queue and thread, and is called directly, because its `write` never waits."""

    name: str
    capacity: int
    draws: bool = False
    always_draws: bool = False
    has_spool: bool = False

    def shows(self, result: FrameResult) -> bool:
        """Whether the sink uses the frame. Previews skip frames without a picture, since a wake-up costs 0.5 ms."""
        return not self.draws or self.always_draws or result.frame.image is not None


@dataclass(frozen=True, slots=True)
class EndOfSource:
    """Marks the end of a source."""

    source_id: str


class SinkWorker:
    """Call `start`, then `put` from the results thread, then `close`."""

    def __init__(
        self, sink: Sink, options: SinkWorkerOptions, metrics: VideoMetrics, *, max_wait_s: float = SINK_TIMEOUT_S
    ) -> None:
        self.options = options
        self.failure = ""
        self._sink = sink
        self._metrics = metrics
        self._channel: Channel[FrameResult | EndOfSource] = Channel(
            options.capacity,
            DropPolicy.DROP_OLDEST,
            max_wait_s=max_wait_s,
            size_of=_picture_bytes,
            capacity_bytes=PICTURES_BYTES,
        )
        self._counted_drops = 0
        self._tell_at = 0.0
        run = self._close_sink if options.has_spool else self._run
        self._is_started = self._is_ended = False
        self._thread = threading.Thread(target=run, name=f"sink-{options.name}", daemon=True)

    def start(self) -> None:
        self._is_started = True
        if not self.options.has_spool:
            self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it takes results. A sink with a spool has a thread here only to close it."""
        return self._thread.is_alive() or (self.options.has_spool and self._is_started and not self._is_ended)

    @property
    def lost(self) -> int:
        """Results that were dropped or could not be written."""
        return self._channel.statistics().dropped + getattr(self._sink, "lost", 0)

    @property
    def sentence(self) -> str:
        """Why the sink failed, and how many results are missing; for a spool, those that did not reach it."""
        is_counted = self.lost > 0 or not self.options.has_spool
        return f"{self.options.name} failed: {self.failure}" + (f" ({self.lost} results lost)" if is_counted else "")

    def put(self, item: FrameResult | EndOfSource, *, may_wait: bool) -> None:
        """Queues a result, waiting at most SINK_TIMEOUT_S if may_wait. The end of a source is never dropped."""
        if self.options.has_spool and not self._is_ended:
            self._guarded(item)
            return
        policy = DropPolicy.BLOCK if may_wait else DropPolicy.DROP_OLDEST
        self._channel.put(item, policy, is_kept=isinstance(item, EndOfSource))

    def end(self, *, is_hurried: bool = False) -> None:
        """Refuses new results, and begins to close a sink with a spool. Does not wait; `close` does."""
        self._channel.close(is_hurried=is_hurried)
        if self.options.has_spool and self._is_started and not self._is_ended:
            self._is_ended = True
            self._thread.start()

    def close(self, timeout_s: float, *, is_hurried: bool = False) -> bool:
        """Returns whether everything was written and the sink closed within the time."""
        self.end(is_hurried=is_hurried)
        if not self._is_started:  # not started: close what the sink opened
            self._close_sink()
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._channel.is_over:
            item = self._channel.take(LOOK_S)
            if item is not None:
                self._guarded(item)
            self._tell_depth()
        self._close_sink()

    def _close_sink(self) -> None:
        try:
            self._sink.close()
        except SinkFailed as error:
            self._fail(error.message)
        except Exception:
            log.exception("a sink failed unexpectedly at its end", sink=self.options.name)
            self._fail("internal error; the log says which")

    def _guarded(self, item: FrameResult | EndOfSource) -> None:
        try:
            if isinstance(item, EndOfSource):
                self._sink.end_source(item.source_id)
            else:
                self._sink.write(item)
        except SinkFailed as error:
            self._fail(error.message)
        except Exception:  # the root of the sink's thread: one sink's bug must not affect the others
            log.exception("a sink failed unexpectedly", sink=self.options.name)
            self._fail("internal error; the log says which")

    def _fail(self, text: str) -> None:
        """Logs the failure once, again if the text changes, and again after LOG_EVERY_S."""
        self._metrics.sink_errors(self.options.name)
        now = time.monotonic()
        if text != self.failure or now >= self._tell_at:
            log.error("a sink fails", sink=self.options.name, reason=text)
            self._tell_at = now + LOG_EVERY_S
        self.failure = text

    def _tell_depth(self) -> None:
        statistics = self._channel.statistics()
        if not self.options.has_spool:
            self._metrics.sink_depth(self.options.name, statistics.depth, statistics.size_bytes)
        lost = statistics.dropped + getattr(self._sink, "lost", 0)  # such as by a full disk, which sinks of files count
        if lost > self._counted_drops:
            self._metrics.sink_dropped(self.options.name, lost - self._counted_drops)
            self._counted_drops = lost


def _picture_bytes(item: FrameResult | EndOfSource) -> int:
    image = item.frame.image if isinstance(item, FrameResult) else None
    return image.nbytes if image is not None else 0
