"""FAULTS 90: a stack that is started in a folder where others may write runs no code from it."""

from pathlib import Path

import psutil
import pytest

from tests.integration.living import family
from tests.support.stack import start_stack, stop_stack

pytestmark = pytest.mark.xdist_group("working_directory")

PLANTED = ("server", "numpy", "msgspec", "cv2", "triton_python_backend_utils")


def plant(folder: Path) -> Path:
    """Writes modules that would run as this user. Returns the file that each of them would write."""
    written = folder / "written"
    for name in PLANTED:
        (folder / f"{name}.py").write_text(f"open({str(written)!r}, 'a').write({name!r} + '\\n')\n")
    return written


def library_path(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("LD_LIBRARY_PATH")
    except psutil.Error:
        return None


@pytest.mark.usefixtures("triton_environment")
def test_nothing_is_imported_from_the_working_directory(tmp_path: Path) -> None:
    """The gateway, decoders, Triton's model processes and the library loader do not use it."""
    folder = tmp_path / "everybody's"
    folder.mkdir()
    written = plant(folder)
    stack = start_stack(tmp_path / "home", "--models", "identity_fp32", folder=folder)
    try:
        paths = {(one.pid, one.name()): library_path(one) for one in family(stack)}
    finally:
        stop_stack(stack)
    assert not written.exists(), written.read_text()
    assert len(paths) > 3
    assert {who: path for who, path in paths.items() if path and "" in path.split(":")} == {}
