"""`pull`: a model of the catalogue into the repository under PENSTOCK_HOME, verified and at once."""

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from server.catalogue.catalogue import CatalogueEntry
from server.catalogue.download import Progress, fetch, is_disk_full
from server.catalogue.errors import PullFailed
from server.catalogue.landing import land, staging_folder
from server.catalogue.source import Source, find_source

MODEL_FILE = Path("1") / "model.onnx"


def repository_of(home: Path) -> Path:
    """The model repository that pulls fill; nothing but finished models ever sits in it."""
    return home / "models"


def pull(
    entry: CatalogueEntry,
    *,
    source: Path | str | None,
    home: Path,
    progress: Progress,
    on_wait: Callable[[], None] = lambda: None,
) -> Path:
    """The folder of the model in home's repository, complete, its file verified.

    source: a folder, a file, a file:// or http(s):// address; None for the catalogue's own address. A file that is
    there already and right is kept. on_wait: called when another process pulls the same model and is waited for.
    Blocks. Raises PullFailed; then the repository is as it was.
    """
    try:
        return _pull(entry, source, home, progress, on_wait)
    except OSError as error:
        raise PullFailed(_disk_text(entry, home, error)) from error


def _pull(
    entry: CatalogueEntry,
    source: Path | str | None,
    home: Path,
    progress: Progress,
    on_wait: Callable[[], None],
) -> Path:
    downloads, repository = home / "downloads", repository_of(home)
    for folder in (downloads, repository):
        folder.mkdir(parents=True, exist_ok=True)
    target = repository / entry.name
    with _locked(downloads / f"{entry.name}.lock", on_wait), staging_folder(home / "staging", entry.name) as staged:
        shutil.copytree(entry.folder, staged, dirs_exist_ok=True)
        model_file = staged / MODEL_FILE
        model_file.parent.mkdir()
        if _is_entry(entry, target / MODEL_FILE):
            shutil.copyfile(target / MODEL_FILE, model_file)
        else:
            _download(entry, find_source(entry, source), downloads, progress).replace(model_file)
        land(staged, target)
    return target


def _download(entry: CatalogueEntry, source: Source, downloads: Path, progress: Progress) -> Path:
    """The verified file, outside the repository; named by its hash, so that what is resumed is the same file."""
    partial = downloads / f"{entry.sha256}.partial"
    if source.path is not None:
        partial = downloads / f"{entry.sha256}.copy"  # a local copy is quick: nothing to resume
        partial.unlink(missing_ok=True)
    try:
        fetch(entry, source, partial, progress)
    except OSError as error:
        if is_disk_full(error):
            partial.unlink(missing_ok=True)
        raise
    return partial


def _is_entry(entry: CatalogueEntry, path: Path) -> bool:
    """Whether the file is there and is the catalogue's."""
    if not path.is_file() or path.stat().st_size != entry.size_bytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """The model's lock, ours alone among processes; the system frees it when we die."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _disk_text(entry: CatalogueEntry, home: Path, error: OSError) -> str:
    where = error.filename if error.filename is not None else home
    if is_disk_full(error):
        return f"the disk of {home} is full: free {entry.size_bytes / 1e6:.1f} MB or choose another with PENSTOCK_HOME"
    if error.errno == errno.EXDEV:
        return f"{home} and its models/ are on two file systems, so nothing can land at once: mount {home} as a whole"
    why = os.strerror(error.errno) if error.errno else str(error)
    return f"{os.fsdecode(where)} cannot be written ({why}): make {home} writable or choose another with PENSTOCK_HOME"
