"""Other programs of this host at the core's socket, beside its fronts."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from server.core.backend import Backend
from server.core.errors import BackendUnavailable, InferenceError, Overloaded
from server.core.infer import InferRequest, InferResponse
from server.core.tensor import tensor_from_numpy
from server.local import core_link, core_server
from server.local.core_link import CoreLink
from server.local.core_server import CoreServer
from server.local.guest_calls import GuestCalls
from server.local.guests import MAX_GUESTS, GuestRoom, guest_room, with_guest_room
from server.local.lent_slab import BorrowedSlab, Lender
from server.local.messages import Hello, Visit
from server.local.slab import SharedSlab
from server.local.slab_memory import nameless_memory
from server.metrics import Metrics
from tests.local.test_core_link import FakeEngine, FakeWatch, request, until

PART = 1 << 20
LARGE = tensor_from_numpy("LARGE", np.arange(20_000, dtype=np.float32).reshape(1, -1))


@dataclass
class FakePlane:
    """Lets everything in."""

    engine: FakeEngine

    async def infer_tensors(
        self, request: InferRequest, alone: Backend, *, client: str, priority: int = 0
    ) -> InferResponse | InferenceError:
        if not self.engine.owns(request.model_name):
            return await alone.infer(request)
        return await self.engine.infer(request, client=client, priority=priority)

    def model_label(self, model_name: str) -> str:
        return model_name


@dataclass
class Core:
    """A core with a slab, and whoever is at its socket."""

    folder: Path
    server: CoreServer
    engine: FakeEngine
    slab: SharedSlab
    running: list["asyncio.Task[None]"]
    metrics: Metrics
    watch: FakeWatch

    async def join(self, greeting: Hello | Visit, slab: BorrowedSlab | None = None) -> CoreLink:
        link = CoreLink(self.folder, greeting, max_asks=8, slab=slab)
        self.running.append(asyncio.create_task(link.run()))
        return link

    async def joined(self, greeting: Hello | Visit, slab: BorrowedSlab | None = None) -> CoreLink:
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
    slab.renew(nameless_memory(8 * PART))
    lender = Lender(slab, 2 * PART, GuestRoom(PART, 2))
    watch, metrics = FakeWatch(), Metrics()
    server = CoreServer(folder, watch, engine, engine, lender=lender)  # type: ignore[arg-type]
    server.guests = GuestCalls(FakePlane(engine), engine, metrics, lambda error: error.reason, lender)
    core = Core(folder, server, engine, slab, [asyncio.create_task(server.run())], metrics, watch)
    try:
        async with asyncio.timeout(60):
            yield core
    finally:
        for task in core.running:
            task.cancel()
        await asyncio.gather(*core.running, return_exceptions=True)
        await asyncio.sleep(0)


async def test_guest_is_answered_and_is_no_front(tmp_path: Path) -> None:
    """It is counted apart, told of the engine, and its large tensors pass through its part of the slab."""
    async with core_in(tmp_path) as core:
        await core.joined(Hello(1))
        slab = BorrowedSlab(asyncio.get_running_loop().call_later)
        guest = await core.joined(Visit("video"), slab)
        await until(lambda: slab.generation)
        answer = await guest.infer(InferRequest("owned", (LARGE,)), client="video")
        assert answer.outputs[0].to_numpy().tolist() == LARGE.to_numpy().tolist()
        assert core.engine.asked[0][0].inputs[0].place is not None
        assert (core.server.front_count, core.server.guest_count) == (1, 1)


async def test_guest_that_hangs_holds_up_no_change_of_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who loads a model waits for the fronts to know of it, and never for a guest."""
    monkeypatch.setattr(core_server, "SPREAD_S", 15.0)
    async with core_in(tmp_path) as core:
        await core.joined(Hello(1))
        guest = await core.joined(Visit("video"))
        monkeypatch.setattr(guest, "_send", lambda record: None)
        started = time.monotonic()
        await core.server.spread()
        assert time.monotonic() - started < 10


