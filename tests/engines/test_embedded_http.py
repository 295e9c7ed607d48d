"""The embedded engine over REST where no Triton is: the answers' form, limits, the event loop's peace."""

import asyncio
import gzip
import json
import time
from pathlib import Path

import numpy as np
import pytest

from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.model_io import classified
from penstock.protocol.call import GrpcCall, HttpAnswer, HttpCall
from penstock.protocol.errors import DeadlineExceeded, EngineUnavailable, InvalidRequest
from penstock.protocol.http_inference import accepted_encoding
from penstock.protocol.inference import Datatype, tensor_from_numpy
from penstock.protocol.json_tensors import tensor_data, tensor_text
from tests.contract.wire_case import X, get, grpc_call, infer, infer_request, infer_x
from tests.contract.wire_models import write_plain
from tests.engines import onnx_models


async def test_rest_infer_in_json_is_answered_to_the_byte(plain_engine: EmbeddedEngine) -> None:
    """Members in Triton's order, without blanks; the id only where one came."""
    relay = plain_engine
    answer = await relay.send(infer_x(request={"id": "7"}), deadline=None)
    assert answer == HttpAnswer(
        200,
        ((b"content-type", b"application/json"),),
        b'{"id":"7","model_name":"plain","model_version":"1",'
        b'"outputs":[{"name":"y","datatype":"FP32","shape":[1,3],"data":[1.0,2.0,3.0]}]}',
    )


async def test_rest_body_that_is_too_large_once_decompressed_is_413(tmp_path: Path) -> None:
    """A megabyte of blanks in a kilobyte."""
    write_plain(tmp_path)
    engine = EmbeddedEngine((tmp_path,), max_body_bytes=1 << 16)
    await engine.load("plain")
    call = infer("plain", gzip.compress(bytes(1 << 20)), {"content-encoding": "gzip"})
    assert (await engine.send(call, deadline=None)).status == 413
    await engine.aclose()


async def test_rest_classes_of_a_model_that_is_unloaded_meanwhile_are_an_error(
    plain_engine: EmbeddedEngine, tmp_path: Path
) -> None:
    """What was accepted is answered."""
    onnx_models.save(onnx_models.slow(), tmp_path, "slow")
    await plain_engine.load("slow")
    tensor = {"name": "trips", "shape": [1, 1], "datatype": "INT64", "data": [300]}
    outputs = [{"name": "done", "parameters": {"classification": 1}}]
    call = infer("slow", {"inputs": [tensor], "outputs": outputs})
    running = asyncio.create_task(plain_engine.send(call, deadline=None))
    await asyncio.sleep(0)
    await plain_engine.unload("slow")
    assert b'"data":["300:0"]' in (await running).body


@pytest.mark.parametrize("call", [infer_x(), get("/v2/models/plain"), grpc_call("ModelInfer", infer_request())])
async def test_calls_without_an_engine_or_time_are_not_answered(
    plain_engine: EmbeddedEngine, call: HttpCall | GrpcCall
) -> None:
    """As Relay says: the transport tells of what no engine answered."""
    if getattr(call, "target", b"") != b"/v2/models/plain":
        with pytest.raises(DeadlineExceeded):
            await plain_engine.send(call, deadline=time.monotonic() - 1)
    await plain_engine.aclose()
    with pytest.raises(EngineUnavailable):
        await plain_engine.send(call, deadline=None)


async def test_rest_body_of_megabytes_of_json_leaves_the_event_loop_free(plain_engine: EmbeddedEngine) -> None:
    """Others are served while a long body is read and refused."""
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    others = asyncio.create_task(take_turns())
    body = {"inputs": [{**X, "shape": [100_000, 3], "data": [0.12345678] * 300_000}]}
    call = infer("plain", body)
    before = turns
    answer = await plain_engine.send(call, deadline=None)
    others.cancel()
    assert b"batch-size must be <= 8" in answer.body
    assert turns - before > 20


