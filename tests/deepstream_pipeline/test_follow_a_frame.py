"""The files under "Follow a frame" in deepstream_pipeline/README.md are those that a frame enters."""

import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import psutil
import pytest

from penstock_video.infer.options import EngineAddress
from penstock_video.main import Program
from tests.deepstream_pipeline.clips import write_clip
from tests.deepstream_pipeline.infer.fake_core import FakeCore
from tests.deepstream_pipeline.settings.reading import read
from tests.support.stack import CHECKOUT
from tests.support.waiting import wait_for

README = CHECKOUT / "deepstream_pipeline" / "README.md"
PACKAGE = CHECKOUT / "deepstream_pipeline" / "penstock_video"
FRAMES = 3  # of a recording: all of the last one's way lies in it
RECORDINGS = 4  # a file is of a frame if each recording has it: others are entered once a second, or at the clip's end
FPS = 10
SETTINGS = """
source: {uri: clip.mp4, loop: true, realtime: true}
primary-gie: {model: one_box}
tracker: {type: bytetrack}
analytics: {line-crossing: [{name: door, line: 10;0;10;90}], roi-filtering: [{name: hall, roi: 0;0;99;0;99;99}]}
sink: {type: jsonl, folder: out}
api: {enable: false}
"""


def wait_for_lines(path: Path, count: int) -> None:
    """Waits until so many lines were added to a file."""
    before = path.read_bytes().count(b"\n") if path.exists() else 0
    wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") >= before + count)


class FrameRecorder:
    """Records the files that this process and the decode process enter. Make it before their threads start."""

    def __init__(self, folder: Path, others: list[psutil.Process]) -> None:
        """others: the children of this process that are no decode process."""
        self._folder, self._others = folder, others
        self._entered: set[CodeType] = set()
        threading.setprofile(self._enter)

    def _enter(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self._entered.add(frame.f_code)

    def record(self, lines: Path) -> set[str]:
        """The files of the package that are entered while frames go from the decoder to this sink's file."""
        (decoder,) = [one for one in psutil.Process().children() if one not in self._others]
        written = self._folder / str(decoder.pid)
        written.unlink(missing_ok=True)
        decoder.send_signal(signal.SIGUSR1)
        self._entered.clear()
        wait_for_lines(lines, FRAMES)
        ours = {code.co_filename for code in list(self._entered)}
        decoder.send_signal(signal.SIGUSR2)
        wait_for(written.exists)
        found = {*ours, *written.read_text().splitlines()}
        return {str(Path(file).relative_to(PACKAGE)) for file in found if file.startswith(f"{PACKAGE}/")}


@pytest.fixture
def entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The files that each of several frames of a clip enters."""
    for name, value in {
        "PYTHONPATH": str(CHECKOUT / "tests" / "integration" / "module_recorder"),
        "RECORD_FOLDER": str(tmp_path),
        "RECORD_PACKAGES": f"{PACKAGE}/",
    }.items():
        monkeypatch.setenv(name, value)
    write_clip(tmp_path / "clip.mp4", frames=4 * FPS, fps=FPS)
    (tmp_path / "run").mkdir()
    core = FakeCore(tmp_path / "run")
    program = Program(read(SETTINGS, tmp_path), EngineAddress(core.folder, "http://127.0.0.1:1", "127.0.0.1:1"))
    try:
        recorder = FrameRecorder(tmp_path, psutil.Process().children())
        program.start()
        lines = tmp_path / "out" / "objects.jsonl"
        wait_for_lines(lines, 1)
        yield set.intersection(*(recorder.record(lines) for _ in range(RECORDINGS)))
    finally:
        threading.setprofile(None)
        program.stop(2.0)
        core.end()


def test_frame_enters_the_files_that_the_readme_names(entered: set[str]) -> None:
    """A clip is decoded, inferred, tracked, judged by rules and written; its frames enter the listed files only."""
    ((count, names),) = re.findall(r"^A frame enters (\d+) files: (.*)$", README.read_text(), re.MULTILINE)
    listed = set(re.findall(r"`([^`]+)`", names))
    assert entered == listed
    assert len(listed) == int(count)
