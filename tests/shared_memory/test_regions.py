"""Regions over an engine that records its calls."""

import asyncio
from collections.abc import Collection

import pytest
from tritonclient.grpc import service_pb2

from penstock.gateway.shared_memory import regions
from penstock.gateway.shared_memory.regions import EngineTraits, SharedMemory
from penstock.gateway.shared_memory.registry import RegionLoss, RegistryLimits
from penstock.protocol.call import GrpcAnswer, GrpcCall, RegionUse
from penstock.protocol.errors import (
    EngineFailed,
    EngineUnavailable,
    InvalidRequest,
    NotSupported,
    RegionNotFound,
    RegionTaken,
)
from penstock.protocol.identity import Identity
from penstock.protocol.shared_memory import CudaRegionSpec, RegionKind, SystemRegionSpec
from penstock.testing import FakeEngine

HERE = Identity(address="127.0.0.1")
OVER_GRPC = Identity(connection="ipv4:127.0.0.1:4000", address="127.0.0.1")
LATER_GRPC = Identity(connection="ipv4:127.0.0.1:4001", address="127.0.0.1")
BOB = Identity("bob")


class FakeSegment:
    """So many bytes; `is_open` until it is closed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.is_open = True

    def size_bytes(self) -> int:
        assert self.is_open
        return self.size

    def close(self) -> None:
        assert self.is_open, "a segment is closed once"
        self.is_open = False


class RecordingEngine(FakeEngine):
    """names: what is registered there. calls: what was asked, in order. answer: given to the next calls, if set."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.asked: list[str] = []
        self.answer: GrpcAnswer | None = None

    async def send(self, call: GrpcCall, *, deadline: float | None) -> GrpcAnswer:
        assert deadline is not None
        await asyncio.sleep(0)
        method = call.method.rpartition("/")[2]
        name: str = service_pb2.SystemSharedMemoryUnregisterRequest.FromString(call.message).name
        self.asked.append(f"{method} {name}".rstrip())
        if self.answer is not None:
            return self.answer
        if method == "SystemSharedMemoryStatus":
            regions = service_pb2.SystemSharedMemoryStatusResponse()
            for known in sorted(self.names):
                regions.regions[known].name = known
            return GrpcAnswer(0, regions.SerializeToString())
        if method.endswith("Register"):
            self.names.add(name)
        elif name:
            self.names.discard(name)
        elif method.startswith("System"):
            self.names.clear()
        return GrpcAnswer(0)


class Bench:
    """A SharedMemory, its engine, and what the test decides: segments, the engine's generation, gone connections."""

    def __init__(self, *, is_ours: bool = True, takes_offsets: bool = False, has_cuda: bool = True) -> None:
        self.engine = RecordingEngine()
        self.segments: dict[str, FakeSegment] = {"seg": FakeSegment(64)}
        self.opened: list[FakeSegment] = []
        self.generation = 1
        self.gone: set[str] = set()
        self.memory = SharedMemory(
            self.engine,
            EngineTraits(is_ours=is_ours, takes_offsets=takes_offsets, has_cuda=has_cuda),
            limits=RegistryLimits(),
            open_segment=self._open,
            generation=lambda: self.generation,
            find_gone=self._find_gone,
        )

    def _open(self, name: str) -> FakeSegment:
        if name not in self.segments:
            raise FileNotFoundError(name)
        self.opened.append(FakeSegment(self.segments[name].size))
        return self.opened[-1]

    def _find_gone(self, watched: Collection[str]) -> set[str]:
        return self.gone & set(watched)

    async def register(self, name: str = "r", caller: Identity = HERE, size: int = 64) -> None:
        await self.memory.register(SystemRegionSpec(name, "/seg", 0, size), caller)


async def test_register_and_unregister_reach_the_engine_and_close_the_segment() -> None:
    """The engine's regions of former times go first, once: it may have served another gateway. Our own slab stays."""
    bench = Bench()
    bench.engine.names = {"former", "penstock_0123456789ab_slab"}
    await bench.register()
    assert (bench.memory.count(), bench.memory.size_bytes()) == (1, 64)
    assert bench.engine.names == {"r", "penstock_0123456789ab_slab"}
    await bench.memory.unregister(RegionKind.SYSTEM, "r", HERE)
    assert bench.engine.asked == [
        "SystemSharedMemoryStatus",
        "SystemSharedMemoryUnregister former",
        "CudaSharedMemoryUnregister",
        "SystemSharedMemoryRegister r",
        "SystemSharedMemoryUnregister r",
    ]
    assert bench.memory.count() == 0
    assert [segment.is_open for segment in bench.opened] == [False]