@pytest.mark.parametrize(
    ("text", "datatype", "expected"),
    [
        (b"[[1, 2.5], [NaN, -Infinity]]", Datatype.FP32, np.array([1, 2.5, np.nan, -np.inf], np.float32)),
        (b"[0.1,1e-320]", Datatype.FP64, np.array([0.1, 1e-320])),
        (b"[1e39]", Datatype.FP32, np.array([np.inf], np.float32)),
        (b"[18446744073709551615]", Datatype.UINT64, np.array([2**64 - 1], np.uint64)),
        (b"[-9223372036854775808]", Datatype.INT64, np.array([-(2**63)])),
        (b"[300, -1]", Datatype.INT8, np.array([44, -1], np.int8)),
        (b"[[true], [], [false]]", Datatype.BOOL, np.array([True, False])),
        (b"[]", Datatype.INT32, np.array([], np.int32)),
        (b"[" + b"1," * 600_000 + b"2]", Datatype.INT32, np.array([*[1] * 600_000, 2], np.int32)),
    ],
)
def test_json_array_becomes_the_tensors_bytes(text: bytes, datatype: Datatype, expected: np.ndarray) -> None:
    """Nested or flat, in one piece or many, exact to the last bit; integers are cut as C++ cuts them."""
    assert tensor_data(text, datatype, name="x", element_count=expected.size) == expected.tobytes()


@pytest.mark.parametrize(
    ("text", "datatype"),
    [
        (b"5", Datatype.FP32),
        (b"[null]", Datatype.FP32),
        (b'["NaN"]', Datatype.FP32),
        (b"[1e400]", Datatype.FP64),
        (b"[1.5]", Datatype.INT32),
        (b"[-1]", Datatype.UINT8),
        (b"[9223372036854775808]", Datatype.INT64),
        (b"[1]", Datatype.BOOL),
        (b"[{}]", Datatype.BYTES),
        (b'["\xff\xfe"]', Datatype.BYTES),
        (b'[["\xff\xfe"]]', Datatype.BYTES),
        (b'["\\ud800"]', Datatype.BYTES),
        (b"[1,2]", Datatype.FP32),
    ],
)
def test_json_array_that_does_not_fit_is_refused(text: bytes, datatype: Datatype) -> None:
    """What is no element of the datatype, or one too many."""
    with pytest.raises(InvalidRequest, match="Unable to parse"):
        tensor_data(text, datatype, name="x", element_count=1)


def test_tensor_of_many_elements_is_written_whole() -> None:
    """In pieces that join without a seam, NaN among them."""
    array = np.arange(200_000, dtype=np.float64) / 7
    array[150_000] = np.nan
    text = tensor_text(tensor_from_numpy("y", array))
    np.testing.assert_array_equal(np.array(json.loads(text)), array)


def test_classes_are_the_largest_values_first_of_equals_first() -> None:
    """64-bit integers keep their order; not a number comes last; a class without a label has none."""
    big = np.array([[2**63 - 1, 2**63 - 2, 2**63 - 1]], np.int64)
    classes = classified(tensor_from_numpy("y", big), classes=2, labels=("a",), has_batch=True).to_numpy()
    assert classes.tolist() == [[b"9223372036854775807:0:a", b"9223372036854775807:2"]]
    odd = np.array([np.nan, 1, np.inf], np.float32)
    classes = classified(tensor_from_numpy("y", odd), classes=3, labels=(), has_batch=False).to_numpy()
    assert classes.tolist() == [b"inf:2", b"1.000000:1", b"nan:0"]


@pytest.mark.parametrize(
    ("header", "encoding"),
    [("", ""), ("br", ""), ("gzip", "gzip"), ("deflate, gzip", "deflate"), ("gzip;q=0.5,deflate", "deflate"),
     ("identity, gzip", ""), ("gzip;q=x", "")],
)  # fmt: skip
def test_accept_encoding_chooses_what_weighs_most(header: str, encoding: str) -> None:
    """The first of equals, as in Triton; what cannot be read weighs nothing."""
    assert accepted_encoding(header) == encoding
