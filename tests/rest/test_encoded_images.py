"""Encoded images as a BYTES tensor over REST: every way to write them down, and what the engine gets instead."""

import base64
import json
import struct
import zlib

import numpy as np
import pytest

from penstock.protocol.inference import tensor_from_numpy
from penstock.protocol.request_checks import ImageInput
from tests.rest.harness import Front, Headers
from tests.vision import images

INFER = "/v2/models/ident/infer"
LENGTH = b"inference-header-content-length"
FIRST, SECOND = (images.jpeg(images.picture(40, 30, seed=seed)) for seed in (1, 2))
BINARY = b"".join(struct.pack("<I", len(image)) + image for image in (FIRST, SECOND))


def text(image: bytes) -> str:
    return base64.b64encode(image).decode()


def request_of(entry: dict[str, object], binary: bytes = b"", **more: object) -> tuple[bytes, Headers]:
    """A body of one input named x, and the headers that go with it."""
    described = {"name": "x", "datatype": "BYTES", **entry}
    if binary:
        described["parameters"] = {"binary_data_size": len(binary)}
    head = json.dumps({"inputs": [described], **more}).encode()
    return head + binary, ((LENGTH, b"%d" % len(head)),) if binary else ()


@pytest.fixture
def pictures(front: Front) -> Front:
    """The front, whose model `ident` takes images of 48 bytes as tensors."""
    front.plane.image_inputs["ident"] = ImageInput("x", 48)
    return front


