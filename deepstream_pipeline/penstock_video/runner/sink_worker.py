"""The thread and bounded queue of each sink, so that a slow or failing sink does not stop the pipeline."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import structlog

from penstock_video.errors import SinkFailed
from penstock_video.interfaces import Sink
from penstock_video.metrics import VideoMetrics
from penstock_video.types import FrameResult

log = structlog.get_logger(component="video")

T = TypeVar("T")
LOOK_S = 0.2  # wait for an item, after which a thread looks whether it should stop
MAX_REQUIRED_ITEMS = 4096  # items that must not be lost, while nothing takes them


class Channel(Generic[T]):
    """A thread-safe bounded FIFO queue. A full one drops its oldest item, or `put` waits for room.

    size_bytes: of queued items; dropped: items lost so far. max_wait_s: how long `put` waits after the consumer's last
    `take`. capacity_bytes: limit by size_of; a single item may be larger."""

    def __init__(
        self,
        capacity: int,
        *,
        max_wait_s: float = math.inf,
        size_of: Callable[[T], int] = lambda _: 0,
        capacity_bytes: int = 1,
    ) -> None:
        self.dropped = self.size_bytes = 0
        self._items: deque[tuple[T, int, bool]] = deque()  # with its size in bytes, and whether it is never dropped
        self._capacity, self._capacity_bytes, self._size_of = max(capacity, 1), capacity_bytes, size_of
        self._max_wait_s = max_wait_s
        self._kept = 0
        self._is_closed = False
        self._taker_came_at = time.monotonic()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T, *, may_wait: bool = False, is_kept: bool = False) -> bool:
        """Returns whether the item was queued; always with an open channel. is_kept: never dropped, and queued beyond
        the capacity (up to MAX_REQUIRED_ITEMS)."""
        size_bytes = self._size_of(item)
        with self._changed:
            if may_wait and not is_kept:
                self._await_room(size_bytes)
            if self._is_closed or (is_kept and self._kept >= MAX_REQUIRED_ITEMS):
                self.dropped += 1
                return False
            while not is_kept and self._is_full(size_bytes):
                self._remove(next(number for number, (*_, is_kept) in enumerate(self._items) if not is_kept))
                self.dropped += 1
            self._items.append((item, size_bytes, is_kept))
            self._kept += is_kept
            self.size_bytes += size_bytes
            self._changed.notify_all()
            return True

    def take(self, timeout_s: float) -> T | None:
        """The oldest item; None on timeout, or if the channel is closed and empty."""
        with self._changed:
            self._taker_came_at = time.monotonic()
            self._changed.wait_for(lambda: self._items or self._is_closed, timeout_s)
            self._taker_came_at = time.monotonic()
            if not self._items:
                return None
            item = self._remove(0)
            self._changed.notify_all()
            return item

    def close(self, *, is_hurried: bool = False) -> None:
        """Refuses new items. Queued items can still be taken, unless it is hurried."""
        with self._changed:
            self._is_closed = True
            if is_hurried:
                self.dropped += len(self._items)
                self._items.clear()
                self._kept = self.size_bytes = 0
            self._changed.notify_all()

    @property
    def is_over(self) -> bool:
        """Whether it is closed and empty."""
        with self._changed:
            return self._is_closed and not self._items

    def _await_room(self, size_bytes: int) -> None:
        while self._is_full(size_bytes) and not self._is_closed:
            left = self._taker_came_at + self._max_wait_s - time.monotonic()
            if left <= 0:
                return
            self._changed.wait(left if math.isfinite(left) else None)

    def _is_full(self, size_bytes: int) -> bool:
        """Whether droppable items leave no room for an item of this size."""
        count = len(self._items) - self._kept
        is_heavy = bool(size_bytes) and self.size_bytes + size_bytes > self._capacity_bytes
        return bool(count) and (count >= self._capacity or is_heavy)

    def _remove(self, index: int) -> T:
        item, size_bytes, is_kept = self._items[index]
        del self._items[index]
        self._kept -= is_kept
        self.size_bytes -= size_bytes
        return item


SINK_TIMEOUT_S = 30.0  # for a sink that takes nothing, if nothing should be lost
LOG_EVERY_S = 60.0
PICTURES_BYTES = 128 << 20  # limit of pictures and masks waiting for one sink: twenty of 1080p, five of 4K


@dataclass(frozen=True, slots=True)
class SinkWorkerOptions:
    """capacity: maximum waiting results. draws: the sink uses pictures; always_draws: of all frames. has_spool: the
    sink has its own queue and thread, and is called directly, because its `write` never waits. has_snapshots: it uses
    the pictures of frames with events. sample_s: it gets frames without events at most once in this time of the
    source's video; 0 for all."""

    name: str
    capacity: int
    draws: bool = False
    always_draws: bool = False
    has_spool: bool = False
    has_snapshots: bool = False
    sample_s: float = 0.0

    def shows(self, result: FrameResult) -> bool:
        """Whether the sink uses the frame. Previews skip frames without a picture, since a wake-up costs 0.5 ms."""
        return not self.draws or self.always_draws or result.frame.image is not None


