"""Folders for uploaded model files: few at a time, removed when a request ends; those of a killed gateway are swept."""

import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from penstock.protocol.errors import InferenceError, InvalidRequest, NotSupported, Overloaded, StorageFull

MAX_UPLOADS = 4  # at a time, of this process: one that is added, others that arrive or wait
RETRY_AFTER_S = 10.0  # an addition takes seconds to a minute
_PREFIX, _LOCK = "upload-", "lock"
_KEY = re.compile(_PREFIX + "[A-Za-z0-9_]{1,32}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # as `penstock models add` has it
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class ModelUploads:
    """Model files on their way into home's repository."""

    def __init__(self, home: Path, repositories: tuple[Path, ...], *, refusal: str = "") -> None:
        """repositories: whose names are taken. refusal: why models cannot be added here; empty if they can."""
        self.home, self.repositories = home, repositories
        self._staging = home / "staging"  # where `models pull` removes what is older than a week
        self._refusal = refusal
        self._count = 0

    def check(self, name: str, *, may_replace: bool) -> None:
        """Raises InvalidRequest if no model of that name can be added."""
        if self._refusal:
            raise InvalidRequest(self._refusal)
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"{name[:120]!r} is no model's name: use up to 100 letters, digits, '.', '_' and '-', and begin with a "
                "letter or digit"
            )
        own = self.home / "models"
        for repository in (*(path for path in self.repositories if path != own), *(() if may_replace else (own,))):
            if (repository / name).exists():
                advice = "; replace=1 replaces a model that was added" if repository == own else ""
                raise InvalidRequest(f"this gateway has a model {name!r}: choose another name{advice}")

    @contextmanager
    def file(self, name: str, size_bytes: int = 0) -> Iterator[Path]:
        """The path for the model's file, removed afterwards. size_bytes: of the file, 0 if unknown.

        Raises Overloaded, StorageFull, NotSupported.
        """
        if self._count >= MAX_UPLOADS:
            raise Overloaded(
                f"{self._count} models are being added, the limit; retry after {RETRY_AFTER_S:g} s",
                reason="adding_models",
                retry_after_s=RETRY_AFTER_S,
            )
        self._count += 1
        try:
            with ExitStack() as stack:
                try:
                    inside = stack.enter_context(self.folder()) / "model"  # nothing else lies beside the file
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
        finally:
            self._count -= 1

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """An empty folder, removed afterwards, that other processes of this stack do not sweep. Raises OSError."""
        self._sweep()
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

    def key_of(self, file: Path) -> str:
        """The name by which another process of this stack finds the file."""
        return file.parent.parent.name

    def found(self, key: str, name: str) -> Path:
        """The file of a worker's upload. Raises InvalidRequest."""
        file = self._staging / key / "model" / f"{name}.onnx"
        if not (_KEY.fullmatch(key) and _NAME.fullmatch(name) and file.is_file()):
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

    def _sweep(self) -> None:
        """Removes the folders of processes that were killed, whose locks are free."""
        for folder in self._staging.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                lock = os.open(folder / _LOCK, os.O_WRONLY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)