async def test_unregister_own_leaves_what_others_registered() -> None:
    """One by one: Triton's own unregister-all would take everybody's."""
    bench = Bench()
    await bench.register("mine", OVER_GRPC)
    await bench.register("other", LATER_GRPC)
    await bench.register("bob", BOB)
    await bench.memory.unregister(RegionKind.SYSTEM, "", OVER_GRPC)
    assert bench.engine.names == {"other", "bob"}
    await bench.memory.unregister(RegionKind.SYSTEM, "bob", OVER_GRPC)
    assert bench.engine.names == {"other", "bob"}


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (SystemRegionSpec("r", "/none", 0, 8), "Unable to open shared memory region: '/none'"),
        (SystemRegionSpec("r", "/seg", 0, 65), "failed to register shared memory region 'r': invalid args"),
        (SystemRegionSpec("r", "/seg", 0, 0), "invalid args"),
        (SystemRegionSpec("r", "/seg", 0, 2**64 - 1), "invalid args"),
        (SystemRegionSpec("r", "/seg", 32, 8), "begins at offset 32; Triton reads such a region at the wrong place"),
        (CudaRegionSpec("r", b"short", 0, 8), "invalid args"),
    ],
)
async def test_register_of_what_the_engine_must_not_see_is_refused(
    wish: SystemRegionSpec | CudaRegionSpec, words: str
) -> None:
    """Nothing is asked of the engine, and no segment stays open."""
    bench = Bench()
    with pytest.raises(InvalidRequest, match=words):
        await bench.memory.register(wish, HERE)
    assert bench.engine.asked == []
    assert not any(segment.is_open for segment in bench.opened)


async def test_register_at_an_offset_is_taken_by_an_engine_that_can() -> None:
    """Up to the segment's end."""
    bench = Bench(takes_offsets=True)
    await bench.memory.register(SystemRegionSpec("r", "/seg", 32, 32), HERE)
    with pytest.raises(InvalidRequest, match="invalid args"):
        await bench.memory.register(SystemRegionSpec("s", "/seg", 33, 32), HERE)
    assert bench.engine.names == {"r"}


async def test_register_that_the_engine_refuses_leaves_nothing() -> None:
    """The engine's words; the name is free again."""
    bench = Bench()
    await bench.register("first")
    bench.engine.answer = GrpcAnswer(3, details="the engine has its reasons")
    with pytest.raises(InvalidRequest, match="the engine has its reasons"):
        await bench.register()
    bench.engine.answer = None
    await bench.register()
    assert bench.engine.names == {"first", "r"}
    assert [segment.is_open for segment in bench.opened] == [True, False, True]


async def test_register_with_an_unknown_outcome_is_taken_back() -> None:
    """The engine may have it or not: it is unregistered before the name is given again."""
    bench = Bench()
    await bench.register("first")
    bench.engine.answer = GrpcAnswer(14, details="gone away")
    with pytest.raises(EngineUnavailable):
        await bench.register()
    bench.engine.answer = None
    await bench.register()
    assert bench.engine.asked[-2:] == ["SystemSharedMemoryUnregister r", "SystemSharedMemoryRegister r"]


async def test_held_region_cannot_be_unregistered() -> None:
    """As in Triton, in its words; unregister-all takes the others."""
    bench = Bench()
    await bench.register()
    await bench.register("free")
    with bench.memory.held([RegionUse("r", 0, 64)], HERE):
        with pytest.raises(EngineFailed, match="Cannot unregister shared memory region 'r', it is currently in use"):
            await bench.memory.unregister(RegionKind.SYSTEM, "r", HERE)
        with pytest.raises(EngineFailed, match="Failed to unregister the following system shared memory regions: r ,"):
            await bench.memory.unregister(RegionKind.SYSTEM, "", HERE)
        assert bench.engine.names == {"r"}
    await bench.memory.unregister(RegionKind.SYSTEM, "r", HERE)
    assert bench.engine.names == set()


