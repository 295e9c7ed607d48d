"""Models of `penstock models add` under a crowd of clients, and with Ultralytics' own client's calls."""

import ast
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import onnxruntime as ort
import pytest
import tritonclient.grpc
import tritonclient.http

from penstock.engines.config_pbtxt import read_config
from penstock.protocol.inference import Array
from tests.integration.added_models import ULTRALYTICS, add_models, crowd_models, one_client, pictures, start_added
from tests.integration.test_batching import multipart
from tests.support.http import call
from tests.support.made_networks import SIDE
from tests.support.stack import CHECKOUT, RunningStack, stop_stack

pytestmark = pytest.mark.xdist_group("added")
CLIENTS, REQUESTS = 8, 20


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models were added."""
    folder = tmp_path_factory.mktemp("added")
    add_models(folder / "home", folder)
    return folder / "home"


@pytest.fixture(scope="module", params=["embedded", "triton"])
def added(
    request: pytest.FixtureRequest, home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningStack]:
    """A stack of each engine over added models."""
    if request.param == "triton":
        request.getfixturevalue("triton_environment")
    stack = start_added(tmp_path_factory.mktemp(request.param), request.param, home)
    yield stack
    assert stop_stack(stack) == 0, "".join(stack.log[-30:])


def test_every_answer_of_a_crowd_is_the_one_of_a_single_request(added: RunningStack) -> None:
    """Eight clients, five models, pictures and tensors, batches of all sizes; requests do share engine calls."""
    models, images = crowd_models(added), pictures()
    for model in models:
        config = read_config(added.home / "models" / model.name / "config.pbtxt")
        assert (config.max_batch_size, config.parameters["batch_owner"]) == (8, "gateway"), model.name
        model.ask_alone(images)
    assert all(any(one[kind] for one in model.alone["image"] for kind in one) for model in models)
    with ThreadPoolExecutor(CLIENTS) as pool:
        found = list(pool.map(lambda seed: one_client(models, images, seed, REQUESTS), range(CLIENTS)))
    assert sum(found) > 0, "no two requests shared an engine call"


class UltralyticsClient:
    """What Ultralytics' client does with tritonclient, in its order.

    Described by ultralytics/ultralytics, ultralytics/utils/triton.py and ultralytics/nn/autobackend.py, which are not
    used: the package is AGPL. It reads the model's config, sorts the outputs by name, and names the inputs by the
    config's types. `metadata` gives the labels and the size; without it the labels are class0, class1 …
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.name = parts.path.strip("/").split("/")[0]
        self.module: ModuleType = tritonclient.http if parts.scheme == "http" else tritonclient.grpc
        self.client = self.module.InferenceServerClient(url=parts.netloc, verbose=False, ssl=False)
        if parts.scheme == "http":
            config: dict[str, Any] = self.client.get_model_config(self.name)
        else:
            config = self.client.get_model_config(self.name, as_json=True)["config"]
        self.types = [tensor["data_type"].removeprefix("TYPE_") for tensor in config["input"]]
        self.inputs = [tensor["name"] for tensor in config["input"]]
        self.outputs = sorted(tensor["name"] for tensor in config["output"])
        text = config.get("parameters", {}).get("metadata", {}).get("string_value", "None")
        self.metadata: dict[str, Any] = ast.literal_eval(text)

    def predict(self, *arrays: Array) -> list[Array]:
        """Outputs by name, in the type of the first array."""
        given = []
        for name, datatype, array in zip(self.inputs, self.types, arrays, strict=True):
            given.append(self.module.InferInput(name, [*array.shape], datatype))
            given[-1].set_data_from_numpy(array.astype({"FP32": np.float32, "FP16": np.float16}[datatype]))
        wanted = [self.module.InferRequestedOutput(name) for name in self.outputs]
        answer = self.client.infer(model_name=self.name, inputs=given, outputs=wanted)
        return [answer.as_numpy(name).astype(arrays[0].dtype) for name in self.outputs]


