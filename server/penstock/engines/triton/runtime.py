"""Finds a Triton on this machine, and prepares its backends, libraries, environment and paths."""

import configparser
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.engines.torch_serving import slab_pictures
from penstock.engines.torch_serving.picture_header import MAX_PIXELS, MAX_PIXELS_VARIABLE

_SPECIAL = re.compile(r"[^\w@%+=:,./-]")  # as in shlex, but letters of all languages are plain


def is_special(path: Path | str) -> bool:
    """Whether a shell would interpret characters of the path."""
    return _SPECIAL.search(str(path)) is not None


def plain_paths(repositories: Iterable[Path], links: Path) -> tuple[Path, ...]:
    """Paths of the repositories without special characters: their own, or new links in `links`. Raises OSError."""
    return tuple(_plain_path(path.absolute(), links / str(number)) for number, path in enumerate(repositories))


def _plain_path(repository: Path, link: Path) -> Path:
    if not is_special(repository):
        return repository
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(repository, target_is_directory=True)
    return link


MIN_GLIBC = (2, 35)
_OUR_BACKENDS = Path(__file__).resolve().parents[1] / "triton_backends"
_BESIDE_OUR_MODEL_PY = {"onnxruntime": ("ort_serving", "torch_serving"), "torch": ("torch_serving",)}
_BESIDE_EACH = "row_trial.py"
_STUB = "triton_python_backend_stub"
_PROBE_TIMEOUT_S = 10.0
# One thread per instance and library; each would otherwise use all cores.
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# malloc's default limits grow up to 32 and 64 MiB for every heap. After 100 hostile pictures and 100 tensors of 10 and
# 15 MiB, Triton's memory had grown by 83 MiB; with these limits by 25. Tensors of 8 to 32 MiB take more CPU time, up to
# a third.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(8 << 20), "MALLOC_TRIM_THRESHOLD_": str(32 << 20)}
_INSTALL = "`penstock setup triton` installs it"
_REMEDY = "use --engine embedded (ONNX models only) or --engine URL (a Triton elsewhere)"


class TritonUnavailable(Exception):
    """No Triton can run here. The text has the reason and the fix for the user."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start Triton. argv: the program and its first arguments. env: its full environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    python_backends: tuple[str, ...] = ("python",)  # their models run in stub processes with shared memory
    folder: Path = Path("/")  # working directory; stubs import from it, so others must not write to it


@dataclass(frozen=True, slots=True)
class WheelFiles:
    """Files of nvidia-pytriton in the models' environment, and that Python's shared library."""

    environment: Path
    site_packages: Path
    stub: Path
    libpython: Path

    @property
    def server(self) -> Path:
        return self.site_packages / "pytriton" / "tritonserver"

    @property
    def libraries(self) -> Path:
        return self.site_packages / "nvidia_pytriton.libs"


@dataclass(frozen=True, slots=True)
class TritonRuntime:
    """A Triton that can run here. wheel: None for one on PATH, which has its own backends.

    max_pixels: of a picture that a model decodes (`image-decoder: engine`). slab_file: by which models find the
    gateway's memory; None for the one in its run directory.
    """

    binary: Path
    wheel: WheelFiles | None = None
    max_pixels: int = MAX_PIXELS
    slab_file: Path | None = None

    def prepare(self, run_dir: Path, environ: Mapping[str, str] | None = None) -> Launch:
        """How to start it; copies the backends to run_dir. environ: PENSTOCK_* is removed. Raises TritonUnavailable."""
        inherited = os.environ if environ is None else environ
        env = _MALLOC | {name: value for name, value in inherited.items() if not name.startswith("PENSTOCK_")}
        env[MAX_PIXELS_VARIABLE] = str(self.max_pixels)
        env[slab_pictures.FILE_VARIABLE] = str(self.slab_file or run_dir.absolute() / slab_pictures.FILE_NAME)
        if self.wheel is None:
            return Launch((str(self.binary),), env, folder=run_dir)
        try:
            binary = _executable(self.binary, run_dir)
            backends = _lay_out_backends(self.wheel, run_dir)
            libraries = _lay_out_libpython(self.wheel, run_dir)
        except OSError as error:
            raise TritonUnavailable(f"Triton's backends cannot be laid out in {run_dir}: {error}") from error
        names = tuple(sorted(path.name for path in backends.iterdir()))
        argv = (str(binary), "--backend-directory", str(backends))
        return Launch(argv, _environment(self.wheel, libraries, env), names, run_dir)


def find_triton(*, environment: Path | None, search_path: str | None = None) -> TritonRuntime:
    """`tritonserver` on the search path (default PATH), else the wheel's in environment. Raises TritonUnavailable."""
    on_path = shutil.which("tritonserver", path=search_path)
    if on_path is not None:
        return TritonRuntime(Path(on_path).absolute())
    if environment is None:
        raise TritonUnavailable(f"no tritonserver on PATH and no environment that has one; {_INSTALL}, or {_REMEDY}")
    check_platform(os.uname().machine, glibc_version())
    try:
        return _from_wheel(environment)
    except PermissionError as error:
        raise TritonUnavailable(
            f"{error.filename} may not be read by this user ({error.strerror}); change its permissions, or {_REMEDY}"
        ) from error


