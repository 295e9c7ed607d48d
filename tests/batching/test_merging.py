"""Merging rows of requests into one engine call, splitting answers, and errors that name rows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.torch_serving.slab_pictures import UNREADABLE, SlabReader
from penstock.gateway.batching.batcher import BatcherPool
from penstock.gateway.batching.merging import (
    key_of,
    merge_requests,
    merge_rows,
    refused_requests,
    refused_rows,
    rows_of,
    split_outputs,
)
from penstock.gateway.batching.options import BatchOptions
from penstock.gateway.workers.slab import SharedSlab, anonymous_memory
from penstock.protocol.errors import EngineFailed
from penstock.protocol.inference import (
    Array,
    BatchOwner,
    Datatype,
    InferRequest,
    InferResponse,
    Parameter,
    Tensor,
    tensor_from_bytes,
    tensor_from_numpy,
)
from penstock.protocol.shared_memory import SLAB_FROM_BYTES, Lease
from tests.batching.echo_engine import EchoEngine, asking, rows_in


def request_of(*inputs: Tensor, **more: Parameter) -> InferRequest:
    return InferRequest("model", inputs, parameters=more)


def echo(request: InferRequest) -> InferResponse:
    """What an identity model answers."""
    return InferResponse(request.model_name, "1", request.inputs)


words = st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=9)), min_size=1, max_size=4)


@given(st.lists(words, min_size=1, max_size=6))
def test_rows_of_numbers_and_of_bytes_come_back_to_their_own_request(members: list[list[tuple[bytes, bytes]]]) -> None:
    """Whatever the counts of rows, an echoed batch gives each request the very tensors that it sent."""
    requests = [
        request_of(
            tensor_from_bytes("WORDS", [word for row in rows for word in row], (len(rows), 2)),
            tensor_from_numpy("SIZES", np.array([[len(a), len(b)] for a, b in rows], np.int64)),
        )
        for rows in members
    ]
    merged = merge_requests(requests)
    assert merged.rows == merged.request.inputs[0].shape[0] == sum(map(rows_of, requests))
    answers = split_outputs(echo(merged.request), merged)
    assert [[(t.name, t.datatype, t.shape, bytes(t.data)) for t in answer] for answer in answers] == [
        [(t.name, t.datatype, t.shape, bytes(t.data)) for t in request.inputs] for request in requests
    ]


NUMBERS = tensor_from_numpy("IN", np.zeros((2, 3), np.float32))


@pytest.mark.parametrize(
    "other",
    [
        InferRequest("another", (NUMBERS,)),
        InferRequest("model", (NUMBERS,), model_version="2"),
        InferRequest("model", (NUMBERS,), outputs=("OUT",)),
        InferRequest("model", (NUMBERS,), parameters={"top": 1}),
        request_of(tensor_from_numpy("IN", np.zeros((2, 4), np.float32))),
        request_of(tensor_from_numpy("IN", np.zeros((2, 3), np.int32))),
        request_of(tensor_from_numpy("OTHER", np.zeros((2, 3), np.float32))),
    ],
)
def test_key_differs_for_requests_that_must_not_share_a_call(other: InferRequest) -> None:
    """Model, version, outputs, parameters, and each input's name, datatype and shape but for its rows."""
    assert key_of(other) != key_of(request_of(NUMBERS))


def test_key_is_equal_for_requests_that_may_share_a_call() -> None:
    """Neither the rows nor the id nor the deadline keep two requests apart; true and 1 do."""
    fewer = tensor_from_numpy("IN", np.ones((1, 3), np.float32))
    assert key_of(InferRequest("model", (fewer,), id="7", deadline=3.0)) == key_of(request_of(NUMBERS))
    assert key_of(request_of(NUMBERS, a=True)) != key_of(request_of(NUMBERS, a=1))
    assert key_of(request_of(NUMBERS, a=1, b="2")) == key_of(request_of(NUMBERS, b="2", a=1))


