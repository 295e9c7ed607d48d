"""`pull`: installs a catalogue model in the repository under PENSTOCK_HOME, verified and atomically."""

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.models.catalogue import CatalogueEntry, PullFailed
from penstock.models.download import ModelSource, Progress, fetch, find_source
from penstock.models.model_folder import (
    disk_sentence,
    downloads_of,
    is_disk_full,
    new_model_folder,
    remove,
    repository_of,
    staging_of,
)

MODEL_FILE = Path("1") / "model.onnx"
EDITABLE = ("config.pbtxt", "labels.txt", "golden.json", "golden.jpg")  # files that users change or record
STALE_AFTER_S = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Pulled:
    """The complete model folder. preserved: names of files that differ from the catalogue's and stayed unchanged.

    was_present: the model's file was there, with the catalogue's SHA-256, and the source was not read.
    """

    folder: Path
    preserved: tuple[str, ...] = ()
    was_present: bool = False


def pull(
    entry: CatalogueEntry,
    *,
    source: Path | str | None,
    home: Path,
    progress: Progress,
    on_wait: Callable[[], None] = lambda: None,
) -> Pulled:
    """Installs the model in home's repository, with its file verified. Raises PullFailed; then nothing changes. Blocks.

    source: a folder, file, or file:// or http(s):// URL; None for the catalogue's. Changed EDITABLE files and
    additional files, such as versions, stay. on_wait: called before waiting for another pull of the model.
    """
    try:
        return _pull(entry, source, home, progress, on_wait)
    except OSError as error:
        raise PullFailed(disk_sentence(error, home, needs_bytes=entry.size_bytes)) from error


def _pull(
    entry: CatalogueEntry, source: Path | str | None, home: Path, progress: Progress, on_wait: Callable[[], None]
) -> Pulled:
    _sweep(downloads_of(home), "*.partial", "*.copy")
    _sweep(staging_of(home), "*")
    target = repository_of(home) / entry.name
    with new_model_folder(home, entry.name, on_wait) as staged:
        for catalogued in entry.folder.iterdir():
            shutil.copyfile(catalogued, staged / catalogued.name)
        preserved = _carry_over(target, staged)
        model_file = staged / MODEL_FILE
        model_file.parent.mkdir(exist_ok=True)
        if was_present := _is_entry(entry, target / MODEL_FILE):
            _link(target / MODEL_FILE, model_file)
        else:
            _download(entry, find_source(entry, source), downloads_of(home), progress).replace(model_file)
            _free_batch(entry, model_file)
    return Pulled(target, preserved, was_present)


def _carry_over(target: Path, staged: Path) -> tuple[str, ...]:
    """Copies changed and additional files; returns the names of changed ones."""
    if not target.is_dir() or target.is_symlink():
        return ()
    changed = [name for name in EDITABLE if _differs(target / name, staged / name)]
    for name in changed:
        (staged / name).unlink(missing_ok=True)
    for path in sorted(target.rglob("*")):
        to = staged / path.relative_to(target)
        if path.is_dir() and not path.is_symlink():
            to.mkdir(exist_ok=True)
        elif to != staged / MODEL_FILE and not to.exists():
            _link(path, to)
    return tuple(changed)


def _differs(path: Path, catalogued: Path) -> bool:
    return path.is_file() and (not catalogued.is_file() or path.read_bytes() != catalogued.read_bytes())


def _link(path: Path, to: Path) -> None:
    try:
        os.link(path, to, follow_symlinks=False)
    except OSError:
        shutil.copy2(path, to, follow_symlinks=False)


def _sweep(folder: Path, *patterns: str) -> None:
    """Removes leftovers of failed pulls, older than a week."""
    oldest = time.time() - STALE_AFTER_S
    for pattern in patterns:
        for path in folder.glob(pattern):
            with suppress(FileNotFoundError):  # another pull may remove it
                if path.lstat().st_mtime < oldest:
                    remove(path)


def _download(entry: CatalogueEntry, source: ModelSource, downloads: Path, progress: Progress) -> Path:
    """The verified file. Its name has the hash, so that only the same file is resumed."""
    partial = downloads / f"{entry.sha256}.partial"
    if source.path is not None:
        partial = downloads / f"{entry.sha256}.copy"  # a local copy is fast: no resume
        partial.unlink(missing_ok=True)
    try:
        fetch(entry, source, partial, progress)
    except OSError as error:
        if is_disk_full(error):
            partial.unlink(missing_ok=True)
        raise
    finally:
        if partial.exists() and not partial.stat().st_size:
            partial.unlink()
    return partial


def _is_entry(entry: CatalogueEntry, path: Path) -> bool:
    return path.is_file() and _sha256(path) == entry.served_sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _free_batch(entry: CatalogueEntry, file: Path) -> None:
    """Makes the batch of the verified file dynamic, if the catalogue has the result's hash. Raises PullFailed."""
    if not entry.freed_sha256:
        return
    from penstock.models.batch_axis import free_batch  # imports ONNX Runtime, which other models do not need

    freed = file.with_name("freed.onnx")
    why = free_batch(file, freed)
    if why:
        raise PullFailed(f"the batch of {entry.name} cannot be freed: {why}")
    written = _sha256(freed)
    if written != entry.freed_sha256:
        raise PullFailed(
            f"{entry.name} with a free batch has SHA-256 {written[:12]}…, the catalogue says "
            f"{entry.freed_sha256[:12]}…: install the versions of onnx and protobuf that Penstock's lock names"
        )
    freed.replace(file)
