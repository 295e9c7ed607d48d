"""The sequence IDs that the engine gets for clients with a key."""

import gzip

import msgspec
import pytest
from tritonclient.grpc import service_pb2

from penstock.engines.relayed_calls import engine_sequence, with_engine_sequence
from penstock.protocol.call import GrpcCall, HttpCall, InferHead
from penstock.protocol.identity import ANONYMOUS, Identity

ALICE, BOB = Identity("alice"), Identity("bob")
INFER = "/inference.GRPCInferenceService/ModelInfer"


def test_each_key_and_each_kind_of_id_has_its_own() -> None:
    """An ID is below 2^63, never 0 (no sequence) and the same each time; 0 and "" are not changed."""
    ids = [engine_sequence(owner, given) for owner in ("key a", "key b", "key 'a', 1") for given in (1, 2, "1", "2")]
    assert len(set(ids)) == 12
    assert all(0 < number < 1 << 63 for number in ids if isinstance(number, int))
    assert ids[0] == engine_sequence("key a", 1)
    assert (engine_sequence("key a", 0), engine_sequence("key a", "")) == (0, "")


@pytest.mark.parametrize("has_binary", [False, True])
@pytest.mark.parametrize("encoding", [b"", b"gzip"])
async def test_http_request_keeps_all_but_the_id(encoding: bytes, has_binary: bool) -> None:
    """This includes the compression and binary tensors after the JSON."""
    text = rb'{"parameters":{"sequence\u005fid":5,"sequence_end":true},"inputs":[{"name":"x","data":[1e2]}]}'
    length = ((b"inference-header-content-length", b"%d" % len(text)),) if has_binary else ()
    body = text + b"\1\2\3" if has_binary else text
    headers = (*length, (b"content-encoding", encoding)) if encoding else length
    call = HttpCall("POST", b"/v2/models/m/infer", headers, gzip.compress(body) if encoding else body)
    head = InferHead("m", sequence=5)
    assert await with_engine_sequence(call, head, ANONYMOUS) is call
    own = await with_engine_sequence(call, head, ALICE)
    size = int(dict(own.headers)[b"inference-header-content-length"]) if has_binary else len(own.body)
    assert msgspec.json.decode(own.body[:size]) == {
        "parameters": {"sequence_id": engine_sequence("key alice", 5), "sequence_end": True},
        "inputs": [{"name": "x", "data": [100.0]}],
    }
    assert own.body[size:] == (b"\1\2\3" if has_binary else b"")
    assert b"content-encoding" not in dict(own.headers)


@pytest.mark.parametrize("given", [5, 0, "five", ""])
async def test_grpc_request_keeps_all_but_the_id(given: int | str) -> None:
    """The engine reads the new ID, however often the message has an ID."""
    request = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[b"\1\2"])
    for field, other in (("int64_param", 42), ("string_param", "other")):
        request.parameters["sequence_id"].Clear()
        setattr(request.parameters["sequence_id"], field, other)
    call = GrpcCall(INFER, request.SerializeToString() + request.SerializeToString())
    head = InferHead("m", sequence=given)
    assert await with_engine_sequence(call, head, ANONYMOUS) is call
    calls = [await with_engine_sequence(call, head, who) for who in (ALICE, BOB)]
    ours, theirs = (
        service_pb2.ModelInferRequest.FromString(own.message).parameters.pop("sequence_id") for own in calls
    )
    kind = "string_param" if isinstance(given, str) else "int64_param"
    assert ours.WhichOneof("parameter_choice") == kind
    assert getattr(ours, kind) == engine_sequence("key alice", given)
    assert (ours == theirs) is (not given)
