"""`penstock up --engine embedded`: the same contract on a machine without any Triton, ONNX Runtime in the gateway."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import onnxruntime
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import service_pb2

from deploy.models.street.render import write_scenes
from penstock.protocol.vision_results import Detections
from penstock.vision.accuracy import average_precision, read_annotations
from tests.integration.embedded_stack import look_up, start_embedded, write_models
from tests.integration.living import family
from tests.integration.pictures import frames
from tests.integration.test_encoded_images import (
    assert_images_answer_as_their_tensor_does,
    assert_images_on_a_stream_are_answered_in_order,
)
from tests.integration.test_image_endpoint import (
    assert_answers_as_plain_onnxruntime,
    assert_oriented_is_answered_as_upright,
)
from tests.integration.test_models import penstock, state_of
from tests.integration.test_streams import answers_to
from tests.support.http import call
from tests.support.pulled_models import SOURCE, pull_model
from tests.support.stack import CHECKOUT, RunningStack, stop_stack
from tests.support.tiny_models import CONFIG, IDENTITY, write_model

pytestmark = pytest.mark.xdist_group("embedded")


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """ONNX models beside one of Triton's python backend, and street; fastestdet where the real inputs are."""
    folder = tmp_path_factory.mktemp("embedded")
    write_models(folder / "models")
    fp32 = CONFIG.format(max_batch_size=8, data_type="TYPE_FP32", count=1)
    write_model(folder / "models", "script", IDENTITY, fp32)
    names = ["lookup", "slow", "script", "street"]
    if SOURCE.is_dir():
        pull_model(folder / "home")
        names.append("fastestdet")
    shipped = ("--model-repository", str(CHECKOUT / "model_repository"))
    stack = start_embedded(folder, *shipped, "--models", ",".join(names), engine="auto")
    yield stack
    assert stop_stack(stack) == 0, "".join(stack.log[-30:])


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def test_embedded_serves_an_onnx_model_to_the_real_clients(embedded: RunningStack, module: object) -> None:
    """Triton's own clients cannot tell: metadata, readiness and an inference of a batch."""
    address = embedded.grpc_address if module is tritonclient.grpc else embedded.http_url.removeprefix("http://")
    with module.InferenceServerClient(address) as client:  # type: ignore[attr-defined]
        assert client.is_server_ready()
        assert client.is_model_ready("lookup")
        tensor = module.InferInput("index", [2, 1], "INT64")  # type: ignore[attr-defined]
        tensor.set_data_from_numpy(np.array([[3], [1]], np.int64))
        np.testing.assert_array_equal(client.infer("lookup", [tensor]).as_numpy("value"), [[30], [10]])


def test_embedded_detector_answers_pictures_as_plain_onnxruntime_does(embedded: RunningStack, shared_dir: Path) -> None:
    """Boxes within IoU 0.99 and scores within 1e-3, as through Triton."""
    reference = onnxruntime.InferenceSession(str(shared_dir / "models" / "FastestDet.onnx"))
    assert_answers_as_plain_onnxruntime(embedded, frames(shared_dir / "media" / "vtest.avi"), reference)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_embedded_answers_a_picture_with_an_exif_orientation_in_display_pixels(
    embedded: RunningStack, shared_dir: Path, orientation: int
) -> None:
    """FAULTS 83: the answers equal Triton's."""
    assert_oriented_is_answered_as_upright(embedded, frames(shared_dir / "media" / "vtest.avi")[1], orientation)


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def test_embedded_images_answer_as_their_tensor_does(embedded: RunningStack, module: ModuleType) -> None:
    """Encoded pictures as a BYTES tensor of street, through the unmodified clients."""
    assert_images_answer_as_their_tensor_does(embedded, module)


def test_embedded_images_on_a_stream_are_answered_in_order(embedded: RunningStack) -> None:
    """Pictures, one of them broken, and a tensor."""
    assert_images_on_a_stream_are_answered_in_order(embedded)


async def test_embedded_engine_streams_in_order(embedded: RunningStack) -> None:
    """Each request once, in its turn, wrong ones too."""
    requests = [looked_up(1, "a"), looked_up(2, "nope", model="nope"), looked_up(3, "c")]
    received, code, _ = await answers_to(embedded.grpc_address, requests)
    answers = [service_pb2.ModelStreamInferResponse.FromString(one) for one in received]
    seen = [(one.infer_response.id, bool(one.error_message)) for one in answers]
    assert (seen, code) == ([("a", False), ("nope", True), ("c", False)], "OK")


