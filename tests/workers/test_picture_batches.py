"""A worker's own calls for pictures that Triton batches."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest

from penstock.engines.model_health import EngineView
from penstock.gateway.batching.engine_call import BatchEngine, BatchMember, EngineCall
from penstock.gateway.batching.entries import Batch
from penstock.gateway.batching.options import BatchOptions, DeclaredOptions
from penstock.gateway.batching.queue import QueueStatistics
from penstock.gateway.workers.picture_batches import PictureBatches, ReportedQueues, share_of
from penstock.protocol.engine import ModelConfig
from penstock.protocol.errors import DeadlineExceeded, EngineUnavailable, Overloaded
from penstock.protocol.inference import BatchOwner, CloseReason, EngineTimeFit
from tests.batching.echo_engine import EchoEngine, asking, rows_in

PICTURES = ModelConfig(
    "m", "torch", 8, (), (), has_dynamic_batching=True, unmerged="", parameters={"image-decoder": "engine"}
)


class Bench:
    """A worker with one model. config: None when it is gone. core: what the core is asked."""

    def __init__(
        self,
        config: ModelConfig | None = PICTURES,
        *,
        core_owns: bool = False,
        is_apart: bool = False,
        workers: int = 1,
    ) -> None:
        self.engine = EchoEngine()
        self.core = Mock(owns=Mock(return_value=core_owns), infer=AsyncMock(return_value="the core's"))
        self.known: dict[str, Any] = {"m": SimpleNamespace(config=config, is_ready=True)}
        self.batches = PictureBatches(
            self.core,
            self.engine,
            cast(EngineView, SimpleNamespace(models=self.known)),
            DeclaredOptions(),
            workers=workers,
            is_apart=lambda _: is_apart,
        )


@asynccontextmanager
async def bench(config: ModelConfig | None = PICTURES, **how: Any) -> AsyncIterator[Bench]:
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


def member(deadline: float | None) -> BatchMember:
    """A request in a batch, with that deadline."""
    request, answer = asking(1.0, deadline=deadline), asyncio.get_running_loop().create_future()
    return BatchMember(
        key="m", rows=1, size_bytes=4, arrived_at=time.monotonic(), deadline=deadline, request=request, answer=answer
    )


@pytest.mark.parametrize(
    ("left_s", "is_queued_again", "timeout_s"),
    [((20.0, 40.0), True, 40.0), ((20.0, None), True, None), ((20.0, 40.0), False, None)],
    ids=["last deadline", "one without", "core's call"],
)
async def test_triton_gets_the_time_until_the_last_deadline_of_a_workers_call(
    left_s: tuple[float | None, ...], timeout_s: float | None, *, is_queued_again: bool
) -> None:
    """Its queue drops the call then. A picture without a deadline keeps the call in the queue."""
    now, engine = time.monotonic(), EchoEngine()
    members = tuple([member(None if left is None else now + left) for left in left_s])
    batch = Batch(1, members, 2, CloseReason.FULL, now, 0)
    call = EngineCall(batch, BatchEngine(engine, 2, is_queued_again=is_queued_again), lambda _: None)
    await call.ask()
    call.close()
    timeout_us = engine.requests[0].parameters.get("timeout")
    assert timeout_us == (None if timeout_s is None else pytest.approx(timeout_s * 1e6, rel=0.2))


async def test_call_that_triton_dropped_fails_its_picture_and_is_not_sent_again() -> None:
    """The client gets 504, and the next picture is served."""
    async with bench() as worker:
        worker.engine.refusals.append(DeadlineExceeded("the engine dropped the request: Request timeout expired"))
        with pytest.raises(DeadlineExceeded, match="timeout expired"):
            await worker.batches.infer(asking(1.0, deadline=time.monotonic() + 30), client="one")
        assert len(worker.engine.calls) == 1
        assert rows_in(await worker.batches.infer(asking(3.0), client="one")) == [4.0]


async def test_full_queue_refuses_as_the_core_would() -> None:
    """503 with the reason, at the worker's share of max_queue_size."""
    config = replace(PICTURES, parameters={"image-decoder": "engine", "max_queue_size": "4"})
    async with bench(config, workers=2) as worker:
        worker.engine.gate.clear()
        running = asyncio.create_task(worker.batches.infer(asking(*range(8)), client="one"))
        await worker.engine.called(1)
        waiting = [asyncio.create_task(worker.batches.infer(asking(1.0), client="one")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match=r"2 requests \(limit 2\) wait") as refused:
            await worker.batches.infer(asking(1.0), client="one")
        assert worker.batches.statistics()["m"].depth == 2
        worker.engine.gate.set()
        await asyncio.gather(running, *waiting)
    assert (refused.value.reason, worker.batches.statistics()["m"].dropped) == ("queue_full", {"queue_full": 1})


@pytest.mark.parametrize(
    ("instances", "workers", "share"),
    [(6, 11, (2, 21)), (6, 2, (3, 64)), (1, 8, (2, 8)), (2, 2, (1, 64)), (6, 4, (2, 56))],
    ids=["more workers", "fewer workers", "one instance", "as many", "half an instance more"],
)
def test_workers_share_calls_rows_and_queue(instances: int, workers: int, share: tuple[int, int]) -> None:
    """Together they keep every instance busy, and have few more rows in Triton than the core would."""
    options = BatchOptions(BatchOwner.TRITON, max_batch_size=64, instances=instances, max_queue_bytes=1 << 20)
    own = share_of(options, rows=64, workers=workers)
    assert (own.instances, own.max_batch_size) == share
    assert own.instances * workers >= instances
    assert own.max_queue_bytes * workers >= 1 << 20
    assert own.owner is BatchOwner.GATEWAY


def queue_of(calls: int, *, depth: int = 0, wait_s: float | None = None) -> QueueStatistics:
    """A worker's queue after so many calls."""
    fit = EngineTimeFit(0.001, 0.0001, 0.0, calls)
    closed = {CloseReason.FULL: calls}
    return QueueStatistics(depth, depth, depth, depth, 8, fit, wait_s, {2: calls}, closed, {"queue_full": 1})


def test_core_adds_the_queues_of_all_workers() -> None:
    """The predicted wait is the longest."""
    reported = ReportedQueues()
    reported.take(1, {"m": queue_of(5, depth=2, wait_s=0.01)})
    reported.take(2, {"m": queue_of(7, depth=1, wait_s=0.04)})
    found = reported.joined({"other": queue_of(1)})
    assert set(found) == {"m", "other"}
    assert (found["m"].depth, found["m"].in_flight, found["m"].wait_s) == (3, 3, 0.04)
    assert (found["m"].closed_by, found["m"].dropped) == ({CloseReason.FULL: 12}, {"queue_full": 2})


def test_counts_of_a_killed_worker_stay() -> None:
    """Nothing waits in it any longer. Its replacement begins at zero, and no counter falls."""
    reported = ReportedQueues()
    reported.take(1, {"m": queue_of(5, depth=2)})
    reported.lost(1)
    assert (reported.joined({})["m"].depth, reported.joined({})["m"].closed_by) == (0, {CloseReason.FULL: 5})
    reported.take(1, {"m": queue_of(2)})
    assert reported.joined({})["m"].closed_by == {CloseReason.FULL: 7}
    reported.take(1, {"m": queue_of(4)})
    assert reported.joined({})["m"].closed_by == {CloseReason.FULL: 9}
    reported.take(1, {})
    assert reported.joined({})["m"].closed_by == {CloseReason.FULL: 9}