def default_environment(prefix: Path, home: Path = Path("~/.penstock")) -> Path:
    """The models' environment beside ours (`.venv` → `.venv-triton`), else that of `penstock setup triton`."""
    beside = prefix.with_name(f"{prefix.name}-triton")
    return beside if beside.is_dir() else home.expanduser() / "triton"


def check_platform(machine: str, glibc: tuple[int, int] | None) -> None:
    """Raises TritonUnavailable if the wheel's binary cannot run. glibc: None for another C library."""
    if machine not in ("x86_64", "AMD64"):
        raise TritonUnavailable(
            f"the Triton of nvidia-pytriton runs on x86-64 and this machine is {machine}; {_REMEDY}"
        )
    if glibc is None or glibc < MIN_GLIBC:
        has = "another C library" if glibc is None else f"glibc {glibc[0]}.{glibc[1]}"
        raise TritonUnavailable(
            f"the Triton of nvidia-pytriton needs glibc {MIN_GLIBC[0]}.{MIN_GLIBC[1]} (Debian 12, Ubuntu 22.04) "
            f"and this machine has {has}; {_REMEDY}"
        )


def glibc_version() -> tuple[int, int] | None:
    """(major, minor) of this machine's glibc; None for another C library."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        major, minor = version.split(".")[:2]
    except (ValueError, OSError):
        return None
    return (int(major), int(minor)) if name == "glibc" else None


def _from_wheel(environment: Path) -> TritonRuntime:
    binaries = sorted(environment.glob("lib/python3.*/site-packages/pytriton/tritonserver/bin/tritonserver"))
    if not binaries:
        raise TritonUnavailable(
            f"no tritonserver on PATH and none of nvidia-pytriton in {environment}; {_INSTALL}, or {_REMEDY}"
        )
    server = binaries[0].parent.parent
    site_packages = server.parent.parent
    version = site_packages.parent.name.removeprefix("python")
    stub = server / "python_backend_stubs" / version / _STUB
    if not stub.is_file():
        known = sorted((path.name for path in stub.parent.parent.glob("3.*")), key=lambda name: int(name[2:]))
        raise TritonUnavailable(
            f"Triton's python backend has no stub for Python {version} of {environment} (it has {', '.join(known)}); "
            "rebuild that environment with one of these"
        )
    wheel = WheelFiles(environment, site_packages, stub, find_libpython(environment, version))
    _check_complete(wheel)
    return TritonRuntime(binaries[0], wheel)


def _check_complete(wheel: WheelFiles) -> None:
    backend = wheel.server / "backends" / "python"
    for needed in (backend / "libtriton_python.so", backend / "triton_python_backend_utils.py", wheel.libraries):
        if not needed.exists():
            raise TritonUnavailable(
                f"nvidia-pytriton in {wheel.environment} lacks {needed}; remove that folder, then {_INSTALL}"
            )


def find_libpython(environment: Path, version: str) -> Path:
    """`libpython3.X.so.1.0` of the environment's base interpreter, for the stub. Raises TritonUnavailable."""
    name = f"libpython{version}.so.1.0"
    home = _base_interpreter(environment)
    folders = [
        *([home.parent / "lib", home.parent / "lib64"] if home is not None else []),
        *_library_folders(environment),
    ]
    for folder in [*folders, *_loader_folders(name)]:
        if (folder / name).is_file():
            return folder / name
    raise TritonUnavailable(
        f"Triton's python backend needs {name}, which the Python in {home or environment} does not bring; "
        f"install it (Debian: apt-get install libpython{version}) or build the environments with a Python that has it"
    )


