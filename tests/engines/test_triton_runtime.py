"""Which Triton is found, and what it is started with."""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.engines.triton.runtime import (
    TritonRuntime,
    TritonUnavailable,
    check_platform,
    default_environment,
    find_libpython,
    find_triton,
)

VERSION = "3.11"
LIBPYTHON = f"libpython{VERSION}.so.1.0"


def write_environment(root: Path, *, version: str = VERSION, stubs: tuple[str, ...] = (VERSION,)) -> Path:
    """An environment with nvidia-pytriton's files as the wheel lays them out, without their x bits."""
    environment = root / "venv"
    server = environment / f"lib/python{version}/site-packages/pytriton/tritonserver"
    files = [
        "bin/tritonserver",
        "backends/python/libtriton_python.so",
        "backends/python/triton_python_backend_utils.py",
    ]
    files += [f"python_backend_stubs/{stub}/triton_python_backend_stub" for stub in stubs]
    for name in files:
        (server / name).parent.mkdir(parents=True, exist_ok=True)
        (server / name).write_text(name)
        (server / name).chmod(0o644)
    (server.parent.parent / "nvidia_pytriton.libs").mkdir()
    (environment / "bin").mkdir()
    base = root / "base"
    (base / "bin").mkdir(parents=True)
    (base / "lib").mkdir()
    (base / "lib" / f"libpython{version}.so.1.0").write_text("a library")
    (environment / "pyvenv.cfg").write_text(f"home = {base / 'bin'}\nversion = {version}.7\n")
    return environment


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment that is complete."""
    return write_environment(tmp_path)


def files_under(folder: Path) -> Iterator[str]:
    """Relative names of all files."""
    return (str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file())


def test_find_with_tritonserver_on_the_path_takes_it_as_it_is(tmp_path: Path, environment: Path) -> None:
    """The container's Triton keeps its own backends and environment; only our settings are kept from it."""
    binary = tmp_path / "opt" / "tritonserver"
    binary.parent.mkdir()
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    runtime = find_triton(environment=environment, search_path=str(binary.parent))
    launch = runtime.prepare(tmp_path / "run", {"PATH": "/bin", "PYTHONPATH": "/x", "PENSTOCK_TOKEN": "secret"})
    assert launch.argv == (str(binary),)
    kept = {name: value for name, value in launch.env.items() if not name.startswith("MALLOC_")}
    own = {"PENSTOCK_MAX_PIXELS": "40000000", "PENSTOCK_SLAB_FILE": str(tmp_path / "run" / "slab-of-pictures")}
    assert kept == {"PATH": "/bin", "PYTHONPATH": "/x"} | own
    assert launch.python_backends == ("python",)


def test_find_without_any_triton_says_what_to_do(tmp_path: Path) -> None:
    """One sentence with the fix, whether an environment is expected or not."""
    with pytest.raises(TritonUnavailable, match=r"penstock setup triton.*--engine embedded.*--engine URL"):
        find_triton(environment=tmp_path / "absent", search_path="")
    with pytest.raises(TritonUnavailable, match=r"penstock setup triton.*--engine embedded.*--engine URL"):
        find_triton(environment=None, search_path="")