@pytest.mark.parametrize("half", [False, True], ids=["float", "half"])
@pytest.mark.parametrize("name", ULTRALYTICS)
@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_ultralytics_own_client_gets_the_models_labels_size_and_outputs(
    added: RunningStack, scheme: str, name: str, *, half: bool
) -> None:
    """YOLO("http://host:8000/model", task="detect") finds all that it needs of the added model, and its outputs."""
    address = added.http_url.removeprefix("http://") if scheme == "http" else added.grpc_address
    ours = UltralyticsClient(f"{scheme}://{address}/{name}")
    found = ours.metadata
    assert (found["names"], found["imgsz"]) == ({0: "person", 1: "helmet", 2: 'it\'s a "vest"'}, [SIDE, SIDE])
    assert (found["stride"], found["batch"], found["args"]["dynamic"]) == (32, 1, False)
    assert found["task"] == ("segment" if name == "safety-seg" else "detect")
    dtype = np.float16 if half else np.float32
    ours.predict(np.zeros((1, 3, *found["imgsz"]), dtype))  # its warm-up
    image = np.random.default_rng(5).random((1, 3, SIDE, SIDE)).astype(dtype)
    session = ort.InferenceSession(str(added.home / "models" / name / "1" / "model.onnx"))
    names = sorted(output.name for output in session.get_outputs())
    kind = {"tensor(float)": np.float32, "tensor(float16)": np.float16}[session.get_inputs()[0].type]
    expected = session.run(names, {"images": image.astype(kind)})
    answers = ours.predict(image)
    assert ours.outputs == names
    for answer, one in zip(answers, expected, strict=True):
        assert answer.dtype == dtype
        assert answer.shape == one.shape
        np.testing.assert_allclose(
            answer, one.astype(dtype), rtol=2e-3 if half or kind == np.float16 else 1e-5, atol=1e-4
        )


def example(title: str, added: RunningStack) -> str:
    """The code below a title of docs/clients.md, for this stack and its model `yolox`."""
    page = (CHECKOUT / "docs" / "clients.md").read_text()
    section = page.partition(f"\n### {title}\n")[2].partition("\n### ")[0].partition("\n## ")[0]
    code = "\n".join(re.findall(r"(?ms)^```python\n(.*?)^```", section)) or section
    side = read_config(added.home / "models" / "yolox" / "config.pbtxt").inputs[0].shape[-1]
    code = code.replace("127.0.0.1:8000", added.http_url.removeprefix("http://")).replace("yolox-nano", "yolox")
    return code.replace("127.0.0.1:8001", added.grpc_address).replace("416, 416", f"{side}, {side}")


def test_examples_of_the_page_of_clients_run_as_they_stand_there(
    added: RunningStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """curl and Python get the same boxes, supervision takes them, tritonclient's two clients get the same outputs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photo.jpg").write_bytes(pictures()[-1])
    (line,) = re.findall(r"(?m)^    (curl .*)$", example("curl", added))
    curled = json.loads(subprocess.run(shlex.split(line), capture_output=True, check=True).stdout)["results"][0]
    found: dict[str, Any] = {}
    exec(example("Python", added), found)
    assert found["result"] == curled
    assert curled["detections"]
    exec(example("supervision", added), found)
    detections = found["detections"]
    assert detections.xyxy.tolist() == np.array([box["xyxy"] for box in curled["detections"]], np.float32).tolist()
    assert detections.data["class_name"].tolist() == [box["label"] for box in curled["detections"]]
    empty = found["to_supervision"]({"detections": []})
    assert (len(empty), empty.is_empty()) == (0, True)
    over: list[dict[str, Any]] = [{}, {}]
    http, _, grpc = example("tritonclient", added).partition("\n\nimport numpy")
    exec(http, over[0])
    exec("import numpy" + grpc, over[1])
    assert over[0]["outputs"].keys() == over[1]["outputs"].keys() != set()
    for name, array in over[0]["outputs"].items():
        np.testing.assert_array_equal(array, over[1]["outputs"][name])


def test_supervision_gets_the_masks_of_the_example(added: RunningStack) -> None:
    """One boolean picture for each object, in the picture's size."""
    found: dict[str, Any] = {"result": {"detections": []}}
    exec(example("supervision", added), found)
    image = pictures()[2]
    body, kind = multipart(image)
    answer = call("POST", f"{added.http_url}/v2/models/safety-seg/image", body, {"content-type": kind})
    result = answer.json["results"][0]
    detections = found["to_supervision"](result)
    assert detections.mask.shape == (len(result["detections"]), 200, 300)
    assert detections.mask.any()


def test_kserve_example_gets_the_models_outputs(added: RunningStack) -> None:
    """In the environment that has KServe's client."""
    python = CHECKOUT / ".venv-clients" / "bin" / "python"
    if not python.is_file():
        pytest.skip("no KServe client here: `make .venv-clients/.ready` fetches it")
    done = subprocess.run([python, "-c", example("KServe", added)], capture_output=True, text=True, check=True)
    name, _, shape = done.stdout.splitlines()[0].partition(" ")
    assert name == read_config(added.home / "models" / "yolox" / "config.pbtxt").outputs[0].name
    assert shape.startswith("(1, ")
