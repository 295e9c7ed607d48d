"""Adds an uploaded model: runs `penstock models add` in a limited process, then loads it. A failure is undone."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.gateway.dataplane import DataPlane
from penstock.gateway.model_command import MAX_TEXT, CommandResult, ModelCommand, ModelProcessOptions, flag_texts
from penstock.gateway.model_inspection import inspection_of
from penstock.gateway.model_uploads import AddSlots, ModelUploads
from penstock.protocol.errors import EngineUnavailable, InferenceError, InvalidRequest, StorageFull
from penstock.protocol.identity import Identity
from penstock.protocol.model_addition import AddFailure, InspectedModel, ModelAdded

READY = "READY"


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

    def __init__(self, plane: DataPlane, uploads: ModelUploads, options: ModelProcessOptions | None = None) -> None:
        self.uploads, self.options, self.plane = uploads, options or ModelProcessOptions(), plane
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

    async def inspect(self, file: Path, flags: Sequence[tuple[str, str]]) -> InspectedModel:
        """What `penstock models inspect` finds in the file; it is not added. Waits for additions.

        Raises Overloaded, InvalidRequest, and StorageFull or NotSupported for an OSError.
        """
        try:
            with self._slots.slot():
                async with self.lock:
                    with self.uploads.folder() as scratch:
                        command = ModelCommand(self.uploads, self.options, file, "")
                        result = await command.run("inspect", scratch, flag_texts(flags))
                    return inspection_of(command, result)
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
        request, uploads = self._request, self._adder.uploads
        command = ModelCommand(uploads, self._adder.options, request.file, request.name)
        flags = [*flag_texts(request.flags), *["--replace"] * request.may_replace]
        origin = f"--origin={request.origin} ({scratch.name})"
        result = await command.run(
            "add", scratch, [*flags, f"--home={uploads.home}", f"--name={request.name}", origin, "--no-load"]
        )
        return self._outcome(command, result)

    def _outcome(self, command: ModelCommand, result: CommandResult) -> ModelAdded:
        """The report. Raises InvalidRequest or StorageFull if the command failed or its process died."""
        if result.code == 0:
            report = msgspec.json.decode(result.reply, type=ModelAdded)
            report.evidence = tuple(map(command.for_client, report.evidence))
            report.warnings = tuple(map(command.for_client, report.warnings))
            return report
        try:
            failure = msgspec.json.decode(result.reply, type=AddFailure)
        except msgspec.DecodeError:
            failure = AddFailure(self._request.name, command.failure(result))
        if failure.is_disk_full:
            raise StorageFull(failure.error)
        is_listed = any(failure.error.startswith(question.ambiguous) for question in failure.questions)
        sentences = [] if is_listed else [failure.error]
        for question in failure.questions:
            choices = f"={' or '.join(question.choices)}" if question.choices else ""
            sentences.append(f"use {question.flag}{choices}: {question.ambiguous}")
        text = command.for_client("; ".join(filter(None, sentences)))
        raise InvalidRequest(f"the model was not added: {text}"[:MAX_TEXT])


def _link(path: str, to: str) -> None:
    """Hard-links the file, or copies it if the file system has no links."""
    try:
        os.link(path, to)
    except OSError:
        shutil.copy2(path, to)
