"""The backend `torch` inside the real Triton on the CPU, against PyTorch.

It wants an environment of Triton with torch: .venv-triton after `make gpu`, or what PENSTOCK_ENGINE_ENVIRONMENT names.
"""

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from server.backends.triton_runtime import find_triton
from tests.backends.triton_of_onnx_models import RunningTriton, running_triton
from tests.conftest import CHECKOUT, TRITON_ENVIRONMENT

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
NAMES = {
    "batched": ("image", "logits"),
    "pixels": ("image", "logits"),
    "lookup": ("word", "vector"),
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
    command = [environment / "bin" / "python", "-m", "tests.backends.torch_programs", folder]
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


def test_requests_at_once_get_their_own_rows(client: grpc_client.InferenceServerClient, root: Path) -> None:
    """Sixty requests of one and two rows in batches that Triton forms: each gets what it gets alone."""
    asked, expected = (np.load(root / folder / "batched.npy") for folder in ("asked", "expected"))
    places = [slice(number % 4, number % 4 + 1 + number % 2) for number in range(60)]
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda place: ask(client, "batched", asked[place]), places))
    for place, answer in zip(places, answers, strict=True):
        np.testing.assert_allclose(answer, expected[place], rtol=1e-4, atol=1e-4)


def test_request_that_the_program_cannot_answer_fails_alone(client: grpc_client.InferenceServerClient) -> None:
    """A word beyond the table is an error without a traceback, and the next request is served."""
    with pytest.raises(
        InferenceServerException, match=r"model 'lookup': \w+ in the torch backend, see the server's log"
    ):
        ask(client, "lookup", np.array([[1000]], np.int64))
    assert ask(client, "lookup", np.array([[1]], np.int64)).shape == (1, 4)


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