class SinkWorker:
    """Call `start`, then `put` from the results thread, then `close`."""

    def __init__(
        self, sink: Sink, options: SinkWorkerOptions, metrics: VideoMetrics, *, max_wait_s: float = SINK_TIMEOUT_S
    ) -> None:
        self.options = options
        self.failure = ""
        self._sink = sink
        self._metrics = metrics
        self._channel: Channel[FrameResult | str] = Channel(
            options.capacity, max_wait_s=max_wait_s, size_of=_picture_bytes, capacity_bytes=PICTURES_BYTES
        )
        self._idle: Callable[[], None] | None = getattr(sink, "idle", None) if not options.has_spool else None
        self._sampled_s: dict[str, float] = {}
        self._counted_drops = 0
        self._tell_at = 0.0
        self._is_started = self._is_ended = False
        run = partial(self._attempt, sink.close) if options.has_spool else self._run
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
        return self._channel.dropped + int(getattr(self._sink, "lost", 0))  # such as by a full disk

    @property
    def sentence(self) -> str:
        """Why the sink failed, and how many results are missing; for a spool, those that did not reach it."""
        is_counted = self.lost > 0 or not self.options.has_spool
        return f"{self.options.name} failed: {self.failure}" + (f" ({self.lost} results lost)" if is_counted else "")

    def emit(self, whole: FrameResult, bare: FrameResult, *, may_wait: bool) -> None:
        """Queues what the sink uses of a result. bare: without its picture. Called by one thread."""
        options, frame = self.options, whole.frame
        if not options.shows(whole) or (options.sample_s and not self._is_due(bare)):
            return
        takes_picture = options.draws or (options.has_snapshots and self._has_room_for_snapshot(whole))
        self.put(whole if takes_picture and frame.image is not None else bare, may_wait=may_wait)

    def put(self, item: FrameResult | str, *, may_wait: bool) -> None:
        """Queues a result, or a source's ID for its end, which is never dropped. may_wait: at most SINK_TIMEOUT_S."""
        if isinstance(item, str):
            self._sampled_s.pop(item, None)
        if self.options.has_spool and not self._is_ended:
            self._guarded(item)
            return
        self._channel.put(item, may_wait=may_wait, is_kept=isinstance(item, str))

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
            self._attempt(self._sink.close)
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _is_due(self, result: FrameResult) -> bool:
        """Whether a sink that samples gets this frame."""
        frame = result.frame
        last_s = self._sampled_s.get(frame.source_id)
        is_due = last_s is None or not 0 <= frame.pts_s - last_s < self.options.sample_s
        if is_due:
            self._sampled_s[frame.source_id] = frame.pts_s
        return is_due or bool(result.analytics.events)

    def _has_room_for_snapshot(self, result: FrameResult) -> bool:
        """Pictures take at most half of the queue's bytes, so that no event is dropped for them."""
        is_event = bool(result.analytics.events)
        return is_event and self._channel.size_bytes + _picture_bytes(result) <= PICTURES_BYTES // 2

    def _run(self) -> None:
        while not self._channel.is_over:
            item = self._channel.take(LOOK_S)
            if item is not None:
                self._guarded(item)
            elif self._idle is not None:
                self._attempt(self._idle)
            self._tell_depth()
        self._attempt(self._sink.close)

    def _guarded(self, item: FrameResult | str) -> None:
        if isinstance(item, str):
            self._attempt(partial(self._sink.end_source, item))
        else:
            self._attempt(partial(self._sink.write, item))

    def _attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
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
        self._metrics.sink_depth(self.options.name, len(self._channel), self._channel.size_bytes)
        if (lost := self.lost) > self._counted_drops:
            self._metrics.sink_dropped(self.options.name, lost - self._counted_drops)
            self._counted_drops = lost


def _picture_bytes(item: FrameResult | str) -> int:
    """Of the picture and of masks."""
    if isinstance(item, str):
        return 0
    image, masks = item.frame.image, item.tracks.detections.masks
    return (image.nbytes if image is not None else 0) + sum(mask.bits.nbytes for mask in masks or ())
