"""What `make test` forgives, and what it does not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
ONLY_THESE = ("-p", "xdist.plugin", "-p", "pytest_rerunfailures")  # the others take seconds to import
FICKLE = """
import pathlib
import pytest

@pytest.mark.parametrize("number", range({fickle}))
def test_fickle(number):
    seen = pathlib.Path(__file__).with_name(f"seen{{number}}")
    was_seen, _ = seen.exists(), seen.touch()
    assert was_seen

def test_steady():
    assert {steady}
"""


@pytest.mark.parametrize(
    ("fickle", "steady", "code", "said"),
    [(3, True, 0, "4 passed, 3 rerun"), (4, True, 1, "4 tests were tried again"), (0, False, 1, "1 failed")],
    ids=["three", "four", "twice"],
)
def test_few_tests_may_pass_at_the_second_try_and_are_named(
    fickle: int, steady: bool, code: int, said: str, tmp_path: Path
) -> None:
    """Three are forgiven and named, a fourth fails the run, and so does a test that fails twice."""
    (tmp_path / "test_it.py").write_text(FICKLE.format(fickle=fickle, steady=steady))
    (told,) = re.findall(r"--reruns.*second_tries", (CHECKOUT / "Makefile").read_text())
    options = ["-c", "/dev/null", *ONLY_THESE, "-n", "1", *told.split(), str(tmp_path)]
    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=CHECKOUT, env=environ, capture_output=True, text=True
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
    assert said in ran.stdout
    named = re.findall(r"^RERUN .*::(\w+)", ran.stdout, re.MULTILINE)
    assert named == ["test_fickle"] * fickle + ["test_steady"] * (not steady)