@pytest.mark.parametrize("deadlines", [(3.0, 5.0, 4.0), (3.0, None), (3.0,)])
def test_call_has_none_of_its_requests_deadlines(deadlines: tuple[float | None, ...]) -> None:
    """Who waits is ended by its own; how long the engine takes after that is worth knowing."""
    merged = merge_requests([InferRequest("model", (NUMBERS,), id="x", deadline=deadline) for deadline in deadlines])
    assert merged.request.deadline is None
    alone = InferRequest("model", (NUMBERS,), id="x")
    assert merge_requests([alone]).request is alone  # no copy
    assert merged.request.id == ("x" if len(deadlines) == 1 else "")


@pytest.mark.parametrize("shape", [(3, 3), (5, 3), (), (1, 4, 3)])
def test_answer_of_other_rows_than_were_sent_is_the_engines_failure(shape: tuple[int, ...]) -> None:
    """Too few rows, too many, none at all: the error names the output, and no request gets a neighbour's row."""
    merged = merge_requests([request_of(NUMBERS), request_of(NUMBERS)])
    response = InferResponse("model", "1", (tensor_from_numpy("OUT", np.zeros(shape, np.float32)),))
    with pytest.raises(EngineFailed, match="output 'OUT'"):
        split_outputs(response, merged)


@pytest.mark.parametrize("data", [b"\x02\0\0\0ab\x09\0\0\0cd", b"\x02\0\0\0ab\0\0", b"\0\0\0\0" * 3])
def test_answer_whose_lengths_do_not_add_up_is_the_engines_failure(data: bytes) -> None:
    """BYTES that end inside an element, inside a length, or past the last element."""
    one = tensor_from_bytes("IN", [b"a"])
    merged = merge_requests([request_of(one), request_of(one)])
    response = InferResponse("model", "1", (Tensor("OUT", Datatype.BYTES, (2,), memoryview(data)),))
    with pytest.raises(EngineFailed, match="do not hold the 2 elements"):
        split_outputs(response, merged)


ROW = SLAB_FROM_BYTES // 4  # elements of a row that is just large enough


class Bench:
    """A slab, and rows in it and elsewhere; a row holds its number."""

    def __init__(self) -> None:
        self.lingering: list[object] = []
        self.slab = SharedSlab(lambda _, release: self.lingering.append(release))
        self.slab.renew(anonymous_memory(4 << 20))
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


def test_model_that_reads_the_slab_gets_references_to_its_pictures(tmp_path: Path) -> None:
    """The model's process finds each picture where a worker wrote it; one that found no room there is sent."""
    bench = Bench()
    pictures = [bytes([number]) * (SLAB_FROM_BYTES + number) for number in range(3)]
    words = [tensor_from_bytes("IN", [picture], (1, 1)) for picture in pictures]
    for number in (0, 2):
        lease = bench.slab.lease(words[number].data.nbytes)
        assert lease is not None
        lease.view[:] = words[number].data
        words[number] = replace(words[number], data=lease.view, place=lease.place)
    assert merge_requests(requests_of(words[:1]), bench.slab, reads_slab=True).request.inputs[0].place is not None
    bench.slab.publish(tmp_path / "slab")
    merged = merge_requests(requests_of(words), bench.slab, reads_slab=True)
    (tensor,) = merged.request.inputs
    assert (tensor.shape, tensor.place, len(merged.leases)) == ((3, 1), None, 2)
    reader = SlabReader(str(tmp_path / "slab"))
    assert [reader.picture(element) for element in tensor.to_numpy().ravel()] == pictures
    assert tensor.data.nbytes < 2 * SLAB_FROM_BYTES
    bench.slab.unpublish()
    assert merge_requests(requests_of(words), bench.slab, reads_slab=True).request.inputs[0].place is not None


