"""The plugin of `make test-gpu`: every file has its place, and the table counts what became of its tests."""

import subprocess
import sys
from pathlib import Path

from tests.gpu_session import ORDER, table
from tests.support.stack import CHECKOUT


def test_every_file_with_tests_for_a_gpu_has_its_place() -> None:
    """A new file is added to the order, and one that is gone is removed."""
    files = {path.stem for path in Path(__file__).parent.glob("test_*.py") if "pytest.mark.gpu" in path.read_text()}
    assert files - {Path(__file__).stem} == set(ORDER)


def test_table_has_a_line_a_file_by_importance() -> None:
    """With the number of each outcome, and the seconds of all."""
    found = [
        ("test_bench_gpu", "skipped", 0.1),
        ("test_onnx_gpu", "passed", 4.0),
        ("test_onnx_gpu", "failed", 2.2),
        ("test_onnx_gpu", "passed", 1.0),
    ]
    assert table(found) == ["test_onnx_gpu: 2 passed, 1 failed; 7 s", "test_bench_gpu: 1 skipped; 0 s"]


PROGRAM = """
import threading

def test_hangs():
    threading.Event().wait(60)

def test_begins_too_late():
    pass
"""


def test_hanging_test_is_ended_and_none_begins_after_the_time_for_all(tmp_path: Path) -> None:
    """The first fails by its limit, the second is not run, and both are in the table."""
    (tmp_path / "test_small.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "pytest", "-p", "tests.gpu_session", "-p", "no:randomly", "-rs"]
    limits = ["--most-s", "0.5", "--within-s", "0.4", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, *limits, "-c", "/dev/null", str(tmp_path)], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert "Failed: Timeout (>0.5s)" in done.stdout, done.stdout + done.stderr
    assert "not run: the 0.4 s for all tests are over" in done.stdout
    assert "test_small: 1 failed, 1 skipped;" in done.stdout
