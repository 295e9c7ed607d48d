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
import onnxruntime as ort
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

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


def plain(model: Any, inputs: Arrays) -> Arrays:
    """What onnxruntime answers in this process."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def assert_same(answered: Arrays, expected: Arrays) -> None:
    """Bit for bit, names and types as well."""
    assert answered.keys() == expected.keys()
    for name, array in expected.items():
        assert answered[name].dtype == array.dtype
        np.testing.assert_array_equal(answered[name], array)


def model_config(triton: RunningTriton, model: str) -> dict[str, Any]:
    """The configuration that Triton serves the model by."""
    with urllib.request.urlopen(f"{triton.http_url}/v2/models/{model}/config", timeout=10) as answer:
        config: dict[str, Any] = json.load(answer)
    return config


def rows(count: int, seed: int = 0) -> Any:
    """A [count, 3] float32 array."""
    return np.random.default_rng(seed).random((count, 3), np.float32)


@pytest.mark.parametrize("datatype", onnx_models.TYPES)
def test_infer_every_datatype_answers_what_was_sent(client: grpc_client.InferenceServerClient, datatype: str) -> None:
    """Each of Triton's thirteen datatypes goes in and comes out unharmed, and never as an empty output."""
    inputs = {f"in_{name}": np.concatenate([SAMPLES[name]] * 3) for name in onnx_models.TYPES}
    answered = infer(client, "types", inputs, (f"out_{datatype}",))
    assert answered[f"out_{datatype}"].size == 6
    assert_same(answered, {f"out_{datatype}": inputs[f"in_{datatype}"]})


def test_infer_text_that_is_not_utf8_is_refused(client: grpc_client.InferenceServerClient) -> None:
    """ONNX Runtime's Python cannot take such bytes: a sentence says so, instead of their repr being looked at."""
    inputs = {f"in_{name}": SAMPLES[name] for name in onnx_models.TYPES}
    inputs["in_BYTES"] = np.array([[b"\xff\xfe", b"b"]], object)
    with pytest.raises(
        InferenceServerException, match="model 'types': input 'in_BYTES' holds bytes that are not UTF-8"
    ):
        infer(client, "types", inputs)


def test_infer_model_without_config_equals_plain_onnxruntime(client: grpc_client.InferenceServerClient) -> None:
    """A folder with nothing but 1/model.onnx is served: two inputs, two outputs."""
    inputs = {"a": rows(4, 1), "b": rows(4, 2)}
    assert_same(infer(client, "no_config", inputs), plain(onnx_models.add_and_multiply(), inputs))


def test_infer_one_output_requested_answers_only_that(client: grpc_client.InferenceServerClient) -> None:
    """An unrequested output is not sent."""
    inputs = {"a": rows(2, 1), "b": rows(2, 2)}
    expected = plain(onnx_models.add_and_multiply(), inputs)["product"]
    assert_same(infer(client, "no_config", inputs, ("product",)), {"product": expected})


@pytest.mark.parametrize(
    ("model", "max_batch_size", "dims"),
    [
        ("no_config", 4, [[3], [3]]),
        ("only_inputs", 2, [[3], [3]]),
        ("no_batch", 0, [[1, 3]]),
        ("dynamic", 4, [[-1, -1]]),
        ("scalar", 0, [[1]]),
        ("batched_scalar", 4, [[1]]),
    ],
)
def test_config_completed_from_the_file_has_its_dims(
    triton: RunningTriton, model: str, max_batch_size: int, dims: list[list[int]]
) -> None:
    """max_batch_size, dynamic batching, inputs and outputs become what NGC's backend makes of the same file."""
    config = model_config(triton, model)
    assert config["max_batch_size"] == max_batch_size
    assert ("dynamic_batching" in config) == (max_batch_size > 0)
    assert [entry["dims"] for entry in config["output"]] == dims
    assert {entry["data_type"] for entry in config["input"] + config["output"]} == {"TYPE_FP32"}


@pytest.mark.parametrize(("model", "shape"), [("no_batch", (1, 3)), ("scalar", (1,)), ("batched_scalar", (3, 1))])
def test_infer_shapes_at_the_edge_keep_their_shape(
    client: grpc_client.InferenceServerClient, model: str, shape: tuple[int, ...]
) -> None:
    """No batch dimension, a scalar, and a scalar behind a batch dimension (a reshape) answer in the shape asked in."""
    x = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    assert_same(infer(client, model, {"x": x}), {"y": x * x})


def test_infer_different_shapes_at_once_each_get_their_own(client: grpc_client.InferenceServerClient) -> None:
    """Requests of three shapes, in flight together, each get the answer to their own picture."""
    pictures = [np.full((1 + n % 2, 2 + n % 3, 5), n, np.float32) for n in range(24)]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda x: infer(client, "dynamic", {"x": x}), pictures))
    for answered, x in zip(answers, pictures, strict=True):
        assert_same(answered, {"y": x * x})


@pytest.mark.parametrize("version", ["1", "2"])
def test_infer_two_versions_each_run_their_own_file(client: grpc_client.InferenceServerClient, version: str) -> None:
    """Both versions are served at once; each adds its own number."""
    x = rows(2)
    assert_same(infer(client, "versions", {"x": x}, model_version=version), {"y": x + np.float32(version)})


def test_infer_classification_uses_the_label_file(client: grpc_client.InferenceServerClient) -> None:
    """Triton's classification extension finds the labels beside the model."""
    tensor = grpc_client.InferInput("x", [1, 3], "FP32").set_data_from_numpy(np.array([[0, 9, 1]], np.float32))
    wanted = [grpc_client.InferRequestedOutput("y", class_count=1)]
    result = client.infer("versions", [tensor], outputs=wanted, model_version="1")
    assert result.as_numpy("y").tolist() == [[b"10.000000:1:middle"]]


@pytest.mark.parametrize(("brought", "bias"), [({}, 5.0), ({"bias": np.array([7], np.float32)}, 7.0)])
def test_infer_optional_input_falls_back_to_the_file(
    client: grpc_client.InferenceServerClient, brought: Arrays, bias: float
) -> None:
    """An initializer that the file also names as an input is Triton's optional input."""
    x = np.array([1, 2, 3], np.float32)
    assert_same(infer(client, "optional", {"x": x} | brought), {"y": x + np.float32(bias)})


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
    """Each instance says in one line how many threads it took; two instances take no more than the cores together."""
    lines = re.findall(
        r"backend ready instance=no_config_\d .*intra_op_threads=(\d+) cores=(\d+) instances=2", triton.log()
    )
    assert len(lines) == 2
    assert all(int(threads) == max(1, int(cores) // 2) for threads, cores in lines)


@pytest.mark.long
def test_load_with_numpy_2_is_refused(launch: Launch, tmp_path: Path) -> None:
    """An interpreter with numpy 2 would answer empty outputs without an error: no model loads there, and says why."""
    onnx_models.save(onnx_models.identity(), tmp_path / "models", "any")
    with running_triton(launch_with(launch, Path(sys.prefix)), tmp_path / "models", tmp_path) as running:
        assert f"returns empty outputs with numpy {np.__version__}: install numpy 1.26.4 into" in running.reason("any")
