"""Per-source pipeline state, and the dispatcher: frames to the engine and results back, in each source's order."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from penstock.vision.preprocess import Geometry, geometry_of
from penstock_video.errors import InferFailed, InferRefused
from penstock_video.infer.calls import RowsResult
from penstock_video.infer.engine import Engine
from penstock_video.infer.network import Network
from penstock_video.interfaces import Analytics, Tracker
from penstock_video.metrics import VideoMetrics
from penstock_video.mux import END, Drop, InFlightLimit, MuxOptions, ResultSequencer, StreamMux
from penstock_video.sources.options import SourceSnapshot
from penstock_video.types import (
    DeviceRow,
    DropPolicy,
    DropReason,
    FrameBatch,
    FrameResult,
    PreparedFrame,
    SourceConfig,
    counter_name,
    event_keys,
)

MAX_LATENCIES = 128
LATENCY_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class FrameOutcome:
    """The result of one frame at the engine or, without a frame, the end of its source. answer: None if the frame was
    not inferred. index: its row in the answer. mux_s: from its packet's arrival to its batch."""

    way: "StreamPipeline"
    prepared: PreparedFrame | None
    answer: RowsResult | None = None
    index: int = 0
    mux_s: float = 0.0


@dataclass(eq=False)
class StreamPipeline:
    """State of one source. order, drops, inferred: under the dispatcher's lock. tracker, analytics, last, latencies,
    events: of the results thread, which also applies next_analytics. first_at, last_at: of the sources' thread.
    is_over: under the pipeline's lock."""

    config: SourceConfig
    policy: DropPolicy
    tracker: Tracker
    analytics: Analytics
    section: object = None
    order: ResultSequencer[FrameOutcome] = field(default_factory=ResultSequencer)
    drops: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    first_at: float | None = None
    last_at: float = 0.0
    inferred: int = 0
    unreadable: int = 0
    last: FrameResult | None = None
    snapshot: SourceSnapshot | None = None
    is_over: bool = False
    is_leaving: bool = False
    next_analytics: deque[Analytics] = field(default_factory=lambda: deque(maxlen=1))
    latencies: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_LATENCIES))

    @property
    def source_id(self) -> str:
        return self.config.source_id

    @property
    def active_s(self) -> float:
        """Seconds from the first frame to the last."""
        return 0.0 if self.first_at is None else max(self.last_at - self.first_at, 0.0)

    def note_frame(self, captured_at: float) -> None:
        """Counts a frame captured at this time."""
        self.first_at = captured_at if self.first_at is None else self.first_at
        self.last_at = captured_at

    def note_events(self, result: FrameResult) -> None:
        for event in result.analytics.events:
            label = None if event.class_id is None else result.label(event.class_id)
            self.events.update(event_keys(event.kind, counter_name(event.rule, event.direction), label))

    def note_latency(self, now: float, seconds: float) -> None:
        """Records the latency of a frame that is delivered now."""
        self.latencies.append((now, seconds))

    def typical_latency_s(self) -> float | None:
        """Median latency over LATENCY_WINDOW_S; None without frames."""
        since = time.monotonic() - LATENCY_WINDOW_S
        recent = sorted(seconds for at, seconds in tuple(self.latencies) if at >= since)
        return recent[len(recent) // 2] if recent else None


RETRY_AFTER_S = (0.1, 0.2, 0.5, 1.0, 2.0)
LONG_S = 60.0  # maximum wait for a frame that must not be lost


@dataclass(frozen=True, slots=True)
class DispatchOptions:
    """max_batches: concurrent engine calls. max_outcomes: waiting for the results thread; more block the engine."""

    max_batches: int = 3
    max_outcomes: int = 64


@dataclass(slots=True)
class _Sent:
    """A batch at the engine, or about to be retried. tries: attempts. since: when it was formed."""

    batch: FrameBatch
    ways: tuple[StreamPipeline, ...]
    since: float
    tries: int = 0

    def part(self, indices: Sequence[int]) -> "_Sent":
        """The same batch with only these frames."""
        frames = tuple(self.batch.frames[index] for index in indices)
        batch = FrameBatch(frames, self.batch.reason, self.batch.oldest_at)
        return _Sent(batch, tuple(self.ways[index] for index in indices), self.since, self.tries)


class Dispatcher:
    """Sends frames to the engine in batches. network: None for no inference."""

    def __init__(
        self, engine: Engine, network: Network | None, mux: MuxOptions, options: DispatchOptions, metrics: VideoMetrics
    ) -> None:
        self._engine = engine
        self._network = network
        self._options = options
        self._metrics = metrics
        self._mux = StreamMux(mux)
        self._allowance = InFlightLimit(options.max_batches * mux.batch_size, mux.max_latency_s)
        self._mux.refresh_s = self._allowance.max_wait_s
        self._ways: dict[str, StreamPipeline] = {}
        self._cameras = 0  # sources whose frames may be dropped
        self._sent = self._frames_sent = 0
        self._is_woken = False
        self._again: deque[tuple[float, _Sent]] = deque()
        self._outcomes: deque[FrameOutcome] = deque()
        self._changed = threading.Condition()

    @property
    def has_cameras(self) -> bool:
        """Whether a source that drops frames has not ended yet."""
        return self._cameras > 0

    def add(self, way: StreamPipeline) -> None:
        with self._changed:
            self._ways[way.source_id] = way
            self._cameras += way.policy is not DropPolicy.BLOCK
            self._mux.add(way.source_id, way.policy)

    def on_frame(self, prepared: PreparedFrame) -> None:
        """Queues a frame; releases it if its source is unknown."""
        now = time.monotonic()
        with self._changed:
            way = self._ways.get(prepared.frame.source_id)
            if way is not None:
                way.note_frame(prepared.frame.captured_at)
            if way is None or way.is_leaving:
                prepared.release()
                if way is not None:
                    self.count_drop(way, DropReason.STOPPED)
                return
            number = prepared.frame.frame_num
            way.order.expect(number)
            if prepared.row is None or self._network is None:
                self._hand_on(way.order.resolve(number, FrameOutcome(way, prepared)))
                return
            if way.policy is not DropPolicy.BLOCK:
                self._allowance.begin()
            self._drop(self._mux.push(prepared, now))
            is_first = len(self._mux) == 1
        self.pump()
        if is_first:
            self._tell_of_waiting()

    def on_end(self, source_id: str) -> None:
        """Ends a source; its last outcome reports that, after all others."""
        with self._changed:
            way = self._ways.get(source_id)
            if way is None:
                return
            if way.is_leaving or way.policy is not DropPolicy.BLOCK:
                self._drop(self._mux.remove(source_id))
            way.order.expect(END)
            self._hand_on(way.order.resolve(END, FrameOutcome(way, None)))
        self.pump()

    def count_drop(self, way: StreamPipeline, reason: DropReason, count: int = 1) -> None:
        """Counts a frame that was lost elsewhere."""
        with self._changed:
            way.drops[reason.value] += count
        self._metrics.dropped(way.source_id, reason, count)

    def take(self, timeout_s: float) -> FrameOutcome | None:
        """The next outcome, for the one consuming thread; None on timeout. Also sends due batches."""
        until = time.monotonic() + timeout_s
        while True:
            with self._changed:
                if self._outcomes:
                    outcome = self._outcomes.popleft()
                    break
                now = time.monotonic()
                if now >= until or self._is_woken:
                    self._is_woken = False
                    return None
                due = self._next_wakeup()
                if due is None or due > now:
                    self._changed.wait(min(until, due if due is not None else until) - now)
                    continue
            self.pump()
        self.pump()
        return outcome

    def wake(self) -> None:
        """Makes `take` return soon, possibly with None, since its thread has other work."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def pump(self) -> None:
        """Sends due batches, as far as the engine has room, and drops old frames."""
        now = time.monotonic()
        with self._changed:
            self._drop(self._mux.expire(now))
            due = self._due(now)
            if self._network is None:
                return
        for sent in due:
            self._submit(self._network, sent)

    def _tell_of_waiting(self) -> None:
        """Wakes the thread that takes outcomes: it also sends due batches, and may sleep."""
        with self._changed:
            if len(self._mux):
                self._changed.notify_all()

    def _has_room(self) -> bool:
        return self._sent < self._options.max_batches and len(self._outcomes) < self._options.max_outcomes

    def _due(self, now: float) -> list[_Sent]:
        due: list[_Sent] = []
        while self._has_room() and self._again and self._again[0][0] <= now:
            due.append(self._again.popleft()[1])
            self._count_sent(due[-1], 1)
        while (most := self._room()) and (batch := self._mux.pop(now, most)) is not None:
            ways = tuple(self._ways[prepared.frame.source_id] for prepared in batch.frames)
            due.append(_Sent(batch, ways, now))
            self._count_sent(due[-1], 1)
            self._metrics.batch(len(batch), batch.reason)
        return due

    def _room(self) -> int:
        """Maximum frames of the next batch. Only cameras are limited."""
        if not self._has_room():
            return 0
        return self._allowance.of_batch(self._frames_sent) if self._cameras else self._mux.options.batch_size

    def _count_sent(self, sent: _Sent, way: int) -> None:
        """Counts a batch sent to the engine (1) or back (-1)."""
        self._sent += way
        self._frames_sent += way * len(sent.batch)

    def _next_wakeup(self) -> float | None:
        has_room = self._has_room()
        times = [self._mux.next_wakeup(has_room=self._room() > 0)]
        times += [self._again[0][0]] if self._again and has_room else []
        known = [at for at in times if at is not None]
        return min(known, default=None)

    def _submit(self, network: Network, sent: _Sent) -> None:
        sent.tries += 1
        rows = [prepared.row for prepared in sent.batch.frames if prepared.row is not None]
        on_device = sum(isinstance(row, DeviceRow) for row in rows)
        for count, is_on_device in ((on_device, True), (len(rows) - on_device, False)):
            if count:
                self._metrics.rows(count, on_device=is_on_device)
        self._engine.submit(
            network,
            rows,
            deadline=self._deadline(sent),
            taken=_release_rows(sent),
            done=partial(self._answered, sent),
            geometries=_geometries(network, sent.batch) if network.takes_sizes else (),
        )

    def _deadline(self, sent: _Sent) -> float:
        """Deadline of a request: short if its frames may be dropped, long for files."""
        oldest = min(
            (
                prepared.frame.captured_at
                for prepared, way in zip(sent.batch.frames, sent.ways, strict=True)
                if way.policy is not DropPolicy.BLOCK
            ),
            default=None,
        )
        return time.monotonic() + LONG_S if oldest is None else oldest + self._mux.options.max_latency_s

    def _answered(self, sent: _Sent, answer: RowsResult) -> None:
        now = time.monotonic()
        with self._changed:
            had_room = self._room() > 0
            self._count_sent(sent, -1)
            self._learn(sent, answer, now)
            if self._network is not None and answer.error is None:
                self._metrics.infer(self._network.name, answer.infer_s)
            again: list[int] = []
            for index, way in enumerate(sent.ways):
                error = answer.error_of(index)
                if error is not None and _must_not_be_lost(way) and now - sent.since < LONG_S:
                    again.append(index)
                else:
                    self._settle(sent, index, answer, error)
            if again:
                pause_s = RETRY_AFTER_S[min(sent.tries, len(RETRY_AFTER_S)) - 1]
                self._again.append((now + pause_s, sent.part(again)))
                self._changed.notify_all()
        self.pump()
        if not had_room:
            self._tell_of_waiting()

    def _learn(self, sent: _Sent, answer: RowsResult, now: float) -> None:
        """Adapts the allowance to what the engine can answer in time."""
        if all(way.policy is DropPolicy.BLOCK for way in sent.ways):
            return
        is_refused = isinstance(answer.error, InferRefused)
        took_s = now - sent.since
        if answer.error is None or is_refused or took_s > self._mux.options.max_latency_s / 2:
            self._allowance.answered(took_s, is_refused=is_refused)
            self._mux.refresh_s = self._allowance.max_wait_s

    def _settle(self, sent: _Sent, index: int, answer: RowsResult, error: InferFailed | None) -> None:
        prepared, way = sent.batch.frames[index], sent.ways[index]
        if error is None:
            way.inferred += 1
            self._metrics.inferred(way.source_id, 1)
        else:
            is_refused = isinstance(error, InferRefused)
            self.count_drop(way, DropReason.REFUSED if is_refused else DropReason.INFER_FAILED)
        mux_s = sent.since - prepared.frame.captured_at
        self._metrics.mux_wait(mux_s)
        outcome = FrameOutcome(way, prepared, answer, index, mux_s)
        self._hand_on(way.order.resolve(prepared.frame.frame_num, outcome))

    def _drop(self, drops: list[Drop]) -> None:
        for drop in drops:
            frame = drop.prepared.frame
            drop.prepared.release()
            way = self._ways.get(frame.source_id)
            if way is not None:
                self.count_drop(way, drop.reason)
                self._hand_on(way.order.forget(frame.frame_num))

    def _hand_on(self, outcomes: list[FrameOutcome]) -> None:
        for outcome in outcomes:
            self._outcomes.append(outcome)
            if outcome.prepared is None and self._ways.pop(outcome.way.source_id, None) is not None:
                self._cameras -= outcome.way.policy is not DropPolicy.BLOCK
                self._mux.remove(outcome.way.source_id)
        if outcomes:
            self._changed.notify_all()


def _must_not_be_lost(way: StreamPipeline) -> bool:
    """Whether the frame is retried until it is answered: a file's, unless its source is removed."""
    return way.policy is DropPolicy.BLOCK and not way.is_leaving


def _geometries(network: Network, batch: FrameBatch) -> list[Geometry]:
    frames = (prepared.frame for prepared in batch.frames)
    return [geometry_of(frame.width, frame.height, network.prepare_spec) for frame in frames]


def _release_rows(sent: _Sent) -> Callable[[], None]:
    """Frees a camera's slot once the row was read, if its picture is not used. A file's row may be sent again."""
    bare = [
        prepared
        for prepared, way in zip(sent.batch.frames, sent.ways, strict=True)
        if prepared.frame.image is None and way.policy is not DropPolicy.BLOCK
    ]

    def release() -> None:
        for prepared in bare:
            prepared.release()

    return release
