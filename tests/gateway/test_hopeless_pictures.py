"""Pictures whose deadline cannot be met are refused before anything is decoded for them."""

import time
from unittest.mock import AsyncMock, Mock

import pytest

from penstock.engines.model_health import EngineView
from penstock.gateway.image_flow import ImageFlow
from penstock.gateway.metrics import Metrics
from penstock.protocol.engine import Engine
from penstock.protocol.errors import InferenceError, Overloaded, UndecodableImage
from penstock.protocol.identity import Identity
from penstock.protocol.inference import Batcher
from penstock.vision.decode_pool import DecodePool
from penstock.vision.results import ImageRequest
from tests.gateway.rig import CLASSIFIER


async def test_picture_that_cannot_be_answered_in_time_is_not_decoded() -> None:
    """The queue is asked first, with all the pictures of the request."""
    batching, pool = Mock(Batcher), Mock(DecodePool)
    batching.owns.return_value = True
    batching.refuse_hopeless.side_effect = Overloaded("too late")
    flow = flow_of(batching, pool)
    with pytest.raises(Overloaded, match="too late"):
        await run(flow, deadline=1e12)
    batching.refuse_hopeless.assert_called_once_with("classes", rows=2, deadline=1e12)
    assert pool.mock_calls == []


async def test_picture_without_a_deadline_is_never_hopeless() -> None:
    """Fails by its own faults only."""
    batching, pool = Mock(Batcher), Mock(DecodePool)
    batching.owns.return_value = True
    pool.prepare = AsyncMock(side_effect=UndecodableImage("torn"))
    with pytest.raises(InferenceError, match="torn"):
        await run(flow_of(batching, pool), deadline=None)
    batching.refuse_hopeless.assert_not_called()


async def test_picture_is_decoded_in_its_clients_turn_until_its_deadline() -> None:
    """The decode pool gets client and deadline, for image bodies and image tensors."""
    pool = Mock(DecodePool)
    pool.prepare = AsyncMock(side_effect=UndecodableImage("torn"))
    flow, deadline = flow_of(Mock(Batcher), pool), time.monotonic() + 60
    request = ImageRequest("classes", "", (b"one",), deadline, client="key camera")
    with pytest.raises(InferenceError, match="torn"):
        await flow.run(request, await flow.model("classes"), "classes")
    with pytest.raises(InferenceError, match="torn"):
        await flow.tensors(request, "classes")
    for called in pool.prepare.call_args_list:
        assert called.kwargs == {"client": "key camera", "deadline": deadline}


@pytest.mark.parametrize(
    ("caller", "client"),
    [
        (Identity("camera", "ipv4:10.0.0.1:53210", "10.0.0.1"), "key camera"),
        (Identity("", "ipv4:10.0.0.1:53210", "10.0.0.1"), "address 10.0.0.1"),
        (Identity("", "", "10.0.0.1"), "address 10.0.0.1"),
        (Identity("", "unix:/run/x"), "connection unix:/run/x"),
    ],
)
def test_client_that_queues_are_fair_to_is_a_key_or_an_address(caller: Identity, client: str) -> None:
    """Several connections of one host count as one client."""
    assert caller.client == client


def flow_of(batching: Batcher, pool: DecodePool) -> ImageFlow:
    watch = Mock(EngineView)
    watch.find = AsyncMock(return_value=CLASSIFIER)
    return ImageFlow(backend=Mock(Engine), watch=watch, pool=pool, metrics=Metrics(), batching=batching)


async def run(flow: ImageFlow, deadline: float | None) -> None:
    request = ImageRequest("classes", "", (b"one", b"two"), deadline)
    await flow.run(request, await flow.model("classes"), "classes")
