"""A model with unusable answers is unavailable from its load on, with the reason, in both engines."""

import base64
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from penstock.cli import models as models_command
from penstock.cli.doctor import model_findings
from penstock.cli.gateway_client import GatewayClient
from penstock.doctor.finding import Severity
from penstock.engines.dedicated_engines import SILENT, STARTING
from tests.engines import onnx_models
from tests.integration.embedded_stack import start_embedded
from tests.integration.pictures import jpeg
from tests.integration.test_model_check import check
from tests.support.http import Answer, call, post_json
from tests.support.stack import RunningStack, start_stack, stop_stack
from tests.support.tiny_models import CONFIG, IDENTITY, write_model

pytestmark = pytest.mark.xdist_group("load-trial")

CARD = """backend: "onnxruntime"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3, 32, 32 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ SIZES ] } ]
parameters { key: "network-type" value { string_value: "1" } }
parameters { key: "labels" value { string_value: "dark;middle;bright" } }
"""
SCALAR = """backend: "onnxruntime"
max_batch_size: 0
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } } ]
"""
NO_PARSER = """"network-type" value { string_value: "0" } }
parameters { key: "parse-bbox-func-name" value { string_value: "nosuch" }"""
HANGS = """import time


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(100000)
"""
TWO_SECONDS = 'parameters { key: "execution_timeout_ms" value { string_value: "2000" } }'
HANG = "it answered nothing for 2 s (execution_timeout_ms)"
NO_OUTPUT = IDENTITY.replace('[pb_utils.Tensor("y", array)]', "[]")


def shades(*, is_endless: bool) -> onnx.ModelProto:
    """x → y [n, 3]: the mean of each channel; is_endless: NaN instead."""
    factor = numpy_helper.from_array(np.array([np.nan if is_endless else 1], np.float32), "factor")
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["means"], axes=[2, 3], keepdims=0),
        helper.make_node("Mul", ["means", "factor"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 32, 32])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])
    graph = helper.make_graph(nodes, "shades", [x], [y], [factor])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


SIZED = CARD.replace("SIZES", "2").replace(
    "dims: [ 3, 32, 32 ] }", 'dims: [ 3, 32, 32 ] }, { name: "size" data_type: TYPE_INT64 dims: [ 2 ] }'
)
NAMED_SIZE = 'parameters { key: "image-size-input" value { string_value: "size" } }'


