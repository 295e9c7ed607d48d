"""The built wheel, installed into an environment of its own and used from another folder."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import CHECKOUT

SOURCES = ("server", "deepstream_pipeline", "loadtest", "model_repository", "requirements")
PACKAGES = {"penstock", "penstock_video", "penstock_load"}
BUILD_SOURCE = "import setuptools.build_meta as build; build.build_sdist('sdist')"
BUILD_WHEEL = "import sys, setuptools.build_meta as build; build.build_wheel(sys.argv[1])"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
OFFLINE = ("-q", "--no-deps", "--no-index")
PYTHONS = ("python3.11", "python3.12", "python3.13")


def run(command: tuple[str | Path, ...], folder: Path) -> str:
    """What the command prints in that folder, without the settings and the import path of ours."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "PYTHONPATH"))}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a checkout that a build reads, with a test that is not to be installed."""
    folder = tmp_path_factory.mktemp("build")
    for name in SOURCES:
        unwanted = shutil.ignore_patterns("__pycache__", "results", "*.egg-info")
        shutil.copytree(CHECKOUT / name, folder / name, symlinks=True, ignore=unwanted)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(CHECKOUT / name, folder)
    (folder / "tests").mkdir()
    (folder / "tests" / "test_any.py").touch()
    return folder


@pytest.fixture(scope="module")
def wheel(sources: Path) -> Path:
    """The wheel that is built from a checkout."""
    run((sys.executable, "-c", BUILD_WHEEL, sources / "dist"), sources)
    (built,) = (sources / "dist").iterdir()
    return built


def names_in(wheel: Path) -> set[str]:
    """The files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`penstock` of an environment with the wheel, beside the packages of this one."""
    folder = tmp_path_factory.mktemp("installed")
    run((sys.executable, "-m", "venv", "--without-pip", "env"), folder)
    run((*PIP, "--python", folder / "env" / "bin" / "python", "install", *OFFLINE, wheel), folder)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "env")}))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "env" / "bin" / "penstock"


@contextmanager
def running(program: Path, folder: Path) -> Iterator[str]:
    """`penstock up` with the embedded engine, started in that folder; gives its address."""
    ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--console-port", "0")
    command = (program, "up", "--engine", "embedded", "--home", folder / "home", *ports)
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as stack:
        try:
            assert stack.stdout is not None
            ready = next((line for line in stack.stdout if line.startswith("ready: ")), "")
            assert ready, f"penstock up ended with {stack.wait()}"
            yield ready.split()[2]
        finally:
            stack.terminate()
            assert stack.wait(timeout=60) == 0


def test_wheel_has_our_packages_alone(wheel: Path) -> None:
    """No other top-level name, no test and no bench is installed."""
    names = names_in(wheel)
    assert {name.split("/")[0] for name in names} == {*PACKAGES, wheel.name.split("-py3")[0] + ".dist-info"}
    assert [name for name in names if {"tests", "bench", "results"} & set(name.split("/"))] == []
    assert [name for name in names if "/test_" in name] == []


@pytest.mark.long
def test_wheel_of_a_checkout_and_of_the_source_distribution_are_the_same(sources: Path, wheel: Path) -> None:
    """The links to the models and the locks are followed in both."""
    run((sys.executable, "-c", BUILD_SOURCE), sources)
    (source,) = (sources / "sdist").iterdir()
    shutil.unpack_archive(source, sources / "unpacked", filter="data")
    (unpacked,) = (sources / "unpacked").iterdir()
    run((sys.executable, "-c", BUILD_WHEEL, sources / "twin"), unpacked)
    (twin,) = (sources / "twin").iterdir()
    assert names_in(wheel) == names_in(twin)


def test_wheel_has_every_shipped_model_and_backend(wheel: Path) -> None:
    """Each file of model_repository, of Triton's backends and the locks of its environment are package data."""
    names = names_in(wheel)
    models = [path for path in (CHECKOUT / "model_repository").rglob("*") if path.is_file()]
    assert models
    for path in models:
        if "__pycache__" not in path.parts:
            assert f"penstock/models/shipped/{path.relative_to(CHECKOUT / 'model_repository')}" in names
    for backend in ("onnxruntime", "torch"):
        assert f"penstock/engines/triton_backends/{backend}/model.py" in names
    for lock in ("triton", "triton-gpu", "triton-tensorrt", "triton-server"):
        assert f"penstock/engines/triton/locks/{lock}.txt" in names


def test_installed_wheel_answers_a_picture_from_another_folder(program: Path, tmp_path: Path) -> None:
    """`up`, `infer` and `models list` work without the checkout, and nothing is written into the environment."""
    environment = program.parent.parent
    before = {path: path.stat().st_mtime_ns for path in environment.rglob("*")}
    (picture,) = environment.glob("lib/*/site-packages/penstock/models/shipped/street/golden.jpg")
    with running(program, tmp_path) as url:
        answer = json.loads(run((program, "infer", "street", picture, "--json", "--url", url), tmp_path))
        models = json.loads(run((program, "models", "list", "--json", "--url", url), tmp_path))
    assert "person" in {found["label"] for found in answer["results"][0]["detections"]}
    assert {row["name"] for row in models if row["state"] == "READY"} >= {"identity_fp32", "street"}
    assert {path: path.stat().st_mtime_ns for path in environment.rglob("*")} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]


def test_installed_wheel_finds_the_commands_of_the_programs(program: Path, tmp_path: Path) -> None:
    """`penstock video` and `penstock load` come by entry points."""
    assert "penstock video run" in run((program, "video", "run", "--help"), tmp_path)
    assert "image-steady" in run((program, "load", "scenarios"), tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("python", PYTHONS)
def test_wheel_with_its_dependencies_serves_in_an_empty_environment(wheel: Path, python: str, tmp_path: Path) -> None:
    """pip installs the wheel and the extras from the index, for each Python, and a picture is answered."""
    if subprocess.run([shutil.which(python) or "false", "-c", ""], capture_output=True).returncode:
        pytest.skip(f"no {python} here")
    run((python, "-m", "venv", "env"), tmp_path)
    run((tmp_path / "env/bin/python", "-m", "pip", "install", "-q", f"{wheel}[video,load,kafka,otel,triton]"), tmp_path)
    program = tmp_path / "env/bin/penstock"
    with running(program, tmp_path) as url:
        (picture,) = tmp_path.glob("env/lib/*/site-packages/penstock/models/shipped/street/golden.jpg")
        assert "person" in run((program, "infer", "street", picture, "--url", url), tmp_path)
    for command in ("video", "load", "setup", "doctor"):
        run((program, command, "--help"), tmp_path)
