"""An engine, a source and sinks in memory: what the runner is tried with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from penstock.vision.preprocess import Geometry
from penstock_video.errors import InferFailed, SinkFailed
from penstock_video.infer.calls import RowResult, RowsResult, failed
from penstock_video.metrics import VideoMetrics
from penstock_video.mux import MuxOptions
from penstock_video.runner.dispatch import Dispatcher, DispatchOptions, StreamPipeline
from penstock_video.types import (
    Detections,
    DropPolicy,
    Frame,
    FrameAnalytics,
    FrameResult,
    PreparedFrame,
    RowArray,
    SourceConfig,
    Tracks,
    no_tracks,
)

NETWORK: Any = SimpleNamespace(
    name="seen", labels=("person",), skeleton=(), is_classifier=False, max_batch_size=4, takes_sizes=False
)


@dataclass
class Asked:
    """One call of the engine."""

    rows: Sequence[RowArray]
    deadline: float
    taken: Callable[[], None]
    done: Callable[[RowsResult], None]
    geometries: Sequence[Geometry] = ()

    def answer(self) -> None:
        self.done(RowsResult(None, tuple(RowResult(None, index) for index in range(len(self.rows))), 0.01))

    def fail(self, error: InferFailed) -> None:
        self.done(failed(error, len(self.rows)))

    @property
    def names(self) -> list[int]:
        """What the rows hold: the numbers that `prepared` put there."""
        return [int(row.flat[0]) for row in self.rows]


@dataclass
class FakeEngine:
    """Keeps what it is asked."""

    asked: list[Asked] = field(default_factory=list)
    is_up: bool = True

    def submit(
        self,
        network: object,
        rows: Sequence[RowArray],
        *,
        deadline: float,
        taken: Callable[[], None],
        done: Callable[[RowsResult], None],
        geometries: Sequence[Geometry] = (),
    ) -> None:
        self.asked.append(Asked(rows, deadline, taken, done, geometries))


class Following:
    """A tracker that follows nothing."""

    def update(self, frame: Frame, detections: Detections) -> Tracks:
        return no_tracks()

    def coast(self, frame: Frame) -> Tracks:
        return no_tracks()

    def reset(self) -> None:
        """Nothing is remembered."""

    def restart(self) -> None:
        """Nothing is remembered."""

    def observe(self, frame: Frame, tracks: Tracks) -> FrameAnalytics:
        return FrameAnalytics()


@dataclass
class KeptSink:
    """A sink in memory. fails: raises for everything."""

    results: list[FrameResult] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    fails: bool = False
    is_closed: bool = False

    def write(self, result: FrameResult) -> None:
        if self.fails:
            raise SinkFailed("full")
        self.results.append(result)

    def end_source(self, source_id: str) -> None:
        self.ended.append(source_id)

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Slots:
    """Counts which frames were released."""

    released: list[tuple[str, int]] = field(default_factory=list)

    def prepared(
        self, source_id: str, number: int, *, has_row: bool = True, image: bool = False, captured_at: float = 1e12
    ) -> PreparedFrame:
        row = np.full((3, 2, 2), number % 256, np.uint8) if has_row else None
        picture = np.zeros((6, 8, 3), np.uint8) if image else None
        frame = Frame(source_id, number, number / 10, captured_at, 8, 6, picture)
        return PreparedFrame(frame, row, lambda: self.released.append((source_id, number)))


def a_way(source_id: str, policy: DropPolicy = DropPolicy.DROP_OLDEST) -> StreamPipeline:
    both = Following()
    return StreamPipeline(SourceConfig(f"rtsp://camera/{source_id}", source_id), policy, both, both)


def a_dispatcher(
    engine: FakeEngine, *ways: StreamPipeline, mux: MuxOptions | None = None, options: DispatchOptions | None = None
) -> Dispatcher:
    whole: Any = engine
    dispatcher = Dispatcher(
        whole, NETWORK, mux or MuxOptions(batch_size=2), options or DispatchOptions(max_batches=1), VideoMetrics()
    )
    for way in ways:
        dispatcher.add(way)
    return dispatcher
