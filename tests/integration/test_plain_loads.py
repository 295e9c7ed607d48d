"""A load without a config serves the files on disk, with both engines."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from penstock.engines.triton.client import DiskLoads
from tests.engines import onnx_models
from tests.integration.embedded_stack import LOOKUP_CONFIG, start_embedded
from tests.support.http import call, post_json
from tests.support.stack import RunningStack, start_stack, stop_stack

LABELS = b"\xef\xbb\xbfzero\r\none\r\n"
LABELLED = LOOKUP_CONFIG.replace('output [ { name: "value"', 'output [ { name: "value" label_filename: "labels.txt"')
OTHER = {
    "backend": "onnxruntime",
    "max_batch_size": 3,
    "input": [{"name": "index", "data_type": "TYPE_INT64", "dims": [1]}],
    "output": [{"name": "value", "data_type": "TYPE_FP32", "dims": [1]}],
    "version_policy": {"specific": {"versions": [1]}},
}


def write(repository: Path) -> None:
    onnx_models.save(onnx_models.lookup(), repository, "lookup", config=LABELLED)
    (repository / "lookup" / "labels.txt").write_bytes(LABELS)
    shutil.copytree(repository / "lookup" / "1", repository / "lookup" / "2.bak")


@pytest.fixture(scope="module", params=["triton", "embedded"])
def running(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("loads")
    write(folder / "models")
    if request.param == "triton":
        request.getfixturevalue("triton_environment")
        stack = start_stack(folder / "home", "--model-repository", str(folder / "models"))
    else:
        stack = start_embedded(folder)
    yield stack
    assert stop_stack(stack) == 0, "".join(stack.log[-30:])


def load_http(stack: RunningStack, config: str = "") -> None:
    parameters = {"parameters": {"config": config}} if config else {}
    assert post_json(f"{stack.http_url}/v2/repository/models/lookup/load", parameters).status == 200


def load_grpc(stack: RunningStack, config: str = "") -> None:
    question = service_pb2.RepositoryModelLoadRequest(model_name="lookup")
    if config:
        question.parameters["config"].string_param = config
    with grpc.insecure_channel(stack.grpc_address) as channel:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).RepositoryModelLoad(question, timeout=30)


def config_of(stack: RunningStack) -> dict[str, object]:
    found: dict[str, object] = call("GET", f"{stack.http_url}/v2/models/lookup/config").json
    return found


@pytest.mark.parametrize("load", [load_http, load_grpc], ids=["http", "grpc"])
def test_plain_load_ends_an_earlier_override(running: RunningStack, load: Callable[..., None]) -> None:
    """After a client loaded another config, a load without one restores the config on disk."""
    load(running, json.dumps(OTHER))
    assert config_of(running)["max_batch_size"] == 3
    load(running)
    assert config_of(running)["max_batch_size"] == 8
    load(running)
    assert config_of(running)["max_batch_size"] == 8


def test_folder_that_begins_with_digits_is_no_version(running: RunningStack) -> None:
    """With `2.bak` beside version 1, the model is ready and has only version 1."""
    load_http(running)
    assert call("GET", f"{running.http_url}/v2/models/lookup/ready").status == 200
    assert call("GET", f"{running.http_url}/v2/models/lookup").json["versions"] == ["1"]


def test_labels_of_a_windows_editor_are_plain_words(running: RunningStack) -> None:
    """A classification's answer has neither the byte order mark nor carriage returns."""
    load_http(running)
    index = {"name": "index", "shape": [1, 1], "datatype": "INT64", "data": [1]}
    wanted = {"name": "value", "parameters": {"classification": 1}}
    answer = post_json(f"{running.http_url}/v2/models/lookup/infer", {"inputs": [index], "outputs": [wanted]})
    (label,) = answer.json["outputs"][0]["data"]
    assert label.split(":")[2] == "zero"


def test_models_that_triton_reads_right_are_loaded_by_name(tmp_path: Path) -> None:
    """No config is sent for a plain model, for one in no repository, or for one whose config cannot be read."""
    repository = tmp_path / "models"
    write(repository)
    shutil.rmtree(repository / "lookup" / "2.bak")
    (repository / "lookup" / "labels.txt").write_bytes(b"zero\none\n")
    (repository / "broken").mkdir()
    (repository / "broken" / "config.pbtxt").write_text("max_batch_size: many")
    disk = DiskLoads((repository,), tmp_path / "labels")
    for name in ("lookup", "missing", "../models/lookup", "broken"):
        assert disk.config_for(name, is_overridden=False) == ""
    assert json.loads(disk.config_for("lookup", is_overridden=True))["max_batch_size"] == 8
    assert not (tmp_path / "labels").exists()


QUEUED = (
    'backend: "torch" max_batch_size: 8 parameters {{ key: "image-decoder" value {{ string_value: "engine" }} }} {}'
)


@pytest.mark.parametrize(
    ("batcher", "is_corrected"),
    [
        ("dynamic_batching { }", True),
        ("", False),
        ("dynamic_batching { default_queue_policy { max_queue_size: 9 } }", False),
    ],
    ids=["as documented", "no batcher", "a queue policy of the model's own"],
)
def test_calls_with_pictures_leave_tritons_queue_when_their_timeout_passes(
    tmp_path: Path, batcher: str, *, is_corrected: bool
) -> None:
    """Triton reads a request's timeout only if the model has a longer one."""
    folder = tmp_path / "models" / "pictures"
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(QUEUED.format(batcher))
    text = DiskLoads((tmp_path / "models",), tmp_path / "labels").config_for("pictures", is_overridden=False)
    assert bool(text) is is_corrected
    if text:
        policy = json.loads(text)["dynamic_batching"]["default_queue_policy"]
        assert policy == {"default_timeout_microseconds": "600000000", "allow_timeout_override": True}
