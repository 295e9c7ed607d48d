"""Pictures whose deadline cannot be met are refused before anything is decoded for them."""

import time
from unittest.mock import AsyncMock, Mock

import pytest

from server.backends.engine_view import EngineView
from server.core.backend import Backend
from server.core.batching import Batching
from server.core.caller import Caller
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


async def test_picture_is_decoded_in_its_clients_turn_until_its_deadline() -> None:
    """The decode pool gets client and deadline, for image bodies and image tensors."""
    pool = Mock(DecodePool)
    pool.prepare = AsyncMock(side_effect=UndecodableImage("torn"))
    flow, deadline = flow_of(Mock(Batching), pool), time.monotonic() + 60
    request = ImageRequest("classes", "", (b"one",), deadline, client="key camera")
    with pytest.raises(InferenceError, match="torn"):
        await flow.run(request, await flow.model("classes"), "classes")
    with pytest.raises(InferenceError, match="torn"):
        await flow.tensor(request, "classes")
    for called in pool.prepare.call_args_list:
        assert called.kwargs == {"client": "key camera", "deadline": deadline}


@pytest.mark.parametrize(
    ("caller", "client"),
    [
        (Caller("camera", "ipv4:10.0.0.1:53210", "10.0.0.1"), "key camera"),
        (Caller("", "ipv4:10.0.0.1:53210", "10.0.0.1"), "address 10.0.0.1"),
        (Caller("", "", "10.0.0.1"), "address 10.0.0.1"),
        (Caller("", "unix:/run/x"), "connection unix:/run/x"),
    ],
)
def test_client_that_queues_are_fair_to_is_a_key_or_an_address(caller: Caller, client: str) -> None:
    """Several connections of one host count as one client."""
    assert caller.client == client


def flow_of(batching: Batching, pool: DecodePool) -> ImageFlow:
    watch = Mock(EngineView)
    watch.find = AsyncMock(return_value=CLASSIFIER)
    return ImageFlow(backend=Mock(Backend), watch=watch, pool=pool, metrics=Metrics(), batching=batching)


async def run(flow: ImageFlow, deadline: float | None) -> None:
    request = ImageRequest("classes", "", (b"one", b"two"), deadline)
    await flow.run(request, await flow.model("classes"), "classes")