def sent(front: Front) -> tuple[dict[str, object], np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """The JSON and the tensor that the engine got: the fake plane's tensor is the images' sizes."""
    _, _, call, _ = front.plane.relayed[-1]
    headers = dict(call.headers)
    assert b"content-encoding" not in headers
    length = int(headers[LENGTH])
    document: dict[str, object] = json.loads(call.body[:length])
    return document, np.frombuffer(call.body[length:], np.float32)


@pytest.mark.parametrize(
    ("entry", "binary"),
    [
        ({"shape": [2]}, BINARY),
        ({"shape": [2, 1]}, BINARY),
        ({"shape": [2], "data": [text(FIRST), text(SECOND)]}, b""),
        ({"shape": [2, 1], "data": [[text(FIRST)], [text(SECOND)]]}, b""),
        ({"shape": [2], "data": [{"b64": text(FIRST)}, {"b64": text(SECOND)}]}, b""),
    ],
    ids=["binary", "binary-column", "base64", "base64-column", "b64-objects"],
)
async def test_images_in_any_form_reach_the_plane_and_their_tensor_the_engine(
    pictures: Front, entry: dict[str, object], binary: bytes
) -> None:
    """The same two pictures, byte for byte, and a tensor in their place."""
    body, headers = request_of(entry, binary)
    assert (await pictures.ask("POST", INFER, body, headers)).status == 200
    assert pictures.plane.encoded == [(FIRST, SECOND)]
    document, tensor = sent(pictures)
    np.testing.assert_array_equal(tensor, [len(FIRST), len(SECOND)])
    assert document == {
        "inputs": [{"name": "x", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}]
    }


async def test_one_bare_image_needs_no_length_before_it(pictures: Front) -> None:
    """As older clients of OpenVINO's server send it."""
    body, headers = request_of({"shape": [1]}, FIRST)
    assert (await pictures.ask("POST", INFER, body, headers)).status == 200
    assert pictures.plane.encoded == [(FIRST,)]


async def test_the_rest_of_the_request_stays_as_it_came(pictures: Front) -> None:
    """Id, parameters, outputs with their flags: nothing but the one input changes."""
    rest = {
        "id": "7",
        "parameters": {"binary_data_output": True, "priority": 3},
        "outputs": [{"name": "p", "parameters": {"classification": 2, "binary_data": False}}],
    }
    body, headers = request_of({"shape": [2]}, BINARY, **rest)
    await pictures.ask("POST", INFER, body, headers)
    document, _ = sent(pictures)
    assert {name: document[name] for name in rest} == rest
    assert pictures.plane.classified == [("p",)]


async def test_compressed_request_goes_on_uncompressed(pictures: Front) -> None:
    """The engine gets the tensor as it is, and no word of the encoding that is gone."""
    body, headers = request_of({"shape": [2]}, BINARY)
    await pictures.ask("POST", INFER, zlib.compress(body), (*headers, (b"content-encoding", b"deflate")))
    assert pictures.plane.encoded == [(FIRST, SECOND)]
    assert sent(pictures)[1].size == 2


async def test_raw_image_is_one_image_and_is_answered_in_binary(pictures: Front) -> None:
    """As Triton answers raw binary requests; a body of the tensor's own size stays a tensor."""
    await pictures.ask("POST", INFER, FIRST, ((LENGTH, b"0"),))
    assert pictures.plane.encoded == [(FIRST,)]
    document, _ = sent(pictures)
    assert document["parameters"] == {"binary_data_output": True}
    await pictures.ask("POST", INFER, FIRST[:48], ((LENGTH, b"0"),))
    assert pictures.plane.relayed[-1][2].body == FIRST[:48]


async def test_bytes_for_models_without_pictures_pass_untouched(pictures: Front) -> None:
    """Another model, another input, two inputs: the engine has its own words for these."""
    body, headers = request_of({"shape": [2]}, BINARY)
    other = body.replace(b'"x"', b'"y"')
    two = json.dumps(
        {
            "inputs": [
                {"name": "x", "shape": [1], "datatype": "BYTES", "data": ["a"]},
                {"name": "z", "shape": [1], "datatype": "FP32", "data": [1]},
            ]
        }
    ).encode()
    for target, asked, how in (("/v2/models/texts/infer", body, headers), (INFER, other, headers), (INFER, two, ())):
        assert (await pictures.ask("POST", target, asked, how)).status == 200
        assert pictures.plane.relayed[-1][2].body == asked
    assert pictures.plane.encoded == []


@pytest.mark.parametrize(
    ("entry", "binary", "words"),
    [
        ({"shape": [2], "data": ["no base64!", "x"]}, b"", "element 1 is no base64"),
        ({"shape": [2, 2]}, BINARY, "encoded images come as [N] or [N, 1]"),
        ({"shape": [0], "data": []}, b"", "encoded images come as [N] or [N, 1]"),
        ({"shape": [1], "data": [text(FIRST), text(SECOND)]}, b"", "holds 2 elements"),
        ({"shape": [2]}, BINARY[:-1], "past its end"),
        ({"shape": [1], "data": [1.5]}, b"", "data"),
    ],
    ids=["no-base64", "grid", "none", "too-many", "cut-off", "numbers"],
)
async def test_what_is_no_list_of_images_is_refused_with_the_reason(
    pictures: Front, entry: dict[str, object], binary: bytes, words: str
) -> None:
    """400, in one sentence, and nothing reaches plane or engine."""
    body, headers = request_of(entry, binary)
    reply = await pictures.ask("POST", INFER, body, headers)
    assert reply.status == 400
    assert words in json.loads(reply.body)["error"]
    assert pictures.plane.relayed == []


async def test_images_in_shared_memory_are_refused(pictures: Front) -> None:
    """The gateway does not read client shared memory."""
    entry: dict[str, object] = {"shape": [1], "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 9}}
    body, headers = request_of(entry)
    reply = await pictures.ask("POST", INFER, body, headers)
    assert reply.status == 400
    assert "shared memory" in json.loads(reply.body)["error"]


@pytest.mark.parametrize("binary", [BINARY, b""], ids=["binary", "base64"])
async def test_sizes_of_images_follow_as_an_input_of_their_own(pictures: Front, binary: bytes) -> None:
    """A model that takes the pictures' sizes gets them, though the client sends pictures only."""
    pictures.plane.more_inputs = (tensor_from_numpy("size", np.array([[40, 30], [41, 31]], np.int64)),)
    entry = {"shape": [2]} if binary else {"shape": [2], "data": [text(FIRST), text(SECOND)]}
    body, headers = request_of(entry, binary, outputs=[{"name": "p"}])
    assert (await pictures.ask("POST", INFER, body, headers)).status == 200
    call = pictures.plane.relayed[-1][2]
    length = int(dict(call.headers)[LENGTH])
    assert json.loads(call.body[:length]) == {
        "inputs": [
            {"name": "x", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": 8}},
            {"name": "size", "shape": [2, 2], "datatype": "INT64", "parameters": {"binary_data_size": 32}},
        ],
        "outputs": [{"name": "p"}],
    }
    assert np.frombuffer(call.body[length + 8 :], np.int64).tolist() == [40, 30, 41, 31]


async def test_size_of_a_raw_image_follows_too(pictures: Front) -> None:
    """A body that is one picture becomes two tensors."""
    pictures.plane.more_inputs = (tensor_from_numpy("size", np.array([[40, 30]], np.int64)),)
    assert (await pictures.ask("POST", INFER, FIRST, ((LENGTH, b"0"),))).status == 200
    call = pictures.plane.relayed[-1][2]
    length = int(dict(call.headers)[LENGTH])
    assert [one["name"] for one in json.loads(call.body[:length])["inputs"]] == ["x", "size"]
    assert np.frombuffer(call.body[length + 4 :], np.int64).tolist() == [40, 30]
