"""A control API over a pipeline that is none; its server is shared by the tests of a module."""

from collections.abc import Iterator

import pytest

from penstock_video.api.server import ApiServer
from tests.deepstream_pipeline.api.pipeline import FakePipeline, serving


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakePipeline, ApiServer]]:
    """A pipeline and its server."""
    pipeline = FakePipeline()
    with serving(pipeline) as server:
        yield pipeline, server


@pytest.fixture
def pipeline(served: tuple[FakePipeline, ApiServer]) -> FakePipeline:
    """With no source."""
    served[0].reset()
    return served[0]


@pytest.fixture
def api(served: tuple[FakePipeline, ApiServer], pipeline: FakePipeline) -> ApiServer:
    """Serving that pipeline."""
    return served[1]
