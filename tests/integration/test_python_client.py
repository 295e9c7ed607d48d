"""The page of the Python client and the notebooks run as they stand there, against the real stack."""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from penstock import Client
from tests.deepstream_pipeline.clips import write_clip
from tests.integration.pictures import frames, jpeg
from tests.support.stack import CHECKOUT, RunningStack

pytestmark = pytest.mark.xdist_group("stack")
PAGE = CHECKOUT / "docs" / "python-client.md"
BLOCKS = re.findall(r"(?ms)^```python\n(.*?)^```", PAGE.read_text())


@pytest.fixture
def place(stack: RunningStack, shared_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files of the page, and the stack as the gateway. Added models are removed at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_GATEWAY_URL", stack.http_url)
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    (tmp_path / "photo.jpg").write_bytes(jpeg(frames(shared_dir / "media" / "vtest.avi")[1]))
    (tmp_path / "best.onnx").symlink_to(shared_dir / "models" / "yolox_nano.onnx")
    (tmp_path / "vtest.avi").symlink_to(shared_dir / "media" / "vtest.avi")
    write_clip(tmp_path / "video.mp4", frames=4)
    yield tmp_path
    for name in ("ppe", "my-model"):
        if (folder := stack.home / "models" / name).exists():
            with Client() as client:
                client.models.unload(name)
            shutil.rmtree(folder)


def test_examples_of_the_page_run_in_their_order(
    place: Path, stack: RunningStack, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each finds people, and the drawing is written."""
    names: dict[str, Any] = {}
    for block in BLOCKS:
        code = block.replace('protocol="grpc")', f'protocol="grpc", grpc_address="{stack.grpc_address}")')
        exec(compile(code, PAGE.name, "exec"), names)
    names["client"].close()
    printed = capsys.readouterr().out
    assert "person" in printed
    assert "yolox" in printed
    assert len(names["detections"]) == len(names["table"]) > 0
    assert (place / "out.jpg").stat().st_size > 1000
    assert names["outputs"]


@pytest.mark.parametrize("page", ["README.md", "docs/coming-from.md"])
def test_example_of_another_page_runs(place: Path, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The client finds people, as README.md and the page for users of Ultralytics show it."""
    (block,) = re.findall(r"(?ms)^```python\n(.*?)^```", (CHECKOUT / page).read_text())
    names: dict[str, Any] = {}
    exec(compile(block, page, "exec"), names)
    if "client" in names:
        names["client"].close()
        assert (place / "boxes.jpg").stat().st_size > 1000
        assert len(names["result"]) > 0
    assert capsys.readouterr().out


def test_page_has_an_example_for_each_task() -> None:
    """None is left out by a misspelt fence."""
    assert len(BLOCKS) == PAGE.read_text().count("```python") == 11


@pytest.mark.parametrize("name", ["first_steps", "your_own_model", "counting_people", "capacity"])
def test_notebook_executes(place: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell runs, and the people who cross the line are those that were counted by eye, within one."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PENSTOCK_HOME", str(place / "home"))
    notebook = nbformat.read(CHECKOUT / "docs" / "notebooks" / f"{name}.ipynb", 4)
    resources = {"metadata": {"path": str(place)}}
    NotebookClient(notebook, timeout=90, kernel_name="python3", resources=resources).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    if name == "counting_people":
        entered, left = map(int, re.findall(r"in (\d+), out (\d+)", printed)[0])
        assert (abs(entered - 3) <= 1, abs(left - 4) <= 1) == (True, True)
