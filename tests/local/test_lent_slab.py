"""Tensors that pass from a front to the core by their place."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from server.core.errors import BackendUnavailable, InvalidRequest
from server.core.infer import InferRequest
from server.core.tensor import tensor_from_bytes, tensor_from_numpy
from server.local.core_link import CoreLink
from server.local.core_server import CoreServer
from server.local.lent_slab import BorrowedSlab, Lender, by_place
from server.local.messages import Hello
from server.local.slab import SharedSlab
from server.local.slab_memory import Lent, lent_memory, nameless_memory
from tests.local.test_core_link import FakeEngine, FakeWatch

PART = 1 << 20
SIZE = 4 * PART
LARGE = tensor_from_numpy("LARGE", np.arange(20_000, dtype=np.float32).reshape(1, -1))
SMALL = tensor_from_numpy("SMALL", np.ones((1, 3), np.float32))
WORDS = tensor_from_bytes("WORDS", [bytes(100_000)])


class Reader:
    """A front's backend, as far as it knows regions."""

    def __init__(self) -> None:
        self.regions: set[str] = set()

    def use_region(self, name: str, lost: Callable[[], None]) -> None:
        self.regions.add(name)

    def drop_region(self, name: str) -> None:
        self.regions.discard(name)


class Bench:
    """A core with its slab, and a front."""

    def __init__(self) -> None:
        self.lingering: list[Callable[[], None]] = []
        self.slab = SharedSlab(lambda _, release: self.lingering.append(release))
        self.slab.renew(nameless_memory(SIZE))
        self.lender = Lender(self.slab, PART)
        self.reader = Reader()
        self.front = BorrowedSlab(lambda _, release: self.lingering.append(release), self.reader)

    def lend(self) -> Lent:
        lent = self.lender.due("front")
        assert lent is not None
        self.front.borrow(lent)
        return lent


def over_the_wire(request: InferRequest) -> InferRequest:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=InferRequest)


def test_large_tensor_is_not_sent_and_arrives_in_full() -> None:
    """Small ones and words are sent as they are."""
    bench = Bench()
    bench.lend()
    sent, leases = by_place(InferRequest("model", (LARGE, SMALL, WORDS)), bench.front)
    assert [tensor.data.nbytes for tensor in sent.inputs] == [0, SMALL.data.nbytes, WORDS.data.nbytes]
    arrived = bench.lender.in_full(over_the_wire(sent), "front")
    assert [bytes(tensor.data) for tensor in arrived.inputs] == [bytes(t.data) for t in (LARGE, SMALL, WORDS)]
    assert [tensor.place is not None for tensor in arrived.inputs] == [True, False, False]
    for lease in leases:
        lease.release()
    assert bench.front.statistics().leases == 0


def test_tensor_that_lies_in_the_part_already_is_not_copied() -> None:
    """A picture that a front decoded there; it is held until it is answered."""
    bench = Bench()
    bench.lend()
    lease = bench.front.lease(LARGE.data.nbytes)
    assert lease is not None
    lease.view[:] = LARGE.data
    placed = replace(LARGE, data=lease.view, place=lease.place)
    sent, leases = by_place(InferRequest("model", (placed,)), bench.front)
    assert sent.inputs[0].place == lease.place
    lease.release()
    assert bench.front.statistics().leases == 1
    leases[0].release()
    assert bench.front.statistics().leases == 0


def test_small_picture_that_lies_in_the_part_is_named_and_found_again() -> None:
    """One element of BYTES, which says itself how long it is; a lie is refused."""
    bench = Bench()
    bench.lend()
    picture = tensor_from_bytes("IN", [b"a picture"], (1, 1))
    lease = bench.front.lease(picture.data.nbytes)
    assert lease is not None
    lease.view[:] = picture.data
    sent, leases = by_place(InferRequest("model", (replace(picture, place=lease.place),)), bench.front)
    assert (len(leases), sent.inputs[0].data.nbytes) == (1, 0)
    (arrived,) = bench.lender.in_full(over_the_wire(sent), "front").inputs
    assert (bytes(arrived.data), arrived.place) == (bytes(picture.data), lease.place)
    lease.view[:4] = (PART).to_bytes(4, "little")
    with pytest.raises(InvalidRequest, match="does not lie in the memory"):
        bench.lender.in_full(over_the_wire(sent), "front")
    with pytest.raises(InvalidRequest, match="or one by its place"):
        bench.lender.in_full(InferRequest("model", (replace(sent.inputs[0], shape=(2, 1)),)), "front")


