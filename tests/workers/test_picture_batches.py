"""A worker's own calls for pictures that Triton batches."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest

from penstock.engines.model_health import EngineView
from penstock.gateway.batching.options import DeclaredOptions
from penstock.gateway.workers.picture_batches import PictureBatches
from penstock.protocol.engine import ModelConfig
from penstock.protocol.errors import EngineUnavailable
from tests.batching.echo_engine import EchoEngine, asking, rows_in

PICTURES = ModelConfig(
    "m", "torch", 8, (), (), has_dynamic_batching=True, unmerged="", parameters={"image-decoder": "engine"}
)


class Bench:
    """A worker with one model. config: None when it is gone. core: what the core is asked."""

    def __init__(
        self, config: ModelConfig | None = PICTURES, *, core_owns: bool = False, is_apart: bool = False
    ) -> None:
        self.engine = EchoEngine()
        self.core = Mock(owns=Mock(return_value=core_owns), infer=AsyncMock(return_value="the core's"))
        self.known: dict[str, Any] = {"m": SimpleNamespace(config=config, is_ready=True)}
        self.batches = PictureBatches(
            self.core,
            self.engine,
            cast(EngineView, SimpleNamespace(models=self.known)),
            DeclaredOptions(),
            is_apart=lambda _: is_apart,
        )


@asynccontextmanager
async def bench(config: ModelConfig | None = PICTURES, **how: bool) -> AsyncIterator[Bench]:
    found = Bench(config, **how)
    yield found
    await found.batches.aclose()


async def test_pictures_that_arrive_during_a_call_share_the_next_one() -> None:
    """Each gets its own rows, and no explanation of a batch that is Triton's."""
    async with bench() as worker:
        assert worker.batches.owns("m")
        await worker.batches.infer(asking(*range(8)), client="one")
        worker.engine.forget()
        worker.engine.gate.clear()
        asked = [asyncio.create_task(worker.batches.infer(asking(float(n)), client="one")) for n in range(6)]
        await worker.engine.called(1)
        worker.engine.gate.set()
        answers = await asyncio.gather(*asked)
    assert [rows_in(answer) for answer in answers] == [[n + 1.0] for n in range(6)]
    assert len(worker.engine.calls) < 6
    assert {answer.explanation for answer in answers} == {None}
    assert not worker.core.infer.called


@pytest.mark.parametrize(
    "config",
    [
        replace(PICTURES, parameters={}),
        replace(PICTURES, backend="onnxruntime"),
        replace(PICTURES, has_dynamic_batching=False),
        replace(PICTURES, unmerged="its rows depend on each other"),
        replace(PICTURES, unmerged=None),
        None,
    ],
    ids=["tensors", "another backend", "no batcher", "rows that may not share a call", "not tried yet", "not loaded"],
)
async def test_other_models_are_called_as_before(config: ModelConfig | None) -> None:
    """Only pictures share calls, and only where a trial showed that rows are independent."""
    async with bench(config) as worker:
        assert not worker.batches.owns("m")
        with pytest.raises(EngineUnavailable, match="'m' is being reloaded"):
            await worker.batches.infer(asking(1), client="one")


async def test_model_of_the_core_is_the_cores() -> None:
    """What the gateway batches, or has an engine process of its own, is asked of the core."""
    async with bench(core_owns=True) as worker:
        assert worker.batches.owns("m")
        assert cast(object, await worker.batches.infer(asking(1), client="one")) == "the core's"
        worker.batches.refuse_hopeless("m", rows=1, deadline=None)
        assert worker.core.refuse_hopeless.called
    async with bench(is_apart=True) as worker:
        assert not worker.batches.owns("m")


async def test_model_that_is_loaded_with_other_options_has_them_at_once() -> None:
    """A batcher of the former options takes no new picture."""
    async with bench() as worker:
        await worker.batches.infer(asking(*range(8)), client="one")
        worker.known["m"] = SimpleNamespace(config=replace(PICTURES, max_batch_size=2), is_ready=True)
        worker.engine.forget()
        await asyncio.gather(*[worker.batches.infer(asking(float(n)), client="one") for n in range(6)])
    assert max(map(len, worker.engine.calls)) <= 2
