"""Requests of one key become one call, and its answer becomes each request's own rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.batching.merge import key_of, merge_requests, rows_of
from server.batching.split import split_outputs
from server.core.errors import BackendFailed
from server.core.infer import InferRequest, InferResponse, Parameter
from server.core.tensor import Datatype, Tensor, tensor_from_bytes, tensor_from_numpy


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
    assert merged.request.id == ("x" if len(deadlines) == 1 else "")


def test_one_request_alone_is_sent_as_it_is() -> None:
    """No copy is made of it, and its id stays."""
    request = InferRequest("model", (NUMBERS,), id="x")
    assert merge_requests([request]).request is request


@pytest.mark.parametrize("shape", [(3, 3), (5, 3), (), (1, 4, 3)])
def test_answer_of_other_rows_than_were_sent_is_the_engines_failure(shape: tuple[int, ...]) -> None:
    """Too few rows, too many, none at all: everyone is told which output, and nobody gets a neighbour's row."""
    merged = merge_requests([request_of(NUMBERS), request_of(NUMBERS)])
    response = InferResponse("model", "1", (tensor_from_numpy("OUT", np.zeros(shape, np.float32)),))
    with pytest.raises(BackendFailed, match="output 'OUT'"):
        split_outputs(response, merged)


@pytest.mark.parametrize("data", [b"\x02\0\0\0ab\x09\0\0\0cd", b"\x02\0\0\0ab\0\0", b"\0\0\0\0" * 3])
def test_answer_whose_lengths_do_not_add_up_is_the_engines_failure(data: bytes) -> None:
    """BYTES that end inside an element, inside a length, or past the last element."""
    one = tensor_from_bytes("IN", [b"a"])
    merged = merge_requests([request_of(one), request_of(one)])
    response = InferResponse("model", "1", (Tensor("OUT", Datatype.BYTES, (2,), memoryview(data)),))
    with pytest.raises(BackendFailed, match="do not hold the 2 elements"):
        split_outputs(response, merged)
