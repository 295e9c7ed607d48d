"""Temporary folders for uploaded model files: a few at a time, removed when the request or its gateway has ended."""

import asyncio
import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from penstock.protocol.errors import (
    InferenceError,
    InvalidRequest,
    ModelNotFound,
    NotSupported,
    Overloaded,
    StorageFull,
)
from penstock.protocol.request_checks import check_new_model_name

MAX_UPLOADS = 4  # concurrent, of this process: one is added, others are received or wait
MAX_STORED, STORED_S = 4, 600.0  # inspected files that may still be added; a new one replaces the oldest
RETRY_AFTER_S = 10.0  # an addition takes seconds to a minute
STORED_NAME = "upload.onnx"
_PREFIX, _LOCK = "upload-", "lock"
_KEY = re.compile(_PREFIX + "[A-Za-z0-9_]{1,32}")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class AddSlots:
    """Limits concurrent uploads, or additions, to MAX_UPLOADS."""

    def __init__(self) -> None:
        self._count = 0

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Occupies a slot for the block. Raises Overloaded if all are occupied."""
        if self._count >= MAX_UPLOADS:
            raise Overloaded(
                f"{self._count} models are being added, the limit; retry after {RETRY_AFTER_S:g} s",
                reason="adding_models",
                retry_after_s=RETRY_AFTER_S,
            )
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


class ModelUploads:
    """Stores uploaded model files in temporary folders of PENSTOCK_HOME."""

    def __init__(self, home: Path, repositories: tuple[Path, ...], *, refusal: str = "") -> None:
        """repositories: their models' names cannot be used. refusal: why no model can be added; empty if one can."""
        self.home, self.repositories = home, repositories
        self._staging = home / "staging"  # where `models pull` removes what is older than a week
        self._refusal = refusal
        self._slots = AddSlots()
        self._stored: dict[str, ExitStack] = {}  # by token

    def check(self, name: str, *, may_replace: bool) -> None:
        """Raises InvalidRequest if no model of that name can be added."""
        self.require()
        check_new_model_name(name)
        own = self.home / "models"
        for repository in (*(path for path in self.repositories if path != own), *(() if may_replace else (own,))):
            if (repository / name).exists():
                advice = "; replace=1 replaces a model that was added" if repository == own else ""
                raise InvalidRequest(f"this gateway has a model {name!r}: choose another name{advice}")

    def require(self) -> None:
        """Raises InvalidRequest if no model can be added."""
        if self._refusal:
            raise InvalidRequest(self._refusal)

    @contextmanager
    def file(self, name: str, size_bytes: int = 0) -> Iterator[Path]:
        """The path for the model's file, removed afterwards. size_bytes: of the file, 0 if unknown.

        Raises Overloaded, StorageFull, NotSupported.
        """
        with ExitStack() as stack:
            stack.enter_context(self._slots.slot())
            try:
                inside = stack.enter_context(self.folder()) / "model"  # no other file may be beside the model's
                inside.mkdir()
                free_bytes = shutil.disk_usage(inside).free
            except OSError as error:
                raise self.failure(error) from error
            if size_bytes > free_bytes:
                raise StorageFull(
                    f"the disk of {self.home} has {free_bytes} bytes free and the model {size_bytes}; free some "
                    "room, or choose another disk with PENSTOCK_HOME"
                )
            yield inside / f"{name}.onnx"

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """An empty folder, removed afterwards; other processes of this stack do not remove it. Raises OSError."""
        self._remove_abandoned()
        self._staging.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f"new-{_PREFIX}", dir=self._staging))
        lock = os.open(new / _LOCK, os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            folder = new.rename(new.with_name(new.name.removeprefix("new-")))  # locked before others see it
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)

    def store(self, file: Path) -> str:
        """Stores the file for STORED_S and returns its token. Call it in the event loop. Raises OSError."""
        while len(self._stored) >= MAX_STORED:
            self.forget(next(iter(self._stored)))
        with ExitStack() as stack:
            folder = stack.enter_context(self.folder())
            (folder / "model").mkdir()
            os.link(file, folder / "model" / STORED_NAME)
            timer = asyncio.get_running_loop().call_later(STORED_S, self.forget, folder.name)
            stack.callback(timer.cancel)
            self._stored[folder.name] = stack.pop_all()
        return folder.name

    def stored(self, token: str) -> Path:
        """The file that was stored. Raises InvalidRequest if it was added or removed."""
        if token not in self._stored:
            raise InvalidRequest(
                f"no upload {token[:80]!r}: an upload is removed when it is added, after {STORED_S / 60:g} "
                f"minutes, or after {MAX_STORED} newer uploads; send the file again"
            )
        return self._staging / token / "model" / STORED_NAME

    def forget(self, token: str) -> None:
        """Removes a stored file, if it exists."""
        if (stack := self._stored.pop(token, None)) is not None:
            stack.close()

    def close(self) -> None:
        """Removes all stored files."""
        for token in tuple(self._stored):
            self.forget(token)

    def has_added(self, name: str) -> bool:
        """Whether a model of that name was added or pulled. Only such models can be removed."""
        try:
            check_new_model_name(name)
        except InvalidRequest:
            return False
        return not self._refusal and (self.home / "models" / name).is_dir()

    def remove(self, name: str) -> None:
        """Removes the folder of a model that was added or pulled. Raises ModelNotFound, NotSupported."""
        if not self.has_added(name):
            raise ModelNotFound(f"no model {name[:120]!r} was added or pulled; only such models can be removed")
        folder = self.home / "models" / name
        try:
            if folder.is_symlink():
                folder.unlink()
                return
            with self.folder() as aside:
                folder.rename(aside / name)  # atomic: an engine never sees a partly removed folder
        except OSError as error:
            raise self.failure(error) from error

    def key_of(self, file: Path) -> str:
        """The name by which another process of this stack finds the file."""
        return file.parent.parent.name

    def find(self, key: str, name: str) -> Path:
        """The file that a worker has received. Raises InvalidRequest if there is none."""
        check_new_model_name(name)
        file = self._staging / key / "model" / f"{name}.onnx"
        if not (_KEY.fullmatch(key) and file.is_file()):
            raise InvalidRequest(f"there is no upload of the model {name[:120]!r}; send it again")
        return file

    def failure(self, error: OSError) -> InferenceError:
        """The error for the client. Only a full disk is worth another attempt."""
        if error.errno in _DISK_FULL:
            return StorageFull(f"the disk of {self.home} is full: free some room, or choose another with PENSTOCK_HOME")
        why = os.strerror(error.errno) if error.errno else str(error)
        return NotSupported(
            f"{self.home} cannot be written ({why}): make it writable, or choose another with PENSTOCK_HOME"
        )

    def _remove_abandoned(self) -> None:
        """Removes folders whose lock is free: their process was killed."""
        for folder in self._staging.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                lock = os.open(folder / _LOCK, os.O_WRONLY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)
