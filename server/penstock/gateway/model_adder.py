"""Adds an uploaded model: runs `penstock models add` in a limited process, then loads it. A failure is undone."""

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from penstock.gateway.dataplane import DataPlane
from penstock.gateway.model_uploads import AddSlots, ModelUploads
from penstock.logs import get_logger
from penstock.protocol.errors import EngineUnavailable, InferenceError, InvalidRequest, StorageFull
from penstock.protocol.identity import Identity
from penstock.protocol.model_addition import AddFailure, ModelAdded

READY = "READY"
_MIB = 1 << 20
_MAX_TEXT = 8000  # characters of an error message
_REPLY_BYTES = 16 * _MIB  # of the process's report; labels and metadata are bounded to less
_INHERITED = (  # no secrets
    "PATH",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "PENSTOCK_LAYOUTS",
    "PENSTOCK_ENGINE_ENVIRONMENT",
)
_STAGING_SUFFIX = re.compile(r"\.[a-z0-9_]{8}")  # of tempfile.mkdtemp
_FLAG = re.compile(r"--(?!allow-model-code)([a-z]+(?:-[a-z]+)*)")  # the gateway has that flag, too

log = get_logger("models")


@dataclass(frozen=True, slots=True)
class AddLimits:
    """Limits of the process that adds a model.

    memory_bytes, file_bytes: in addition to 8 times and 2 times the size of the file. cpu_s: of all threads. wall_s:
    until it is killed. Its child, which inspects the file, has lower limits.
    """

    memory_bytes: int = 4 << 30
    cpu_s: int = 600
    wall_s: float = 300.0
    file_bytes: int = 64 * _MIB


@dataclass(frozen=True, slots=True)
class AddProcessOptions:
    """allows_code: --allow-model-code of the gateway. command: `penstock models add` under limits."""

    allows_code: bool = False
    command: tuple[str, ...] = (sys.executable, "-P", "-m", "penstock.cli.add_process")
    limits: AddLimits = field(default_factory=AddLimits)


@dataclass(frozen=True, slots=True)
class AddRequest:
    """A model to add. flags: (name with underscores, value) of `penstock models add`. origin: for MODEL.md."""

    name: str
    file: Path
    flags: Sequence[tuple[str, str]] = ()
    may_replace: bool = False
    origin: str = ""


class ModelAdder:
    """Adds one model at a time; MAX_UPLOADS - 1 more wait."""

    def __init__(self, plane: DataPlane, uploads: ModelUploads, options: AddProcessOptions | None = None) -> None:
        self.uploads, self.options, self.plane = uploads, options or AddProcessOptions(), plane
        self.lock = asyncio.Lock()
        self._slots = AddSlots()

    @asynccontextmanager
    async def adding(self, request: AddRequest, caller: Identity) -> "AsyncIterator[Addition]":
        """Admits an addition: call its `prepare`, then its `load`. An error undoes it.

        Raises Overloaded, errors of admission, and StorageFull or NotSupported for an OSError.
        """
        try:
            async with AsyncExitStack() as stack:
                stack.enter_context(self._slots.slot())
                stack.enter_context(self.plane.adding(request.name, caller))
                addition = Addition(self, request, stack)
                try:
                    yield addition
                except BaseException:
                    addition.undo()
                    raise
        except OSError as error:
            raise self.uploads.failure(error) from error