def _base_interpreter(environment: Path) -> Path | None:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string("[venv]\n" + (environment / "pyvenv.cfg").read_text("utf-8"))
    except (OSError, configparser.Error, UnicodeDecodeError):
        return None
    home = parser.get("venv", "home", fallback="")
    return Path(home) if home else None


def _library_folders(environment: Path) -> list[Path]:
    code = "import sysconfig as s; print(s.get_config_var('LIBDIR') or ''); print(s.get_config_var('MULTIARCH') or '')"
    libdir, _, multiarch = _output([str(environment / "bin" / "python"), "-I", "-S", "-c", code]).partition("\n")
    if not libdir.strip():
        return []
    return [Path(libdir.strip()), Path(libdir.strip()) / multiarch.strip()]


def _loader_folders(name: str) -> list[Path]:
    for line in _output(["/sbin/ldconfig", "-p"]).splitlines():
        library, _, path = line.strip().partition(" => ")
        if library.startswith(f"{name} ") and "x86-64" in library:
            return [Path(path).parent]
    return []


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _executable(program: Path, run_dir: Path) -> Path:
    """The program, or an executable copy if it has no x bit; the wheel's files may belong to others."""
    if os.access(program, os.X_OK):
        return program
    copy = run_dir / program.name
    shutil.copyfile(program, copy)
    copy.chmod(0o755)
    return copy


def _lay_out_backends(wheel: WheelFiles, run_dir: Path) -> Path:
    """Creates `<run_dir>/backends/{python,onnxruntime,torch}`. Copies, because Triton rejects links."""
    backends = run_dir.resolve() / "backends"
    if backends.exists():
        shutil.rmtree(backends)
    python = backends / "python"
    python.mkdir(parents=True)
    for source in (wheel.server / "backends" / "python").iterdir():
        if source.is_file() and source.name != _STUB:
            shutil.copyfile(source, python / source.name)
    shutil.copyfile(wheel.stub, python / _STUB)
    (python / _STUB).chmod(0o755)
    no_bytecode = shutil.ignore_patterns("__pycache__")
    for ours in _OUR_BACKENDS.iterdir():
        if (ours / "model.py").is_file():
            laid_out = backends / ours.name
            shutil.copytree(ours, laid_out, ignore=no_bytecode)
            for beside in _BESIDE_OUR_MODEL_PY[ours.name]:
                shutil.copytree(_OUR_BACKENDS.parent / beside, laid_out / beside, ignore=no_bytecode)
            shutil.copyfile(_OUR_BACKENDS.parent / _BESIDE_EACH, laid_out / _BESIDE_EACH)
    return backends


def _lay_out_libpython(wheel: WheelFiles, run_dir: Path) -> Path:
    """A folder with libpython only, because Triton must not load other libraries of that Python (conda's libstdc++)."""
    folder = run_dir / "lib"
    folder.mkdir(exist_ok=True)
    link = folder / wheel.libpython.name
    link.unlink(missing_ok=True)
    link.symlink_to(wheel.libpython)
    return folder


def _environment(wheel: WheelFiles, libpython_folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Without PYTHON* variables, by which the models' interpreter would find our packages."""
    env = {name: value for name, value in inherited.items() if not name.startswith("PYTHON")}
    libraries = [str(wheel.libraries), str(libpython_folder), *filter(None, [env.get("LD_LIBRARY_PATH")])]
    env |= {
        "LD_LIBRARY_PATH": ":".join(libraries),
        "PATH": f"{wheel.environment / 'bin'}:{env.get('PATH', os.defpath)}",
        "VIRTUAL_ENV": str(wheel.environment),
        "PYTHONDONTWRITEBYTECODE": "1",  # for the models' child processes; the stub itself ignores it
        "PYTHONUNBUFFERED": "1",
    }
    return env | {name: env.get(name, "1") for name in _ONE_THREAD}
