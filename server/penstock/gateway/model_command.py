"""Runs `penstock models add` or `inspect` on an uploaded file, or `check` on a model, in a process with limits."""

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.engines.ort_serving.placement import has_nvidia_driver
from penstock.gateway.model_uploads import ModelUploads
from penstock.logs import get_logger
from penstock.protocol.errors import InvalidRequest

_MIB = 1 << 20
MAX_TEXT = 8000  # characters of an error message
_REPLY_BYTES = 16 * _MIB  # of the process's report; labels and metadata are bounded to less
_INHERITED = (  # no secrets
    "PATH",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "SSL_CERT_FILE",
    "PENSTOCK_LAYOUTS",
    "PENSTOCK_ENGINE_ENVIRONMENT",
)
_STAGING_SUFFIX = re.compile(r"\.[a-z0-9_]{8}")  # of tempfile.mkdtemp
_FLAG = re.compile(r"--(?!allow-model-code)([a-z]+(?:-[a-z]+)*)")  # --allow-model-code is also a flag of the gateway

log = get_logger("models")


MEMORY_BYTES = 4 << 30
CUDA_MEMORY_BYTES = 8 << 30  # more on a GPU: a session takes 4 GB of private memory there (H200, ONNX Runtime 1.31)


def _memory_bytes() -> int:
    return MEMORY_BYTES + (CUDA_MEMORY_BYTES if has_nvidia_driver() else 0)


@dataclass(frozen=True, slots=True)
class ModelProcessLimits:
    """Limits of the process that inspects, adds or checks a model.

    memory_bytes, file_bytes: in addition to 8 times and 2 times the size of the file. cpu_s: of all threads. wall_s:
    until it is killed. Its child, which inspects the file, has lower limits.
    """

    memory_bytes: int = field(default_factory=_memory_bytes)
    cpu_s: int = 600
    wall_s: float = 300.0
    file_bytes: int = 64 * _MIB


@dataclass(frozen=True, slots=True)
class ModelProcessOptions:
    """allows_code: --allow-model-code of the gateway. command: `penstock models …` under limits."""

    allows_code: bool = False
    command: tuple[str, ...] = (sys.executable, "-P", "-m", "penstock.cli.add_process")
    limits: ModelProcessLimits = field(default_factory=ModelProcessLimits)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Exit code, the last line of standard output, and standard error; both bounded."""

    code: int
    reply: bytes
    stderr: str


class ModelCommand:
    """A command of the group `models` over one file, or over the model if file is None."""

    def __init__(self, uploads: ModelUploads, options: ModelProcessOptions, file: Path | None, model: str) -> None:
        self._uploads, self._options, self._file, self._model = uploads, options, file, model

    async def run(self, verb: str, scratch: Path, flags: Sequence[str], api_key: str = "") -> CommandResult:
        """Runs it. scratch: an empty folder. api_key: for calls of this gateway. Cancelling kills the process.

        Raises InvalidRequest if it takes too long, OSError.
        """
        reply, stderr = scratch / "reply", scratch / "stderr"
        wall_s = self._options.limits.wall_s
        with reply.open("wb") as out, stderr.open("wb") as error:
            process = await asyncio.create_subprocess_exec(
                *self._arguments(verb, flags),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=error,
                env=self._environment(scratch, api_key),
            )
        try:
            async with asyncio.timeout(wall_s):
                code = await process.wait()
        except TimeoutError:
            task = "checking the model" if self._file is None else "inspecting the file"
            raise InvalidRequest(f"{task} took longer than {wall_s:g} s and was stopped") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            if process.returncode is not None and process.returncode < 0:
                self._remove_staged()
        last_line = _head_of(reply, _REPLY_BYTES).strip().rpartition(b"\n")[2]
        return CommandResult(code, last_line, _head_of(stderr, _MIB).decode("utf-8", "replace"))

    def for_client(self, text: str) -> str:
        """The command's message with query parameters instead of flags, and without paths of the gateway."""
        if self._file is not None:
            text = text.replace(str(self._file), "the file")
        text = text.replace(str(self._uploads.home), "PENSTOCK_HOME")
        text = text.replace("--name", "the name in the path").replace("--replace", "replace=1")
        return _FLAG.sub(lambda flag: flag[1].replace("-", "_"), text)

    def failure(self, result: CommandResult) -> str:
        """The command's own message, if it has one; otherwise how the process ended."""
        code, lines = result.code, result.stderr.strip().splitlines()
        if lines and (code == 2 or (code == 1 and lines[-1].startswith("penstock: "))):
            return lines[-1].removeprefix("penstock: ").removeprefix("Error: ")
        log.warning("the process that reads a model died", model=self._model, code=code, last="".join(lines[-1:]))
        limits, size_bytes = self._options.limits, self._size_bytes()
        memory = f"{(limits.memory_bytes + 8 * size_bytes) // _MIB} MiB of memory and {limits.cpu_s} s of CPU time"
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        task = "checks" if self._file is None else "inspects"
        return f"the process that {task} it {how}; it may use {memory}"

    def _size_bytes(self) -> int:
        return 0 if self._file is None else self._file.stat().st_size

    def _arguments(self, verb: str, flags: Sequence[str]) -> list[str]:
        options, limits, size_bytes = self._options, self._options.limits, self._size_bytes()
        numbers = (os.getpid(), limits.memory_bytes + 8 * size_bytes, limits.cpu_s, limits.file_bytes + 2 * size_bytes)
        code = ["--allow-model-code"] * options.allows_code
        target = [*code, "--json", str(self._file)] if self._file is not None else ["--json", "--", self._model]
        return [*options.command, *map(str, numbers), verb, *flags, *target]

    def _environment(self, scratch: Path, api_key: str) -> dict[str, str]:
        inherited = {name: value for name in _INHERITED if (value := os.environ.get(name)) is not None}
        repositories = os.pathsep.join(map(str, self._uploads.repositories))
        own = {"PENSTOCK_MODEL_REPOSITORY": repositories, "PENSTOCK_HOME": str(self._uploads.home)}
        key = {"PENSTOCK_API_KEY": api_key} if api_key else {}  # `ps` does not show the environment to other users
        return inherited | own | key | {"HOME": str(scratch), "TMPDIR": str(scratch)}

    def _remove_staged(self) -> None:
        """Removes the staging folder of the killed process, unless a command writes the same model now."""
        home, name = self._uploads.home, self._model
        with contextlib.suppress(OSError), (home / "downloads" / f"{name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for folder in (home / "staging").glob(f"{name}.*"):
                if _STAGING_SUFFIX.fullmatch(folder.name.removeprefix(name)):
                    shutil.rmtree(folder, ignore_errors=True)


def flag_texts(flags: Sequence[tuple[str, str]]) -> list[str]:
    """Command-line flags, one argument each. flags: (name with underscores, value)."""
    return [f"--{key.replace('_', '-')}={value}" for key, value in flags]


def _head_of(path: Path, limit_bytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(min(limit_bytes, path.stat().st_size))
