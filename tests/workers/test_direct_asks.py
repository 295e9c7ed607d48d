"""Fronts' inferences in the core's own queues: answered, refused, given up, without a task for any of them."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.gateway.batching.batcher import BatcherPool
from penstock.gateway.batching.options import BatchOptions
from penstock.gateway.workers.client import CoreClient
from penstock.gateway.workers.connection import WorkerHello
from penstock.gateway.workers.core_server import CoreServer
from penstock.protocol.cancellation import CancelStage, when_stage_known
from penstock.protocol.errors import DeadlineExceeded, EngineFailed, InferenceError
from penstock.protocol.inference import BatchOwner
from tests.workers.test_core_link import FakeEngine, FakeWatch, request, short_path

__all__ = ["short_path"]
pytestmark = pytest.mark.usefixtures("short_path")
OPTIONS = BatchOptions(owner=BatchOwner.GATEWAY, max_batch_size=1, instances=1)


@dataclass
class Rig:
    """The engine has one call at a time, of one row, and a second just before it ends; what comes besides waits."""

    link: CoreClient
    engine: FakeEngine
    queues: BatcherPool
    server: CoreServer

    async def crowd(self, count: int) -> "list[asyncio.Task[object]]":
        """So many requests, all of which the core has."""
        asked = [asyncio.create_task(self.link.infer(request(), client="c")) for _ in range(count)]
        await self.until(lambda: self.engine.asked and self.kept() == count)
        return asked

    def kept(self) -> int:
        return sum(len(front.asks) for front in self.server._fronts.values())

    @staticmethod
    async def until(is_so: object) -> None:
        async with asyncio.timeout(30):
            while not is_so():  # type: ignore[operator]
                await asyncio.sleep(0.001)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig_in(tmp_path) as rig:
        yield rig


@asynccontextmanager
async def rig_in(folder: Path) -> AsyncIterator[Rig]:
    engine = FakeEngine()
    queues = BatcherPool(engine, lambda name: OPTIONS if name == "owned" else None)  # type: ignore[arg-type]
    server = CoreServer(FakeWatch(), engine, queues)  # type: ignore[arg-type]
    link = CoreClient(folder, WorkerHello(1), max_asks=64)
    tasks = [asyncio.create_task(server.run(folder)), asyncio.create_task(link.run())]
    try:
        async with asyncio.timeout(60):
            await link.first_up.wait()
            yield Rig(link, engine, queues, server)
    finally:
        engine.release.set()
        for task in reversed(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await queues.aclose()
        await asyncio.sleep(0)


async def test_answers_of_a_crowd_come_by_their_numbers_and_no_task_is_made_for_any(rig: Rig) -> None:
    """What is not the gateway's is asked of the engine alone, by a task as ever."""
    answers = await asyncio.gather(*[rig.link.infer(request(), client="c") for _ in range(20)])
    assert {answer.id for answer in answers} == {"id-7"}
    assert all(answer.explanation is not None for answer in answers)
    assert rig.kept() == 0
    assert (await rig.link.infer(request("other"), client="c")).explanation is None


async def test_refusals_keep_their_class(rig: Rig) -> None:
    """Before the queue, and of the engine's; an unexpected one is an internal error, and logged."""
    with pytest.raises(DeadlineExceeded):
        await rig.link.infer(request(deadline=time.monotonic() - 0.01), client="c")
    rig.engine.error = EngineFailed("the engine's own words")
    with pytest.raises(EngineFailed, match="the engine's own words"):
        await rig.link.infer(request(), client="c")
    rig.engine.error = ValueError("a bug")  # type: ignore[assignment]
    with pytest.raises(InferenceError, match="internal error"):
        await rig.link.infer(request(), client="c")
    assert rig.kept() == 0


async def test_bug_on_the_way_into_the_queue_is_one_requests_end_and_not_the_lines(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the front asked before is answered over the same line."""
    rig.engine.holds = True
    before = await rig.crowd(1)

    def enter(*_: object, **__: object) -> object:
        raise ValueError("a bug")

    monkeypatch.setattr(rig.queues, "enter", enter)
    with pytest.raises(InferenceError, match="internal error"):
        await rig.link.infer(request(), client="c")
    rig.engine.release.set()
    await asyncio.gather(*before)


@pytest.mark.parametrize(("which", "where"), [(0, CancelStage.BATCH), (-1, CancelStage.QUEUE)])
async def test_who_leaves_hears_where_the_request_was(rig: Rig, which: int, where: CancelStage) -> None:
    """Its place is free at once; the others are answered."""
    rig.engine.holds = True
    asked = await rig.crowd(4)
    asked[which].cancel()
    stages: list[CancelStage] = []
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await asked[which]
    when_stage_known(cancelled.value, CancelStage.STREAM, stages.append)
    await rig.until(lambda: stages)
    assert stages == [where]
    assert rig.kept() == 3
    rig.engine.release.set()
    del asked[which]
    await asyncio.gather(*asked)


async def test_front_that_dies_leaves_nothing_in_the_queue(rig: Rig) -> None:
    """What it requested is cancelled."""
    rig.engine.holds = True
    asked = await rig.crowd(4)
    assert rig.link._line is not None
    rig.link._line.close()
    await rig.until(lambda: rig.queues.statistics()["owned"].depth == 0)
    await asyncio.gather(*asked, return_exceptions=True)
    await rig.until(rig.engine.cancelled.is_set)
