"""Two engines over the very same repository: a real Triton, and ONNX Runtime in this process."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.triton.client import TritonEngine
from penstock.engines.triton.runtime import find_triton
from penstock.protocol.engine import Engine
from penstock.protocol.errors import ModelNotReady
from tests.contract.models import write_repository
from tests.contract.wire_engines import Engines, both_engines
from tests.contract.wire_models import write_models
from tests.engines.triton_of_onnx_models import RunningTriton, running_triton


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository of both engines. A test that changes a model makes one of its own in it."""
    folder = tmp_path_factory.mktemp("contract") / "models"
    write_repository(folder)
    return folder


@pytest.fixture(scope="session")
def real_triton(
    triton_environment: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningTriton]:
    """A real Triton with every model of the repository loaded as far as it can be."""
    folder = tmp_path_factory.mktemp("triton")
    launch = find_triton(environment=triton_environment, search_path="").prepare(folder)
    with running_triton(launch, repository, folder) as running:
        yield running


@pytest.fixture(scope="session")
def wire_triton(triton_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    """One real Triton over the models of the wire; they are in the folder `models` beside its log."""
    folder = tmp_path_factory.mktemp("wire")
    write_models(folder / "models")
    launch = find_triton(environment=triton_environment, search_path="").prepare(tmp_path_factory.mktemp("run"))
    with running_triton(launch, folder / "models", folder) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(wire_triton: RunningTriton) -> AsyncIterator[Engines]:
    """That Triton, and the embedded engine over the same models."""
    async with both_engines(wire_triton, wire_triton.log_path.parent / "models") as engines:
        yield engines


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedded(repository: Path) -> AsyncIterator[EmbeddedEngine]:
    """The embedded engine, with the same models loaded."""
    engine = EmbeddedEngine((repository,))
    for name in [row.name for row in await engine.repository_index() if not row.name.startswith("test_")]:
        try:
            await engine.load(name)
        except ModelNotReady:
            assert name.startswith("broken")
    yield engine
    await engine.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def triton(real_triton: RunningTriton) -> AsyncIterator[TritonEngine]:
    """The real Triton behind the same protocol."""
    async with TritonEngine(
        http_url=real_triton.http_url,
        grpc_address=real_triton.grpc_address,
        metrics_url=f"{real_triton.metrics_url}/metrics",
        max_connections=8,
    ) as engine:
        yield engine


@pytest.fixture(params=["embedded", "triton"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine in turn."""
    backend: Engine = request.getfixturevalue(request.param)
    return backend
