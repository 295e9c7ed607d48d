"""Clips for cameras: two sizes, pictures that tell their number."""

from pathlib import Path

import pytest

from tests.deepstream_pipeline.clips import write_clip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the clips lie."""
    return tmp_path_factory.mktemp("cameras")


@pytest.fixture(scope="module")
def clip(folder: Path) -> Path:
    """Two seconds of 160x96, pictures 0 to 49, a key frame each half second."""
    return write_clip(folder / "small.mp4", frames=50, fps=25, gop=12)


@pytest.fixture(scope="module")
def other(folder: Path) -> Path:
    """One second of 320x192, pictures 1000 to 1024."""
    return write_clip(folder / "large.ts", frames=25, fps=25, gop=12, size=(320, 192), first=1000)