async def test_sweep_leaves_what_the_engine_still_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton counts uses, too: of a request whose caller is gone it knows more than we do. It is tried again."""
    monkeypatch.setattr(regions, "SWEEP_S", 0.01)
    monkeypatch.setattr("penstock.gateway.shared_memory.registry.ORPHAN_S", 0.0)
    bench = Bench()
    await bench.register("r", OVER_GRPC)
    bench.gone = {OVER_GRPC.connection}
    bench.engine.answer = GrpcAnswer(13, details="Cannot unregister shared memory region 'r', it is currently in use.")
    sweeper = asyncio.create_task(bench.memory.run())
    async with asyncio.timeout(60):
        while bench.engine.asked.count("SystemSharedMemoryUnregister r") < 2:
            await asyncio.sleep(0.01)
        assert bench.memory.count() == 1
        bench.engine.answer = None
        while bench.memory.count():
            await asyncio.sleep(0.01)
    sweeper.cancel()
    assert bench.engine.names == set()
    assert bench.memory.lost() == {(RegionLoss.LEASE,): 0, (RegionLoss.CONNECTION,): 1}


async def test_name_of_a_region_that_stays_in_use_stays_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A register waits a while for what is about to go, and no longer."""
    monkeypatch.setattr(regions, "DRAIN_S", 0.1)
    bench = Bench()
    await bench.register("r", OVER_GRPC)
    with bench.memory.held([RegionUse("r", 0, 64)], HERE):
        bench.gone = {OVER_GRPC.connection}
        with pytest.raises(RegionTaken):
            await bench.register("r", LATER_GRPC)
    assert bench.engine.names == {"r"}


async def test_held_segment_that_was_cut_is_refused() -> None:
    """Its owner made it shorter: Triton would die of SIGBUS."""
    bench = Bench()
    await bench.register()
    bench.opened[0].size = 16
    words = "has 64 bytes, but its segment was cut to 16"
    with pytest.raises(InvalidRequest, match=words), bench.memory.held([RegionUse("r", 0, 8)], HERE):
        pass


async def test_regions_of_a_gone_connection_give_their_names_to_who_comes_again() -> None:
    """A client that was killed and started again registers what it did before, at once."""
    bench = Bench()
    await bench.register("r", OVER_GRPC)
    with pytest.raises(RegionTaken):
        await bench.register("r", LATER_GRPC)
    bench.gone = {OVER_GRPC.connection}
    await bench.register("r", LATER_GRPC)
    assert bench.engine.names == {"r"}
    bench.gone = {LATER_GRPC.connection}
    await bench.memory.unregister(
        RegionKind.SYSTEM, "", Identity(connection="ipv4:127.0.0.1:4002", address="127.0.0.1")
    )
    assert bench.engine.names == set()


@pytest.mark.parametrize(
    ("is_ours", "asked"),
    [
        (
            True,
            [
                "SystemSharedMemoryStatus",
                "SystemSharedMemoryUnregister r",
                "CudaSharedMemoryUnregister",
                "SystemSharedMemoryRegister s",
            ],
        ),
        (False, ["SystemSharedMemoryUnregister r", "SystemSharedMemoryRegister s"]),
    ],
)
async def test_regions_end_with_the_engine(is_ours: bool, asked: list[str]) -> None:
    """Unknown from then on; its own leftovers are removed, but not those of others on an external engine."""
    bench = Bench(is_ours=is_ours)
    await bench.register()
    bench.generation += 1
    bench.engine.asked.clear()
    with pytest.raises(RegionNotFound), bench.memory.held([RegionUse("r", 0, 8)], HERE):
        pass
    assert not bench.opened[0].is_open
    await bench.register("s")
    assert bench.engine.asked == asked


async def test_cuda_region_is_passed_on_as_it_is() -> None:
    """Its handle means nothing to us; only its size bounds what requests may name."""
    bench = Bench()
    await bench.memory.register(CudaRegionSpec("gpu", bytes(64), 0, 128), HERE)
    assert bench.engine.asked[-1] == "CudaSharedMemoryRegister gpu"
    with pytest.raises(InvalidRequest), bench.memory.held([RegionUse("gpu", 120, 16)], HERE):
        pass
    assert [region.name for region in bench.memory.status(RegionKind.CUDA, HERE)] == ["gpu"]
    assert bench.memory.status(RegionKind.SYSTEM, HERE) == []


async def test_cuda_is_not_supported_where_the_engine_has_none() -> None:
    """Each question about it says so."""
    memory = Bench(has_cuda=False).memory
    with pytest.raises(NotSupported, match="shares no GPU memory"):
        await memory.register(CudaRegionSpec("gpu", bytes(64), 0, 128), HERE)
    with pytest.raises(NotSupported):
        memory.status(RegionKind.CUDA, HERE)
    with pytest.raises(NotSupported):
        await memory.unregister(RegionKind.CUDA, "", HERE)
