"""The Python-based onnxruntime backend inside the real Triton, against plain onnxruntime in this process."""

import json
import re
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from penstock.engines.ort_serving.placement import EngineFacts, read_facts
from penstock.engines.triton.runtime import Launch, find_triton
from tests.engines import onnx_models
from tests.engines.onnx_models import SAMPLES
from tests.engines.triton_of_onnx_models import RunningTriton, launch_with, running_triton, write_repository
from tests.integration.living import COUNTED_WITHIN_S
from tests.support.waiting import wait_for

pytestmark = pytest.mark.xdist_group("onnxruntime-backend")

Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def launch(triton_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """The bundled Triton with our backends beside its own."""
    return find_triton(environment=triton_environment, search_path="").prepare(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def triton(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    """One Triton with all the tiny models."""
    folder = tmp_path_factory.mktemp("triton")
    write_repository(folder / "models")
    with running_triton(launch, folder / "models", folder) as running:
        yield running


@pytest.fixture(scope="module")
def client(triton: RunningTriton) -> Iterator[grpc_client.InferenceServerClient]:
    """A blocking client; several threads may use it."""
    with grpc_client.InferenceServerClient(triton.grpc_address) as connected:
        yield connected


def infer(
    client: grpc_client.InferenceServerClient, model: str, inputs: Arrays, outputs: tuple[str, ...] = (), **options: Any
) -> Arrays:
    """What the server answers, by output name."""
    tensors = []
    for name, array in inputs.items():
        tensor = grpc_client.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensors.append(tensor.set_data_from_numpy(array))
    wanted = [grpc_client.InferRequestedOutput(name) for name in outputs] or None
    result = client.infer(model, tensors, outputs=wanted, client_timeout=30, **options)
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


def model_config(triton: RunningTriton, model: str) -> dict[str, Any]:
    """The configuration that Triton serves the model by."""
    with urllib.request.urlopen(f"{triton.http_url}/v2/models/{model}/config", timeout=10) as answer:
        config: dict[str, Any] = json.load(answer)
    return config


def test_infer_text_that_is_not_utf8_is_refused(client: grpc_client.InferenceServerClient) -> None:
    """ONNX Runtime's Python cannot take such bytes: a sentence says so, instead of their repr being looked at."""
    inputs = {f"in_{name}": SAMPLES[name] for name in onnx_models.TYPES}
    inputs["in_BYTES"] = np.array([[b"\xff\xfe", b"b"]], object)
    with pytest.raises(
        InferenceServerException, match="model 'types': input 'in_BYTES' holds bytes that are not UTF-8"
    ):
        infer(client, "types", inputs)


@pytest.mark.parametrize(("model", "max_batch_size"), [("no_config", 4), ("only_inputs", 2)])
def test_config_completed_from_the_file_has_its_dims(triton: RunningTriton, model: str, max_batch_size: int) -> None:
    """max_batch_size, dynamic batching, inputs and outputs become what NGC's backend makes of the same file."""
    config = model_config(triton, model)
    assert config["max_batch_size"] == max_batch_size
    assert "dynamic_batching" in config
    assert [entry["dims"] for entry in config["output"]] == [[3], [3]]
    assert {entry["data_type"] for entry in config["input"] + config["output"]} == {"TYPE_FP32"}


def test_infer_sequence_start_reaches_the_model(client: grpc_client.InferenceServerClient) -> None:
    """The control tensor that Triton's sequence batcher makes is an input of the ONNX file."""
    x = np.array([[1]], np.float32)
    first = infer(client, "sequences", {"x": x}, sequence_id=7, sequence_start=True)
    last = infer(client, "sequences", {"x": x}, sequence_id=7, sequence_end=True)
    assert (first["y"].item(), last["y"].item()) == (101.0, 1.0)


def test_infer_one_bad_request_of_a_batch_fails_alone(client: grpc_client.InferenceServerClient) -> None:
    """Four requests in one run, one with an index outside the table: three are answered, one gets the reason."""

    def ask(index: int) -> Arrays | InferenceServerException:
        try:
            return infer(client, "lookup", {"index": np.array([[index]], np.int64)})
        except InferenceServerException as error:
            return error

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(ask, (0, 9, -1, 3)))

    def batch_sizes() -> list[int]:
        batches = client.get_inference_statistics("lookup").model_stats[0].batch_stats
        return [batch.batch_size for batch in batches]

    wait_for(batch_sizes, COUNTED_WITHIN_S, "Triton counts the batch, a moment after it answered it")
    assert batch_sizes() == [4], "Triton did not hand over the four as one batch"
    error = answers.pop(1)
    assert isinstance(error, InferenceServerException)
    assert error.status() == "StatusCode.INVALID_ARGUMENT"
    sentence = "model 'lookup': Gather node 'lookup': indices element out of data bounds, idx=9"
    assert error.message().startswith(sentence)
    assert not re.search(r"Traceback|\.py|\n", error.message())
    assert [answer["value"].item() for answer in answers] == onnx_models.TABLE[[0, -1, 3]].tolist()


def test_infer_cancelled_while_queued_is_not_run(
    triton: RunningTriton, client: grpc_client.InferenceServerClient
) -> None:
    """A request of minutes is cancelled while it waits for a slow instance: the next one does not wait for it."""

    def start(trips: int) -> Any:
        tensor = grpc_client.InferInput("trips", [1, 1], "INT64").set_data_from_numpy(np.array([[trips]]))
        return client.async_infer("slow", [tensor], callback=lambda result, error: ended.release())

    ended = threading.Semaphore(0)
    pending = 'nv_inference_pending_request_count{model="slow",version="1"}'
    infer(client, "slow", {"trips": np.array([[1]])})
    began = time.monotonic()
    infer(client, "slow", {"trips": np.array([[500]])})
    start(round(500 * 2 / (time.monotonic() - began)))
    start(1)
    wait_for_counter(triton, pending, 1)
    minutes = start(1_000_000)
    wait_for_counter(triton, pending, 2)
    minutes.cancel()
    assert infer(client, "slow", {"trips": np.array([[2]])}) == {"done": 2}
    assert all(ended.acquire(timeout=5) for _ in range(3))


def wait_for_counter(triton: RunningTriton, counter: str, value: int, timeout_s: float = 20.0) -> None:
    """Until Triton's metrics say so."""
    until, wanted, metrics = time.monotonic() + timeout_s, f"{counter} {value}", ""
    while time.monotonic() < until:
        with urllib.request.urlopen(f"{triton.metrics_url}/metrics", timeout=10) as answer:
            metrics = answer.read().decode()
        if wanted in metrics.splitlines():
            return
        time.sleep(0.02)
    raise AssertionError(f"no {wanted} in {timeout_s} s, but:\n" + "\n".join(re.findall(r".*slow.*", metrics)))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("broken_datatype", "input 'x' is TYPE_FP32 in the ONNX file, TYPE_INT32 in the configuration"),
        ("broken_dims", "input 'x' is [-1,3] in the ONNX file, [-1,4] in the configuration"),
        ("broken_bfloat16", "'x' is a tensor(bfloat16) in the ONNX file, which Triton's backends cannot carry"),
        ("broken_batch", "max_batch_size is 8, but not every tensor of the ONNX file has a dynamic first dimension"),
        ("broken_pictures", "image-decoder: engine needs PyTorch in the environment of Triton's models"),
        ("broken_file", "cannot open"),
        ("broken_absent", "there is no file"),
    ],
)
def test_load_model_that_cannot_be_served_says_why(triton: RunningTriton, model: str, sentence: str) -> None:
    """The load fails, the server and the other models live, and the reason names tensor, expected and given."""
    reason = triton.reason(model)
    assert f"model '{model}': " in reason
    assert sentence in reason
    assert "Traceback" not in reason


def test_load_two_instances_share_the_cores(triton: RunningTriton) -> None:
    """Each instance logs its device and threads in one line; two instances use no more than the cores together."""
    lines = re.findall(
        r"backend ready instance=no_config_\d .*intra_op_threads=(\d+) cores=(\d+) instances=2", triton.log()
    )
    facts = [read_facts(line) for line in triton.log().splitlines() if "backend ready instance=no_config" in line]
    assert len(lines) == 2
    assert facts == [EngineFacts(), EngineFacts()]
    assert all(int(threads) == max(1, int(cores) // 2) for threads, cores in lines)


@pytest.mark.long
def test_load_with_numpy_2_is_refused(launch: Launch, tmp_path: Path) -> None:
    """An interpreter with numpy 2 would answer empty outputs without an error: no model loads there, and says why."""
    onnx_models.save(onnx_models.identity(), tmp_path / "models", "any")
    with running_triton(launch_with(launch, Path(sys.prefix)), tmp_path / "models", tmp_path) as running:
        assert f"returns empty outputs with numpy {np.__version__}: install numpy 1.26.4 into" in running.reason("any")
