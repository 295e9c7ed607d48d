"""Pictures whose deadline cannot be met are refused before anything is decoded for them."""

from unittest.mock import AsyncMock, Mock

import pytest

from server.backends.engine_view import EngineView
from server.core.backend import Backend
from server.core.batching import Batching
from server.core.errors import InferenceError, Overloaded, UndecodableImage
from server.image_flow import ImageFlow, ImageRequest
from server.metrics import Metrics
from server.vision.pool import DecodePool
from tests.gateway.rig import CLASSIFIER


async def test_picture_that_cannot_be_answered_in_time_is_not_decoded() -> None:
    """The queue is asked first, with all the pictures of the request."""
    batching, pool = Mock(Batching), Mock(DecodePool)
    batching.owns.return_value = True
    batching.refuse_hopeless.side_effect = Overloaded("too late")
    flow = flow_of(batching, pool)
    with pytest.raises(Overloaded, match="too late"):
        await run(flow, deadline=1e12)
    batching.refuse_hopeless.assert_called_once_with("classes", rows=2, deadline=1e12)
    assert pool.mock_calls == []


async def test_picture_without_a_deadline_is_never_hopeless() -> None:
    """Nobody is asked; it fails by its own faults only."""
    batching, pool = Mock(Batching), Mock(DecodePool)
    batching.owns.return_value = True
    pool.prepare = AsyncMock(side_effect=UndecodableImage("torn"))
    with pytest.raises(InferenceError, match="torn"):
        await run(flow_of(batching, pool), deadline=None)
    batching.refuse_hopeless.assert_not_called()


def flow_of(batching: Batching, pool: DecodePool) -> ImageFlow:
    watch = Mock(EngineView)
    watch.find = AsyncMock(return_value=CLASSIFIER)
    return ImageFlow(backend=Mock(Backend), watch=watch, pool=pool, metrics=Metrics(), batching=batching)


async def run(flow: ImageFlow, deadline: float | None) -> None:
    request = ImageRequest("classes", "", (b"one", b"two"), deadline)
    await flow.run(request, await flow.model("classes"), "classes")
