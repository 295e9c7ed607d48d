"""What the program tells the on-screen display of its sources."""

from pathlib import Path

import pytest

from penstock_video.infer.options import EngineAddress
from penstock_video.main import Program
from penstock_video.sinks.osd import Osd
from tests.deepstream_pipeline.infer.fake_core import FakeCore
from tests.deepstream_pipeline.settings.reading import read

SETTINGS = """
api: {enable: false}
sink: {type: jsonl, folder: out}
tracker: {type: none}
primary-gie: {model: owned}
source: [{uri: rtsp://127.0.0.1:9/1, camera_id: camera}, {uri: clip.mp4, camera_id: clip}]
"""


def test_title_has_the_time_of_cameras_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's time of day would be that of its processing."""
    live: dict[str, object] = {}
    monkeypatch.setattr(Osd, "set_source", lambda self, source_id, **given: live.update({source_id: given["is_live"]}))
    (tmp_path / "run").mkdir()
    (tmp_path / "clip.mp4").write_bytes(b"no video")
    core = FakeCore(tmp_path / "run")
    program = Program(read(SETTINGS, tmp_path), EngineAddress(core.folder, "http://127.0.0.1:1", "127.0.0.1:1"))
    try:
        program.start()
    finally:
        program.stop(0.0)
        core.end()
    assert live == {"camera": True, "clip": False}
