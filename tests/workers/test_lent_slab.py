"""Tensors that pass from a front to the core by their place."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from penstock.gateway.workers.slab import SharedSlab, SlabPart, anonymous_memory, map_slab_part
from penstock.gateway.workers.slab_sharing import (
    ClientSlab,
    SlabPartitions,
    client_slab_part_bytes,
    client_slab_parts,
    move_to_slab,
    slab_bytes_with_client_parts,
)
from penstock.protocol.errors import EngineUnavailable, InvalidRequest
from penstock.protocol.inference import InferRequest, tensor_from_bytes, tensor_from_numpy

PART = 1 << 20
SIZE = 4 * PART
LARGE = tensor_from_numpy("LARGE", np.arange(20_000, dtype=np.float32).reshape(1, -1))
SMALL = tensor_from_numpy("SMALL", np.ones((1, 3), np.float32))
WORDS = tensor_from_bytes("WORDS", [bytes(100_000)])


class Reader:
    """A front's backend, as far as it knows regions."""

    def __init__(self) -> None:
        self.regions: dict[str, Callable[[], None]] = {}

    def use_region(self, name: str, lost: Callable[[], None]) -> None:
        self.regions[name] = lost

    def drop_region(self, name: str) -> None:
        self.regions.pop(name, None)


class Bench:
    """A core with its slab, and a front."""

    def __init__(self) -> None:
        self.lingering: list[Callable[[], None]] = []
        self.slab = SharedSlab(lambda _, release: self.lingering.append(release))
        self.slab.renew(anonymous_memory(SIZE))
        self.slab_partitions = SlabPartitions(self.slab, PART)
        self.reader = Reader()
        self.front = ClientSlab(lambda _, release: self.lingering.append(release), [self.reader])

    def grant_part(self) -> SlabPart:
        lent = self.slab_partitions.due("front")
        assert lent is not None
        self.front.borrow(lent)
        return lent


def over_the_wire(request: InferRequest) -> InferRequest:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=InferRequest)


def test_large_tensor_is_not_sent_and_arrives_in_full() -> None:
    """Small ones and words are sent as they are."""
    bench = Bench()
    bench.grant_part()
    sent, leases = move_to_slab(InferRequest("model", (LARGE, SMALL, WORDS)), bench.front)
    assert [tensor.data.nbytes for tensor in sent.inputs] == [0, SMALL.data.nbytes, WORDS.data.nbytes]
    arrived = bench.slab_partitions.in_full(over_the_wire(sent), "front")
    assert [bytes(tensor.data) for tensor in arrived.inputs] == [bytes(t.data) for t in (LARGE, SMALL, WORDS)]
    assert [tensor.place is not None for tensor in arrived.inputs] == [True, False, False]
    for lease in leases:
        lease.release()
    assert bench.front.statistics().leases == 0


def test_tensor_that_lies_in_the_part_already_is_not_copied() -> None:
    """A picture that a front decoded there; it is held until it is answered."""
    bench = Bench()
    bench.grant_part()
    lease = bench.front.lease(LARGE.data.nbytes)
    assert lease is not None
    lease.view[:] = LARGE.data
    placed = replace(LARGE, data=lease.view, place=lease.place)
    sent, leases = move_to_slab(InferRequest("model", (placed,)), bench.front)
    assert sent.inputs[0].place == lease.place
    lease.release()
    assert bench.front.statistics().leases == 1
    leases[0].release()
    assert bench.front.statistics().leases == 0


def test_small_picture_that_lies_in_the_part_is_named_and_found_again() -> None:
    """One element of BYTES, which says itself how long it is; a lie is refused."""
    bench = Bench()
    bench.grant_part()
    picture = tensor_from_bytes("IN", [b"a picture"], (1, 1))
    lease = bench.front.lease(picture.data.nbytes)
    assert lease is not None
    lease.view[:] = picture.data
    sent, leases = move_to_slab(InferRequest("model", (replace(picture, place=lease.place),)), bench.front)
    assert (len(leases), sent.inputs[0].data.nbytes) == (1, 0)
    (arrived,) = bench.slab_partitions.in_full(over_the_wire(sent), "front").inputs
    assert (bytes(arrived.data), arrived.place) == (bytes(picture.data), lease.place)
    lease.view[:4] = (PART).to_bytes(4, "little")
    with pytest.raises(InvalidRequest, match="outside of its sender"):
        bench.slab_partitions.in_full(over_the_wire(sent), "front")
    with pytest.raises(InvalidRequest, match="or the address of a single one"):
        bench.slab_partitions.in_full(InferRequest("model", (replace(sent.inputs[0], shape=(2, 1)),)), "front")


