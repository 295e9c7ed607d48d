"""A gateway's core on a thread of its own, over a real socket and slab; and an engine whose answers are collected."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from penstock.engines.model_health import KnownModel
from penstock.gateway.metrics import Metrics
from penstock.gateway.workers.core_server import CoreServer
from penstock.gateway.workers.inference_calls import ClientProcessCalls
from penstock.gateway.workers.slab import SharedSlab, anonymous_memory
from penstock.gateway.workers.slab_sharing import SlabPartitions
from penstock.protocol import engine as protocol_engine
from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.errors import InferenceError, ModelNotFound
from penstock.protocol.inference import Datatype, InferRequest, InferResponse, Tensor, Timings, tensor_from_numpy
from penstock.vision.preprocess import geometry_of
from penstock_video.infer.calls import Row, RowsResult
from penstock_video.infer.engine import Engine
from penstock_video.infer.network import Network
from penstock_video.infer.options import EngineAddress
from penstock_video.types import RowArray

SIDE = 64  # of a row: 48 KiB, enough for the slab
PART = 4 << 20
CLASSIFIER = {"network-type": "1", "labels": "dark;bright"}
DETECTOR = {"network-type": "0", "parse-bbox-func-name": "boxes", "labels": "person;bicycle"}
BOXES = (
    TensorSpec("boxes", Datatype.FP32, (-1, 4)),
    TensorSpec("scores", Datatype.FP32, (-1,)),
    TensorSpec("class_ids", Datatype.INT64, (-1,)),
)


RELAYED = DETECTOR | {"image-decoder": "engine", "infer-dims": "3;8;8"}


ASTRAY = "output 'y' has a row for each object"


def classifier(name: str, max_batch_size: int, shape: tuple[int, ...] = (3, SIDE, SIDE)) -> ModelConfig:
    inputs = (TensorSpec("x", Datatype.FP32, shape),)
    outputs = (TensorSpec("y", Datatype.FP32, (2,)),)
    return ModelConfig(name, "python", max_batch_size, inputs, outputs, CLASSIFIER, unmerged="")


def one_box() -> ModelConfig:
    """Takes pictures at their own size, one a call."""
    parameters = DETECTOR | {"network-input-order": "NHWC", "max-side": "320"}
    return ModelConfig("one_box", "python", 0, (TensorSpec("x", Datatype.UINT8, (-1, -1, 3)),), BOXES, parameters)


def sized(name: str, max_batch_size: int) -> ModelConfig:
    """Its second input takes the pictures' (width, height)."""
    one = classifier(name, max_batch_size, (3, SIDE, SIDE) if max_batch_size else (1, 3, SIDE, SIDE))
    sizes = TensorSpec("sizes", Datatype.INT64, (2,) if max_batch_size else (1, 2))
    parameters = CLASSIFIER | {"image-size-input": "sizes"}
    return replace(one, inputs=(*one.inputs, sizes), parameters=parameters)


CONFIGS = (
    classifier("owned", 4),
    sized("sized", 4),
    sized("sized_alone", 0),
    classifier("lone", 0, (1, 3, SIDE, SIDE)),
    replace(classifier("astray", 4), unmerged=ASTRAY),
    one_box(),
    ModelConfig("tensors", "python", 4, (TensorSpec("x", Datatype.FP32, (3,)),), (), {}),
    ModelConfig("encoded", "python", 4, (TensorSpec("x", Datatype.BYTES, (1,)),), BOXES, RELAYED),
    ModelConfig("wrong", "python", 4, (TensorSpec("x", Datatype.FP32, (3, 8, 8)),), BOXES, DETECTOR | {"offsets": "a"}),
)


