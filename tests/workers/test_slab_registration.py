"""The slab at an engine that comes, goes, refuses and forgets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tritonclient.grpc import service_pb2

from penstock.engines.torch_serving.slab_pictures import SlabReader
from penstock.gateway.workers import slab_registration
from penstock.gateway.workers.slab import SHARED_MEMORY, SharedSlab
from penstock.gateway.workers.slab_registration import SlabEngine, SlabRegistration
from penstock.protocol.call import GrpcAnswer, GrpcCall
from penstock.protocol.errors import EngineUnavailable
from penstock.protocol.inference import SlabAddress
from penstock.protocol.shared_memory import is_slab_name
from penstock.testing import FakeEngine

SIZE = 1 << 20


class Engine(FakeEngine):
    """A Triton's registry. refusal: what the next registrations are answered; is_away: nothing is answered at all."""

    def __init__(self) -> None:
        super().__init__()
        self.generation = 1
        self.regions: set[str] = set()
        self.refusal: GrpcAnswer | None = None
        self.is_away = False
        self.tries = 0
        self.read: dict[str, Callable[[], None]] = {}
        self.were_there: list[bool] = []

    async def send(self, call: GrpcCall, *, deadline: float | None) -> GrpcAnswer:
        if call.method.endswith("Status"):
            answer = service_pb2.SystemSharedMemoryStatusResponse()
            for name in self.regions:
                answer.regions[name].name = name
            return GrpcAnswer(0, answer.SerializeToString())
        if call.method.endswith("Unregister"):
            self.regions.discard(service_pb2.SystemSharedMemoryUnregisterRequest.FromString(call.message).name)
            return GrpcAnswer(0)
        self.tries += 1
        if self.is_away:
            raise EngineUnavailable("away")
        if self.refusal is not None:
            return self.refusal
        wish = service_pb2.SystemSharedMemoryRegisterRequest.FromString(call.message)
        self.were_there.append(_is_there(wish.key.lstrip("/")) and wish.byte_size == SIZE)
        self.regions.add(wish.name)
        return GrpcAnswer(0)

    def use_region(self, name: str, lost: Callable[[], None]) -> None:
        self.read[name] = lost

    def drop_region(self, name: str) -> None:
        self.read.pop(name, None)

    def restart(self) -> None:
        self.regions.clear()
        self.read.clear()
        self.generation += 1


def at(engine: Engine) -> SlabEngine:
    return SlabEngine(engine, engine, lambda: engine.generation)


def _is_there(name: str) -> bool:
    return (SHARED_MEMORY / name).exists()


class Bench:
    """An engine, the slab, and what keeps the one known to the other."""

    def __init__(self, published: Path | None = None) -> None:
        self.engine = Engine()
        self.later: list[object] = []
        self.slab = SharedSlab(lambda *later: self.later.append(later))
        self.registration = SlabRegistration(self.slab, [at(self.engine)], size_bytes=SIZE, published=published)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.registration.run())
        yield
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not is_so():
                await asyncio.sleep(0.002)

    def region(self) -> str:
        """Where leases are now."""
        lease = self.slab.lease(1)
        assert lease is not None
        lease.release()
        return lease.place.region


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    monkeypatch.setattr(slab_registration, "LOOK_S", 0.002)
    monkeypatch.setattr(slab_registration, "RETRY_S", 0.002)
    return Bench(tmp_path / "slab")


async def test_engine_that_comes_up_opens_a_file_that_has_no_name_afterwards(bench: Bench) -> None:
    """Leases are of what it opened, and it reads there; the end takes both back."""
    async with bench.running():
        await bench.until(lambda: bool(bench.engine.read))
        assert bench.engine.were_there == [True]
        assert {bench.region()} == set(bench.engine.read) == bench.engine.regions
        assert not _is_there(bench.region())
    assert not bench.engine.read
    await bench.registration.aclose()
    assert not bench.engine.regions


async def test_engine_that_comes_again_opens_another_file(bench: Bench) -> None:
    """Another generation, another region; what lies in the former is sent from then on."""
    async with bench.running():
        await bench.until(lambda: bool(bench.engine.read))
        former = bench.region()
        bench.engine.regions.clear()
        bench.engine.generation += 1
        await bench.until(lambda: bool(bench.engine.read.keys() - {former}))
        assert set(bench.engine.read) == {bench.region()} != {former}


async def test_models_read_each_memory_that_can_be_published(bench: Bench, tmp_path: Path) -> None:
    """Also the one after an engine's restart. An engine that is not ours, or a full disk, is sent the bytes."""
    references: list[bytes] = []
    async with bench.running():
        for generation in (1, 2):
            await bench.until(lambda: bench.slab.generation == bench.engine.generation)
            lease = bench.slab.lease(8)
            assert lease is not None
            lease.view[:] = b"picture%d" % generation
            reference = bench.slab.reference(lease.place, 8)
            assert reference is not None
            references.append(reference)
            bench.engine.generation += 1
            reader = SlabReader(str(tmp_path / "slab"))  # of a process that has just begun
            assert [reader.picture(one) for one in references] == [b"picture1", b"picture2"][:generation]
            lease.release()
    other = Bench(tmp_path / "missing" / "slab")
    async with other.running():
        await other.until(lambda: bool(other.engine.read))
        assert other.slab.reference(SlabAddress(other.region(), other.slab.generation, 0), 8) is None


