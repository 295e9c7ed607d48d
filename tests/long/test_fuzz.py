"""Many more random cases than `make test` tries, against what reads a stranger's bytes.

Each case starts from something valid and damages a few bytes. Whatever comes is read or refused as InvalidRequest;
any other exception, a case that takes a second, or memory that grows, fails.
"""

import json
import time
from collections.abc import Callable, Sequence

import cv2
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from penstock.gateway.rest.image import parse_files
from penstock.protocol import grpc_codec
from penstock.protocol import http_codec as rest_codec
from penstock.protocol.call import InferHead
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.shared_memory import check_region_name, segment_of
from penstock.vision.decode import decode
from penstock.vision.spec import ColorFormat
from tests.long import fuzz_rules as rules
from tests.support.damage import MIB, Run, damaged, damaged_json

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
SLOW_CASE_S = 1.0
MAX_PIXELS = 4_000_000
MAX_GROWTH_BYTES = 96 * MIB
DEPTH = 64
BOUNDARY = b"3f9"
FORM = f"multipart/form-data; boundary={BOUNDARY.decode()}"


def rest_seeds() -> list[bytes]:
    tensor = {"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [[1, 2.5], [3e9, -4]]}
    words = {"name": "w", "shape": [1], "datatype": "BYTES", "data": ['a"\\\u00e9']}
    output = {"name": "y", "parameters": {"classification": 3, "binary_data": True}}
    shared = {"shared_memory_region": "r", "shared_memory_byte_size": 16, "shared_memory_offset": 8}
    placed = {"name": "x", "shape": [4], "datatype": "FP32", "parameters": shared}
    requests: list[dict[str, object]] = [
        {"id": "1", "inputs": [tensor, words], "outputs": [output], "parameters": {"timeout": 5}},
        {"inputs": [placed], "outputs": [{"name": "y", "parameters": shared}]},
    ]
    return [json.dumps(request).encode() for request in requests]


def rest_binary_seeds() -> list[bytes]:
    """Four bytes follow the JSON."""
    one = {"name": "x", "shape": [1], "datatype": "FP32", "parameters": {"binary_data_size": 4}}
    none = {"name": "y", "shape": [0], "datatype": "INT64", "parameters": {"binary_data_size": 0}}
    output = {"name": "z", "parameters": {"binary_data": True}}
    return [
        json.dumps(request).encode() for request in ({"inputs": [one]}, {"inputs": [one, none], "outputs": [output]})
    ]


def generate_seeds() -> list[bytes]:
    request = {
        "text_input": 'a"b',
        "x": [1.5, float("nan")],
        "stream": False,
        "parameters": {"temperature": 0.5},
        "id": "7",
    }
    return [json.dumps(request).encode(), b"{}", b'{"x": [[1, 2], [3, 4]]}']


def settings_seeds() -> list[bytes]:
    requests: list[dict[str, object]] = [
        {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": None},
        {"log_info": True, "log_verbose_level": 1, "log_format": "default"},
    ]
    return [json.dumps(request).encode() for request in requests]


def repository_seeds() -> list[bytes]:
    parameters = {"config": '{"name": "m"}', "file:1/model.py": "eA==", "unload_dependents": True}
    return [json.dumps({"parameters": parameters}).encode(), b'{"ready": true}']


def grpc_seeds() -> list[bytes]:
    request = service_pb2.ModelInferRequest(model_name="m", model_version="1", id="i")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4]).parameters["p"].string_param = "s"
    request.outputs.add(name="y").parameters["classification"].int64_param = 2
    request.parameters["timeout"].int64_param = 9
    request.raw_input_contents.append(bytes(16))
    placed = service_pb2.ModelInferRequest(model_name="m")
    place = placed.inputs.add(name="x", datatype="FP32", shape=[1, 4]).parameters
    place["shared_memory_region"].string_param = "r"
    place["shared_memory_byte_size"].int64_param = 16
    return [request.SerializeToString(), placed.SerializeToString()]


def grpc_repository_seeds() -> list[bytes]:
    request = service_pb2.RepositoryModelLoadRequest(model_name="m")
    request.parameters["config"].string_param = "{}"
    request.parameters["file:1/model.py"].bytes_param = b"x"
    return [request.SerializeToString(), service_pb2.ModelReadyRequest(name="m", version="1").SerializeToString()]


def grpc_settings_seeds() -> list[bytes]:
    trace = service_pb2.TraceSettingRequest(model_name="m")
    trace.settings["trace_level"].value.extend(["TIMESTAMPS", "TENSORS"])
    log = service_pb2.LogSettingsRequest()
    log.settings["log_info"].bool_param = True
    return [trace.SerializeToString(), log.SerializeToString()]


def form_seeds() -> list[bytes]:
    part = b'--%s\r\nContent-Disposition: form-data; name="a"; filename="b"\r\nContent-Type: image/png\r\n\r\nx\r\n'
    return [part % BOUNDARY * 2 + b"--%s--\r\n" % BOUNDARY]


