"""Creates the environment of the bundled Triton: Triton's wheel, numpy 1.26, and packages of its models."""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from penstock.engines.triton.runtime import check_platform, find_libpython, find_triton, glibc_version

PYTHONS = ("3.12", "3.11")  # numpy 1.26 has no wheel for later ones
LOCKS = Path(__file__).with_name("locks")  # in a checkout, a link to requirements
# For the Python inside Triton, which ignores PYTHON* variables: no __pycache__ beside a model's files.
BYTECODE_RULE = 'import sys; sys.pycache_prefix = sys.prefix + "/pycache"\n'
ONNXRUNTIMES = ("onnxruntime", "onnxruntime-gpu")
READY = ".ready"  # in the environment: a digest of its sources
_PROBE_TIMEOUT_S = 10.0


class SetupFailed(Exception):
    """The environment could not be created. Its text is one sentence for the user."""


@dataclass(frozen=True, slots=True)
class TritonSetup:
    """python: an interpreter, or None to search one. has_gpu: with PyTorch and onnxruntime-gpu (5 GB). has_tensorrt:
    with ONNX Runtime's plug-in for TensorRT-RTX."""

    folder: Path
    python: Path | None = None
    has_gpu: bool = False
    has_tensorrt: bool = False

    @property
    def locks(self) -> tuple[Path, ...]:
        """Triton comes last, so an environment that has it is complete."""
        added = {"triton-gpu": self.has_gpu, "triton-tensorrt": self.has_tensorrt}
        names = ("triton", *(name for name, is_wanted in added.items() if is_wanted), "triton-server")
        return tuple(LOCKS / f"{name}.txt" for name in names)

    def run(self, progress: Callable[[str], None]) -> bool:
        """Creates or updates the environment; False if it is up to date. Raises SetupFailed, TritonUnavailable."""
        check_platform(os.uname().machine, glibc_version())
        python, version = self._interpreter()
        try:
            digest = hashlib.sha256(b"".join([version.encode(), *(lock.read_bytes() for lock in self.locks)]))
            ready = self.folder / READY
            if ready.is_file() and ready.read_text() == digest.hexdigest():
                return False
            progress(f"environment {self.folder} (Python {version})")
            self._make(python, version)
            find_libpython(self.folder, version)
            site_packages = self.folder / "lib" / f"python{version}" / "site-packages"
            (site_packages / "penstock.pth").write_text(BYTECODE_RULE)
            for lock in self.locks:
                progress(f"packages of {lock.name}")
                self._remove_other_onnxruntime(lock, site_packages)
                _install(self.folder / "bin" / "python", lock)
            find_triton(environment=self.folder, search_path="")
            ready.write_text(digest.hexdigest())
        except OSError as error:
            raise SetupFailed(f"{error.filename or self.folder}: {error.strerror or error}") from error
        return True

    def _remove_other_onnxruntime(self, lock: Path, site_packages: Path) -> None:
        """onnxruntime and onnxruntime-gpu have the same files, so the lock's one is installed without the other."""
        if lock.stem == "triton-gpu":
            other = "onnxruntime"
        elif lock.stem == "triton" and not self.has_gpu:
            other = "onnxruntime_gpu"
        else:
            return
        if any(site_packages.glob(f"{other}-*.dist-info")):
            _uninstall(self.folder / "bin" / "python", ONNXRUNTIMES)

    def _interpreter(self) -> tuple[str, str]:
        wanted = [str(self.python)] if self.python else [sys.executable, *(f"python{version}" for version in PYTHONS)]
        for python in wanted:
            if (version := _version_of(python)) in PYTHONS:
                return python, version
        raise SetupFailed(
            f"Triton's models need Python 3.11 or 3.12 (numpy 1.26), and {' '.join(wanted)} is none; install one, or "
            "name it: --python /path/to/python3.12"
        )

    def _make(self, python: str, version: str) -> None:
        is_environment = (self.folder / "pyvenv.cfg").is_file()
        if is_environment and _version_of(str(self.folder / "bin" / "python")) == version:
            return
        if not is_environment and self.folder.is_dir() and any(self.folder.iterdir()):
            raise SetupFailed(f"{self.folder} has other files; choose another folder: --folder DIR")
        made = subprocess.run(
            [python, "-m", "venv", "--without-pip", "--clear", str(self.folder)], capture_output=True, text=True
        )
        if made.returncode:
            reason = (made.stderr or made.stdout).strip().splitlines()[-1:]
            raise SetupFailed(f"{python} -m venv {self.folder}: {reason[0] if reason else 'failed'}")


def _version_of(python: str) -> str:
    """Its major and minor version, "3.11"; empty if it does not run."""
    ask = [python, "-I", "-S", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _install(python: Path, lock: Path) -> None:
    """Installs the lock's packages. Tries uv, which is faster, then pip, which may have its own index."""
    tried = []
    for installer in _installers(python):
        command = [*installer, "--no-deps", "--require-hashes", "-r", str(lock)]
        if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode == 0:
            return
        tried.append("pip" if "-m" in installer else Path(installer[0]).name)
    if not tried:
        raise SetupFailed("neither uv nor pip is installed here; install uv: pip install 'penstock[triton]'")
    raise SetupFailed(
        f"the packages of {lock.name} could not be installed (messages of {', '.join(tried)} above); run it again when "
        "that is solved: what is complete stays"
    )


def _uninstall(python: Path, names: Sequence[str]) -> None:
    """Removes packages, also absent ones. Raises SetupFailed."""
    for installer in _installers(python, "uninstall"):
        command = [*installer, *(("-y",) if "-m" in installer else ()), *names]
        if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode == 0:
            return
    raise SetupFailed(f"{' and '.join(names)} could not be removed from the environment of {python} (messages above)")


def _installers(python: Path, verb: str = "install") -> Iterator[list[str]]:
    quiet = [] if sys.stderr.isatty() else ["-q"]
    places = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)))
    if uv := shutil.which("uv", path=places):
        yield [uv, "pip", verb, *quiet, "--python", str(python)]
    if find_spec("pip"):
        yield [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), verb, *quiet]
