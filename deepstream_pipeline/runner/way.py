"""One source's way through the pipeline: its tracker, its rules, its order, and what was counted on it."""

import time
from collections import Counter, deque
from dataclasses import dataclass, field

from deepstream_pipeline.infer.answer import Answer
from deepstream_pipeline.interfaces import Analytics, Tracker
from deepstream_pipeline.order import Sequencer
from deepstream_pipeline.sources.snapshot import SourceSnapshot
from deepstream_pipeline.types import DropPolicy, FrameResult, PreparedFrame, SourceConfig, event_keys

LATENCIES_KEPT = 128
LATENCY_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What became of one frame at the engine, or, without a frame, that its source is over.

    answer: None where the frame was not to be inferred. index: of its row in the answer. mux_s: from its packet's
    coming to its batch.
    """

    way: "SourceWay"
    prepared: PreparedFrame | None
    answer: Answer | None = None
    index: int = 0
    mux_s: float = 0.0


@dataclass(eq=False)
class SourceWay:
    """order, drops, inferred: the dispatcher's, under its lock. tracker, analytics, last, latencies, events: of the
    thread of the results. first_at, last_at: of the sources' thread. next_analytics: what the results' thread goes on
    with, for others to fill. is_over: under the pipeline's lock.
    """

    config: SourceConfig
    policy: DropPolicy
    tracker: Tracker
    analytics: Analytics
    section: object = None
    order: Sequencer[Outcome] = field(default_factory=Sequencer)
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
    latencies: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=LATENCIES_KEPT))

    @property
    def source_id(self) -> str:
        return self.config.source_id

    @property
    def active_s(self) -> float:
        """From its first frame to its last."""
        return 0.0 if self.first_at is None else max(self.last_at - self.first_at, 0.0)

    def note_frame(self, captured_at: float) -> None:
        """That one came, captured at that moment."""
        self.first_at = captured_at if self.first_at is None else self.first_at
        self.last_at = captured_at

    def note_events(self, result: FrameResult) -> None:
        """Of a frame that sinks are given."""
        for event in result.analytics.events:
            label = None if event.class_id is None else result.label(event.class_id)
            self.events.update(event_keys(event.kind, event.rule, label))

    def note_latency(self, now: float, seconds: float) -> None:
        """Of a frame that a sink is given now."""
        self.latencies.append((now, seconds))

    def typical_latency_s(self) -> float | None:
        """The median of the last seconds; None where there was no frame."""
        since = time.monotonic() - LATENCY_WINDOW_S
        recent = sorted(seconds for at, seconds in tuple(self.latencies) if at >= since)
        return recent[len(recent) // 2] if recent else None
