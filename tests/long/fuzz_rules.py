"""Fuzzing seeds and targets for checks of untrusted input: cards, browsers, loads, paths, picture headers."""

import json
import posixpath
from urllib.parse import unquote

from penstock.engines.load_policy import check_model, parse_config
from penstock.port_policy import BrowserPolicy, host_fault, parse_host, parse_origin
from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.errors import InvalidRequest, PermissionDenied
from penstock.protocol.inference import Datatype
from penstock.protocol.request_checks import check_inside_folder
from penstock.vision.card import card_from_config
from penstock.vision.decode import header_within

POLICY = BrowserPolicy("127.0.0.1", ("models.example", "*.lan"), ("https://console.example",))
OUTPUTS = (TensorSpec("y", Datatype.FP32, (10,)), TensorSpec("boxes", Datatype.FP32, (-1, 6)))


def card_seeds() -> list[bytes]:
    classifier = {"network-type": "1", "net-scale-factor": "0.017", "offsets": "123.7;116.3;103.5", "labels": "a;b"}
    detector = {"network-type": "0", "maintain-aspect-ratio": "1", "symmetric-padding": "1", "layout": "yolo"}
    odd = {"network-type": "0", "model-color-format": "1", "network-input-order": "1", "pre-cluster-threshold": "0.3"}
    return [json.dumps(parameters).encode() for parameters in (classifier, detector, odd)]


def read_card(data: bytes) -> object:
    values = json.loads(data)
    parameters = {str(key): str(value) for key, value in values.items()} if isinstance(values, dict) else {}
    inputs = (TensorSpec("x", Datatype.FP32, (3, 32, 32)),)
    return card_from_config(ModelConfig("m", "onnxruntime", 8, inputs, OUTPUTS, parameters))


def browser_seeds() -> list[bytes]:
    heads = (
        "POST /v2/models/m/infer HTTP/1.1\nhost: 127.0.0.1:8000\norigin: https://evil.example\ncontent-type: text/css",
        "POST /v2/repository/models/m/load HTTP/1.1\nhost: evil.example\nsec-fetch-site: cross-site",
        "GET http://models.example/v2 HTTP/1.1\nhost: models.example\nreferer: https://console.example/x",
        "POST /v2 HTTP/1.1\nhost: [::1]:8000\norigin: http://[::1]:8000\nsec-fetch-site: same-origin",
    )
    return [head.encode() for head in heads]


def read_browser(data: bytes) -> object:
    """A request of a page of another origin never passes."""
    line, *lines = data.split(b"\n")
    method, _, target = line.partition(b" ")
    headers = [(name.strip().lower(), value.strip()) for name, _, value in (each.partition(b":") for each in lines)]
    fault = host_fault(target.partition(b" ")[0], "1.1", headers)
    if fault:
        raise InvalidRequest(fault)
    try:
        POLICY.check(method.decode("latin-1"), headers, local_address="127.0.0.1", is_trusted=False)
    except PermissionDenied as error:
        raise InvalidRequest(error.message) from error
    found = dict(headers)
    if method == b"POST" and b"origin" in found:
        origin, host = parse_origin(found[b"origin"]), parse_host(found[b"host"])
        assert origin is not None
        assert host is not None
        assert origin.authority.name in (host.name, "console.example"), data
    return method


def load_seeds() -> list[bytes]:
    file = "default_model_filename"
    configs: list[dict[str, object]] = [
        {"name": "m", "backend": "onnxruntime", "max_batch_size": 8, file: "model.onnx"},
        {"name": "m", "backend": "python", "parameters": {"EXECUTION_ENV_PATH": {"string_value": "/tmp/x"}}},
        {"platform": "onnxruntime_onnx", "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1]}]},
        {"backend": "onnxruntime", "output": [{"name": "y", "label_filename": "../labels.txt", "dims": [1]}]},
    ]
    return [json.dumps(config).encode() for config in configs]


def read_load(data: bytes) -> object:
    """No other backend than ONNX Runtime passes."""
    config = parse_config(data.decode(errors="replace"))
    check_model(config, {}, allows_code=False)
    assert config.backend in ("", "onnxruntime"), data
    assert config.platform in ("", "onnxruntime_onnx"), data
    return config


def path_seeds() -> list[bytes]:
    return [b"1/model.onnx", b"../x", b"%2e%2e/x", b"a/../../b", b"/etc/passwd", b"labels.txt", "1/\u00e9.bin".encode()]


def read_path(data: bytes) -> object:
    """A name that passes is inside the folder."""
    name = data.decode(errors="surrogateescape")
    check_inside_folder("a file", name)
    for form in (name, unquote(name)):
        assert posixpath.normpath(f"/folder/{form}").startswith("/folder/"), data
    return name


def read_picture_header(data: bytes) -> object:
    """A header that is read has a size within the limit."""
    header = header_within(data, 4_000_000)
    assert 0 < header.width * header.height <= 4_000_000
    return header
