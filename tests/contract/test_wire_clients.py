"""Unmodified clients against two whole stacks over the same models: one with Triton, one with `--engine embedded`."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from tests.contract.wire_models import write_models
from tests.engines import onnx_models
from tests.integration.living import COUNTED_WITHIN_S
from tests.support.stack import RunningStack, start_stack, stop_stack, wait_until_ready
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.xdist_group("wire-stacks"), pytest.mark.long]


@dataclass(frozen=True)
class Stacks:
    triton: RunningStack
    embedded: RunningStack

    def __iter__(self) -> Iterator[RunningStack]:
        return iter((self.triton, self.embedded))


@pytest.fixture(scope="module")
def stacks(triton_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stacks]:
    """Both stacks, ready."""
    folder = tmp_path_factory.mktemp("stacks")
    write_models(folder / "models")
    models = ("--model-repository", str(folder / "models"))
    triton = start_stack(folder / "triton", "--engine", "triton", *models, wait=False)
    embedded = start_stack(folder / "embedded", "--engine", "embedded", *models, wait=False)
    wait_until_ready(embedded)
    wait_until_ready(triton)
    yield Stacks(triton, embedded)
    assert [stop_stack(triton), stop_stack(embedded)] == [0, 0]


def http_client(stack: RunningStack) -> tritonclient.http.InferenceServerClient:
    return tritonclient.http.InferenceServerClient(stack.http_url.removeprefix("http://"))


def tensor(module: Any, array: Any, datatype: str = "FP32", **options: Any) -> Any:
    made = module.InferInput("x", list(array.shape), datatype)
    made.set_data_from_numpy(array, **options)
    return made


def test_http_client_infers_alike_in_every_encoding(stacks: Stacks) -> None:
    """tritonclient.http: binary and JSON tensors, gzip and deflate both ways, strings, classes."""
    array, words = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([[b"", "é".encode()]], np.object_)
    answers = []
    for stack in stacks:
        with http_client(stack) as client:
            results: list[Any] = []
            for is_binary in (True, False):
                wanted = [tritonclient.http.InferRequestedOutput("y", binary_data=is_binary)]
                asked = [tensor(tritonclient.http, array, binary_data=is_binary)]
                results.append(client.infer("plain", asked, outputs=wanted).as_numpy("y").tolist())
                text = [tensor(tritonclient.http, words, "BYTES", binary_data=is_binary)]
                results.append(client.infer("text", text).as_numpy("y").tolist())
            for way in ("gzip", "deflate"):
                done = client.infer(
                    "plain",
                    [tensor(tritonclient.http, array)],
                    request_id="7",
                    request_compression_algorithm=way,
                    response_compression_algorithm=way,
                )
                results.append((done.as_numpy("y").tolist(), done.get_response()["id"]))  # fmt: skip
            classes = [tritonclient.http.InferRequestedOutput("y", class_count=2)]
            results.append(
                client.infer("plain", [tensor(tritonclient.http, array)], outputs=classes).as_numpy("y").tolist()
            )
            answers.append(results)
    assert answers[0] == answers[1]
    assert answers[1][0] == array.tolist()


def has_counted(client: tritonclient.grpc.InferenceServerClient, rows: int) -> bool:
    return bool(client.get_inference_statistics("plain").model_stats[0].inference_count >= rows)


def test_grpc_client_infers_and_reads_alike(stacks: Stacks) -> None:
    """tritonclient.grpc: inference, classes, metadata, configuration, index, readiness."""
    array, answers = np.arange(6, dtype=np.float32).reshape(2, 3), []
    for stack in stacks:
        with tritonclient.grpc.InferenceServerClient(stack.grpc_address) as client:
            assert client.is_server_live()
            assert client.is_model_ready("versions", "1")
            classes = [tritonclient.grpc.InferRequestedOutput("y", class_count=3)]
            config = client.get_model_config("pair", as_json=True)["config"]
            config.pop("runtime", None)
            answers.append([
                client.infer("versions", [tensor(tritonclient.grpc, array)], model_version="1").as_numpy("y").tolist(),
                client.infer("plain", [tensor(tritonclient.grpc, array)], outputs=classes).as_numpy("y").tolist(),
                client.get_model_metadata("pair", as_json=True),
                config,
                [(row.name, row.version, row.state) for row in client.get_model_repository_index().models],
            ])  # fmt: skip
            wait_for(partial(has_counted, client, 2), COUNTED_WITHIN_S, "the two rows of 'plain' are counted")
    assert answers[0] == answers[1]


def test_models_are_loaded_and_unloaded_through_the_gateway(stacks: Stacks) -> None:
    """Over both protocols, with a config of its own and without; a file that comes along is refused with a sentence."""
    config = {"backend": "onnxruntime", "max_batch_size": 2}
    with http_client(stacks.embedded) as over_http, tritonclient.grpc.InferenceServerClient(
        stacks.embedded.grpc_address
    ) as over_grpc:  # fmt: skip
        over_http.unload_model("spare")
        assert not over_grpc.is_model_ready("spare")
        over_grpc.load_model("spare", config=json.dumps(config))
        assert over_http.get_model_config("spare")["max_batch_size"] == 2
        over_http.load_model("spare")
        assert over_grpc.get_model_config("spare").config.max_batch_size == 8
        model = onnx_models.plus(1).SerializeToString()
        with pytest.raises(InferenceServerException, match="loads no files from requests"):
            over_http.load_model("spare", config=json.dumps(config), files={"file:1/model.onnx": model})
