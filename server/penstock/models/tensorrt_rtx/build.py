"""Builds an engine for one GPU architecture in a bounded child process, and writes it beside the model.

The file is an ONNX model of one EPContext node that holds the engine: what ONNX Runtime's TensorRT-RTX plug-in loads.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from penstock.engines.ort_serving.placement import Precision
from penstock.engines.ort_serving.tensorrt_rtx import FOLDER, RUNTIME_CACHE, engine_key, engine_prefix
from penstock.gpu.tensorrt import capability_text
from penstock.gpu.triton_images import Capability
from penstock.models.tensorrt_rtx.layers import FusionTable

_MESSAGE_BYTES = 1 << 26
_MIB = 1 << 20
_MAX_REASON = 300  # characters
_NO_GEMM = "FP32 GEMM is not supported"  # of the builder's error for Turing
_PART = ".part"  # suffix of a file that a build writes; it begins with a dot
_ABANDONED_S = 7200.0  # no build takes so long: its process was killed

Shape = tuple[int, ...]


class CannotBuild(Exception):
    """No engine was built, and no file changed. str() is one sentence for the user."""


@dataclass(frozen=True, slots=True)
class BuildLimits:
    """Of the child process. memory_bytes: of its private memory, beside eight times the file's size."""

    memory_bytes: int = 6 << 30
    cpu_s: int = 1800
    wall_s: float = 900.0
    engine_bytes: int = (2 << 30) - (1 << 20)  # the engine lies in a protobuf message


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What to build. model: path of the ONNX file. max_batch: rows of a call, where the file leaves them free.

    sides: whole shapes of inputs, to fill in what the file leaves free behind the first side; -1 if unknown. size:
    (height, width) in pixels, for sides of pictures that are free then. precision: of the kernels; FP16 converts the
    model first, and FP32 leaves a file that is FP16 as it is.
    """

    model: str
    architecture: Capability
    max_batch: int
    sides: dict[str, Shape] = field(default_factory=dict)
    size: tuple[int, int] | None = None
    precision: Precision = Precision.FP32
    has_batch_wish: bool = False
    limits: BuildLimits = field(default_factory=BuildLimits)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """shapes: minimum and maximum of each input. build_s: wall time of the build. library: TensorRT-RTX's version."""

    architecture: Capability
    precision: Precision
    library: str
    model_sha256: str
    engine_bytes: int
    build_s: float
    shapes: dict[str, tuple[Shape, Shape]]
    table: FusionTable


@dataclass(frozen=True, slots=True)
class BuildMessage:
    """One line from the child process: a phase that begins or goes on, the engine, or why there is none."""

    phase: str = ""
    done: int = 0
    count: int = 0
    engine: BuiltEngine | None = None
    problem: str = ""


OnPhase = Callable[[str, int, int], None]


def why_not_as_wished(request: BuildRequest, shapes: dict[str, tuple[Shape, Shape]]) -> str:
    """Why the batch or the size that the user gave is not the engine's; empty if it is. shapes: of BuiltEngine."""
    greatest = [most for _, most in shapes.values()]
    ignored = []
    if request.has_batch_wish and not any(most[:1] == (request.max_batch,) for most in greatest):
        ignored.append("--max-batch")
    if request.size is not None and not any(request.size in (most[1:3], most[2:4]) for most in greatest):
        ignored.append("--input-size")
    if not ignored:
        return ""
    fixed = ", ".join(f"{name} {list(most)}" for name, (_, most) in shapes.items())
    return f"the file or config.pbtxt fixes its inputs: {fixed}; leave {' and '.join(ignored)} out"


def failure_reason(errors: Sequence[str]) -> str:
    """Why TensorRT-RTX built no engine, by the last of its errors."""
    if not errors:
        return "it gives no reason"
    if _NO_GEMM in errors[-1]:
        return f"{_NO_GEMM} there: give --precision fp16"
    return " ".join(errors[-1].split())[:_MAX_REASON]


