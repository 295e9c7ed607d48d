"""Secondary models: crops of tracked objects, batched over all sources."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import structlog

from penstock_video.errors import InferFailed
from penstock_video.infer.calls import CropResult, RowsResult, crop_result_of
from penstock_video.infer.crops import Crop, SecondaryOptions, SecondaryPlan
from penstock_video.infer.engine import Engine
from penstock_video.infer.network import Network
from penstock_video.metrics import VideoMetrics
from penstock_video.mux import END, ResultSequencer
from penstock_video.runner.dispatch import StreamPipeline
from penstock_video.types import ByteArray, FrameResult

log = structlog.get_logger(component="video")
MAX_WAITING_FRAMES = 64  # frames that wait for their crops, or behind such; beyond, the oldest is delivered without
MAX_WAITING = 256  # crops for one model; beyond, no crops are made
MAX_BATCHES = 2  # of crops at the engine, per model
ANSWER_TIMEOUT_S = 5.0  # for a batch of crops


@dataclass(frozen=True, slots=True)
class SecondaryModel:
    """A model for crops, and its selection of objects."""

    network: Network
    options: SecondaryOptions


@dataclass(eq=False)
class _WaitingFrame:
    """A frame with pending crops or, without a frame, the source's end. missing: unanswered crops."""

    way: StreamPipeline
    result: FrameResult | None
    number: int = END
    missing: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _PendingCrop:
    held: _WaitingFrame
    plan: SecondaryPlan
    crop: Crop


@dataclass(eq=False)
class _ModelQueue:
    """One model's crops. sent: batches at the engine."""

    model: SecondaryModel
    waiting: deque[_PendingCrop] = field(default_factory=deque)
    sent: int = 0


@dataclass(eq=False)
class _Plans:
    plans: tuple[SecondaryPlan, ...]
    order: ResultSequencer[_WaitingFrame] = field(default_factory=ResultSequencer)


