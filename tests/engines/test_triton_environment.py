"""`penstock setup triton`: the environment of the bundled Triton."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import build_app
from penstock.engines.triton import environment
from penstock.engines.triton.environment import READY, SetupFailed, TritonSetup
from penstock.engines.triton.runtime import TritonUnavailable

pytestmark = pytest.mark.skipif(
    f"{sys.version_info[0]}.{sys.version_info[1]}" not in environment.PYTHONS, reason="needs Python 3.11 or 3.12"
)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The locks that would have been installed, in their order; nothing is fetched and no Triton is needed."""
    found: list[str] = []
    monkeypatch.setattr(environment, "_install", lambda python, lock: found.append(lock.name))
    monkeypatch.setattr(environment, "check_platform", lambda machine, glibc: None)
    monkeypatch.setattr(environment, "find_libpython", lambda folder, version: Path("/libpython.so"))
    monkeypatch.setattr(environment, "find_triton", lambda **_: None)
    return found


def steps_of(setup: TritonSetup) -> list[str]:
    """The steps that a setup reports."""
    steps: list[str] = []
    setup.run(steps.append)
    return steps


def test_setup_makes_the_environment_once(tmp_path: Path, installed: list[str]) -> None:
    """Triton comes last, so an environment that has it is complete. A second setup finds nothing to do.

    Python writes the bytecode of models there.
    """
    setup = TritonSetup(tmp_path / "triton")
    assert len(steps_of(setup)) == 3
    assert installed == ["triton.txt", "triton-server.txt"]
    asked = [setup.folder / "bin" / "python", "-c", "import sys; print(sys.pycache_prefix)"]
    assert subprocess.run(asked, capture_output=True, text=True).stdout == f"{setup.folder}/pycache\n"
    assert steps_of(setup) == []
    assert steps_of(TritonSetup(setup.folder, has_gpu=True))
    assert installed[2:] == ["triton.txt", "triton-gpu.txt", "triton-server.txt"]
    assert steps_of(TritonSetup(setup.folder, has_gpu=True, has_tensorrt=True))
    assert installed[5:] == ["triton.txt", "triton-gpu.txt", "triton-tensorrt.txt", "triton-server.txt"]


def test_setup_leaves_exactly_one_onnxruntime(
    tmp_path: Path, installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnxruntime-gpu replaces onnxruntime, and the other way round, because both write the same files."""
    removed: list[tuple[str, ...]] = []

    def install(python: Path, lock: Path) -> None:
        site_packages = next((python.parents[1] / "lib").glob("python*")) / "site-packages"
        name = {"triton": "onnxruntime", "triton-gpu": "onnxruntime_gpu"}.get(lock.stem)
        if name:
            (site_packages / f"{name}-1.31.1.dist-info").mkdir(exist_ok=True)

    def uninstall(python: Path, names: tuple[str, ...]) -> None:
        removed.append(names)
        for folder in python.parents[1].glob("lib/python*/site-packages/onnxruntime*"):
            folder.rmdir()

    monkeypatch.setattr(environment, "_install", install)
    monkeypatch.setattr(environment, "_uninstall", uninstall)
    for has_gpu, name in ((False, "onnxruntime"), (True, "onnxruntime_gpu"), (False, "onnxruntime")):
        setup = TritonSetup(tmp_path / "triton", has_gpu=has_gpu)
        assert steps_of(setup)
        (found,) = setup.folder.glob("lib/python*/site-packages/onnxruntime*")
        assert found.name == f"{name}-1.31.1.dist-info"
    assert removed == [("onnxruntime", "onnxruntime-gpu")] * 2


def test_setup_that_was_interrupted_goes_on(
    tmp_path: Path, installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment without the mark of a complete one is installed again, without being made again."""
    setup = TritonSetup(tmp_path / "triton")
    setup.run(lambda step: None)
    (setup.folder / READY).unlink()
    (setup.folder / "kept").touch()
    assert setup.run(lambda step: None)
    assert len(installed) == 4
    assert (setup.folder / "kept").exists()


def test_setup_writes_into_no_other_folder(tmp_path: Path, installed: list[str]) -> None:
    """A folder with other files is refused."""
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SetupFailed, match=f"{tmp_path} has other files; choose another folder: --folder DIR"):
        TritonSetup(tmp_path).run(lambda step: None)
    assert not installed


def test_setup_without_a_fitting_python_names_those_that_fit(tmp_path: Path, installed: list[str]) -> None:
    """An interpreter that is absent, or of another version, is refused before anything is made."""
    with pytest.raises(SetupFailed, match=r"3\.11 or 3\.12 \(numpy 1\.26\), and /no/python is none"):
        TritonSetup(tmp_path / "triton", python=Path("/no/python")).run(lambda step: None)
    assert not (tmp_path / "triton").exists()


@pytest.mark.parametrize(
    ("installers", "sentence"),
    [
        ([], r"neither uv nor pip .* 'penstock\[triton\]'"),
        ([["false"]], r"triton\.txt could not be installed .* false"),
    ],
)
def test_setup_that_cannot_install_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installers: list[list[str]], sentence: str
) -> None:
    """One sentence, and no mark of a complete environment."""
    monkeypatch.setattr(environment, "_installers", lambda python: iter(installers))
    with pytest.raises(SetupFailed, match=sentence):
        environment._install(tmp_path / "python", environment.LOCKS / "triton.txt")


def test_installers_are_uv_then_pip(tmp_path: Path) -> None:
    """pip also knows an index that is configured for pip alone."""
    programs = [command[:3] for command in environment._installers(tmp_path / "python")]
    assert [Path(command[0]).name for command in programs[:1]] == ["uv"]
    assert programs[-1] == [sys.executable, "-m", "pip"]


def test_setup_command_prints_one_json_object(
    tmp_path: Path, installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder and whether anything changed; progress goes to standard error."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    words = ["setup", "triton", "--home", str(tmp_path), "--json"]
    for is_changed in (True, False):
        done = CliRunner().invoke(build_app(words), words)
        assert done.exit_code == 0, done.stderr
        assert json.loads(done.stdout) == {"environment": str(tmp_path / "triton"), "changed": is_changed}


def test_setup_on_another_machine_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The wheel of Triton is for x86-64 alone."""

    def refuse(machine: str, glibc: object) -> None:
        raise TritonUnavailable("runs on x86-64")

    monkeypatch.setattr(environment, "check_platform", refuse)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    done = CliRunner().invoke(build_app(["setup"]), ["setup", "triton", "--home", str(tmp_path)])
    assert (done.exit_code, done.stderr) == (1, "penstock: runs on x86-64\n")


def test_setup_in_a_checkout_fills_no_folder_that_is_not_used(
    tmp_path: Path, installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.venv-triton` wins there: gigabytes elsewhere would change nothing. A folder that is named is filled."""
    (tmp_path / ".venv-triton").mkdir()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    words = ["setup", "triton", "--gpu", "--home", str(tmp_path / "home")]
    refused = CliRunner().invoke(build_app(words), words)
    assert (refused.exit_code, installed) == (2, [])
    assert f"uses {tmp_path}/.venv-triton, not {tmp_path}/home/triton: run make gpu" in refused.stderr
    words += ["--folder", str(tmp_path / "other")]
    assert CliRunner().invoke(build_app(words), words).exit_code == 0
