"""Pictures that an engine decodes, in the slab: whatever becomes of one, nothing of it stays there."""

import asyncio
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest

from penstock.engines.model_health import EngineView
from penstock.gateway.image_flow import ImageFlow
from penstock.gateway.metrics import Metrics
from penstock.gateway.workers.slab import SharedSlab, anonymous_memory
from penstock.protocol.engine import Engine, ModelConfig, TensorSpec
from penstock.protocol.errors import DeadlineExceeded, EngineFailed, InferenceError, UnsupportedMedia
from penstock.protocol.inference import Batcher, Datatype, InferRequest, InferResponse, tensor_from_numpy
from penstock.vision import image_tasks as relayed
from penstock.vision.decode_pool import DecodePool
from penstock.vision.results import ImageRequest, ImageResponse
from tests.gateway.rig import picture

PICTURE = picture(255)
MODEL = ModelConfig(
    "finder",
    "torch",
    8,
    (TensorSpec("picture", Datatype.BYTES, (1,)),),
    (TensorSpec("scores", Datatype.FP32, (3,)),),
    {"network-type": "1", "image-decoder": "engine", "infer-dims": "3;8;8"},
)


class Rig:
    """The engine, by the gateway's queues or alone: `error` is its answer, or it waits for `gate`."""

    def __init__(self, *, is_owned: bool) -> None:
        self.slab = SharedSlab(lambda _, release: release())
        self.slab.renew(anonymous_memory(1 << 20))
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()
        self.error: InferenceError | None = None
        self.read: list[bytes] = []
        watch, batching, backend, pool = Mock(EngineView), Mock(Batcher), Mock(Engine), Mock(DecodePool)
        watch.find = AsyncMock(return_value=MODEL)
        batching.owns.return_value = is_owned
        batching.infer = backend.infer = self._infer
        pool.max_pixels = 1000
        self.flow = ImageFlow(
            backend=backend, watch=watch, pool=pool, metrics=Metrics(), batching=batching, slab=self.slab
        )

    async def _infer(self, request: InferRequest, *, client: str = "") -> InferResponse:
        (tensor,) = request.inputs
        assert tensor.place is not None
        assert self.slab.statistics().leases == 1
        self.read.append(bytes(self.slab.window(tensor.place, tensor.data.nbytes)[4:]))
        self.entered.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return InferResponse("finder", "1", (tensor_from_numpy("scores", np.ones((1, 3), np.float32)),), "")

    async def see(self, image: bytes) -> ImageResponse:
        request = ImageRequest("finder", "", (image,), None)
        return await self.flow.run(request, await self.flow.model("finder"), "finder")


@pytest.fixture(params=[True, False], ids=["owned", "alone"])
async def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(is_owned=request.param)


@pytest.mark.parametrize("at_once_bytes", [1 << 20, 0], ids=["short", "long"])
async def test_lease_of_a_picture_ends_with_its_answer(
    rig: Rig, at_once_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine reads the picture's own bytes; afterwards its room is free, long ones' too."""
    monkeypatch.setattr(relayed, "MAX_INLINE_BYTES", at_once_bytes)
    assert len((await rig.see(PICTURE)).results) == 1
    assert rig.read == [PICTURE]
    assert rig.slab.statistics().leases == 0


@pytest.mark.parametrize("error", [EngineFailed("no"), DeadlineExceeded("late")], ids=["failed", "late"])
async def test_lease_of_a_picture_ends_with_its_failure(rig: Rig, error: InferenceError) -> None:
    """The engine's, and the deadline's."""
    rig.error = error
    with pytest.raises(type(error)):
        await rig.see(PICTURE)
    assert rig.slab.statistics().leases == 0


async def test_lease_of_a_picture_ends_with_its_caller(rig: Rig) -> None:
    """Who leaves while the engine has it."""
    rig.gate.clear()
    asked = asyncio.create_task(rig.see(PICTURE))
    await rig.entered.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert rig.slab.statistics().leases == 0


async def test_picture_that_is_refused_by_its_header_never_had_a_lease(rig: Rig) -> None:
    """And the engine is not asked."""
    with pytest.raises(UnsupportedMedia):
        await rig.see(b"GIF89a" + bytes(9))
    assert (rig.read, rig.slab.statistics().leases) == ([], 0)