def test_prepare_lays_the_backends_out_as_files_of_its_own(tmp_path: Path, environment: Path) -> None:
    """Triton refuses links out of its backend folder; stub and server are executable whatever the wheel lost."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    launch = find_triton(environment=environment, search_path="").prepare(run_dir, {})
    backends = run_dir / "backends"
    assert launch.argv == (str(run_dir / "tritonserver"), "--backend-directory", str(backends))
    names = set(files_under(backends))
    assert {
        "python/libtriton_python.so",
        "python/triton_python_backend_utils.py",
        "python/triton_python_backend_stub",
        "onnxruntime/model.py",
        "onnxruntime/ort_serving/session.py",
        "onnxruntime/torch_serving/session_pictures.py",
        "onnxruntime/row_trial.py",
        "torch/model.py",
        "torch/torch_serving/program.py",
        "torch/row_trial.py",
    } <= names
    assert not any("__pycache__" in name for name in names)
    assert not any(path.is_symlink() for path in backends.rglob("*"))
    assert os.access(backends / "python" / "triton_python_backend_stub", os.X_OK)
    assert os.access(run_dir / "tritonserver", os.X_OK)
    assert launch.python_backends == ("onnxruntime", "python", "torch")


def test_prepare_leaves_the_wheel_as_it_is(tmp_path: Path, environment: Path) -> None:
    """Its files may be hard links into a cache that others use: no mode is changed."""
    runtime = find_triton(environment=environment, search_path="")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    runtime.prepare(run_dir, {})
    assert not os.access(runtime.binary, os.X_OK)


def test_prepare_twice_in_one_folder_gives_the_same(tmp_path: Path, environment: Path) -> None:
    """A second start finds the first one's files and replaces them."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    runtime = find_triton(environment=environment, search_path="")
    assert runtime.prepare(run_dir, {}) == runtime.prepare(run_dir, {})


def test_prepare_environment_leads_to_the_models_python_alone(tmp_path: Path, environment: Path) -> None:
    """Our PYTHON*, settings and lib folder do not leak; what the user set for threads stays."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    inherited = {
        "PATH": "/usr/bin",
        "PYTHONPATH": "/ours",
        "PYTHONHOME": "/ours",
        "PENSTOCK_ADMIN_TOKEN": "secret",
        "LD_LIBRARY_PATH": "/cuda",
        "OMP_NUM_THREADS": "4",
        "LANG": "C.UTF-8",
    }
    runtime = replace(find_triton(environment=environment, search_path=""), max_pixels=1000)
    env = runtime.prepare(run_dir, inherited).env
    own = {"PENSTOCK_MAX_PIXELS": "1000", "PENSTOCK_SLAB_FILE": str(run_dir / "slab-of-pictures")}
    assert {name: env[name] for name in env if name.startswith("PENSTOCK")} == own
    libraries = environment / f"lib/python{VERSION}/site-packages/nvidia_pytriton.libs"
    assert env["LD_LIBRARY_PATH"] == f"{libraries}:{run_dir / 'lib'}:/cuda"
    assert [path.name for path in (run_dir / "lib").iterdir()] == [LIBPYTHON]
    assert env["PATH"] == f"{environment / 'bin'}:/usr/bin"
    assert env["VIRTUAL_ENV"] == str(environment)
    assert (env["OMP_NUM_THREADS"], env["OPENBLAS_NUM_THREADS"]) == ("4", "1")
    assert env["LANG"] == "C.UTF-8"
    assert not {"PYTHONPATH", "PYTHONHOME", "PENSTOCK_ADMIN_TOKEN"} & set(env)


@pytest.mark.parametrize("search_path", ["", "bin"])
def test_prepare_bounds_what_malloc_keeps_unless_the_user_did(
    tmp_path: Path, environment: Path, search_path: str
) -> None:
    """For Triton from PATH and from the wheel: a heap retains at most 32 MiB, whatever the largest tensor was."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tritonserver").touch(0o755)
    runtime = find_triton(environment=environment, search_path=str(tmp_path / search_path) if search_path else "")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    env = runtime.prepare(run_dir, {"MALLOC_MMAP_THRESHOLD_": "1000000"}).env
    assert (env["MALLOC_MMAP_THRESHOLD_"], env["MALLOC_TRIM_THRESHOLD_"]) == ("1000000", str(32 << 20))


def test_prepare_where_nothing_can_be_written_is_unavailable(tmp_path: Path, environment: Path) -> None:
    """One line with the folder."""
    runtime = find_triton(environment=environment, search_path="")
    with pytest.raises(TritonUnavailable, match="absent"):
        runtime.prepare(tmp_path / "absent", {})


def test_find_without_a_stub_for_the_python_names_those_it_has(tmp_path: Path) -> None:
    """An environment of a Python that Triton does not know cannot run its models."""
    environment = write_environment(tmp_path, version="3.99", stubs=("3.9", "3.11"))
    with pytest.raises(TritonUnavailable, match=r"no stub for Python 3\.99 .*3\.9, 3\.11"):
        find_triton(environment=environment, search_path="")