def name_seeds() -> list[bytes]:
    return [b"region_0", b"/segment", b"/penstock_1", "\u00e9\u4e2d".encode(), b"../shm/x", b"sem.x"]


def image_seeds() -> list[bytes]:
    chance = np.random.default_rng(7)
    picture = cv2.GaussianBlur(chance.integers(0, 255, (48, 64, 3), np.uint8), (9, 9), 0)
    flags = ([cv2.IMWRITE_JPEG_PROGRESSIVE, 1], [cv2.IMWRITE_JPEG_PROGRESSIVE, 0])
    encoded = [cv2.imencode(".jpg", picture, flag)[1] for flag in flags]
    encoded += [cv2.imencode(kind, picture)[1] for kind in (".png", ".webp")]
    return [array.tobytes() for array in encoded]


def scan_rest(data: bytes) -> object:
    return rest_codec.read_head(data, None, InferHead("m"), DEPTH)


def scan_rest_binary(data: bytes) -> object:
    return rest_codec.read_head(data + bytes(4), len(data), InferHead("m"), DEPTH)


def scan_generate(data: bytes) -> object:
    return rest_codec.read_generate_head(data, InferHead("m"), DEPTH)


def scan_settings(data: bytes) -> object:
    return rest_codec.check_settings_body(data, DEPTH)


def scan_repository(data: bytes) -> object:
    return rest_codec.check_repository_body(data, DEPTH)


def read_form(data: bytes) -> object:
    return parse_files(data, FORM, 100)


def read_name(data: bytes) -> object:
    """As gRPC gives it, and as a path does; a name that is taken names one file of /dev/shm and no other place."""
    text = data.decode(errors="surrogateescape")
    check_region_name(text)
    segment = segment_of(text)
    assert "/" not in segment
    assert segment not in ("", ".", "..")
    assert not segment.startswith(("penstock_", "triton_python_backend_", "sem."))
    return segment


def decode_picture(data: bytes) -> object:
    return decode(data, ColorFormat.BGR, max_pixels=MAX_PIXELS)


Seeds = Callable[[], Sequence[bytes]]
Read = Callable[[bytes], object]
TARGETS: dict[str, tuple[int, Seeds, Read]] = {
    "rest": (180_000, rest_seeds, scan_rest),
    "rest binary": (120_000, rest_binary_seeds, scan_rest_binary),
    "rest generate": (100_000, generate_seeds, scan_generate),
    "rest settings": (60_000, settings_seeds, scan_settings),
    "rest repository": (80_000, repository_seeds, scan_repository),
    "rest form": (80_000, form_seeds, read_form),
    "grpc": (180_000, grpc_seeds, grpc_codec.read_head),
    "grpc repository": (80_000, grpc_repository_seeds, grpc_codec.read_repository_model_name),
    "grpc settings": (60_000, grpc_settings_seeds, grpc_codec.read_settings_model_name),
    "shared memory names": (60_000, name_seeds, read_name),
    "images": (200_000, image_seeds, decode_picture),
    "image headers": (200_000, image_seeds, rules.read_picture_header),
    "cards": (60_000, rules.card_seeds, rules.read_card),
    "browsers": (100_000, rules.browser_seeds, rules.read_browser),
    "loads": (60_000, rules.load_seeds, rules.read_load),
    "paths": (100_000, rules.path_seeds, rules.read_path),
}
JSON_TARGETS = {"rest", "rest binary", "rest generate", "rest settings", "rest repository", "cards", "loads"}
ONLY_JSON = {"cards"}  # parsed parameters of a config


def test_all_targets_together_are_a_million_cases() -> None:
    """With those against the running stack some more."""
    assert sum(cases for cases, _, _ in TARGETS.values()) >= 1_000_000


@pytest.mark.parametrize("target", TARGETS)
def test_damaged_input_is_read_or_refused(target: str) -> None:
    """No exception but InvalidRequest, no case that hangs, no growth; the seed is printed on failure."""
    cases, seeds, read = TARGETS[target]
    valid = seeds()
    run = Run(target, cases)
    refused = 0
    while run.done < cases:
        is_json = target in ONLY_JSON or (target in JSON_TARGETS and run.done % 2)
        damage = damaged_json if is_json else damaged
        data = damage(run.chance.choice(valid), run.chance)
        started = time.monotonic()
        try:
            read(data)
        except InvalidRequest:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{run}: {error!r} for {data!r}") from error
        assert time.monotonic() - started < SLOW_CASE_S, f"{run}: slow: {data!r}"
        run.step()
    print(f"{run}, {refused} refused")  # noqa: T201
    assert run.done == cases
    assert cases > refused > 0
    assert run.grown_bytes() < MAX_GROWTH_BYTES
