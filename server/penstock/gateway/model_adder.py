"""Adds an uploaded model: `penstock models add` in a bounded process, then the load; what fails leaves no trace."""

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
from penstock.gateway.model_uploads import MAX_UPLOADS, RETRY_AFTER_S, ModelUploads
from penstock.logs import get_logger
from penstock.protocol.errors import EngineUnavailable, InferenceError, InvalidRequest, Overloaded, StorageFull
from penstock.protocol.identity import Identity

READY = "READY"
_MIB = 1 << 20
_MAX_TEXT = 8000  # characters of a refusal
_REPLY_BYTES = 16 * _MIB  # of the process's report; labels and metadata are bounded to less
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "PENSTOCK_LAYOUTS")  # no secrets
_BEGUN = re.compile(r"\.[a-z0-9_]{8}")  # a folder's suffix by tempfile
_FLAG = re.compile(r"--(?!allow-model-code)([a-z]+(?:-[a-z]+)*)")  # that one is the gateway's, too

log = get_logger("models")


@dataclass(frozen=True, slots=True)
class AddLimits:
    """Of the process that adds a model. memory_bytes, file_bytes: beside 8 times and twice the file's size.

    cpu_s: of all its threads. It starts a process that inspects the file, which has smaller limits of its own.
    """

    memory_bytes: int = 4 << 30
    cpu_s: int = 600
    wall_s: float = 300.0
    file_bytes: int = 64 * _MIB


@dataclass(frozen=True, slots=True)
class AddOptions:
    """allows_code: --allow-model-code of the gateway. command: `penstock models add` under limits."""

    allows_code: bool = False
    command: tuple[str, ...] = (sys.executable, "-P", "-m", "penstock.cli.add_process")
    limits: AddLimits = field(default_factory=AddLimits)


@dataclass(frozen=True, slots=True)
class AddRequest:
    """flags: (name with underscores, value) of `penstock models add`. origin: who sent the file, for MODEL.md."""

    name: str
    file: Path
    flags: Sequence[tuple[str, str]] = ()
    may_replace: bool = False
    origin: str = ""


class ModelAdded(msgspec.Struct):
    """What was found of the added model. max_batch_size: 0 for one picture a call. state: READY."""

    name: str
    layout: str
    max_batch_size: int
    batches: str
    evidence: tuple[str, ...]
    warnings: tuple[str, ...]
    state: str = ""


class _Question(msgspec.Struct):
    flag: str
    choices: tuple[str, ...]
    ambiguous: str


class _Failure(msgspec.Struct):
    error: str
    questions: tuple[_Question, ...] = ()
    is_disk_full: bool = False


class ModelAdder:
    """One addition at a time; a few wait."""

    def __init__(self, plane: DataPlane, uploads: ModelUploads, options: AddOptions | None = None) -> None:
        self.uploads, self.options, self.plane = uploads, options or AddOptions(), plane
        self.turn = asyncio.Lock()
        self._count = 0

    @asynccontextmanager
    async def adding(self, asked: AddRequest, caller: Identity) -> "AsyncIterator[Addition]":
        """Admits one addition: call its `prepare`, then its `load`. Raises what admission raises, and Overloaded."""
        if self._count >= MAX_UPLOADS:
            raise Overloaded(
                f"{self._count} models are being added, the limit; retry after {RETRY_AFTER_S:g} s",
                reason="adding_models",
                retry_after_s=RETRY_AFTER_S,
            )
        self._count += 1
        try:
            async with AsyncExitStack() as stack:
                stack.enter_context(self.plane.adding(asked.name, caller))
                addition = Addition(self, asked, stack)
                try:
                    yield addition
                except BaseException:
                    addition.undo()
                    raise
        except OSError as error:
            raise self.uploads.failure(error) from error
        finally:
            self._count -= 1