async def test_guest_that_dies_leaves_nothing_running_and_its_part_comes_back(tmp_path: Path) -> None:
    """What it asked for is cancelled; two parts are lent at most, and a third guest gets one when it is free."""
    async with core_in(tmp_path) as core:
        core.engine.holds = True
        slabs = [BorrowedSlab(asyncio.get_running_loop().call_later) for _ in range(3)]
        await core.joined(Visit("third"), slabs[2])
        await until(lambda: slabs[2].generation)
        await core.joined(Visit("first"), slabs[0])
        await until(lambda: slabs[0].generation)
        waiting = await core.joined(Visit("second"), slabs[1])
        await waiting.find("new")  # the core has looked since
        await asyncio.sleep(3 * core_server.LOOK_S)
        assert not slabs[1].generation
        core.running[-1], core.running[-2] = core.running[-2], core.running[-1]
        first = core.running[-1]
        guest_asks = asyncio.create_task(waiting.infer(request(), client="c"))
        await core.engine.entered.wait()
        first.cancel()  # dies with nothing of its own running
        core.running.pop()
        await asyncio.gather(first, return_exceptions=True)
        await until(lambda: slabs[1].generation)
        assert not core.engine.cancelled.is_set()
        await core.leave()
        await core.engine.cancelled.wait()
        with pytest.raises(BackendUnavailable):
            await guest_asks
        await until(lambda: core.server.guest_count == 1)


async def test_guests_beyond_the_limit_are_told_so_and_come_in_when_one_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fronts are let in whatever guests there are."""
    monkeypatch.setattr(core_link, "_ASK_AGAIN_S", 0.05)
    async with core_in(tmp_path) as core:
        for number in range(MAX_GUESTS):
            await core.joined(Visit(f"guest {number}"))
        last = core.running[-1]
        late = await core.join(Visit("late"))
        await until(lambda: "already" in late.reason)
        assert not late.is_up
        await core.joined(Hello(1))
        assert (core.server.front_count, core.server.guest_count) == (1, MAX_GUESTS)
        last.cancel()
        await late.first_up.wait()


async def test_guest_that_asks_too_much_at_once_is_refused_and_fronts_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core counts; what a guest says of its own limit is no limit."""
    monkeypatch.setattr(core_server, "MAX_GUEST_ASKS", 2)
    async with core_in(tmp_path) as core:
        core.engine.holds = True
        guest, front = await core.joined(Visit("video")), await core.joined(Hello(1))
        asks = [asyncio.create_task(link.infer(request(), client="c")) for link in (guest, guest, front, front, front)]
        await until(lambda: len(core.engine.asked) == 5)
        with pytest.raises(Overloaded, match="2 requests of this program"):
            await guest.infer(request(), client="c")
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)


async def test_drain_lets_guests_end_what_they_have_and_takes_nothing_new(tmp_path: Path) -> None:
    """What does not end in its time is cut; fronts are none of its business."""
    async with core_in(tmp_path) as core:
        core.engine.holds = True
        guest = await core.joined(Visit("video"))
        assert await core.server.drain(0.01)
        core.server._is_draining = False
        asked = asyncio.create_task(guest.infer(request(), client="c"))
        await core.engine.entered.wait()
        assert not await core.server.drain(0.01)
        draining = asyncio.create_task(core.server.drain(20))
        with pytest.raises(Overloaded, match="about to stop") as refused:
            await guest.infer(request(), client="c")
        assert refused.value.reason == "draining"
        core.engine.release.set()
        assert await draining
        assert (await asked).id == "id-7"


def test_parts_of_guests_that_come_and_go_never_take_the_cores_own_room() -> None:
    """A part counts until nobody reads it: a guest that dies again and again is lent two at most."""
    lingering: list[object] = []
    slab = SharedSlab(lambda _, release: lingering.append(release))
    slab.renew(nameless_memory(8 * PART))
    lender = Lender(slab, PART, GuestRoom(PART, 2))
    lent = 0
    for number in range(5):
        lent += lender.due(f"guest {number}", is_guest=True) is not None
        lender.gone(f"guest {number}")
    assert (lent, len(lingering)) == (2, 2)
    for release in lingering:
        assert callable(release)
        release()
    assert lender.due("another", is_guest=True) is not None


def test_memory_of_the_gateway_itself_is_not_less_with_guests() -> None:
    """What guests are lent comes on top."""
    own = 256 << 20
    room = guest_room(own)
    assert with_guest_room(own) == own + room.parts * room.part_bytes
    assert room.part_bytes == 64 << 20
    assert with_guest_room(0) == 0