@pytest.mark.parametrize("times", [1, 2])
async def test_model_that_cannot_read_the_slab_is_sent_the_pictures(times: int) -> None:
    """Its process is of another user, say: the call is made once more, and references are no longer made."""
    options = BatchOptions(owner=BatchOwner.GATEWAY, max_batch_size=8, reads_slab=True)
    engine, slab = EchoEngine(), Mock(**{"lease_of.return_value": None, "lease.return_value": None})
    engine.refusals += [EngineFailed(f"{UNREADABLE}: Permission denied") for _ in range(times)]
    pool = BatcherPool(engine, lambda _: options, slab=slab)
    if times == 1:
        assert rows_in(await pool.infer(asking(1), client="one")) == [2]
    else:
        with pytest.raises(EngineFailed, match="cannot be read"):
            await pool.infer(asking(1), client="one")
    slab.unpublish.assert_called_once_with()
    await pool.aclose()


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
    bench.slab.renew(anonymous_memory(4 << 20))
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model 'm': row 3 of 16: the picture ends early", {3: "model 'm': the picture ends early"}),
        ("rows 0, 15 of 16: it ends; row 4 of 16: it is huge", {0: "it ends", 15: "it ends", 4: "it is huge"}),
        ("rows 0, 1 of 16: it ends; rows 2, …", {0: "it ends; rows 2, …", 1: "it ends; rows 2, …"}),
        ("row 3 of 17: of another call", {}),
        ("rows 3; 4 of 16: another form", {}),
        ("cannot read 'row 3 of 16: you lose'", {}),
        ("Failed to process: row 3 of 16: you lose", {}),
        (
            "rows 0, 15 of 16: it ends row 4 of 16: in itself",
            {0: "it ends row 4 of 16: in itself", 15: "it ends row 4 of 16: in itself"},
        ),
        ("the picture in row 3 cannot be decoded", {}),
    ],
)
def test_rows_are_read_off_the_engines_own_words(text: str, said: dict[int, str]) -> None:
    """Counted from 0, each with what is said of it; what does not fit the call tells nothing, nor does what was cut."""
    assert refused_rows(text, 16, "m") == said


def test_rows_belong_to_requests_in_the_order_of_the_call() -> None:
    """Requests of several rows, which the call had in another order; of two bad rows the first counts."""
    assert refused_requests({0: "a", 4: "b"}, (2, 0, 1), (3, 1, 2)) == {2: "a", 1: "b"}
    assert refused_requests({2: "b", 1: "a"}, (2, 0, 1), (3, 1, 2)) == {2: "a"}
    assert refused_requests({}, (0,), (1,)) == {}


def test_merge_for_model_without_batch_axis_calls_once_an_array() -> None:
    """max_batch_size 0: one call each, with the leading ones that the model declares."""
    calls = merge_rows([np.zeros((3, 4, 4)), np.ones((3, 4, 4))], declared_shape=(1, 3, 4, 4), max_batch_size=0)
    assert [call.array.shape for call in calls] == [(1, 3, 4, 4)] * 2
    assert [call.members for call in calls] == [(0,), (1,)]
    assert not any(call.has_batch_axis for call in calls)


def test_merge_keeps_shape_where_dimensions_vary() -> None:
    """A model that takes any height and width gets the array as it is."""
    (call,) = merge_rows([np.zeros((5, 7, 3))], declared_shape=(-1, -1, 3), max_batch_size=0)
    assert call.array.shape == (5, 7, 3)


def test_merge_of_unlike_shapes_groups_likes_within_the_limit() -> None:
    """Unlike shapes never share a call, and no call is larger than max_batch_size."""
    arrays = [np.full((2,), 0), np.full((3,), 1), np.full((2,), 2), np.full((2,), 3)]
    calls = merge_rows(arrays, declared_shape=(-1,), max_batch_size=2)
    assert [call.members for call in calls] == [(0, 2), (3,), (1,)]
    for call in calls:
        assert [row[0] for row in call.array] == list(call.members)