async def test_engine_that_lost_the_region_gets_another(bench: Bench) -> None:
    """Another program unregistered everything: the backend noticed, and the slab comes back."""
    async with bench.running():
        await bench.until(lambda: bool(bench.engine.read))
        former = bench.region()
        bench.engine.read[former]()
        await bench.until(lambda: bool(bench.engine.read.keys() - {former}))
        assert bench.engine.regions == {bench.region()}, "what is left of the former one is cleared away"


async def test_engine_that_refuses_is_asked_once_a_coming_and_sent_every_byte(bench: Bench) -> None:
    """In a container of its own, on another machine behind a loopback port: no leases, and no end of tries."""
    bench.engine.refusal = GrpcAnswer(13, details="Unable to open shared memory region")
    async with bench.running():
        await bench.until(lambda: bench.engine.tries == 1)
        assert bench.slab.lease(1) is None
        bench.engine.generation += 1
        await bench.until(lambda: bench.engine.tries >= 2)
        bench.engine.refusal = None
        bench.engine.generation += 1
        await bench.until(lambda: bool(bench.engine.read))
        assert bench.engine.tries == 3


async def test_engine_that_does_not_answer_is_asked_again(bench: Bench) -> None:
    """Until it says yes or no."""
    bench.engine.is_away = True
    async with bench.running():
        await bench.until(lambda: bench.engine.tries >= 2)
        bench.engine.is_away = False
        await bench.until(lambda: bool(bench.engine.read))


@pytest.fixture
def pair(bench: Bench) -> tuple[Bench, Engine]:
    """A second engine beside the bench's."""
    second = Engine()
    bench.registration = SlabRegistration(bench.slab, [at(bench.engine), at(second)], size_bytes=SIZE)
    return bench, second


async def test_several_engines_read_the_same_memory_while_one_comes_and_goes(pair: tuple[Bench, Engine]) -> None:
    """The one that comes up opens the file again; leases and the other engine do not notice. The end removes it."""
    bench, second = pair
    second.generation = 0
    async with bench.running():
        await bench.until(lambda: bool(bench.engine.read))
        region, lease = bench.region(), bench.slab.lease(8)
        assert not second.read, "it has not answered yet"
        second.generation = 1
        await bench.until(lambda: bool(second.read))
        for _ in range(2):
            second.restart()
            await bench.until(lambda: bool(second.read))
        second.read.pop(region)()  # another program unregistered everything, or an answer was late
        await bench.until(lambda: bool(second.read))
        assert bench.engine.regions == second.regions == {region} == {bench.region()}
        assert (bench.engine.tries, second.tries) == (1, 4)
        assert lease is not None
        assert bench.slab.lease_of(lease.place) is lease
        assert _is_there(region)
    assert not _is_there(region)
    await bench.registration.aclose()
    assert not bench.engine.regions | second.regions


async def test_engine_of_several_that_refuses_is_sent_every_byte_while_the_others_read(
    pair: tuple[Bench, Engine],
) -> None:
    """And the one that does not answer is asked again. If all refuse there are no leases, and no file."""
    bench, second = pair
    second.refusal = GrpcAnswer(13, details="Unable to open shared memory region")
    async with bench.running():
        await bench.until(lambda: bool(bench.engine.read))
        assert not second.read
        second.refusal, second.is_away = None, True
        second.generation += 1
        await bench.until(lambda: second.tries >= 3)
        second.is_away = False
        await bench.until(lambda: bool(second.read))
    names = {path.name for path in SHARED_MEMORY.glob("penstock_*_slab")}
    refused = Bench()
    refused.engine.refusal = second.refusal = GrpcAnswer(13)
    refused.registration = SlabRegistration(refused.slab, [at(refused.engine), at(second)], size_bytes=SIZE)
    async with refused.running():
        await refused.until(lambda: refused.engine.tries == 1)
        assert refused.slab.lease(1) is None
    assert {path.name for path in SHARED_MEMORY.glob("penstock_*_slab")} <= names


async def test_regions_of_gateways_that_are_gone_are_cleared_away_and_no_others(bench: Bench) -> None:
    """An engine that outlives a killed gateway does not keep its memory; a living neighbour's stays."""
    neighbour = Bench()
    neighbour.engine = bench.engine
    neighbour.registration = SlabRegistration(neighbour.slab, [at(bench.engine)], size_bytes=SIZE)
    bench.engine.regions = {"penstock_0123456789ab_slab", "a_clients"}
    async with neighbour.running():
        await bench.until(lambda: bool(bench.engine.read))
        theirs = neighbour.region()
        async with bench.running():
            await bench.until(lambda: len(bench.engine.read) == 2)
            assert bench.engine.regions == {"a_clients", theirs, bench.region()}
    assert all(map(is_slab_name, bench.engine.regions - {"a_clients"}))
