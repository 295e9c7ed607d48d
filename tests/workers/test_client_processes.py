"""Other programs of this host at the core's socket, beside its fronts."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from penstock.gateway.metrics import Metrics
from penstock.gateway.workers import client as core_link
from penstock.gateway.workers import core_server
from penstock.gateway.workers.client import CoreClient
from penstock.gateway.workers.connection import ClientHello, WorkerHello
from penstock.gateway.workers.core_server import CoreServer
from penstock.gateway.workers.inference_calls import ClientProcessCalls
from penstock.gateway.workers.slab import SharedSlab, anonymous_memory
from penstock.gateway.workers.slab_sharing import (
    MAX_CLIENT_PROCESSES,
    ClientSlab,
    SlabPartitions,
    client_slab_part_bytes,
    slab_bytes_with_client_parts,
)
from penstock.protocol.engine import Engine
from penstock.protocol.errors import EngineUnavailable, InferenceError, Overloaded
from penstock.protocol.inference import InferRequest, InferResponse, tensor_from_numpy
from tests.support.waiting import until
from tests.workers.test_core_link import FakeEngine, FakeWatch, request

PART = 1 << 20
LARGE = tensor_from_numpy("LARGE", np.arange(20_000, dtype=np.float32).reshape(1, -1))


@dataclass
class FakePlane:
    """Lets everything in."""

    engine: FakeEngine

    async def infer_tensors(
        self, request: InferRequest, alone: Engine, *, client: str, priority: int = 0
    ) -> InferResponse | InferenceError:
        if not self.engine.owns(request.model_name):
            return await alone.infer(request)
        return await self.engine.infer(request, client=client, priority=priority)

    def model_label(self, model_name: str) -> str:
        return model_name


@dataclass
class Core:
    """A core with a slab, and the peers at its socket."""

    folder: Path
    server: CoreServer
    engine: FakeEngine
    slab: SharedSlab
    running: list["asyncio.Task[None]"]
    metrics: Metrics
    watch: FakeWatch

    async def join(self, greeting: WorkerHello | ClientHello, slab: ClientSlab | None = None) -> CoreClient:
        link = CoreClient(self.folder, greeting, max_asks=8, slab=slab)
        self.running.append(asyncio.create_task(link.run()))
        return link

    async def joined(self, greeting: WorkerHello | ClientHello, slab: ClientSlab | None = None) -> CoreClient:
        link = await self.join(greeting, slab)
        await link.first_up.wait()
        return link

    async def leave(self) -> None:
        """The last that came."""
        task = self.running.pop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def core_in(folder: Path) -> AsyncIterator[Core]:
    engine, slab = FakeEngine(), SharedSlab(asyncio.get_running_loop().call_later)
    slab.renew(anonymous_memory(8 * PART))
    slab_partitions = SlabPartitions(slab, 2 * PART, PART)
    watch, metrics = FakeWatch(), Metrics()
    calls = ClientProcessCalls(FakePlane(engine), engine, metrics, lambda error: error.reason, slab_partitions)
    server = CoreServer(
        watch,  # type: ignore[arg-type]
        engine,
        engine,  # type: ignore[arg-type]
        slab_partitions=slab_partitions,
        client_calls=calls,
    )
    core = Core(folder, server, engine, slab, [asyncio.create_task(server.run(folder))], metrics, watch)
    try:
        async with asyncio.timeout(60):
            yield core
    finally:
        for task in core.running:
            task.cancel()
        await asyncio.gather(*core.running, return_exceptions=True)
        await asyncio.sleep(0)


async def test_client_process_is_answered_and_is_no_front(tmp_path: Path) -> None:
    """It is counted apart, gets the engine's state, and its large tensors pass through its part of the slab."""
    async with core_in(tmp_path) as core:
        await core.joined(WorkerHello(1))
        slab = ClientSlab(asyncio.get_running_loop().call_later)
        client = await core.joined(ClientHello("video"), slab)
        await until(lambda: slab.generation)
        answer = await client.infer(InferRequest("owned", (LARGE,)), client="video")
        assert answer.outputs[0].to_numpy().tolist() == LARGE.to_numpy().tolist()
        assert core.engine.asked[0][0].inputs[0].place is not None
        assert (core.server.front_count, core.server.client_process_count) == (1, 1)