class Addition:
    """One model on its way. Made by ModelAdder.adding."""

    def __init__(self, adder: ModelAdder, asked: AddRequest, stack: AsyncExitStack) -> None:
        """stack: what is left when the addition ends."""
        self._adder, self._asked, self._stack = adder, asked, stack
        self._target = adder.uploads.home / "models" / asked.name
        self._scratch: Path | None = None
        self._report: ModelAdded | None = None

    async def prepare(self) -> None:
        """Waits for its turn, then inspects the file and makes the model's folder. Cancelling it ends the process.

        Raises InvalidRequest with what is wrong or open, StorageFull, OSError.
        """
        await self._stack.enter_async_context(self._adder.turn)
        self._scratch = self._stack.enter_context(self._adder.uploads.folder())
        if self._target.exists():
            shutil.copytree(self._target, self._scratch / "former", copy_function=_link, symlinks=True)
        self._report = await self._run(self._scratch)

    async def load(self) -> ModelAdded:
        """Loads the model as POST …/load does. Raises InvalidRequest if it cannot be served."""
        if self._report is None:
            raise RuntimeError("the model is not prepared")
        name = self._asked.name
        try:
            await self._adder.plane.load_added(name)
        except EngineUnavailable:
            raise  # a restarted engine loads what is in the repository then
        except InferenceError as error:
            has_former = self.undo()
            await self._adder.plane.take_back(name, has_former=has_former)
            left = "the model that it was to replace is back" if has_former else "its folder is removed"
            raise InvalidRequest(f"the model was not added, as it cannot be served: {error.message}; {left}") from error
        self._report.state = READY
        return self._report

    def undo(self) -> bool:
        """Puts the repository back, once the process has ended. Returns whether a former model is back."""
        if self._scratch is None or not self._is_ours(self._scratch):
            return False
        self._target.rename(self._scratch / "failed")
        former = self._scratch / "former"
        has_former = former.exists()
        if has_former:
            former.rename(self._target)
        return has_former

    def _is_ours(self, scratch: Path) -> bool:
        """Whether the model's folder is of this addition: a killed process may have finished it, and commands run
        beside.
        """
        try:
            return scratch.name in (self._target / "MODEL.md").read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            return False

    async def _run(self, scratch: Path) -> ModelAdded:
        limits = self._adder.options.limits
        reply, complaint = scratch / "reply", scratch / "complaint"
        with reply.open("wb") as out, complaint.open("wb") as error:
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
                self._sweep()
        return self._outcome(code, _head_of(reply, _REPLY_BYTES), _head_of(complaint, _MIB))

    def _command(self, scratch: Path) -> list[str]:
        asked, options, home = self._asked, self._adder.options, self._adder.uploads.home
        limits, size_bytes = options.limits, asked.file.stat().st_size
        numbers = (os.getpid(), limits.memory_bytes + 8 * size_bytes, limits.cpu_s, limits.file_bytes + 2 * size_bytes)
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in asked.flags]
        flags += ["--replace"] * asked.may_replace + ["--allow-model-code"] * options.allows_code
        place = (
            f"--home={home}",
            f"--name={asked.name}",
            f"--origin={asked.origin} ({scratch.name})",
            "--json",
            "--no-load",
        )
        return [*options.command, *map(str, numbers), *flags, *place, str(asked.file)]

    def _environment(self, scratch: Path) -> dict[str, str]:
        kept = {name: value for name in _PASSED_ON if (value := os.environ.get(name)) is not None}
        repositories = os.pathsep.join(map(str, self._adder.uploads.repositories))
        return kept | {"PENSTOCK_MODEL_REPOSITORY": repositories, "HOME": str(scratch), "TMPDIR": str(scratch)}

    def _outcome(self, code: int, reply: bytes, complaint: bytes) -> ModelAdded:
        """The report. Raises InvalidRequest or StorageFull for a refusal, or for a process that died."""
        reply = reply.strip().rpartition(b"\n")[2]
        if code == 0:
            report = msgspec.json.decode(reply, type=ModelAdded)
            report.evidence = tuple(map(self._for_client, report.evidence))
            report.warnings = tuple(map(self._for_client, report.warnings))
            return report
        try:
            failure = msgspec.json.decode(reply, type=_Failure)
        except msgspec.DecodeError:
            failure = _Failure(self._complaint(code, complaint.decode("utf-8", "replace")))
        if failure.is_disk_full:
            raise StorageFull(failure.error)
        is_asked = any(question.ambiguous == failure.error for question in failure.questions)
        sentences = [] if is_asked else [failure.error]
        for question in failure.questions:
            choices = f"={' or '.join(question.choices)}" if question.choices else ""
            sentences.append(f"say {question.flag}{choices}: {question.ambiguous}")
        text = self._for_client("; ".join(filter(None, sentences)))
        raise InvalidRequest(f"the model was not added: {text}"[:_MAX_TEXT])

    def _for_client(self, text: str) -> str:
        """The command's sentence with query parameters in place of flags, and without the gateway's paths."""
        text = text.replace(str(self._asked.file), "the file")
        text = text.replace("--name", "the name in the path").replace("--replace", "replace=1")
        return _FLAG.sub(lambda flag: flag[1].replace("-", "_"), text)

    def _complaint(self, code: int, text: str) -> str:
        """What the command wrote, if its usage is wrong; else how it ended."""
        lines = text.strip().splitlines()
        if code == 2 and lines:
            return lines[-1].removeprefix("penstock: ").removeprefix("Error: ")
        log.warning("the process that adds a model died", model=self._asked.name, code=code, last="".join(lines[-1:]))
        limits, size_bytes = self._adder.options.limits, self._asked.file.stat().st_size
        memory = f"{(limits.memory_bytes + 8 * size_bytes) // _MIB} MiB of memory and {limits.cpu_s} s of CPU time"
        how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
        return f"the process that inspects it {how}; it may use {memory}"

    def _sweep(self) -> None:
        """Removes what the killed process had begun, unless a command has begun the same model since."""
        home, name = self._adder.uploads.home, self._asked.name
        with contextlib.suppress(OSError), (home / "downloads" / f"{name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for begun in (home / "staging").glob(f"{name}.*"):
                if _BEGUN.fullmatch(begun.name.removeprefix(name)):
                    shutil.rmtree(begun, ignore_errors=True)


def _link(path: str, to: str) -> None:
    """A second name of the file, or a copy where the file system has none."""
    try:
        os.link(path, to)
    except OSError:
        shutil.copy2(path, to)


def _head_of(path: Path, limit_bytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(min(limit_bytes, path.stat().st_size))
