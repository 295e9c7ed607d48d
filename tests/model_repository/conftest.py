"""A real Triton that serves copies of single shipped models."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tritonclient import http as triton_http

from penstock.engines.triton.runtime import find_triton
from tests.engines.triton_of_onnx_models import running_triton

SHIPPED = Path(__file__).resolve().parents[2] / "model_repository"

ServeModel = Callable[[str], triton_http.InferenceServerClient]


@pytest.fixture(scope="module")
def serve_model(triton_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeModel]:
    """Starts a Triton with one shipped model and gives its client; all are stopped at the end."""
    with ExitStack() as stack:

        def serve(name: str) -> triton_http.InferenceServerClient:
            return stack.enter_context(_served(name, triton_environment, tmp_path_factory.mktemp(name)))

        yield serve


@contextmanager
def _served(name: str, environment: Path, folder: Path) -> Iterator[triton_http.InferenceServerClient]:
    """A copy of the model is served: Python leaves bytecode beside what it runs."""
    shutil.copytree(SHIPPED / name, folder / "models" / name, ignore=shutil.ignore_patterns("__pycache__"))
    launch = find_triton(environment=environment).prepare(folder)
    with running_triton(launch, folder / "models", folder) as running:
        client = triton_http.InferenceServerClient(running.http_url.removeprefix("http://"), network_timeout=60)
        try:
            yield client
        finally:
            client.close()