def sizes() -> onnx.ModelProto:
    """x, size [n, 2] → y [n, 2]: the size, and 0 · the mean of x."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[1, 2, 3], keepdims=0),
        helper.make_node("Mul", ["mean", "zero"], ["nothing"]),
        helper.make_node("Reshape", ["nothing", "column"], ["nothings"]),
        helper.make_node("Cast", ["size"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["floats", "nothings"], ["y"]),
    ]
    constants = {"zero": np.float32(0), "column": np.array([-1, 1])}
    initializers = [numpy_helper.from_array(np.array(value), name) for name, value in constants.items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 32, 32])
    size = helper.make_tensor_value_info("size", TensorProto.INT64, ["n", 2])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])
    graph = helper.make_graph(nodes, "sizes", [x, size], [y], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def mean() -> onnx.ModelProto:
    """x [n] → y, a scalar."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [])
    graph = helper.make_graph([helper.make_node("ReduceMean", ["x"], ["y"], keepdims=0)], "mean", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def endless() -> onnx.ModelProto:
    """x [n] → y [n], after matrix products that take practically forever."""
    eye = helper.make_tensor_value_info("kept", TensorProto.FLOAT, [64, 64])
    body = helper.make_graph(
        [helper.make_node("MatMul", ["kept", "eye"], ["next"]), helper.make_node("Identity", ["go"], ["go_on"])],
        "trip",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            eye,
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, [64, 64]),
        ],
    )
    nodes = [
        helper.make_node("Loop", ["count", "true", "eye"], ["matrix"], body=body),
        helper.make_node("ReduceMax", ["matrix"], ["one"], keepdims=0),
        helper.make_node("Mul", ["x", "one"], ["y"]),
    ]
    constants = {"count": np.int64(1 << 50), "true": np.bool_(True), "eye": np.eye(64, dtype=np.float32)}
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])
    initializers = [numpy_helper.from_array(np.array(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "endless", [x], [y], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@dataclass(frozen=True)
class Loaded:
    """A stack and its model repository."""

    stack: RunningStack
    repository: Path
    is_embedded: bool

    def write(self, name: str, *, is_endless: bool) -> None:
        """Writes a model with this name; replaces an existing one."""
        shutil.rmtree(self.repository / name, ignore_errors=True)
        config = CARD.replace("SIZES", "3")
        onnx_models.save(shades(is_endless=is_endless), self.repository, name, config=config)

    def write_hanging(self, name: str) -> None:
        """Writes a model that answers nothing."""
        if self.is_embedded:
            onnx_models.save(endless(), self.repository, name, config=f'backend: "onnxruntime"\n{TWO_SECONDS}')
        else:
            config = CONFIG.format(max_batch_size=0, data_type="TYPE_FP32", count=1)
            write_model(self.repository, name, HANGS, config + TWO_SECONDS)

    def status(self, model: str) -> int:
        return call("GET", f"{self.stack.http_url}/v2/models/{model}/ready").status

    def reason(self, model: str) -> str:
        rows = post_json(f"{self.stack.http_url}/v2/repository/index", {}).json
        return str(next(row.get("reason", "") for row in rows if row["name"] == model))

    def see(self, model: str) -> Answer:
        target = f"{self.stack.http_url}/v2/models/{model}/image"
        return call("POST", target, jpeg(np.full((48, 64, 3), 90, np.uint8)), {"content-type": "image/jpeg"})

    def command(self, *words: str) -> Any:
        return CliRunner().invoke(models_command.app, [*words, "--url", self.stack.http_url])


@pytest.fixture(scope="module", params=["embedded", "triton"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    folder = tmp_path_factory.mktemp("load-trial")
    repository = folder / "models"
    for name, is_endless in (("fine", False), ("shades", True)):
        config = CARD.replace("SIZES", "3")
        onnx_models.save(shades(is_endless=is_endless), repository, name, config=config)
    card = CARD.replace("SIZES", "3").replace('"network-type" value { string_value: "1" }', NO_PARSER)
    onnx_models.save(shades(is_endless=False), repository, "yolox", config=card)
    onnx_models.save(mean(), repository, "scalar", config='backend: "onnxruntime"\n')
    onnx_models.save(sizes(), repository, "sized", config=SIZED + NAMED_SIZE)
    onnx_models.save(sizes(), repository, "unsized", config=SIZED)
    if request.param == "triton":
        request.getfixturevalue("triton_environment")
        write_model(repository, "mute", NO_OUTPUT, CONFIG.format(max_batch_size=0, data_type="TYPE_FP32", count=1))
        stack = start_stack(folder / "home", "--model-repository", str(repository))
    else:
        onnx_models.save(mean(), repository, "reshaped", config=SCALAR)
        stack = start_embedded(folder)
    yield Loaded(stack, repository, request.param == "embedded")
    assert stop_stack(stack) == 0, "".join(stack.log[-30:])


def test_model_that_answers_no_picture_is_not_ready_and_says_why(loaded: Loaded) -> None:
    """From the start it gets 503 for pictures and tensors, with the reason in the index; other models are ready."""
    assert (loaded.status("fine"), loaded.status("shades")) == (200, 503)
    why = loaded.reason("shades")
    assert why.startswith("its trial at load failed: a picture through /image: ")
    refused = loaded.see("shades")
    assert refused.status == 503
    assert why in refused.json["error"]
    assert "retry-after" not in refused.headers  # only another load can help
    assert loaded.see("fine").status == 200
    assert call("GET", f"{loaded.stack.http_url}/v2/health/ready").status == 200


def test_model_with_an_invalid_picture_parameter_is_not_ready_and_says_why(loaded: Loaded) -> None:
    """A load fails with the reason, which the readiness, `models list` and `/image` report as well."""
    why = "its trial at load failed: parameter 'parse-bbox-func-name' = 'nosuch' is not one of: boxes, center-heatmap"
    assert loaded.status("yolox") == 503
    assert loaded.reason("yolox").startswith(why)
    assert f"yolox: {why}" in loaded.command("list").output
    refused = loaded.see("yolox")
    assert (refused.status, why in refused.json["error"]) == (503, True)
    failed = loaded.command("load", "yolox")
    assert (failed.exit_code, why in failed.output) == (1, True), failed.output


def test_model_that_cannot_serve_is_a_finding_of_the_doctor(loaded: Loaded) -> None:
    """With the reason of the repository index; models that serve are counted."""
    findings = {one.id: one for one in model_findings(GatewayClient(loaded.stack.http_url))}
    assert loaded.reason("shades") in findings["models.shades"].found
    assert findings["models.shades"].status is Severity.WARNING
    assert "models.fine" not in findings


def test_model_whose_input_for_sizes_is_not_named_is_not_ready(loaded: Loaded) -> None:
    """It would refuse every picture; the reason says which parameter is missing."""
    assert (loaded.status("sized"), loaded.status("unsized")) == (200, 503)
    assert "name it by image-size-input" in loaded.reason("unsized")


def test_model_with_an_input_for_sizes_gets_them_however_pictures_come(loaded: Loaded) -> None:
    """/image, encoded pictures over HTTP (JSON, binary, raw) and gRPC: the answer is the picture's width and height."""
    classes = json.loads(loaded.see("sized").body)["results"][0]["classes"]
    assert [(one["class_id"], one["score"]) for one in classes] == [(0, 64.0), (1, 48.0)]
    images = [jpeg(np.full((height, width, 3), 90, np.uint8)) for width, height in ((64, 48), (80, 20))]
    tensor = np.empty(2, np.object_)
    tensor[:] = images
    for module, address in ((http, loaded.stack.http_url[7:]), (grpc, loaded.stack.grpc_address)):
        with module.InferenceServerClient(address) as client:
            sent = module.InferInput("x", [2], "BYTES")
            sent.set_data_from_numpy(tensor)
            assert client.infer("sized", [sent]).as_numpy("y").tolist() == [[64, 48], [80, 20]]
    data = [base64.b64encode(image).decode() for image in images]
    body = {"inputs": [{"name": "x", "shape": [2], "datatype": "BYTES", "data": data}]}
    url = f"{loaded.stack.http_url}/v2/models/sized/infer"
    assert post_json(url, body).json["outputs"][0]["data"] == [64, 48, 80, 20]
    raw = call("POST", url, images[1], {"Inference-Header-Content-Length": "0"})
    assert np.frombuffer(raw.body[-8:], np.float32).tolist() == [80, 20]


def test_model_that_lacks_an_output_is_not_ready(loaded: Loaded) -> None:
    """This is tested with the engine that returns such answers."""
    if (loaded.repository / "mute").is_dir():
        assert loaded.status("mute") == 503
        assert "its trial at load failed" in loaded.reason("mute")


@pytest.mark.parametrize("model", ["scalar", "reshaped"])
def test_scalar_output_is_answered(loaded: Loaded, model: str) -> None:
    """It has the shape of the config."""
    if not (loaded.repository / model).is_dir():
        pytest.skip("Triton 2.51 refuses a reshape to a scalar at load")
    body = {"inputs": [{"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 3]}]}
    answer = post_json(f"{loaded.stack.http_url}/v2/models/{model}/infer", body)
    assert answer.status == 200, answer.body
    (output,) = answer.json["outputs"]
    assert (output["shape"], output["data"]) == ([1], [2.0])


def test_load_and_check_try_what_users_send(loaded: Loaded, tmp_path: Path) -> None:
    """Both fail although tensors are answered correctly; when the model is fixed and loaded, it serves at once."""
    loaded.write("mended", is_endless=True)
    failed = loaded.command("load", "mended")
    assert failed.exit_code == 1
    assert "its trial at load failed: a picture through /image" in failed.output
    code, rows = check(tmp_path, "mended", "fine", repository=loaded.repository)
    assert (code, rows["mended"]["verdict"], rows["fine"]["verdict"]) == (1, "cannot run", "ok"), rows
    loaded.write("mended", is_endless=False)
    mended = loaded.command("load", "mended")
    assert mended.exit_code == 0, mended.output
    assert (loaded.status("mended"), loaded.see("mended").status) == (200, 200)
    seen = json.loads(loaded.see("mended").body)["results"][0]["classes"][0]
    assert seen["label"] in ("dark", "middle", "bright")


@pytest.mark.parametrize("loaded", ["embedded", pytest.param("triton", marks=pytest.mark.long)], indirect=True)
def test_load_of_a_model_that_hangs_fails_after_its_execution_timeout(loaded: Loaded) -> None:
    """It is never ready; the index and `models list` have the reason; other models are served."""
    loaded.write_hanging("stuck")
    end, statuses = threading.Event(), list[int]()

    def look() -> None:
        while not end.is_set():
            statuses.append(loaded.status("stuck"))

    looking = threading.Thread(target=look)
    looking.start()
    failed = loaded.command("load", "stuck")
    end.set()
    looking.join()
    assert (failed.exit_code, HANG in failed.output) == (1, True), failed.output
    assert 503 in statuses
    assert 200 not in statuses[statuses.index(503) :]
    assert loaded.status("stuck") == 503
    assert loaded.reason("stuck") in (HANG, STARTING, SILENT)  # while its own engine process starts
    listed = loaded.command("list").output
    assert any(f"stuck: {reason}" in listed for reason in (HANG, STARTING, SILENT)), listed
    refused = post_json(
        f"{loaded.stack.http_url}/v2/models/stuck/infer",
        {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]},
    )
    assert (refused.status, HANG in refused.json["error"]) == (503, True)
    assert "retry-after" in refused.headers
    assert (loaded.status("fine"), loaded.see("fine").status) == (200, 200)