def test_find_without_libpython_names_the_debian_package(tmp_path: Path) -> None:
    """A Python that brings no shared library is the commonest gap; the fix is one package."""
    environment = write_environment(tmp_path, version="3.99", stubs=("3.99",))
    (tmp_path / "base" / "lib" / "libpython3.99.so.1.0").unlink()
    with pytest.raises(TritonUnavailable, match=r"libpython3\.99\.so\.1\.0.*apt-get install libpython3\.99"):
        find_triton(environment=environment, search_path="")


def test_find_where_a_folder_may_not_be_read_names_it(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's Python under a closed folder is one sentence, not a traceback."""
    closed = PermissionError(13, "Permission denied", "/closed/lib/libpython3.11.so.1.0")

    def refuse(path: Path) -> bool:
        raise closed

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(TritonUnavailable, match=r"/closed/lib/\S+ may not be read by this user"):
        find_triton(environment=environment, search_path="")


def test_find_with_a_file_missing_names_it(tmp_path: Path, environment: Path) -> None:
    """A half-installed wheel is noticed at the start, not at the first model."""
    next(environment.rglob("libtriton_python.so")).unlink()
    with pytest.raises(TritonUnavailable, match=r"lacks .*libtriton_python\.so"):
        find_triton(environment=environment, search_path="")


def test_find_libpython_asks_the_environment_where_its_home_has_none(tmp_path: Path, environment: Path) -> None:
    """Debian keeps the library in the folder of the architecture, which the interpreter knows."""
    multiarch = tmp_path / "usr" / "lib" / "x86_64-linux-gnu"
    multiarch.mkdir(parents=True)
    (multiarch / LIBPYTHON).write_text("a library")
    (tmp_path / "base" / "lib" / LIBPYTHON).unlink()
    python = environment / "bin" / "python"
    python.write_text(f"#!/bin/sh\necho {multiarch.parent}\necho {multiarch.name}\n")
    python.chmod(0o755)
    assert find_libpython(environment, VERSION) == multiarch / LIBPYTHON


@pytest.mark.parametrize(
    ("machine", "glibc", "complaint"),
    [
        ("aarch64", (2, 39), "x86-64 and this machine is aarch64"),
        ("x86_64", (2, 31), r"needs glibc 2\.35 .* has glibc 2\.31"),
        ("x86_64", None, "another C library"),
    ],
)
def test_platform_that_the_wheel_cannot_run_on_is_refused(
    machine: str, glibc: tuple[int, int] | None, complaint: str
) -> None:
    """The reason and the way out, instead of the loader's message later."""
    with pytest.raises(TritonUnavailable, match=f"{complaint}.*--engine"):
        check_platform(machine, glibc)


def test_platform_that_the_wheel_runs_on_is_taken() -> None:
    """Debian 12 and Ubuntu 22.04 are the oldest."""
    check_platform("x86_64", (2, 35))


def test_default_environment_stands_beside_ours_or_in_the_home(tmp_path: Path) -> None:
    """A checkout has it beside its own environment (`make up`), others have what `penstock setup triton` makes."""
    prefix, home = tmp_path / ".venv", tmp_path / "home"
    assert default_environment(prefix, home) == home / "triton"
    (tmp_path / ".venv-triton").mkdir()
    assert default_environment(prefix, home) == tmp_path / ".venv-triton"


def test_find_in_the_real_environment_gives_the_real_triton(triton_environment: Path, tmp_path: Path) -> None:
    """The environment that `make up` built is complete, with the library of the Python that runs it."""
    runtime = find_triton(environment=triton_environment, search_path="")
    assert isinstance(runtime, TritonRuntime)
    assert runtime.wheel is not None
    assert runtime.wheel.libpython.name == f"libpython3.{sys.version_info.minor}.so.1.0"
    assert os.access(runtime.prepare(tmp_path, {}).argv[0], os.X_OK)