def looked_up(index: int, request_id: str, *, model: str = "lookup") -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    request.inputs.add(name="index", datatype="INT64", shape=[1, 1])
    request.raw_input_contents.append(np.array([index], np.int64).tobytes())
    serialised: bytes = request.SerializeToString()
    return serialised


def test_embedded_stack_says_which_engine_serves_and_what_it_cannot(embedded: RunningStack) -> None:
    """The last lines name the engine, and a model of another backend with the reason; there is no engine process.

    One line of the log tells what was missing for a Triton.
    """
    (said,) = embedded.logged("info .* engine: embedded, since ")
    assert "no tritonserver on PATH and none of nvidia-pytriton in /nonexistent" in said
    assert f"engine: embedded (ONNX Runtime {onnxruntime.__version__} on the CPU)\n" in embedded.output
    (refused,) = [line for line in embedded.output if line.startswith("cannot serve ")]
    assert refused.startswith("cannot serve script: ")
    assert "python" in refused
    assert not embedded.logged("engine process")
    others = {" ".join(child.cmdline()[1:3]) for child in family(embedded)}
    assert others == {"-m penstock.gateway", "-m penstock.vision.decoder_worker"}


def test_embedded_lists_a_model_of_another_backend_with_its_reason(embedded: RunningStack) -> None:
    """Who asks what is served also sees what is not, and why."""
    rows = json.loads(penstock(embedded, "list", "--json"))
    (script,) = [row for row in rows if row["name"] == "script"]
    assert script["state"] != "READY"
    assert "python" in script["reason"]
    assert "ONNX" in script["reason"]


def test_embedded_loads_and_unloads_by_the_command_line(embedded: RunningStack) -> None:
    """`penstock models load` and `unload` do what they do with Triton."""
    penstock(embedded, "unload", "lookup")
    assert state_of(embedded, "lookup") != "READY"
    assert look_up(embedded).status in (400, 404)
    penstock(embedded, "load", "lookup")
    assert state_of(embedded, "lookup") == "READY"
    assert look_up(embedded).status == 200


def test_embedded_metrics_hold_ours_and_the_engines(embedded: RunningStack) -> None:
    """One scrape has both, under Triton's names for the engine's part, and each part has its own path."""
    assert look_up(embedded).status == 200
    text = call("GET", embedded.metrics_url).body.decode()
    assert "penstock_engine_up 1.0" in text
    assert 'penstock_model_ready{model="script"} 0.0' in text
    assert 'nv_inference_request_success{model="lookup",version="1"}' in text
    assert "penstock_" not in call("GET", f"{embedded.metrics_url}/engine").body.decode()


def test_parent_loads_no_gateway_and_the_gateway_of_a_triton_no_onnx_runtime() -> None:
    """What only another process or the embedded engine needs costs neither time nor memory."""
    program = """import sys, penstock.cli.up, penstock.gateway.stack.stack
ours = {"fastapi", "penstock.gateway.main", "penstock.gateway.dataplane"} & set(sys.modules)
import penstock.gateway.main
raise SystemExit(" ".join(ours | {"onnxruntime"} & set(sys.modules)) or None)"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_embedded_engine_finds_what_rendered_scenes_show(embedded: RunningStack, tmp_path: Path) -> None:
    """The shipped detector, where there is no Triton."""
    assert [line for line in embedded.output if line.startswith("serving ") and "street" in line]
    write_scenes(tmp_path, 6, 900_001, size=(640, 360), scenarios=("plain",))
    truth = read_annotations(tmp_path)
    found = [find(embedded, tmp_path / name) for name in truth]
    assert average_precision(list(truth.values()), found, class_count=3).mean > 0.7


def find(stack: RunningStack, picture: Path) -> Detections:
    """What street finds in the picture."""
    answer = call(
        "POST", f"{stack.http_url}/v2/models/street/image", picture.read_bytes(), {"content-type": "image/jpeg"}
    )
    assert answer.status == 200, answer.body
    rows = answer.json["results"][0]["detections"]
    return Detections(
        np.array([row["xyxy"] for row in rows], np.float32).reshape(-1, 4),
        np.array([row["score"] for row in rows], np.float32),
        np.array([row["class_id"] for row in rows], np.int64),
    )
