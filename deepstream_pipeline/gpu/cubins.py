"""The kernels compiled for a card, by NVRTC, once a machine: a decode process does not wait a third of a second for it.

What was compiled is kept in $XDG_CACHE_HOME/penstock/kernels (~/.cache), by the source, the card's compute capability
and NVRTC's version. A file there is code for the card: one that another user could have written, or that is damaged,
is not taken. Where nothing can be kept, every process compiles.
"""

import ctypes
import hashlib
import os
import stat
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepstream_pipeline.errors import GpuFailed, GpuUnavailable
from deepstream_pipeline.gpu.kernels import SOURCE

_KEPT = 16  # compiled sources: other versions of the program, other cards of the machine
_MOST_BYTES = 4 << 20
_DIGEST_BYTES = 32
_COMPILERS = ("cuda_nvrtc/lib", "cu13/lib")  # in the packages nvidia: of nvidia-cuda-nvrtc-cu12, and of CUDA 13's
# Without --fmad=false the places would be rounded otherwise than on the CPU.
_OPTIONS = (b"--fmad=false", b"--std=c++14")


def cubin_for(capability: tuple[int, int], folder: Path | None = None) -> bytes:
    """Of all kernels. folder: where compiled ones are kept, None for the user's own.

    Raises GpuUnavailable where NVRTC is missing or knows no such card, GpuFailed where it refuses the source.
    """
    nvrtc = _nvrtc()
    version = _version(nvrtc)
    architecture = f"sm_{capability[0]}{capability[1]}"
    told = "\0".join((SOURCE, architecture, version, repr(_OPTIONS)))
    name = f"{architecture}-{hashlib.sha256(told.encode()).hexdigest()[:32]}.cubin"
    folder = folder or cache_folder()
    if folder is None:
        return compile_cubin(nvrtc, architecture)
    kept = _read(folder, name)
    if kept is not None:
        return kept
    made = compile_cubin(nvrtc, architecture)
    with suppress(OSError):
        _keep(folder, name, made)
    return made


def cache_folder() -> Path | None:
    """The user's own; None for one who has no home."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(root):
        root = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "penstock" / "kernels" if os.path.isabs(root) else None


def compile_cubin(nvrtc: Any, architecture: str) -> bytes:
    """By NVRTC, which needs no card. architecture: sm_90."""
    program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"penstock.cu", 0, [], []))
    try:
        options = [f"--gpu-architecture={architecture}".encode(), *_OPTIONS]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
            _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
            said = " ".join(log.rstrip(b"\0").decode(errors="replace").split())
            if error == nvrtc.nvrtcResult.NVRTC_ERROR_INVALID_OPTION or not said.strip():
                raise GpuUnavailable(
                    f"NVRTC {_version(nvrtc)} compiles for no card of {architecture}: {said or error.name}; "
                    "install another nvidia-cuda-nvrtc, or use the CPU (decoder: cpu)"
                )
            raise GpuFailed(f"NVRTC {_version(nvrtc)} refuses the kernels for {architecture}: {said}")
        cubin = bytearray(_checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(folder: Path, name: str) -> bytes | None:
    """What is kept under that name, if it is ours and whole."""
    try:
        if not _is_ours(os.lstat(folder)):
            return None
        with open(os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            known = os.fstat(file.fileno())
            if not (stat.S_ISREG(known.st_mode) and _is_ours(known) and known.st_size <= _MOST_BYTES):
                return None
            content = file.read(_MOST_BYTES)
    except OSError:
        return None
    digest, cubin = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return cubin if cubin and hashlib.sha256(cubin).digest() == digest else None


def _keep(folder: Path, name: str, cubin: bytes) -> None:
    """Whole or not at all; the oldest go beyond a handful."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(os.lstat(folder)):
        return
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".part")
    try:
        with open(handle, "wb") as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        os.replace(temporary, folder / name)
    except OSError:
        os.unlink(temporary)
        raise
    kept = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in kept[_KEPT:]:
        path.unlink(missing_ok=True)


def _is_ours(known: os.stat_result) -> bool:
    """This user's, and writable by nobody else."""
    is_link = stat.S_ISLNK(known.st_mode)
    return known.st_uid == os.geteuid() and not known.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_link


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise GpuUnavailable("the package cuda-bindings is not installed: run make gpu") from None
    _load_compiler()
    return nvrtc


def _load_compiler() -> None:
    """NVRTC as pip installs it, wherever this Python has its packages: cuda-bindings looks for it in the interpreter's
    own folder and where the linker looks, and takes what is loaded. NVRTC 13 does not look beside itself for its
    builtins. Where there is none, it is left to cuda-bindings to find one."""
    package = find_spec("nvidia")
    for root in list(package.submodule_search_locations or ()) if package else []:
        for folder in _COMPILERS:
            compilers = sorted(Path(root, folder).glob("libnvrtc.so.*"))
            if compilers:
                with suppress(OSError):
                    for builtins in Path(root, folder).glob("libnvrtc-builtins.so.*"):
                        ctypes.CDLL(str(builtins))
                    ctypes.CDLL(str(compilers[-1]))
                    return


def _version(nvrtc: Any) -> str:
    try:
        error, major, minor = nvrtc.nvrtcVersion()
    except (RuntimeError, OSError) as missing:  # cuda-bindings finds no libnvrtc
        raise GpuUnavailable(
            "NVIDIA's run-time compiler (libnvrtc) is not here: run make gpu, or use the CPU (decoder: cpu)"
        ) from missing
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise GpuFailed(f"{error.name}: could not ask NVRTC's version")
    return f"{major}.{minor}"


def _checked(nvrtc: Any, answer: tuple[Any, ...]) -> Any:
    error, *values = answer
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise GpuFailed(f"{error.name}: could not compile the kernels")
    return values[0] if values else None
