"""Breaks each promise of FAULTS in a copy of the checkout: the row's test must fail."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.table import CHECKOUT, Mutation, read_mutations

pytestmark = pytest.mark.long

MUTATIONS = read_mutations()
ENVIRONMENTS = (".venv-triton", ".venv-clients")
TEST_TIMEOUT_S, RUN_TIMEOUT_S = 150, 400
TESTS_FAILED = 1  # pytest's exit code


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of the checkout with an environment of its own. Its tests and their child processes import the copy."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / ".venv/bin/python"

    @contextmanager
    def changed(self, mutation: Mutation) -> Iterator[None]:
        """Within the block the copy has the mutation."""
        path = self.folder / mutation.file
        text = path.read_text()
        assert text.count(mutation.old) == 1, f"{mutation.file} has {text.count(mutation.old)} places to change"
        path.write_text(text.replace(mutation.old, mutation.new))
        try:
            yield
        finally:
            shutil.copy2(CHECKOUT / mutation.file, path)

    def run(self, node_id: str, report: Path) -> tuple[int, str]:
        """Exit code and output of pytest for one test; the report is JUnit's XML."""
        command = [str(self.python), "-m", "pytest", "-p", "no:randomly", "-x", "--tb=short"]
        command += ["--timeout", str(TEST_TIMEOUT_S), f"--junitxml={report}", node_id]
        with subprocess.Popen(
            command,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as running:
            try:
                output, _ = running.communicate(timeout=RUN_TIMEOUT_S)
            finally:
                if running.poll() is None:
                    os.killpg(running.pid, signal.SIGKILL)
        return running.returncode, output


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A copy with every file in git, the inputs beside the checkout, and links to the other environments."""
    parent = tmp_path_factory.mktemp("mutations")
    made = Copy(parent / "checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        target = made.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(CHECKOUT / name, target, follow_symlinks=False)
    for name in ENVIRONMENTS:
        if (CHECKOUT / name).exists():
            (made.folder / name).symlink_to(CHECKOUT / name)
    if (CHECKOUT.parent / "shared").exists():
        (parent / "shared").symlink_to(CHECKOUT.parent / "shared")
    _make_environment(made)
    return made


def _make_environment(made: Copy) -> None:
    """The packages of this environment without its link to this checkout; `link.py` links them to the copy.

    Python does not read .pth files in folders that a .pth file names.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made.folder / ".venv"], check=True, timeout=60)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(made.folder / ".venv")}))
    (packages / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([made.python, "requirements/link.py"], cwd=made.folder, check=True, timeout=60)
    for script in Path(sys.executable).parent.iterdir():
        link = made.python.parent / script.name
        if not link.exists():
            link.symlink_to(script)


def failures(report: Path) -> list[str]:
    """Names of the tests that failed in their body, not in a fixture or during collection."""
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return [case.get("name", "") for case in cases if case.find("failure") is not None]


def test_copy_imports_its_own_code(copy: Copy) -> None:
    """Otherwise tests would not see a mutation in the copy. Its command also imports the copy's code."""
    code = "import penstock, penstock_video, tests; print(penstock.__file__)"
    done = subprocess.run([copy.python, "-c", code], cwd="/", capture_output=True, text=True, check=True, timeout=60)
    assert Path(done.stdout.strip()).is_relative_to(copy.folder)
    assert str(copy.folder) in (copy.python.parent / "penstock").read_text()


@pytest.mark.parametrize("name", MUTATIONS)
def test_broken_promise_is_noticed(name: str, copy: Copy, tmp_path: Path) -> None:
    """With the change that breaks the promise of the row, its test fails."""
    _, mutation = MUTATIONS[name]
    with copy.changed(mutation):
        code, output = copy.run(mutation.test, tmp_path / "report.xml")
    if code == 0 and " skipped" in output.splitlines()[-1]:
        pytest.skip(f"this machine cannot run {mutation.test}: {output.splitlines()[-1]}")
    assert code == TESTS_FAILED, (
        f"{mutation.test} passes though its promise is broken: exit code {code}\n{output[-3000:]}"
    )
    failed = {case.partition("[")[0] for case in failures(tmp_path / "report.xml")}
    assert failed == {mutation.test.rpartition("::")[2]}, output[-3000:]
