"""A GPU with the stand-in of NVIDIA's libraries, and clips for it."""

from pathlib import Path

import pytest

from penstock_video.gpu.device import Device
from tests.deepstream_pipeline.decode.broken_clips import annex_b_packets
from tests.deepstream_pipeline.decode.cameras import Card
from tests.deepstream_pipeline.gpu.fake_driver import install


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """A GPU with the stand-in of the library."""
    install(monkeypatch)
    return Card(Device.open())


@pytest.fixture
def clips(tmp_path: Path) -> tuple[list[bytes], list[bytes]]:
    """Packets of two different clips."""
    (tmp_path / "other").mkdir()
    return annex_b_packets(tmp_path, "h264"), annex_b_packets(tmp_path / "other", "h264", fps=7)
