"""The backend `torch` inside the real Triton on the CPU, against PyTorch.

It wants an environment of Triton with torch: .venv-triton after `make gpu`, or what PENSTOCK_ENGINE_ENVIRONMENT names.
"""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from penstock.engines.triton.runtime import find_triton
from tests.engines.triton_of_onnx_models import RunningTriton, running_triton
from tests.support.stack import CHECKOUT, TRITON_ENVIRONMENT

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
NAMES = {
    "batched": ("image", "logits"),
    "pixels": ("image", "logits"),
    "two-in-flight": ("image", "logits"),
    "shared": ("image", "logits"),
    "lookup": ("word", "vector"),
    "lookup-two": ("word", "vector"),
    "one-row": ("image", "logits"),
    "any-size": ("numbers", "mean"),
}


@pytest.fixture(scope="module")
def environment() -> Path:
    chosen = Path(os.environ.get("PENSTOCK_ENGINE_ENVIRONMENT", TRITON_ENVIRONMENT))
    if not list(chosen.glob("lib/python3.*/site-packages/torch")):
        pytest.skip(f"no torch in {chosen}: `make gpu` adds it")
    return chosen


@pytest.fixture(scope="module")
def root(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs exported by that environment's PyTorch, and what it answers."""
    folder: Path = tmp_path_factory.mktemp("torch")
    command = [environment / "bin" / "python", "-m", "tests.engines.torch_programs", folder]
    subprocess.run(command, cwd=CHECKOUT, env=os.environ | {"PYTHONPATH": ""}, check=True, timeout=200)
    return folder


@pytest.fixture(scope="module")
def triton(environment: Path, root: Path) -> Iterator[RunningTriton]:
    launch = find_triton(environment=environment, search_path="").prepare(root)
    with running_triton(launch, root / "models", root, ready_timeout_s=200) as running:
        yield running


@pytest.fixture(scope="module")
def client(triton: RunningTriton) -> Iterator[grpc_client.InferenceServerClient]:
    with grpc_client.InferenceServerClient(triton.grpc_address) as connected:
        yield connected


def ask(client: grpc_client.InferenceServerClient, model: str, array: Any) -> Any:
    name, output = NAMES[model]
    tensor = grpc_client.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return client.infer(model, [tensor], client_timeout=60).as_numpy(output)


@pytest.mark.parametrize("model", NAMES)
def test_infer_answers_what_pytorch_answers(client: grpc_client.InferenceServerClient, root: Path, model: str) -> None:
    """FP32, UINT8 and INT64, with a batch dimension and without, of fixed and of free dimensions."""
    answer = ask(client, model, np.load(root / "asked" / f"{model}.npy"))
    expected = np.load(root / "expected" / f"{model}.npy")
    assert (answer.dtype, answer.shape) == (expected.dtype, expected.shape)
    tolerance = 0.05 if model == "pixels" else 1e-4  # bf16
    np.testing.assert_allclose(answer, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("model", ["batched", "two-in-flight", "shared"])
def test_requests_at_once_get_their_own_rows(client: grpc_client.InferenceServerClient, root: Path, model: str) -> None:
    """Sixty requests of one and two rows in batches that Triton forms: each gets what it gets alone, and is counted."""
    asked, expected = (np.load(root / folder / f"{model}.npy") for folder in ("asked", "expected"))
    places = [slice(number % 4, number % 4 + 1 + number % 2) for number in range(60)]
    before = successes(client, model)
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda place: ask(client, model, asked[place]), places))
    for place, answer in zip(places, answers, strict=True):
        np.testing.assert_allclose(answer, expected[place], rtol=1e-4, atol=1e-4)
    until = time.monotonic() + 5.0
    while successes(client, model) < before + 60 and time.monotonic() < until:
        time.sleep(0.01)  # Triton counts a batch beside its answers
    assert successes(client, model) == before + 60


def successes(client: grpc_client.InferenceServerClient, model: str) -> int:
    """The requests that Triton has counted as answered."""
    statistics = client.get_inference_statistics(model)
    return sum(int(stats.inference_stats.success.count) for stats in statistics.model_stats)


@pytest.mark.parametrize("model", ["lookup", "lookup-two"])
def test_request_that_the_program_cannot_answer_fails_alone(
    client: grpc_client.InferenceServerClient, model: str
) -> None:
    """A word beyond the table is an error without a traceback, and the next request is served."""
    with pytest.raises(
        InferenceServerException, match=rf"model '{model}': \w+ in the torch backend, see the server's log"
    ):
        ask(client, model, np.array([[1000]], np.int64))
    assert ask(client, model, np.array([[1]], np.int64)).shape == (1, 4)


