"""Encoded images as a BYTES tensor, through the unmodified clients, to Triton; test_embedded does so without."""

import base64
import gzip
import json
import queue
from pathlib import Path
from types import ModuleType

import cv2
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from penstock.protocol.inference import Array
from penstock.vision.decode import decode
from penstock.vision.preprocess import prepare
from penstock.vision.spec import ColorFormat, PrepareSpec, ResizeMode
from tests.integration.pictures import fastestdet_input, frames, jpeg
from tests.support.http import call
from tests.support.stack import CHECKOUT, RunningStack

BOTH = pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
STREET = PrepareSpec(
    width=512, height=288, color=ColorFormat.BGR, scale=0.00392156862745098, fit=ResizeMode.PAD_RIGHT_BOTTOM
)
GOLDEN = (CHECKOUT / "model_repository" / "street" / "golden.jpg").read_bytes()
PEOPLE = (CHECKOUT / "model_repository" / "people" / "golden.jpg").read_bytes()

pytestmark = pytest.mark.xdist_group("stack")


def ask(stack: RunningStack, module: ModuleType, model: str, name: str, array: Array, **more: object) -> Array:
    """The first output that the model's config names."""
    address = stack.grpc_address if module is tritonclient.grpc else stack.http_url.removeprefix("http://")
    datatype = "BYTES" if array.dtype == np.object_ else {"float32": "FP32", "uint8": "UINT8"}[array.dtype.name]
    with module.InferenceServerClient(address) as client:
        tensor = module.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        output = {"street": "heatmap", "people": "boxes", "fastestdet": "758"}[model]
        answer = client.infer(model, [tensor], outputs=[module.InferRequestedOutput(output)], request_id="7", **more)
    response = answer.get_response()
    assert (response["id"] if isinstance(response, dict) else response.id) == "7"
    result: Array = answer.as_numpy(output)
    return result


def encoded(*images: bytes) -> Array:
    array = np.empty(len(images), np.object_)
    array[:] = images
    return array


def street_input(*images: bytes) -> Array:
    return np.stack([prepare(decode(image, STREET.color), STREET)[0] for image in images])


def png(image: bytes) -> bytes:
    pixels = cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_COLOR)
    return cv2.imencode(".png", pixels)[1].tobytes()


@BOTH
def test_images_answer_as_their_tensor_does(stack: RunningStack, module: ModuleType) -> None:
    """street, a batch of a JPEG and a PNG: what the engine says of the encoded is what it says of the prepared."""
    assert_images_answer_as_their_tensor_does(stack, module)


def assert_images_answer_as_their_tensor_does(stack: RunningStack, module: ModuleType) -> None:
    images = (GOLDEN, png(GOLDEN[:]))
    got = ask(stack, module, "street", "images", encoded(*images))
    wanted = ask(stack, module, "street", "images", street_input(*images))
    assert got.shape == (2, 3, 72, 128)
    np.testing.assert_array_equal(got, wanted)


@BOTH
def test_image_of_its_own_size_reaches_a_model_without_batching(stack: RunningStack, module: ModuleType) -> None:
    """people takes the picture's own pixels, BGR, height by width."""
    pixels = decode(PEOPLE, ColorFormat.BGR).pixels
    wanted = ask(stack, module, "people", "image", np.ascontiguousarray(pixels))
    np.testing.assert_array_equal(ask(stack, module, "people", "image", encoded(PEOPLE)), wanted)


@BOTH
def test_frame_of_the_real_video_reaches_fastestdet(stack: RunningStack, shared_dir: Path, module: ModuleType) -> None:
    """Against a preparation written by hand: the outputs agree as far as JPEG decoders do."""
    image = jpeg(frames(shared_dir / "media" / "vtest.avi", 1)[0])
    picture = cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_COLOR)
    got = ask(stack, module, "fastestdet", "input.1", encoded(image))
    wanted = ask(stack, module, "fastestdet", "input.1", fastestdet_input(picture))
    np.testing.assert_allclose(got, wanted, atol=0.05)


@BOTH
def test_compressed_request_is_served(stack: RunningStack, module: ModuleType) -> None:
    """gzip on the way in changes nothing."""
    how = {"request_compression_algorithm" if module is tritonclient.http else "compression_algorithm": "gzip"}
    got = ask(stack, module, "street", "images", encoded(GOLDEN), **how)
    np.testing.assert_array_equal(got, ask(stack, module, "street", "images", street_input(GOLDEN)))


@BOTH
def test_bad_picture_and_too_many_are_refused_and_named(stack: RunningStack, module: ModuleType) -> None:
    """400 / INVALID_ARGUMENT with the picture's number; the model's max_batch_size is kept."""
    with pytest.raises(InferenceServerException, match="image 2 of 2: the JPEG image cannot be decoded") as refused:
        ask(stack, module, "street", "images", encoded(GOLDEN, GOLDEN[:200]))
    assert refused.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
    with pytest.raises(InferenceServerException, match="17 images for model 'street', which takes 16 at once"):
        ask(stack, module, "street", "images", encoded(*[GOLDEN] * 17))


def test_images_on_a_stream_are_answered_in_order(stack: RunningStack) -> None:
    """Pictures, one of them broken, and a tensor: each is answered as alone, in the order of the requests."""
    assert_images_on_a_stream_are_answered_in_order(stack)


def assert_images_on_a_stream_are_answered_in_order(stack: RunningStack) -> None:
    wanted = ask(stack, tritonclient.grpc, "street", "images", street_input(GOLDEN))
    answers: queue.Queue[tuple[object, InferenceServerException | None]] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(stack.grpc_address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number, array in enumerate((encoded(GOLDEN), encoded(GOLDEN[:200]), street_input(GOLDEN))):
            tensor = tritonclient.grpc.InferInput(
                "images", list(array.shape), "BYTES" if array.dtype == np.object_ else "FP32"
            )
            tensor.set_data_from_numpy(array)
            client.async_stream_infer("street", [tensor], request_id=str(number))
        got = [answers.get(timeout=20) for _ in range(3)]
        client.stop_stream()
    for result, error in (got[0], got[2]):
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("heatmap"), wanted)  # type: ignore[attr-defined]
    assert "the JPEG image cannot be decoded" in str(got[1][1])


def test_json_base64_and_raw_bodies_are_served(stack: RunningStack) -> None:
    """Without a client library: base64 in JSON, gzip over it, and the file itself as the body."""
    url = f"{stack.http_url}/v2/models/street/infer"
    wanted = ask(stack, tritonclient.http, "street", "images", street_input(GOLDEN))
    text = base64.b64encode(GOLDEN).decode()
    document = {
        "inputs": [{"name": "images", "shape": [1], "datatype": "BYTES", "data": [text]}],
        "outputs": [{"name": "heatmap"}],
    }
    body = json.dumps(document).encode()
    for content, headers in ((body, {}), (gzip.compress(body), {"content-encoding": "gzip"})):
        answer = call("POST", url, content, headers)
        assert answer.status == 200, answer.body
        (output,) = json.loads(answer.body)["outputs"]
        np.testing.assert_allclose(np.array(output["data"], np.float32).reshape(wanted.shape), wanted, atol=1e-6)
    raw = call("POST", url, GOLDEN, {"inference-header-content-length": "0"})
    assert raw.status == 200, raw.body
    outputs = json.loads(raw.body[: int(raw.headers["inference-header-content-length"])])["outputs"]
    assert sorted(output["parameters"]["binary_data_size"] for output in outputs) == [110592, 147456]