def build_engine(request: BuildRequest, on_phase: OnPhase = lambda *_: None) -> tuple[BuiltEngine, Path]:
    """Builds the engine of an ONNX file; returns it and its file, in FOLDER beside the model. Blocks.

    Engines for the same architecture of older versions of the file are removed. on_phase(name, parts done, parts):
    progress. Raises CannotBuild, OSError.
    """
    model = Path(request.model)
    folder = model.parent / FOLDER
    folder.mkdir(exist_ok=True)
    with _new_file(folder) as part:
        built = _run_child(request, part.fileno(), on_phase)
        prefix = engine_prefix(model.stem, request.architecture, request.precision)
        file = folder / f"{prefix}{engine_key(built.model_sha256, built.library)}.onnx"
        Path(part.name).replace(file)
        shutil.rmtree(folder / RUNTIME_CACHE, ignore_errors=True)  # of older engines; the plug-in fills it again
    for older in folder.iterdir():
        if older.name.startswith(prefix) and older.stem != file.stem:
            older.unlink(missing_ok=True)
    return built, file


def write_page(file: Path, text: str) -> None:
    """Writes or replaces the page of an engine, beside its file; never through a link. Raises OSError."""
    with _new_file(file.parent) as part:
        part.write(text.encode())
        part.flush()
        Path(part.name).replace(file.with_suffix(".md"))


@contextlib.contextmanager
def _new_file(folder: Path) -> "Iterator[tempfile._TemporaryFileWrapper[bytes]]":
    """A file to rename, removed if it was not; so is the folder, if it is empty then, and files of killed builds.

    Others may be able to write to the folder, so the name cannot be guessed, and an existing file is never opened.
    """
    for remains in folder.glob(f".*{_PART}"):
        with contextlib.suppress(OSError):
            if time.time() - remains.lstat().st_mtime > _ABANDONED_S:
                remains.unlink()
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".", suffix=_PART, delete=False) as part:
            try:
                os.fchmod(part.fileno(), 0o644)  # a Triton of another user reads it
                yield part
            finally:
                Path(part.name).unlink(missing_ok=True)
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # if it is empty


def _run_child(request: BuildRequest, descriptor: int, on_phase: OnPhase) -> BuiltEngine:
    """descriptor: of the file that the child process writes. It gets no path, which could be a link by then."""
    command = [sys.executable, "-P", "-m", "penstock.models.tensorrt_rtx.child", str(os.getpid()), str(descriptor)]
    is_late = threading.Event()
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=(descriptor,)
    ) as process:
        timer = threading.Timer(request.limits.wall_s, _stop, (process, is_late))
        timer.start()
        try:
            message = _converse(process, request, on_phase)
        finally:
            timer.cancel()
            process.kill()
    if message.engine is None:
        raise CannotBuild(message.problem or _death(request, process.returncode, is_late=is_late.is_set()))
    return message.engine


def _stop(process: "subprocess.Popen[bytes]", is_late: threading.Event) -> None:
    is_late.set()
    process.kill()


def _converse(process: "subprocess.Popen[bytes]", request: BuildRequest, on_phase: OnPhase) -> BuildMessage:
    """The last message of the child process; an empty one if it ended before."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it ended: _death says how
        process.stdin.write(msgspec.msgpack.encode(request))
        process.stdin.close()
    while line := process.stdout.readline(_MESSAGE_BYTES):
        try:
            message = msgspec.json.decode(line, type=BuildMessage)
        except msgspec.DecodeError:
            if len(line) < _MESSAGE_BYTES:  # it was killed while it wrote
                break
            mib = _MESSAGE_BYTES // _MIB
            return BuildMessage(problem=f"{request.model}: the description of its layers has more than {mib} MiB")
        if not message.phase:
            return message
        on_phase(message.phase, message.done, message.count)
    process.wait()
    return BuildMessage()


def _death(request: BuildRequest, returncode: int, *, is_late: bool) -> str:
    limits = request.limits
    what = f"{request.model}: no engine for {capability_text(request.architecture)} was built"
    if is_late:
        return f"{what} in {limits.wall_s:g} s; it was stopped"
    if returncode == -signal.SIGXCPU:
        return f"{what}: it needs more than {limits.cpu_s} s of CPU time"
    how = f"was ended by signal {-returncode}" if returncode < 0 else f"ended with {returncode}"
    memory_mib = limits.memory_bytes // _MIB
    return f"{what}: its process {how}, perhaps for memory: it may use {memory_mib} MiB and eight times the file's size"
