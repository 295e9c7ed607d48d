"""Secondary models: crops of tracked objects, from all sources in common batches; a frame waits for its own.

`look` and `pump` are called by the thread of the results; the engine's thread only leaves its answers.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import structlog

from deepstream_pipeline.errors import InferFailed
from deepstream_pipeline.infer.answer import Answer
from deepstream_pipeline.infer.crops import Crop, SecondaryOptions, SecondaryPlan
from deepstream_pipeline.infer.engine import Engine
from deepstream_pipeline.infer.network import Network
from deepstream_pipeline.metrics import VideoMetrics
from deepstream_pipeline.order import END, Sequencer
from deepstream_pipeline.parse.results import classes_of
from deepstream_pipeline.runner.way import SourceWay
from deepstream_pipeline.types import ByteArray, ClassScore, FrameResult

log = structlog.get_logger(component="video")
MAX_HELD = 64  # frames that wait for their crops, or behind such; of more the oldest goes on without
MAX_WAITING = 256  # crops for one model; nothing is cut while there are more
MAX_BATCHES = 2  # of crops at the engine, for each model
PATIENCE_S = 5.0  # for a batch of crops


@dataclass(frozen=True, slots=True)
class SecondaryModel:
    """A model that looks at crops, and at which."""

    network: Network
    options: SecondaryOptions


@dataclass(eq=False)
class _Held:
    """A frame whose crops are being looked at, or, without one, the source's end. missing: crops not answered yet."""

    way: SourceWay
    result: FrameResult | None
    number: int = END
    missing: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """One crop of one held frame."""

    held: _Held
    plan: SecondaryPlan
    crop: Crop


@dataclass(eq=False)
class _Lane:
    """One model's crops. sent: batches at the engine."""

    model: SecondaryModel
    waiting: deque[_Asked] = field(default_factory=deque)
    sent: int = 0


@dataclass(eq=False)
class _Plans:
    """One source's part."""

    plans: tuple[SecondaryPlan, ...]
    order: Sequencer[_Held] = field(default_factory=Sequencer)


class Secondaries:
    """deliver: who gets each frame when all is known of it, in its source's order; ended: who hears behind the last.

    wake: has `pump` called soon.
    """

    def __init__(
        self, engine: Engine, models: tuple[SecondaryModel, ...], metrics: VideoMetrics, wake: Callable[[], None]
    ) -> None:
        self.deliver: Callable[[SourceWay, FrameResult], None] = lambda _, __: None
        self.ended: Callable[[SourceWay], None] = lambda _: None
        self._engine = engine
        self._metrics = metrics
        self._wake = wake
        self._lanes = [_Lane(model) for model in models]
        self._plans: dict[SourceWay, _Plans] = {}
        self._held = 0
        self._pending: dict[_Held, None] = {}  # the oldest first
        self._answers: deque[tuple[_Lane, list[_Asked], Answer]] = deque()
        self._lock = threading.Lock()

    def look(self, way: SourceWay, result: FrameResult, image: ByteArray | None) -> None:
        """The frame's crops that are due are cut now; the frame is delivered when all of them are answered.

        image: (H, W, 3) uint8 RGB, read only here; None where none travelled.
        """
        plans = self._plans_of(way)
        held = _Held(way, result, result.frame.frame_num)
        if image is not None:
            self._cut(plans, result, held, image)
        plans.order.expect(held.number)
        self._held += 1
        if held.missing:
            self._pending[held] = None
        else:
            self._resolved(plans, held)
        while self._held > MAX_HELD and self._pending:
            self._give_up(next(iter(self._pending)))
        self.pump()

    def finish(self, way: SourceWay) -> None:
        """No more frames of it come: `ended` is called behind the last of them."""
        plans = self._plans_of(way)
        plans.order.expect(END)
        self._held += 1
        self._resolved(plans, _Held(way, None))

    def pump(self) -> None:
        """Ask for crops that wait, and deliver frames whose answers are there."""
        while True:
            with self._lock:
                if not self._answers:
                    break
                lane, asked, answer = self._answers.popleft()
            lane.sent -= 1
            self._take(lane, asked, answer)
        for lane in self._lanes:
            while lane.waiting and lane.sent < MAX_BATCHES:
                self._submit(lane)

    def _cut(self, plans: _Plans, result: FrameResult, held: _Held, image: ByteArray) -> None:
        for lane, plan in zip(self._lanes, plans.plans, strict=True):
            if len(lane.waiting) < MAX_WAITING:
                crops = plan.cut(lane.model.network, image, result.frame, result.tracks)
                held.missing += len(crops)
                lane.waiting.extend(_Asked(held, plan, crop) for crop in crops)

    def _give_up(self, held: _Held) -> None:
        """The frame goes on without what is not answered yet."""
        for lane in self._lanes:
            for one in lane.waiting:
                if one.held is held:
                    one.plan.take(one.crop, ())
            lane.waiting = deque(one for one in lane.waiting if one.held is not held)
        del self._pending[held]
        self._resolved(self._plans[held.way], held)

    def _submit(self, lane: _Lane) -> None:
        network = lane.model.network
        size = max(network.max_batch_size, 1)
        asked = [lane.waiting.popleft() for _ in range(min(size, len(lane.waiting)))]
        lane.sent += 1
        self._engine.submit(
            network,
            [one.crop.row for one in asked],
            deadline=time.monotonic() + PATIENCE_S,
            taken=lambda: None,
            done=partial(self._answered, lane, asked),
        )

    def _answered(self, lane: _Lane, asked: list[_Asked], answer: Answer) -> None:
        with self._lock:
            self._answers.append((lane, asked, answer))
        self._wake()

    def _take(self, lane: _Lane, asked: list[_Asked], answer: Answer) -> None:
        if answer.error is None:
            self._metrics.infer(lane.model.network.name, answer.infer_s)
        for index, one in enumerate(asked):
            one.plan.take(one.crop, self._classes(lane, answer, index))
            one.held.missing -= 1
            if one.held.missing == 0 and one.held in self._pending:
                del self._pending[one.held]
                self._resolved(self._plans[one.held.way], one.held)

    def _plans_of(self, way: SourceWay) -> _Plans:
        if way not in self._plans:
            self._plans[way] = _Plans(tuple(SecondaryPlan(lane.model.options) for lane in self._lanes))
        return self._plans[way]

    @staticmethod
    def _classes(lane: _Lane, answer: Answer, index: int) -> tuple[ClassScore, ...]:
        if answer.error is not None:
            return ()
        try:
            return classes_of(lane.model.network, answer, index)
        except InferFailed as error:
            log.warning("an answer cannot be read", model=lane.model.network.name, reason=error.message)
            return ()

    def _resolved(self, plans: _Plans, held: _Held) -> None:
        for ready in plans.order.resolve(held.number, held):
            self._send(plans, ready)

    def _send(self, plans: _Plans, held: _Held) -> None:
        self._held -= 1
        if held.result is None:
            del self._plans[held.way]
            self.ended(held.way)
            return
        tracks = held.result.tracks
        said = [plan.attributes(tracks) for plan in plans.plans]
        attributes = tuple(tuple(score for row in rows for score in row) for rows in zip(*said, strict=True))
        self.deliver(held.way, replace(held.result, attributes=attributes if len(tracks) else ()))