class Addition:
    """The addition of one model. Created by ModelAdder.adding."""

    def __init__(self, adder: ModelAdder, request: AddRequest, stack: AsyncExitStack) -> None:
        """stack: closed at the end of the addition."""
        self._adder, self._request, self._stack = adder, request, stack
        self._target = adder.uploads.home / "models" / request.name
        self._scratch: Path | None = None
        self._report: ModelAdded | None = None

    async def prepare(self) -> None:
        """Waits for earlier additions, then inspects the file and writes the model's folder. Cancelling it kills the
        process.

        Raises InvalidRequest with the fault or the open questions, StorageFull, OSError.
        """
        await self._stack.enter_async_context(self._adder.lock)
        self._scratch = self._stack.enter_context(self._adder.uploads.folder())
        if self._target.exists():
            shutil.copytree(self._target, self._scratch / "previous", copy_function=_link, symlinks=True)
        self._report = await self._run(self._scratch)

    async def load(self) -> ModelAdded:
        """Loads the model, as POST …/load does. Raises InvalidRequest if it cannot be served, EngineUnavailable."""
        if self._report is None:
            raise RuntimeError("the model is not prepared")
        name = self._request.name
        try:
            await self._adder.plane.load_added(name)
        except EngineUnavailable:
            raise  # the engine loads the repository's models at its restart
        except InferenceError as error:
            has_previous = self.undo()
            await self._adder.plane.restore(name, has_previous=has_previous)
            left = "the previous model is restored" if has_previous else "its folder is removed"
            raise InvalidRequest(f"the model was not added, as it cannot be served: {error.message}; {left}") from error
        self._report.state = READY
        return self._report

    def undo(self) -> bool:
        """Restores the repository after the process has ended. Returns whether there was a previous model."""
        if self._scratch is None or not self._has_written(self._scratch):
            return False
        self._target.rename(self._scratch / "failed")
        previous = self._scratch / "previous"
        has_previous = previous.exists()
        if has_previous:
            previous.rename(self._target)
        return has_previous

    def _has_written(self, scratch: Path) -> bool:
        """Whether this addition wrote the model's folder. A `models add` command can write it at the same time."""
        try:
            return scratch.name in (self._target / "MODEL.md").read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            return False

    async def _run(self, scratch: Path) -> ModelAdded:
        limits = self._adder.options.limits
        reply, stderr = scratch / "reply", scratch / "stderr"
        with reply.open("wb") as out, stderr.open("wb") as error:
            process = await asyncio.create_subprocess_exec(
                *self._command(scratch),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=error,
                env=self._environment(scratch),
            )
        try:
            async with asyncio.timeout(limits.wall_s):
                code = await process.wait()
        except TimeoutError:
            raise InvalidRequest(f"the model was not added in {limits.wall_s:g} s; its process was stopped") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            if process.returncode is not None and process.returncode < 0:
                self._remove_staged()
        return self._outcome(code, _head_of(reply, _REPLY_BYTES), _head_of(stderr, _MIB))

    def _command(self, scratch: Path) -> list[str]:
        request, options, home = self._request, self._adder.options, self._adder.uploads.home
        limits, size_bytes = options.limits, request.file.stat().st_size
        numbers = (os.getpid(), limits.memory_bytes + 8 * size_bytes, limits.cpu_s, limits.file_bytes + 2 * size_bytes)
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in request.flags]
        flags += ["--replace"] * request.may_replace + ["--allow-model-code"] * options.allows_code
        place = (
            f"--home={home}",
            f"--name={request.name}",
            f"--origin={request.origin} ({scratch.name})",
            "--json",
            "--no-load",
        )
        return [*options.command, *map(str, numbers), *flags, *place, str(request.file)]

    def _environment(self, scratch: Path) -> dict[str, str]:
        inherited = {name: value for name in _INHERITED if (value := os.environ.get(name)) is not None}
        repositories = os.pathsep.join(map(str, self._adder.uploads.repositories))
        own = {"PENSTOCK_MODEL_REPOSITORY": repositories, "PENSTOCK_HOME": str(self._adder.uploads.home)}
        return inherited | own | {"HOME": str(scratch), "TMPDIR": str(scratch)}

    def _outcome(self, code: int, reply: bytes, stderr: bytes) -> ModelAdded:
        """The report. Raises InvalidRequest or StorageFull if the command failed or its process died."""
        reply = reply.strip().rpartition(b"\n")[2]
        if code == 0:
            report = msgspec.json.decode(reply, type=ModelAdded)
            report.evidence = tuple(map(self._for_client, report.evidence))
            report.warnings = tuple(map(self._for_client, report.warnings))
            return report
        try:
            failure = msgspec.json.decode(reply, type=AddFailure)
        except msgspec.DecodeError:
            failure = AddFailure(self._request.name, self._process_error(code, stderr.decode("utf-8", "replace")))
        if failure.is_disk_full:
            raise StorageFull(failure.error)
        is_listed = any(failure.error.startswith(question.ambiguous) for question in failure.questions)
        sentences = [] if is_listed else [failure.error]
        for question in failure.questions:
            choices = f"={' or '.join(question.choices)}" if question.choices else ""
            sentences.append(f"use {question.flag}{choices}: {question.ambiguous}")
        text = self._for_client("; ".join(filter(None, sentences)))
        raise InvalidRequest(f"the model was not added: {text}"[:_MAX_TEXT])

    def _for_client(self, text: str) -> str:
        """The command's sentence with query parameters in place of flags, and without the gateway's paths."""
        text = text.replace(str(self._request.file), "the file")
        text = text.replace(str(self._adder.uploads.home), "PENSTOCK_HOME")
        text = text.replace("--name", "the name in the path").replace("--replace", "replace=1")
        return _FLAG.sub(lambda flag: flag[1].replace("-", "_"), text)

    def _process_error(self, code: int, text: str) -> str:
        """The command's message for a usage error; otherwise how the process ended."""
        lines = text.strip().splitlines()
        if code == 2 and lines:
            return lines[-1].removeprefix("penstock: ").removeprefix("Error: ")
        log.warning("the process that adds a model died", model=self._request.name, code=code, last="".join(lines[-1:]))
        limits, size_bytes = self._adder.options.limits, self._request.file.stat().st_size
        memory = f"{(limits.memory_bytes + 8 * size_bytes) // _MIB} MiB of memory and {limits.cpu_s} s of CPU time"
        how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
        return f"the process that inspects it {how}; it may use {memory}"

    def _remove_staged(self) -> None:
        """Removes the staging folder of the killed process, unless a command writes the same model now."""
        home, name = self._adder.uploads.home, self._request.name
        with contextlib.suppress(OSError), (home / "downloads" / f"{name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for folder in (home / "staging").glob(f"{name}.*"):
                if _STAGING_SUFFIX.fullmatch(folder.name.removeprefix(name)):
                    shutil.rmtree(folder, ignore_errors=True)


def _link(path: str, to: str) -> None:
    """Hard-links the file, or copies it if the file system has no links."""
    try:
        os.link(path, to)
    except OSError:
        shutil.copy2(path, to)


def _head_of(path: Path, limit_bytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(min(limit_bytes, path.stat().st_size))
