"""Which event loops the tests of this room run on, and the embedded engine that some of them share."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest
import pytest_asyncio
import uvloop

from penstock.engines.embedded.engine import EmbeddedEngine
from tests.contract.wire_models import write_plain

ON_BOTH_LOOPS = ("test_triton_http.py",)
ON_UVLOOP = ("test_triton_backend.py", "test_triton_grpc.py", "test_triton_stream.py")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The engine's client on the loop that the gateway runs on; its own sockets on both, whose transports differ."""
    if item.path.name in ON_BOTH_LOOPS:
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"uvloop": uvloop.new_event_loop} if item.path.name in ON_UVLOOP else {"asyncio": asyncio.new_event_loop}


@pytest_asyncio.fixture
async def engine(tmp_path: Path) -> AsyncIterator[EmbeddedEngine]:
    """An engine over an empty repository, in which one request of a model may wait."""
    (tmp_path / "models").mkdir()
    embedded = EmbeddedEngine((tmp_path / "models",), max_waiting=1)
    yield embedded
    await embedded.aclose()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest_asyncio.fixture
async def plain_engine(tmp_path: Path) -> AsyncIterator[EmbeddedEngine]:
    """An engine with one model, `plain`: [N, 3] FP32, at most 8 rows, answers its input."""
    write_plain(tmp_path)
    engine = EmbeddedEngine((tmp_path,))
    await engine.load("plain")
    yield engine
    await engine.aclose()
