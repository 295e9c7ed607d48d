"""Rows that lie where the engine reads them are not copied; others are, where it pays."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from server.batching.merge import merge_requests
from server.batching.split import split_outputs
from server.core.infer import InferRequest, InferResponse
from server.core.slab import SLAB_FROM_BYTES, Lease
from server.core.tensor import Array, Tensor, tensor_from_bytes, tensor_from_numpy
from server.local.slab import SharedSlab
from server.local.slab_memory import nameless_memory

ROW = SLAB_FROM_BYTES // 4  # elements of a row that is just large enough


class Bench:
    """A slab, and rows in it and elsewhere; a row holds its number."""

    def __init__(self) -> None:
        self.lingering: list[object] = []
        self.slab = SharedSlab(lambda _, release: self.lingering.append(release))
        self.slab.renew(nameless_memory(4 << 20))
        self.leases: list[Lease] = []

    def elsewhere(self, number: int, size: int = ROW) -> Tensor:
        return tensor_from_numpy("IN", np.full((1, size), number, np.float32))

    def within(self, number: int) -> Tensor:
        lease = self.slab.lease(SLAB_FROM_BYTES)
        assert lease is not None
        self.leases.append(lease)
        lease.view[:] = self.elsewhere(number).data
        array: Array = np.frombuffer(lease.view, np.float32).reshape(1, ROW)
        tensor = tensor_from_numpy("IN", array)
        return Tensor(tensor.name, tensor.datatype, tensor.shape, tensor.data, lease.place)


def requests_of(tensors: Sequence[Tensor]) -> list[InferRequest]:
    return [InferRequest("model", (tensor,)) for tensor in tensors]


def assert_own_rows(tensors: Sequence[Tensor], bench: Bench) -> Tensor:
    """The merged input; an echo of it gives each request its own row."""
    merged = merge_requests(requests_of(tensors), bench.slab)
    (tensor,) = merged.request.inputs
    assert tensor.shape == (len(tensors), *tensors[0].shape[1:])
    answers = split_outputs(InferResponse("model", "1", merged.request.inputs), merged)
    assert [bytes(answer[0].data) for answer in answers] == [bytes(tensor.data) for tensor in tensors]
    merged.release(is_answered=True)
    return tensor


def test_neighbours_in_the_slab_stay_where_they_are() -> None:
    """In whatever order they were chosen; the batch is one window of the slab, and needs no room of its own."""
    bench = Bench()
    rows = [bench.within(number) for number in range(4)]
    tensor = assert_own_rows([rows[2], rows[0], rows[3], rows[1]], bench)
    assert tensor.place == rows[0].place
    assert bench.slab.statistics().leases == 4


@pytest.mark.parametrize("gap", ["a hole", "a row elsewhere"])
def test_rows_that_are_no_neighbours_are_brought_together(gap: str) -> None:
    """By one copy into the slab, whose room is given back with the answer."""
    bench = Bench()
    rows = [bench.within(number) for number in range(3)]
    chosen = [rows[0], rows[2]] if gap == "a hole" else [rows[0], rows[1], bench.elsewhere(7)]
    tensor = assert_own_rows(chosen, bench)
    assert tensor.place is not None
    assert tensor.place not in [row.place for row in rows]
    assert bench.slab.statistics().leases == 3


def test_large_rows_from_clients_go_into_the_slab_and_small_ones_do_not() -> None:
    """A place costs more than a few bytes."""
    bench = Bench()
    assert assert_own_rows([bench.elsewhere(1), bench.elsewhere(2)], bench).place is not None
    assert assert_own_rows([bench.elsewhere(1, 16), bench.elsewhere(2, 16)], bench).place is None
    assert bench.slab.statistics().leases == 0


def test_words_are_never_put_into_the_slab() -> None:
    """Their lengths are read by the engine: it must never find others there."""
    bench = Bench()
    assert assert_own_rows([tensor_from_bytes("IN", [bytes(SLAB_FROM_BYTES)])] * 2, bench).place is None


def test_pictures_that_the_gateway_laid_there_are_brought_together_there() -> None:
    """One of them found no room in its front's part and was sent: all go by one place."""
    bench = Bench()
    words = [tensor_from_bytes("IN", [bytes([number]) * (SLAB_FROM_BYTES // 3 + number)]) for number in range(5)]
    lease = bench.slab.lease(words[0].data.nbytes)
    assert lease is not None
    lease.view[:] = words[0].data
    placed = replace(words[0], data=lease.view, place=lease.place)
    tensor = assert_own_rows([words[1], placed, *words[2:]], bench)
    assert tensor.place is not None
    assert tensor.place != lease.place
    assert assert_own_rows([placed], bench).place == lease.place
    assert bench.slab.statistics().leases == 1


def test_full_slab_is_no_hindrance() -> None:
    """The batch goes as bytes."""
    bench = Bench()
    while bench.slab.lease(SLAB_FROM_BYTES) is not None:
        continue
    assert assert_own_rows([bench.elsewhere(1), bench.elsewhere(2)], bench).place is None


def test_row_of_a_former_slab_is_read_where_it_is_and_sent_from_the_new() -> None:
    """An engine that came later never reads by an old place."""
    bench = Bench()
    former = bench.within(1)
    bench.slab.renew(nameless_memory(4 << 20))
    tensor = assert_own_rows([former, former], bench)
    assert tensor.place is not None
    assert tensor.place.generation == 2


def test_rows_stay_while_the_engine_reads_them_though_their_owner_left() -> None:
    """The call holds what it lies in; where it was given up, a moment longer."""
    bench = Bench()
    rows = [bench.within(number) for number in range(2)]
    merged = merge_requests(requests_of(rows), bench.slab)
    for lease in bench.leases:
        lease.release()
    assert bench.slab.statistics().leases == 2
    merged.release(is_answered=False)
    assert (bench.slab.statistics().leases, len(bench.lingering)) == (2, 2)
