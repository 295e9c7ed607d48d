"""Rows on a card, at real stacks of a machine that has none: why they go through the host. NVIDIA's driver is a
stand-in; tests/gpu has a real card."""

from collections.abc import Callable

import numpy as np
import pytest

from penstock_video.errors import InferFailed
from penstock_video.gpu.device import Device
from penstock_video.infer.engine import Engine
from penstock_video.infer.options import EngineAddress, RowMemory
from tests.deepstream_pipeline.gpu.fake_driver import FakeDriver, install
from tests.deepstream_pipeline.infer.fake_core import submit
from tests.integration.client_processes import figures, local, remote, row_of
from tests.support.stack import RunningStack

pytestmark = pytest.mark.xdist_group("stack")
Way = Callable[[RunningStack], EngineAddress]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


def tried(place: EngineAddress, model: str, wish: RowMemory) -> str:
    """Why the model's rows go through the host; a row that does is answered all the same."""
    engine = Engine(place, device=Device.open())
    engine.start(20)
    try:
        network = engine.network(model, 20)
        choice = engine.hand_over(network, wish)
        assert not choice.is_on_card
        picture = np.full((128, 128, 3), 128, np.uint8)
        assert submit(engine, network, [row_of(network, picture)]).answer().error is None
        return choice.reason
    finally:
        engine.close()


@pytest.mark.parametrize("way", [local, remote])
def test_triton_without_a_card_takes_no_rows_there_and_says_so(
    fronts: RunningStack, driver: FakeDriver, way: Way
) -> None:
    """In Triton's own words, whether the program is a local client process or uses the ports; nothing stays."""
    assert "cannot open memory of GPU 0 (" in tried(way(fronts), "plain", RowMemory.AUTO)
    with pytest.raises(InferFailed, match="it must run on that GPU, on this host"):
        tried(way(fronts), "plain", RowMemory.DEVICE)
    assert driver.is_all_given_back
    assert figures(fronts)["shared_memory_regions",] == 0


def test_model_whose_batches_the_gateway_forms_takes_no_rows_there(fronts: RunningStack, driver: FakeDriver) -> None:
    """By the sentence that says what to change."""
    assert "batch_owner gateway" in tried(local(fronts), "brightness", RowMemory.AUTO)


def test_stack_that_shares_no_memory_says_how_it_would(stack: RunningStack, driver: FakeDriver) -> None:
    """With the default flags of `penstock up`."""
    assert "start the gateway with --allow-client-shm" in tried(local(stack), "people", RowMemory.AUTO)
