"""Which tests `make test` keeps together."""

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tests.work_units import LONGEST_FIRST, unit_of

CHECKOUT = Path(__file__).resolve().parent.parent
TESTS = """
import os
import pytest

{mark}
@pytest.mark.parametrize("number", range(6))
def test_where(number):
    with open({seen!r}, "a") as seen:
        print({unit!r}, os.getpid(), file=seen)
"""


def test_group_and_file_each_stay_on_one_worker_and_share_them(tmp_path: Path) -> None:
    """As make test runs them: two files of one group in one process, a file without a group too, on three workers."""
    group = 'pytestmark = [pytest.mark.xdist_group("two"), pytest.mark.timeout(9)]'
    for file, unit, mark in (("a", "two", group), ("b", "two", group), ("c", "c", ""), ("d", "d", "")):
        text = TESTS.format(mark=mark, unit=unit, seen=str(tmp_path / "seen"))
        (tmp_path / f"test_{file}.py").write_text(text)
    (received,) = re.findall(r"-n \d .*work_units", (CHECKOUT / "Makefile").read_text())
    options = ["-c", "/dev/null", "-p", "xdist.plugin", "--rootdir", str(tmp_path), *received.split(), str(tmp_path)]
    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # other plugins take seconds to import
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=CHECKOUT, env=environ, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    processes = defaultdict(list)
    for line in (tmp_path / "seen").read_text().splitlines():
        unit, process = line.split()
        processes[unit].append(process)
    assert {unit: len(ran) for unit, ran in processes.items()} == {"two": 12, "c": 6, "d": 6}
    assert all(len(set(ran)) == 1 for ran in processes.values())
    assert len({process for ran in processes.values() for process in ran}) == 3


FIXTURE = """
import pytest
from pathlib import Path

@pytest.fixture(scope="session")
def shared():
    with open({seen!r}, "a") as seen:
        seen.write("began ")
        seen.flush()
        yield
        seen.write("ended ")
"""


def test_fixture_of_the_session_ends_with_the_one_unit_that_uses_it(tmp_path: Path) -> None:
    """It is shared by the unit's files, and has ended when the next unit begins."""
    seen = tmp_path / "seen"
    (tmp_path / "conftest.py").write_text(FIXTURE.format(seen=str(seen)))
    mark = 'import pytest\npytestmark = pytest.mark.xdist_group("two")\n'
    for name in "ab":
        (tmp_path / f"test_{name}.py").write_text(f"{mark}def test_one(shared): pass\ndef test_two(shared): pass\n")
    check = f"def test_it():\n    assert open({str(seen)!r}).read() == 'began ended '\n"
    (tmp_path / "test_c.py").write_text(check)
    options = ["-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "xdist.plugin", "-p", "tests.work_units"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        cwd=CHECKOUT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert seen.read_text() == "began ended "


def test_longest_units_exist_and_every_mark_is_read() -> None:
    """A unit that was renamed is not looked for in vain, and no file's group is overlooked."""
    files = [path.relative_to(CHECKOUT) for path in (CHECKOUT / "tests").rglob("test_*.py")]
    units = {unit_of(CHECKOUT, str(path)) for path in files}
    assert set(LONGEST_FIRST) <= units
    for path in files:
        marks = re.findall(r"^\s*(?:pytestmark|@).*\bxdist_group\(", (CHECKOUT / path).read_text(), re.MULTILINE)
        assert len(marks) <= 1, f"{path}: one group a file, in pytestmark"
        assert bool(marks) == (unit_of(CHECKOUT, str(path)) != str(path)), path