def test_tensor_that_cannot_be_copied_leaves_nothing_leased() -> None:
    """Neither its own room nor that of those before it."""
    bench = Bench()
    bench.grant_part()
    odd = replace(LARGE, data=memoryview(np.ones(20_000, np.float32)))  # floats, not bytes
    with pytest.raises(ValueError, match="different structures"):
        move_to_slab(InferRequest("model", (LARGE, odd)), bench.front)
    assert bench.front.statistics().leases == 0


def test_parts_and_the_cores_own_leases_never_meet() -> None:
    """Each front has its own, at the far end; the core leases from the near one."""
    bench = Bench()
    lents = [bench.slab_partitions.due(front) for front in ("a", "b")]
    ranges = sorted((lent.offset, lent.offset + lent.size_bytes) for lent in lents if lent is not None)
    assert ranges == [(SIZE - 2 * PART, SIZE - PART), (SIZE - PART, SIZE)]
    assert bench.slab_partitions.due("a") is None
    own = bench.slab.lease(SIZE - 2 * PART)
    assert own is not None
    assert bench.slab.lease(1) is None


def test_part_of_a_front_that_died_comes_back_when_it_is_not_read_any_more() -> None:
    """After what the engine may still read; a call over it holds it as long as it runs."""
    bench = Bench()
    lent = bench.grant_part()
    place = move_to_slab(InferRequest("model", (LARGE,)), bench.front)[0].inputs[0].place
    assert place is not None
    call = bench.slab.lease_of(place)
    assert call is not None
    call.hold()
    bench.slab_partitions.gone("front")
    for release in bench.lingering:
        release()
    assert bench.slab.lease_of(place) is call
    call.release()
    assert bench.slab.lease_of(place) is None
    again = bench.slab_partitions.due("its successor")
    assert again is not None
    assert again.offset == lent.offset


def test_new_engine_means_a_new_part_and_refuses_what_was_on_its_way() -> None:
    """What lies in the former memory is copied where it is sent later, and refused where it was sent before."""
    bench = Bench()
    former = bench.grant_part()
    sent, _ = move_to_slab(InferRequest("model", (LARGE,)), bench.front)
    bench.slab.renew(anonymous_memory(SIZE))
    with pytest.raises(EngineUnavailable, match="send it again"):
        bench.slab_partitions.in_full(sent, "front")
    later = bench.grant_part()
    assert (later.generation, set(bench.reader.regions)) == (former.generation + 1, {later.region})
    sent, _ = move_to_slab(InferRequest("model", (LARGE,)), bench.front)
    assert bench.slab_partitions.in_full(sent, "front").inputs[0].data == LARGE.data


def test_every_client_process_has_a_part_with_several_engines() -> None:
    """With one engine only two have; the memory is as large as that needs."""
    own, part = 4 << 20, client_slab_part_bytes(4 << 20)
    for engines, count in ((1, 2), (2, 8), (8, 8)):
        slab = SharedSlab(lambda *_: None)
        slab.renew(anonymous_memory(slab_bytes_with_client_parts(own, engines)))
        partitions = SlabPartitions(slab, own // 2, part, client_slab_parts(engines))
        granted = [partitions.due(number, is_client_process=True) for number in range(10)]
        assert [one is not None for one in granted] == [True] * count + [False] * (10 - count)
        assert slab.lease(own) is not None


def test_engine_that_lost_the_region_gets_addresses_again_after_a_pause() -> None:
    """The core registers it there meanwhile. A region of an earlier part is not used again."""
    bench = Bench()
    former = bench.grant_part().region
    lost = bench.reader.regions.pop(former)
    lost()
    assert not bench.reader.regions
    bench.lingering.pop()()
    assert set(bench.reader.regions) == {former}
    lost()
    bench.slab.renew(anonymous_memory(SIZE))
    later = bench.grant_part().region
    bench.lingering.pop()()
    assert set(bench.reader.regions) == {later}


def test_front_without_a_core_sends_every_byte() -> None:
    """Nothing is leased from a core that is gone, and nothing named to the engine."""
    bench = Bench()
    bench.grant_part()
    bench.front.forget()
    request = InferRequest("model", (LARGE,))
    assert move_to_slab(request, bench.front) == (request, [])
    assert not bench.reader.regions


def test_another_process_writes_into_its_part() -> None:
    """Over the core's descriptor, by its process's number."""
    bench = Bench()
    lent = bench.slab_partitions.due("front")
    assert lent is not None
    program = (
        "import sys, msgspec\n"
        "from penstock.gateway.workers.slab import SlabPart, map_slab_part\n"
        "lent = msgspec.json.decode(sys.argv[1], type=SlabPart)\n"
        "map_slab_part(lent).view[lent.offset:lent.offset + 2] = b'ok'\n"
    )
    subprocess.run([sys.executable, "-c", program, msgspec.json.encode(lent).decode()], check=True)
    assert bytes(map_slab_part(lent).view[lent.offset : lent.offset + 2]) == b"ok"