def test_tensor_that_cannot_be_copied_leaves_nothing_leased() -> None:
    """Neither its own room nor that of those before it."""
    bench = Bench()
    bench.lend()
    odd = replace(LARGE, data=memoryview(np.ones(20_000, np.float32)))  # floats, not bytes
    with pytest.raises(ValueError, match="different structures"):
        by_place(InferRequest("model", (LARGE, odd)), bench.front)
    assert bench.front.statistics().leases == 0


def test_parts_and_the_cores_own_leases_never_meet() -> None:
    """Each front has its own, at the far end; the core leases from the near one."""
    bench = Bench()
    lents = [bench.lender.due(front) for front in ("a", "b")]
    ranges = sorted((lent.offset, lent.offset + lent.size_bytes) for lent in lents if lent is not None)
    assert ranges == [(SIZE - 2 * PART, SIZE - PART), (SIZE - PART, SIZE)]
    assert bench.lender.due("a") is None
    own = bench.slab.lease(SIZE - 2 * PART)
    assert own is not None
    assert bench.slab.lease(1) is None


def test_part_of_a_front_that_died_comes_back_when_nobody_reads_it() -> None:
    """After what the engine may still read; a call over it holds it as long as it runs."""
    bench = Bench()
    lent = bench.lend()
    place = by_place(InferRequest("model", (LARGE,)), bench.front)[0].inputs[0].place
    assert place is not None
    call = bench.slab.lease_of(place)
    assert call is not None
    call.hold()
    bench.lender.gone("front")
    for release in bench.lingering:
        release()
    assert bench.slab.lease_of(place) is call
    call.release()
    assert bench.slab.lease_of(place) is None
    again = bench.lender.due("its successor")
    assert again is not None
    assert again.offset == lent.offset


def test_new_engine_means_a_new_part_and_refuses_what_was_on_its_way() -> None:
    """What lies in the former memory is copied where it is sent later, and refused where it was sent before."""
    bench = Bench()
    former = bench.lend()
    sent, _ = by_place(InferRequest("model", (LARGE,)), bench.front)
    bench.slab.renew(nameless_memory(SIZE))
    with pytest.raises(BackendUnavailable, match="send it again"):
        bench.lender.in_full(sent, "front")
    later = bench.lend()
    assert (later.generation, bench.reader.regions) == (former.generation + 1, {later.region})
    sent, _ = by_place(InferRequest("model", (LARGE,)), bench.front)
    assert bench.lender.in_full(sent, "front").inputs[0].data == LARGE.data


def test_front_without_a_core_sends_every_byte() -> None:
    """Nothing is leased from a core that is gone, and nothing named to the engine."""
    bench = Bench()
    bench.lend()
    bench.front.forget()
    request = InferRequest("model", (LARGE,))
    assert by_place(request, bench.front) == (request, [])
    assert not bench.reader.regions


async def test_large_tensor_of_a_front_reaches_the_core_through_the_slab(tmp_path: Path) -> None:
    """Over their socket goes its place; the answer, or the core's end, gives the room back."""
    loop, engine = asyncio.get_running_loop(), FakeEngine()
    slab = SharedSlab(loop.call_later)
    slab.renew(nameless_memory(SIZE))
    server = CoreServer(tmp_path, FakeWatch(), engine, engine, lender=Lender(slab, PART))  # type: ignore[arg-type]
    front = BorrowedSlab(loop.call_later)
    link = CoreLink(tmp_path, Hello(1), max_asks=4, slab=front)
    tasks = [asyncio.create_task(server.run()), asyncio.create_task(link.run())]
    try:
        async with asyncio.timeout(60):
            while not front.generation:
                await asyncio.sleep(0.005)
            response = await link.infer(InferRequest("owned", (LARGE, SMALL)), client="c")
        assert [tensor.to_numpy().tolist() for tensor in response.outputs] == [
            tensor.to_numpy().tolist() for tensor in (LARGE, SMALL)
        ]
        ((asked, _, _),) = engine.asked
        assert [tensor.place is not None for tensor in asked.inputs] == [True, False]
        assert front.statistics().leases == 0
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert front.generation == 0


def test_another_process_writes_into_its_part() -> None:
    """Over the core's descriptor, by its process's number."""
    bench = Bench()
    lent = bench.lender.due("front")
    assert lent is not None
    program = (
        "import sys, msgspec\n"
        "from server.local.slab_memory import Lent, lent_memory\n"
        "lent = msgspec.json.decode(sys.argv[1], type=Lent)\n"
        "lent_memory(lent).view[lent.offset:lent.offset + 2] = b'ok'\n"
    )
    subprocess.run([sys.executable, "-c", program, msgspec.json.encode(lent).decode()], check=True)
    assert bytes(lent_memory(lent).view[lent.offset : lent.offset + 2]) == b"ok"
