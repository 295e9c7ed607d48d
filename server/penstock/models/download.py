"""Downloads a model file from a folder, file or URL: streamed, resumable, with its size and SHA-256 verified."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import quote, unquote, urlsplit

from penstock.models.catalogue import CatalogueEntry, DownloadInterrupted, PullFailed, WrongContent
from penstock.models.remote_file import ADVICE_OTHER_SOURCE, OpenedSource, open_url

_POINTER = b"version https://git-lfs"
_OF_PATHS = "/%:@!$&'()*+,;=~[]"  # not quoted in a URL's path; % because the path may be quoted already


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A local file (path) or a remote one (url); exactly one is set."""

    path: Path | None = None
    url: str = ""

    def __str__(self) -> str:
        return str(self.path) if self.path is not None else self.url


def find_source(entry: CatalogueEntry, given: Path | str | None) -> ModelSource:
    """The source for a folder, file, or file:// or http(s):// URL; the catalogue's URL by default.

    A folder is searched for the file's name and for the paths of a model repository. A URL that ends in / gets the
    file's name. Raises PullFailed.
    """
    if given is None:
        return ModelSource(url=entry.url)
    scheme, mark, _ = str(given).partition("://")
    if not mark:
        return _local_source(entry, _expanded(Path(given)))
    try:
        parts = urlsplit(str(given))
    except ValueError as error:
        raise PullFailed(f"{given} is no address ({error}): give one such as http://mirror.example/models/") from error
    if scheme.lower() in ("http", "https"):
        path = f"{parts.path}{entry.file_name}" if parts.path.endswith("/") else parts.path
        return ModelSource(url=parts._replace(path=quote(path, safe=_OF_PATHS)).geturl())
    if scheme.lower() == "file" and parts.netloc in ("", "localhost"):
        return _local_source(entry, Path(unquote(parts.path)))
    raise PullFailed(f"{given} cannot be read from here: give a folder, a file, or a file:// or http(s):// address")


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise PullFailed(
            f"{path} names a user that this machine does not know: give the folder's whole path"
        ) from error


def _local_source(entry: CatalogueEntry, path: Path) -> ModelSource:
    try:
        if path.is_file():
            return ModelSource(path=path)
        is_folder = path.is_dir()
        names = dict.fromkeys((entry.file_name, f"{entry.name}.onnx", "1/model.onnx", f"{entry.name}/1/model.onnx"))
        found = [path / name for name in names if (path / name).is_file()]
        right = [file for file in found if file.stat().st_size == entry.size_bytes]
    except OSError as error:
        raise _unreadable(path, error) from error
    if not is_folder:
        raise PullFailed(
            f"there is no {path}: give the folder that holds {entry.file_name}, the file itself, or an address"
        )
    if not found:
        *others, last = names
        raise PullFailed(f"{path} has neither {', '.join(others)} nor {last}: download {entry.url} into it")
    return ModelSource(path=(right or found)[0])


@contextmanager
def open_source(source: ModelSource, offset: int) -> Iterator[OpenedSource]:
    """Opens the source at the offset, or at 0 if it cannot resume. Raises PullFailed."""
    if source.path is None:
        with open_url(source.url, offset) as opened:
            yield opened
        return
    path = source.path
    try:
        file = path.open("rb")
    except OSError as error:
        raise _unreadable(path, error) from error

    def read(size: int) -> bytes:
        try:
            return file.read(size)
        except OSError as error:
            raise _unreadable(path, error) from error

    with file:
        is_pointer = read(len(_POINTER)) == _POINTER
        file.seek(offset)
        yield OpenedSource(read, offset, path.stat().st_size, is_pointer=is_pointer)


def _unreadable(path: Path, error: OSError) -> PullFailed:
    return PullFailed(f"{path} cannot be read ({error.strerror}): check its permissions and its disk")


Progress = Callable[[int], None]  # called with the bytes available so far
CHUNK_BYTES = 1 << 18
MOST_RESUMES = 4  # in one call, and only if the last attempt received bytes