async def test_client_process_that_hangs_holds_up_no_change_of_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load of a model waits until the fronts know of it, and never for a client process."""
    monkeypatch.setattr(core_server, "SPREAD_S", 15.0)
    async with core_in(tmp_path) as core:
        await core.joined(WorkerHello(1))
        client = await core.joined(ClientHello("video"))
        monkeypatch.setattr(client, "_send", lambda record: None)
        started = time.monotonic()
        await core.server.spread()
        assert time.monotonic() - started < 10


async def test_client_process_that_dies_leaves_nothing_running_and_its_part_comes_back(tmp_path: Path) -> None:
    """What it requested is cancelled; at most two parts are granted, and a third process gets one when it is free."""
    async with core_in(tmp_path) as core:
        core.engine.holds = True
        slabs = [ClientSlab(asyncio.get_running_loop().call_later) for _ in range(3)]
        await core.joined(ClientHello("third"), slabs[2])
        await until(lambda: slabs[2].generation)
        await core.joined(ClientHello("first"), slabs[0])
        await until(lambda: slabs[0].generation)
        waiting = await core.joined(ClientHello("second"), slabs[1])
        await waiting.find("new")  # the core has looked since
        await asyncio.sleep(3 * core_server.LOOK_S)
        assert not slabs[1].generation
        core.running[-1], core.running[-2] = core.running[-2], core.running[-1]
        first = core.running[-1]
        client_asks = asyncio.create_task(waiting.infer(request(), client="c"))
        await core.engine.entered.wait()
        first.cancel()  # dies with nothing of its own running
        core.running.pop()
        await asyncio.gather(first, return_exceptions=True)
        await until(lambda: slabs[1].generation)
        assert not core.engine.cancelled.is_set()
        await core.leave()
        await core.engine.cancelled.wait()
        with pytest.raises(EngineUnavailable):
            await client_asks
        await until(lambda: core.server.client_process_count == 1)


async def test_client_processes_beyond_the_limit_are_rejected_and_admitted_when_one_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fronts are admitted beside any number of client processes."""
    monkeypatch.setattr(core_link, "_RETRY_REJECTED_S", 0.05)
    async with core_in(tmp_path) as core:
        for number in range(MAX_CLIENT_PROCESSES):
            await core.joined(ClientHello(f"client {number}"))
        last = core.running[-1]
        late = await core.join(ClientHello("late"))
        await until(lambda: "already" in late.reason)
        assert not late.is_up
        await core.joined(WorkerHello(1))
        assert (core.server.front_count, core.server.client_process_count) == (1, MAX_CLIENT_PROCESSES)
        last.cancel()
        await late.first_up.wait()


async def test_client_process_with_too_many_calls_is_refused_and_fronts_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core counts; a limit that the client process states itself does not matter."""
    monkeypatch.setattr(core_server, "MAX_CLIENT_CALLS", 2)
    async with core_in(tmp_path) as core:
        core.engine.holds = True
        client, front = await core.joined(ClientHello("video")), await core.joined(WorkerHello(1))
        asks = [
            asyncio.create_task(link.infer(request(), client="c")) for link in (client, client, front, front, front)
        ]
        await until(lambda: len(core.engine.asked) == 5)
        with pytest.raises(Overloaded, match="2 requests of this program"):
            await client.infer(request(), client="c")
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)


async def test_drain_lets_client_processes_end_what_they_have_and_takes_nothing_new(tmp_path: Path) -> None:
    """What does not end in its time is cut; fronts are none of its business."""
    async with core_in(tmp_path) as core:
        core.engine.holds = True
        client = await core.joined(ClientHello("video"))
        assert await core.server.drain(0.01)
        core.server._is_draining = False
        asked = asyncio.create_task(client.infer(request(), client="c"))
        await core.engine.entered.wait()
        assert not await core.server.drain(0.01)
        draining = asyncio.create_task(core.server.drain(20))
        with pytest.raises(Overloaded, match="about to stop") as refused:
            await client.infer(request(), client="c")
        assert refused.value.reason == "draining"
        core.engine.release.set()
        assert await draining
        assert (await asked).id == "id-7"


def test_parts_of_client_processes_that_come_and_go_never_take_the_cores_own_room() -> None:
    """A part counts while it is read: a client process that dies again and again has two at most."""
    lingering: list[object] = []
    slab = SharedSlab(lambda _, release: lingering.append(release))
    slab.renew(anonymous_memory(8 * PART))
    slab_partitions = SlabPartitions(slab, PART, PART)
    lent = 0
    for number in range(5):
        lent += slab_partitions.due(f"client {number}", is_client_process=True) is not None
        slab_partitions.gone(f"client {number}")
    assert (lent, len(lingering)) == (2, 2)
    for release in lingering:
        assert callable(release)
        release()
    assert slab_partitions.due("another", is_client_process=True) is not None


def test_memory_of_the_gateway_itself_is_not_less_with_client_processes() -> None:
    """Client processes' parts come on top."""
    own = 256 << 20
    assert client_slab_part_bytes(own) == 64 << 20
    assert slab_bytes_with_client_parts(own) == own + 2 * (64 << 20)
    assert slab_bytes_with_client_parts(0) == 0
