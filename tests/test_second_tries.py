"""What `make test` forgives, and what it does not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
FICKLE = """
import pathlib
import pytest

@pytest.fixture(scope="module")
def server():
    seen = pathlib.Path(__file__).with_suffix(".seen")
    was_seen, _ = seen.exists(), seen.touch()
    assert was_seen, "not up in time"

@pytest.mark.parametrize("number", range(5))
def test_fickle(server, number):
    pass
"""


@pytest.mark.parametrize(
    ("fickle", "steady", "code", "said"),
    [
        (5, True, 0, "second try of 25 by themselves"),
        (6, True, 1, "tests of 6 files failed; of up to 5 they are tried again"),
        (0, False, 1, "second try of 1 by themselves"),
        (0, True, 0, "1 passed"),
    ],
    ids=["five files", "six files", "twice", "none"],
)
def test_what_failed_may_pass_by_itself_at_a_second_try_and_is_named(
    fickle: int, steady: bool, code: int, said: str, tmp_path: Path
) -> None:
    """Tests of five files may pass at a retry; a sixth file fails the run, and so does a test that fails twice."""
    for number in range(fickle):
        (tmp_path / f"test_fickle_{number}.py").write_text(FICKLE)
    (tmp_path / "test_steady.py").write_text(f"def test_steady():\n    assert {steady}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (given,) = re.findall(r"-p tests.second_tries", (CHECKOUT / "Makefile").read_text())
    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(CHECKOUT)}
    options = ["-p", "xdist.plugin", "-n", "1", *given.split()]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
    assert said in ran.stdout
    if fickle == 5:
        assert len(re.findall(r"^PASSED .*::test_fickle", ran.stdout, re.MULTILINE)) == 25
