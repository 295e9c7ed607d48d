"""A control API over a pipeline that is none."""

from collections.abc import Iterator

import pytest

from penstock_video.api.server import ApiServer
from tests.deepstream_pipeline.api.pipeline import FakePipeline, serving


@pytest.fixture
def pipeline() -> FakePipeline:
    """With no source."""
    return FakePipeline()


@pytest.fixture
def api(pipeline: FakePipeline) -> Iterator[ApiServer]:
    """Serving that pipeline."""
    with serving(pipeline) as server:
        yield server
