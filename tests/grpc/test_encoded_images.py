"""Encoded images as a BYTES tensor over gRPC: both places where they may stand, and what the engine gets instead."""

import struct

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from penstock.protocol.inference import tensor_from_numpy
from penstock.protocol.request_checks import ImageInput
from tests.grpc.harness import Front, infer_message
from tests.vision import images

FIRST, SECOND = (images.jpeg(images.picture(40, 30, seed=seed)) for seed in (1, 2))
RAW = b"".join(struct.pack("<I", len(image)) + image for image in (FIRST, SECOND))


@pytest.fixture
def pictures(front: Front) -> Front:
    """The front, whose model `double` takes images."""
    front.plane.image_inputs["double"] = ImageInput("x", 48)
    return front


def asking(*, shape: list[int], raw: bytes = b"", contents: tuple[bytes, ...] = ()) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name="double", id="7")
    entry = request.inputs.add(name="x", datatype="BYTES", shape=shape)
    entry.contents.bytes_contents.extend(contents)
    if raw:
        request.raw_input_contents.append(raw)
    return request


@pytest.mark.parametrize(
    "request_message",
    [asking(shape=[2], raw=RAW), asking(shape=[2, 1], raw=RAW), asking(shape=[2], contents=(FIRST, SECOND))],
    ids=["raw", "raw-column", "contents"],
)
async def test_images_become_the_tensor_and_the_engine_answers(
    pictures: Front, request_message: service_pb2.ModelInferRequest
) -> None:
    """The fake plane makes one row of the images' sizes; the engine doubles it; id and outputs are kept."""
    request_message.outputs.add(name="y")
    request_message.parameters["priority"].int64_param = 3
    answer = service_pb2.ModelInferResponse.FromString(
        await pictures.call("ModelInfer", request_message.SerializeToString())
    )
    sizes = np.frombuffer(answer.raw_output_contents[0], np.float32)
    np.testing.assert_array_equal(sizes, [2.0 * len(FIRST), 2.0 * len(SECOND)])
    got = service_pb2.ModelInferRequest.FromString(pictures.plane.relayed[-1][2].message)
    assert (got.id, got.parameters["priority"].int64_param, got.outputs[0].name) == ("7", 3, "y")
    assert (got.inputs[0].datatype, list(got.inputs[0].shape)) == ("FP32", [1, 2])
    assert not got.inputs[0].HasField("contents")


async def test_tensors_of_an_image_model_pass_untouched(pictures: Front) -> None:
    """What is no BYTES is not even parsed."""
    message = infer_message()
    await pictures.call("ModelInfer", message)
    assert pictures.plane.relayed[-1][2].message == message


@pytest.mark.parametrize(
    ("request_message", "words"),
    [
        (asking(shape=[2, 2], raw=RAW), "encoded images come as"),
        (asking(shape=[3], contents=(FIRST, SECOND)), "holds 2 elements"),
        (asking(shape=[2], raw=RAW[:-1]), "past its end"),
    ],
    ids=["grid", "too-few", "cut-off"],
)
async def test_what_is_no_list_of_images_is_refused_with_the_reason(
    pictures: Front, request_message: service_pb2.ModelInferRequest, words: str
) -> None:
    """INVALID_ARGUMENT in one sentence; nothing reaches the engine."""
    with pytest.raises(grpc.aio.AioRpcError, match=words) as refused:
        await pictures.call("ModelInfer", request_message.SerializeToString())
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert pictures.plane.relayed == []


async def test_images_in_shared_memory_are_refused(pictures: Front) -> None:
    """The gateway does not read client shared memory."""
    request = asking(shape=[1])
    request.inputs[0].parameters["shared_memory_region"].string_param = "r"
    with pytest.raises(grpc.aio.AioRpcError, match="shared memory") as refused:
        await pictures.call("ModelInfer", request.SerializeToString())
    assert refused.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)


async def test_sizes_of_images_follow_as_an_input_of_their_own(pictures: Front) -> None:
    """A model that takes the pictures' sizes gets them, though the client sends pictures only."""
    pictures.plane.more_inputs = (tensor_from_numpy("size", np.array([[40, 30]], np.int64)),)
    await pictures.call("ModelInfer", asking(shape=[2], raw=RAW).SerializeToString())
    got = service_pb2.ModelInferRequest.FromString(pictures.plane.relayed[-1][2].message)
    described = [(one.name, one.datatype, list(one.shape)) for one in got.inputs]
    assert described == [("x", "FP32", [1, 2]), ("size", "INT64", [1, 2])]
    assert [len(raw) for raw in got.raw_input_contents] == [8, 16]
    assert np.frombuffer(got.raw_input_contents[1], np.int64).tolist() == [40, 30]