class Secondaries:
    """Runs secondary models. deliver: called with each complete frame, in its source's order. ended: called after a
    source's last. wake: makes `pump` run soon."""

    def __init__(
        self, engine: Engine, models: tuple[SecondaryModel, ...], metrics: VideoMetrics, wake: Callable[[], None]
    ) -> None:
        self.deliver: Callable[[StreamPipeline, FrameResult], None] = lambda _, __: None
        self.ended: Callable[[StreamPipeline], None] = lambda _: None
        self._engine = engine
        self._metrics = metrics
        self._wake = wake
        self._lanes = [_ModelQueue(model) for model in models]
        self._plans: dict[StreamPipeline, _Plans] = {}
        self._held = 0
        self._pending: dict[_WaitingFrame, None] = {}  # oldest first
        self._answers: deque[tuple[_ModelQueue, list[_PendingCrop], RowsResult]] = deque()
        self._lock = threading.Lock()

    def look(self, way: StreamPipeline, result: FrameResult, image: ByteArray | None) -> None:
        """Cuts the frame's due crops; delivers the frame when all are answered. image: (H, W, 3) uint8 RGB, only read
        here; None without a picture."""
        plans = self._plans_of(way)
        held = _WaitingFrame(way, result, result.frame.frame_num)
        if image is not None:
            self._cut(plans, result, held, image)
        plans.order.expect(held.number)
        self._held += 1
        if held.missing:
            self._pending[held] = None
        else:
            self._resolved(plans, held)
        while self._held > MAX_WAITING_FRAMES and self._pending:
            self._give_up(next(iter(self._pending)))
        self.pump()

    def finish(self, way: StreamPipeline) -> None:
        """Ends a source: `ended` is called after its last frame."""
        plans = self._plans_of(way)
        plans.order.expect(END)
        self._held += 1
        self._resolved(plans, _WaitingFrame(way, None))

    def pump(self) -> None:
        """Sends waiting crops, and delivers frames whose answers arrived."""
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

    def _cut(self, plans: _Plans, result: FrameResult, held: _WaitingFrame, image: ByteArray) -> None:
        for lane, plan in zip(self._lanes, plans.plans, strict=True):
            if len(lane.waiting) < MAX_WAITING:
                crops = plan.cut(lane.model.network, image, result.frame, result.tracks)
                held.missing += len(crops)
                lane.waiting.extend(_PendingCrop(held, plan, crop) for crop in crops)

    def _give_up(self, held: _WaitingFrame) -> None:
        """Delivers the frame without missing answers."""
        for lane in self._lanes:
            for one in lane.waiting:
                if one.held is held:
                    one.plan.take(one.crop, CropResult())
            lane.waiting = deque(one for one in lane.waiting if one.held is not held)
        del self._pending[held]
        self._resolved(self._plans[held.way], held)

    def _submit(self, lane: _ModelQueue) -> None:
        network = lane.model.network
        size = max(network.max_batch_size, 1)
        asked = [lane.waiting.popleft() for _ in range(min(size, len(lane.waiting)))]
        lane.sent += 1
        self._engine.submit(
            network,
            [one.crop.row for one in asked],
            deadline=time.monotonic() + ANSWER_TIMEOUT_S,
            taken=lambda: None,
            done=partial(self._answered, lane, asked),
            geometries=[one.crop.geometry for one in asked],
        )

    def _answered(self, lane: _ModelQueue, asked: list[_PendingCrop], answer: RowsResult) -> None:
        with self._lock:
            self._answers.append((lane, asked, answer))
        self._wake()

    def _take(self, lane: _ModelQueue, asked: list[_PendingCrop], answer: RowsResult) -> None:
        if answer.error is None:
            self._metrics.infer(lane.model.network.name, answer.infer_s)
        for index, one in enumerate(asked):
            one.plan.take(one.crop, self._result(lane, answer, index, one.crop))
            one.held.missing -= 1
            if one.held.missing == 0 and one.held in self._pending:
                del self._pending[one.held]
                self._resolved(self._plans[one.held.way], one.held)

    def _plans_of(self, way: StreamPipeline) -> _Plans:
        if way not in self._plans:
            self._plans[way] = _Plans(tuple(SecondaryPlan(lane.model.options) for lane in self._lanes))
        return self._plans[way]

    @staticmethod
    def _result(lane: _ModelQueue, answer: RowsResult, index: int, crop: Crop) -> CropResult:
        if answer.error is not None:
            return CropResult()
        try:
            return crop_result_of(lane.model.network, answer, index, crop.geometry)
        except InferFailed as error:
            log.warning("an answer cannot be read", model=lane.model.network.name, reason=error.message)
            return CropResult()

    def _resolved(self, plans: _Plans, held: _WaitingFrame) -> None:
        for ready in plans.order.resolve(held.number, held):
            self._send(plans, ready)

    def _send(self, plans: _Plans, held: _WaitingFrame) -> None:
        self._held -= 1
        if held.result is None:
            del self._plans[held.way]
            self.ended(held.way)
            return
        result, tracks = held.result, held.result.tracks
        said = [plan.attributes(tracks) for plan in plans.plans]
        attributes = tuple(tuple(score for row in rows for score in row) for rows in zip(*said, strict=True))
        result = replace(result, attributes=attributes if len(tracks) else ())
        self.deliver(held.way, self._with_keypoints(plans, result))

    def _with_keypoints(self, plans: _Plans, result: FrameResult) -> FrameResult:
        """Adds the keypoints of the first secondary model that has some, unless the primary model has keypoints."""
        seen = result.tracks.detections
        for lane, plan in zip(self._lanes, plans.plans, strict=True):
            if seen.keypoints is None and (keypoints := plan.keypoints(result.tracks)) is not None:
                tracks = replace(result.tracks, detections=replace(seen, keypoints=keypoints))
                return replace(result, tracks=tracks, skeleton=lane.model.network.skeleton)
        return result