def fetch(entry: CatalogueEntry, source: ModelSource, partial: Path, progress: Progress) -> None:
    """Completes the partial file. Raises WrongContent (the file is removed) or PullFailed (it stays for a resume)."""
    for _ in range(MOST_RESUMES):
        before = _usable_bytes(partial, entry.size_bytes)
        try:
            return _fetch_once(entry, source, partial, progress)
        except DownloadInterrupted:
            if _usable_bytes(partial, entry.size_bytes) <= before:
                raise
    return _fetch_once(entry, source, partial, progress)


def _fetch_once(entry: CatalogueEntry, source: ModelSource, partial: Path, progress: Progress) -> None:
    """One connection, or two if the partial file turns out to belong to another file."""
    offset = _usable_bytes(partial, entry.size_bytes)
    try:
        _fetch_from(entry, source, partial, offset, progress)
    except WrongContent:
        partial.unlink(missing_ok=True)
        if offset == 0:
            raise
        _fetch_once(entry, source, partial, progress)


def _usable_bytes(partial: Path, size_bytes: int) -> int:
    """Size of the partial file; 0 if it is larger than the entry."""
    try:
        there = partial.stat().st_size
    except FileNotFoundError:
        return 0
    return there if there <= size_bytes else 0


def _fetch_from(entry: CatalogueEntry, source: ModelSource, partial: Path, offset: int, progress: Progress) -> None:
    digest = hashlib.sha256()
    with partial.open("r+b" if offset else "wb") as file:
        if offset == entry.size_bytes:
            _digest_prefix(file, offset, digest)
        else:
            with open_source(source, offset) as opened:
                _require_size(entry, source, opened)
                file.truncate(_digest_prefix(file, opened.offset, digest))
                _copy(entry, source, opened, _PartialFile(file, digest, progress, opened.offset))
        file.flush()
        os.fsync(file.fileno())
    _require_hash(entry, source, digest.hexdigest())


def _digest_prefix(file: IO[bytes], length: int, digest: "hashlib._Hash") -> int:
    left = length
    while left and (chunk := file.read(min(CHUNK_BYTES, left))):
        digest.update(chunk)
        left -= len(chunk)
    return length


@dataclass(slots=True)
class _PartialFile:
    file: IO[bytes]
    digest: "hashlib._Hash"
    progress: Progress
    done_bytes: int

    def write(self, chunk: bytes) -> None:
        self.file.write(chunk)
        self.digest.update(chunk)
        self.done_bytes += len(chunk)
        self.progress(self.done_bytes)


def _require_size(entry: CatalogueEntry, source: ModelSource, opened: OpenedSource) -> None:
    """Checks the size before writing. A web page leaves the partial file: the real file may return later."""
    if opened.size_bytes == entry.size_bytes:
        return
    if opened.is_web_page:
        raise PullFailed(
            f"{source} is a web page, not the file (a login, a proxy's notice, or a folder, whose address must end in "
            f"/): check the address, {ADVICE_OTHER_SOURCE}"
        )
    if opened.is_pointer:
        raise WrongContent(
            f"{source} is the note that Git LFS left in the file's place: run `git lfs pull` there first"
        )
    if opened.size_bytes is not None:
        raise WrongContent(_size_text(entry, source, str(opened.size_bytes)))


def _copy(entry: CatalogueEntry, source: ModelSource, opened: OpenedSource, sink: _PartialFile) -> None:
    while chunk := opened.read(CHUNK_BYTES):
        if sink.done_bytes + len(chunk) > entry.size_bytes:
            raise WrongContent(_size_text(entry, source, f"more than {entry.size_bytes}"))
        sink.write(chunk)
    if sink.done_bytes < entry.size_bytes:
        raise DownloadInterrupted(
            f"{source} broke off after {sink.done_bytes} of {entry.size_bytes} bytes: run the same command again, "
            f"it goes on from there, {ADVICE_OTHER_SOURCE}"
        )


def _require_hash(entry: CatalogueEntry, source: ModelSource, sha256: str) -> None:
    if sha256 != entry.sha256:
        raise WrongContent(
            f"{source} has SHA-256 {sha256[:12]}…, the catalogue says {entry.sha256[:12]}…: it is not {entry.name} "
            f"as catalogued; get it from {entry.url}"
        )


def _size_text(entry: CatalogueEntry, source: ModelSource, found: str) -> str:
    return (
        f"{source} has {found} bytes, {entry.name} as catalogued {entry.size_bytes}: it is another file or a damaged "
        f"copy; get it from {entry.url}"
    )