@dataclass
class FakeCore:
    """EngineWatch, Backend and Batching at once. error: what every inference fails with. holds: nothing is answered.

    answers: outputs by the model's name, instead of _outputs.
    """

    folder: Path
    is_up: bool = True
    reason: str = ""
    generation: int = 1
    error: InferenceError | None = None
    holds: bool = False
    fails_row: float | None = None
    asked: list[InferRequest] = field(default_factory=list)
    clients: list[str] = field(default_factory=list)
    served: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    cancelled: int = 0
    suspicions: int = 0
    answers: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    models: dict[str, KnownModel] = field(
        default_factory=lambda: {config.name: KnownModel(config.name, True, config=config) for config in CONFIGS}
    )

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._task: asyncio.Task[None] | None = None
        self.run(self._open())

    # what the server asks

    def owns(self, model_name: str) -> bool:
        return model_name == "owned"

    async def find(self, model_name: str) -> ModelConfig:
        known = self.models.get(model_name)
        if known is None or known.config is None:
            raise ModelNotFound(f"Request for unknown model: '{model_name}' is not found")
        return known.config

    def note_served(self, model_name: str) -> None:
        self.served.append(model_name)

    def suspect(self) -> None:
        self.suspicions += 1

    def note_late(self) -> None:
        """Of no matter here."""

    async def infer_tensors(
        self, request: InferRequest, alone: protocol_engine.Engine, *, client: str, priority: int = 0
    ) -> InferResponse | InferenceError:
        response = await self.infer(request, client=client if self.owns(request.model_name) else "")
        self.note_served(request.model_name)
        return response

    def model_label(self, model_name: str) -> str:
        return model_name

    async def infer(self, request: InferRequest, *, client: str = "", priority: int = 0) -> InferResponse:
        self.asked.append(request)
        self.clients.append(client)
        if self.holds:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        pixels = request.inputs[0].to_numpy()
        if self.error is not None and self.fails_row in (None, float(pixels.flat[0])):
            raise self.error
        timings = Timings(queue=0.25, infer=0.5)
        outputs = self.answers.get(request.model_name) or self._outputs(request, pixels)
        return InferResponse(request.model_name, "1", outputs, timings=timings)

    @staticmethod
    def _outputs(
        request: InferRequest, pixels: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]"
    ) -> tuple[Tensor, ...]:
        """A classifier: (1 - mean, mean) a row; one_box: one box as large as the picture; sized: its second input."""
        if request.model_name.startswith("sized"):
            return (tensor_from_numpy("y", request.inputs[1].to_numpy().astype(np.float32)),)
        if request.model_name == "one_box":
            height, width = pixels.shape[:2]
            return (
                tensor_from_numpy("boxes", np.array([[0, 0, width, height]], np.float32)),
                tensor_from_numpy("scores", np.array([0.75], np.float32)),
                tensor_from_numpy("class_ids", np.array([1], np.int64)),
            )
        means = pixels.astype(np.float32).mean(axis=(1, 2, 3))
        return (tensor_from_numpy("y", np.stack([1 - means, means], axis=1).astype(np.float32)),)

    # what a test does with it

    def run(self, work: "asyncio.coroutines.Coroutine[object, object, None]") -> None:  # type: ignore[name-defined]
        asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _open(self) -> None:
        self.slab = SharedSlab(self._loop.call_later)
        self.slab.renew(anonymous_memory(4 * PART))
        slab_partitions = SlabPartitions(self.slab, PART, PART)
        calls = ClientProcessCalls(self, self, Metrics(), lambda error: error.reason, slab_partitions)  # type: ignore[arg-type]
        self.server = CoreServer(
            self,  # type: ignore[arg-type]
            self,
            self,  # type: ignore[arg-type]
            slab_partitions=slab_partitions,
            client_calls=calls,
        )
        self._task = self._loop.create_task(self.server.run(self.folder))

    async def _close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await asyncio.sleep(0)

    def die(self) -> None:
        """As a core that is killed: its connections end."""
        self.run(self._close())

    def revive(self) -> None:
        """Another core in its place."""
        self.run(self._open())

    def cut(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self.server.cut, reason)

    def end(self) -> None:
        self.die()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class Asked:
    """One submission: what was called, in order, and from which thread."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.threads: set[str] = set()
        self._answers: list[RowsResult] = []
        self._done = threading.Event()

    def taken(self) -> None:
        self.calls.append("taken")
        self.threads.add(threading.current_thread().name)

    def done(self, answer: RowsResult) -> None:
        self.calls.append("done")
        self.threads.add(threading.current_thread().name)
        self._answers.append(answer)
        self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def answer(self, timeout_s: float = 20.0) -> RowsResult:
        assert self._done.wait(timeout_s), "no answer came"
        (answer,) = self._answers
        return answer


def submit(
    engine: Engine,
    network: Network,
    rows: Sequence[Row],
    *,
    within_s: float = 20.0,
    sizes: Sequence[tuple[int, int]] = (),
) -> Asked:
    """sizes: (width, height) of the rows' pictures."""
    asked = Asked()
    deadline = time.monotonic() + within_s
    geometries = [geometry_of(width, height, network.prepare_spec) for width, height in sizes]
    engine.submit(network, rows, deadline=deadline, taken=asked.taken, done=asked.done, geometries=geometries)
    return asked


def row(value: float) -> RowArray:
    """Of the classifiers: their mean is the value."""
    return np.full((3, SIDE, SIDE), value, np.float32)


@contextlib.contextmanager
def engine_at(place: EngineAddress) -> Iterator[Engine]:
    engine = Engine(place)
    engine.start(20)
    try:
        yield engine
    finally:
        engine.close()
