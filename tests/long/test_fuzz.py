"""Many more random cases than `make test` tries, against what reads a stranger's bytes.

Each case starts from something valid and damages a few bytes. Whatever comes is read or refused as InvalidRequest;
any other exception, or a case that takes a second, fails.
"""

import json
import random
import time
from collections.abc import Callable

import cv2
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from server.core.errors import InvalidRequest
from server.core.relay import InferHead
from server.grpc import codec as grpc_codec
from server.rest import codec as rest_codec
from server.vision.decode import decode
from server.vision.spec import ColorFormat

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
DURATION_S = 60.0
SLOW_CASE_S = 1.0
MAX_PIXELS = 4_000_000


def damaged(seed: bytes, chance: random.Random) -> bytes:
    """A few bytes changed, cut out, doubled or put in."""
    data = bytearray(seed)
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del data[at : at + chance.randint(1, 16)]
            case 2:
                data[at:at] = data[at : at + chance.randint(1, 64)]
            case _:
                data[at:at] = chance.randbytes(chance.randint(1, 8))
    return bytes(data)


def rest_seeds() -> list[bytes]:
    tensor = {"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [[1, 2.5], [3e9, -4]]}
    words = {"name": "w", "shape": [1], "datatype": "BYTES", "data": ['a"\\\u00e9']}
    output = {"name": "y", "parameters": {"classification": 3, "binary_data": True}}
    binary = {"name": "x", "shape": [1], "datatype": "FP32", "parameters": {"binary_data_size": 4}}
    requests: list[dict[str, object]] = [
        {"id": "1", "inputs": [tensor, words], "outputs": [output], "parameters": {"timeout": 5}},
        {"inputs": [binary]},
    ]
    return [json.dumps(request).encode() for request in requests]


def grpc_seeds() -> list[bytes]:
    request = service_pb2.ModelInferRequest(model_name="m", model_version="1", id="i")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4]).parameters["p"].string_param = "s"
    request.outputs.add(name="y").parameters["classification"].int64_param = 2
    request.parameters["timeout"].int64_param = 9
    request.raw_input_contents.append(bytes(16))
    return [request.SerializeToString()]


def image_seeds() -> list[bytes]:
    chance = np.random.default_rng(7)
    picture = cv2.GaussianBlur(chance.integers(0, 255, (48, 64, 3), np.uint8), (9, 9), 0)
    flags = ([cv2.IMWRITE_JPEG_PROGRESSIVE, 1], [cv2.IMWRITE_JPEG_PROGRESSIVE, 0])
    encoded = [cv2.imencode(".jpg", picture, flag)[1] for flag in flags]
    encoded += [cv2.imencode(kind, picture)[1] for kind in (".png", ".webp")]
    return [array.tobytes() for array in encoded]


def scan_rest(data: bytes) -> object:
    return rest_codec.scan_infer(data, None, InferHead("m"), 64)


def scan_rest_binary(data: bytes) -> object:
    return rest_codec.scan_infer(data + bytes(4), len(data), InferHead("m"), 64)


def decode_picture(data: bytes) -> object:
    return decode(data, ColorFormat.BGR, max_pixels=MAX_PIXELS)


TARGETS: dict[str, tuple[Callable[[], list[bytes]], Callable[[bytes], object]]] = {
    "rest": (rest_seeds, scan_rest),
    "rest binary": (rest_seeds, scan_rest_binary),
    "grpc": (grpc_seeds, grpc_codec.scan_infer),
    "grpc repository": (grpc_seeds, grpc_codec.scan_repository_request),
    "images": (image_seeds, decode_picture),
}


@pytest.mark.parametrize("target", TARGETS)
def test_damaged_input_is_read_or_refused(target: str) -> None:
    """No exception but InvalidRequest, and no case that hangs, in a minute of them; the seed is printed on failure."""
    seeds, read = TARGETS[target]
    valid = seeds()
    number = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(number)
    cases = refused = 0
    until = time.monotonic() + DURATION_S
    while time.monotonic() < until:
        data = damaged(chance.choice(valid), chance)
        started = time.monotonic()
        try:
            read(data)
        except InvalidRequest:
            refused += 1
        except Exception as error:
            raise AssertionError(f"seed {number}, case {cases}: {error!r} for {data!r}") from error
        assert time.monotonic() - started < SLOW_CASE_S, f"seed {number}, case {cases} is slow: {data!r}"
        cases += 1
    print(f"{target}: {cases} cases, {refused} refused, seed {number}")  # noqa: T201
    assert cases > refused > 0
