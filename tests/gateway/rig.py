"""A data plane over a fake engine, with models for pictures and tensors, and everything that tests inspect."""

import asyncio
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

from penstock.engines.watch import EngineWatch
from penstock.gateway.dataplane import DataPlane
from penstock.gateway.image_flow import ImageFlow
from penstock.gateway.in_flight import InFlightLimiter
from penstock.gateway.metrics import Metrics
from penstock.protocol.call import HttpCall
from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.inference import Datatype, InferRequest, Tensor, tensor_from_numpy
from penstock.testing import FakeEngine
from penstock.vision.decode import MAX_PIXELS, decode
from penstock.vision.decode_pool import DecodePool, PreparedImage
from penstock.vision.preprocess import least_decoded_size, prepare
from penstock.vision.results import ImageRequest
from penstock.vision.spec import PrepareSpec

DETECTOR = ModelConfig(
    name="boxes",
    backend="python",
    max_batch_size=0,
    inputs=(TensorSpec("image", Datatype.UINT8, (-1, -1, 3)),),
    outputs=(
        TensorSpec("boxes", Datatype.FP32, (-1, 4)),
        TensorSpec("scores", Datatype.FP32, (-1,)),
        TensorSpec("class_ids", Datatype.INT64, (-1,)),
    ),
    parameters={"network-type": "0", "network-input-order": "1", "parse-bbox-func-name": "boxes", "labels": "thing"},
)
CLASSIFIER = ModelConfig(
    name="classes",
    backend="onnxruntime",
    max_batch_size=2,
    inputs=(TensorSpec("x", Datatype.FP32, (3, 8, 8)),),
    outputs=(TensorSpec("p", Datatype.FP32, (3,)),),
    parameters={"network-type": "1", "labels": "dark;middle;bright", "net-scale-factor": "0.00392156862745098"},
    unmerged="",
)
NMS_INSIDE = ModelConfig(  # one row for each object of all pictures together
    name="found",
    backend="onnxruntime",
    max_batch_size=8,
    inputs=CLASSIFIER.inputs,
    outputs=DETECTOR.outputs,
    parameters={"network-type": "0", "parse-bbox-func-name": "boxes", "net-scale-factor": "0.00392156862745098"},
    unmerged="output 'boxes' has the shape [3, 4] for one row of input",
)
TENSORS_ONLY = ModelConfig(
    "plain",
    "python",
    8,
    (TensorSpec("x", Datatype.FP32, (-1,)),),
    (TensorSpec("y", Datatype.BYTES, (-1,)),),
    {"slo_p99ms": "50"},  # a typo: the option is slo_p99_ms
)
CALL = HttpCall("POST", b"/v2/models/plain/infer", (), b"{}")


def answer(request: InferRequest) -> list[Tensor]:
    """A box over the whole picture, more boxes if it is brighter, or the brightness class of each row."""
    array = request.inputs[0].to_numpy()
    if request.model_name == "boxes":
        height, width = array.shape[:2]
        return [
            tensor_from_numpy("boxes", np.array([[0, 0, width, height]], np.float32)),
            tensor_from_numpy("scores", np.array([0.75], np.float32)),
            tensor_from_numpy("class_ids", np.array([0], np.int64)),
        ]
    means = array.reshape(array.shape[0], -1).mean(axis=1)
    if request.model_name.startswith("found"):
        counts = [round(float(mean) * 4) for mean in means]
        boxes = [[2 * place, 0, 2 * place + 2, 8] for count in counts for place in range(count)]
        return [
            tensor_from_numpy("boxes", np.array(boxes, np.float32).reshape(-1, 4)),
            tensor_from_numpy("scores", np.full(len(boxes), 0.75, np.float32)),
            tensor_from_numpy("class_ids", np.repeat(np.arange(len(counts), dtype=np.int64), counts)),
        ]
    rows = [[1 - mean, 0.1, mean] for mean in means]
    return [tensor_from_numpy("p", np.array(rows, np.float32))]


def picture(level: int, width: int = 20, height: int = 10) -> bytes:
    is_written, encoded = cv2.imencode(".png", np.full((height, width, 3), level, np.uint8))
    assert is_written
    return encoded.tobytes()


class LazyPool(DecodePool):
    """Starts its decoder process with the first image: most tests decode none."""

    def __init__(self) -> None:
        super().__init__(workers=1)
        self._starting = asyncio.Lock()

    async def prepare(self, *image: Any, **options: Any) -> PreparedImage:
        async with self._starting:
            if not self._is_open:
                await self.start()
        return await super().prepare(*image, **options)


class InlinePool:
    """Decodes in this process, without a decoder process's start."""

    max_pixels = MAX_PIXELS

    async def prepare(self, data: bytes, spec: PrepareSpec, *_: object, **__: object) -> PreparedImage:
        await asyncio.sleep(0)
        decoded = decode(data, spec.color, at_least=least_decoded_size(spec))
        return PreparedImage(*prepare(decoded, spec), 0.001, 0.001)

    async def aclose(self) -> None: ...


@dataclass
class Rig:
    """A data plane with everything that tests inspect."""

    plane: DataPlane
    backend: FakeEngine
    admission: InFlightLimiter
    watch: EngineWatch
    metrics: Metrics
    images: ImageFlow
    pool: LazyPool | InlinePool

    async def ask(self, model: str, *images: bytes, deadline: float | None = None) -> object:
        return await self.plane.infer_images(ImageRequest(model, "", images, deadline))