@pytest.mark.parametrize("model", ["two-in-flight", "shared"])
def test_clients_that_leave_do_no_harm(triton: RunningTriton, root: Path, model: str) -> None:
    """Twenty leave over HTTP and twenty over gRPC amid the requests of others, which get their answers."""
    asked, expected = (np.load(root / folder / f"{model}.npy") for folder in ("asked", "expected"))
    row = {"name": "image", "shape": [1, 3, 32, 32], "datatype": "FP32", "data": asked[0].ravel().tolist()}
    body = json.dumps({"inputs": [row]}).encode()
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    tensor = grpc_client.InferInput("image", [1, 3, 32, 32], "FP32")
    tensor.set_data_from_numpy(asked[:1])
    with grpc_client.InferenceServerClient(triton.grpc_address) as client, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, client, model, asked[number % 5 : number % 5 + 1]) for number in range(60)]
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", int(triton.http_url.rpartition(":")[2]))) as connection:
                connection.sendall(head + body)
            client.async_infer(model, [tensor], callback=lambda **_: None).cancel()
        for number, answer in enumerate(answers):
            place = slice(number % 5, number % 5 + 1)
            np.testing.assert_allclose(answer.result(60), expected[place], rtol=1e-4, atol=1e-4)


def processes_of_programs(root: Path) -> list[psutil.Process]:
    """Those of this Triton that run the program of several instances."""
    found = [
        one for one in psutil.process_iter(["cmdline"]) if "program_process" in " ".join(one.info["cmdline"] or ())
    ]
    return [one for one in found if one.environ().get("PENSTOCK_SLAB_FILE", "").startswith(str(root))]


def test_process_of_a_shared_program_that_is_killed_is_started_again(
    client: grpc_client.InferenceServerClient, root: Path
) -> None:
    """By the next request; the model's instances go on."""
    asked, expected = (np.load(root / folder / "shared.npy") for folder in ("asked", "expected"))
    (process,) = processes_of_programs(root)
    process.kill()
    until = time.monotonic() + 20.0
    while not set(processes_of_programs(root)) - {process} and time.monotonic() < until:
        with suppress(InferenceServerException):  # a run that is sent while the process ends is lost with it
            ask(client, "shared", asked)
    for _ in range(6):  # both instances
        np.testing.assert_allclose(ask(client, "shared", asked), expected, rtol=1e-4, atol=1e-4)
    assert len(processes_of_programs(root)) == 1


@pytest.mark.parametrize("model", ["two-in-flight", "shared"])
def test_model_unloaded_amid_requests_answers_each_of_them(triton: RunningTriton, root: Path, model: str) -> None:
    """Rightly, or that the model is not there; none waits on, and the model can be loaded again."""
    asked, expected = (np.load(root / folder / f"{model}.npy") for folder in ("asked", "expected"))

    def outcome(_: int) -> str:
        try:
            answer = ask(client, model, asked)
        except InferenceServerException as error:
            return str(error)
        np.testing.assert_allclose(answer, expected, rtol=1e-4, atol=1e-4)
        return "answered"

    with grpc_client.InferenceServerClient(triton.grpc_address) as client, ThreadPoolExecutor(8) as pool:
        outcomes = [pool.submit(outcome, number) for number in range(400)]
        while sum(one.done() for one in outcomes) < 20:
            time.sleep(0.001)
        client.unload_model(model)
        said = {one.result(60) for one in outcomes}
        client.load_model(model)
        assert outcome(0) == "answered"
    assert "answered" in said
    assert all("not ready" in one or "unknown model" in one for one in said - {"answered"}), said
    assert len(said) > 1, "all were answered before the model went"


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("broken-dims", "output 'logits' of the program has shape [1, 10] for 1 rows; config.pbtxt says [1, 9]"),
        ("broken-word", "parameter precision is 'int4': say one of fp16, bf16, fp32"),
        ("broken-file", "is not a program of torch.export.save"),
    ],
)
def test_model_that_cannot_be_served_says_why(triton: RunningTriton, model: str, sentence: str) -> None:
    """In one sentence, in the repository's index."""
    assert sentence in triton.reason(model)
