"""A verified file from a source: streamed, resumed, its size and SHA-256 checked on the way."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from server.catalogue.catalogue import CatalogueEntry
from server.catalogue.errors import Interrupted, PullFailed, WrongContent
from server.catalogue.remote import OTHERWISE
from server.catalogue.source import Opened, Source, open_source

Progress = Callable[[int], None]  # bytes that are there so far
CHUNK_BYTES = 1 << 18
MOST_RESUMES = 4  # in one call, and only after a break before which something came


def fetch(entry: CatalogueEntry, source: Source, partial: Path, progress: Progress) -> None:
    """Makes partial the entry's file; what an earlier call left there is continued, and so is what broke off now.

    Raises WrongContent (partial is gone: it is of no use) and PullFailed (partial stays, to be continued).
    """
    for _ in range(MOST_RESUMES):
        before = _usable_bytes(partial, entry.size_bytes)
        try:
            return _fetch_once(entry, source, partial, progress)
        except Interrupted:
            if _usable_bytes(partial, entry.size_bytes) <= before:
                raise
    return _fetch_once(entry, source, partial, progress)


def _fetch_once(entry: CatalogueEntry, source: Source, partial: Path, progress: Progress) -> None:
    """One connection; two where what an earlier call left turns out to be of another file."""
    offset = _usable_bytes(partial, entry.size_bytes)
    try:
        _fetch_from(entry, source, partial, offset, progress)
    except WrongContent:
        partial.unlink(missing_ok=True)
        if offset == 0:
            raise
        _fetch_afresh(entry, source, partial, progress)


def _fetch_afresh(entry: CatalogueEntry, source: Source, partial: Path, progress: Progress) -> None:
    try:
        _fetch_from(entry, source, partial, 0, progress)
    except WrongContent:
        partial.unlink(missing_ok=True)
        raise


def _usable_bytes(partial: Path, size_bytes: int) -> int:
    """How many bytes an earlier call left; 0 where there are more than the file has."""
    try:
        there = partial.stat().st_size
    except FileNotFoundError:
        return 0
    return there if there <= size_bytes else 0


def _fetch_from(entry: CatalogueEntry, source: Source, partial: Path, offset: int, progress: Progress) -> None:
    digest = hashlib.sha256()
    with partial.open("r+b" if offset else "wb") as file:
        if offset == entry.size_bytes:
            _digest_prefix(file, offset, digest)
        else:
            with open_source(source, offset) as opened:
                _require_size(entry, source, opened)
                file.truncate(_digest_prefix(file, opened.offset, digest))
                _copy(entry, source, opened, _Sink(file, digest, progress, opened.offset))
        file.flush()
        os.fsync(file.fileno())
    _require_hash(entry, source, digest.hexdigest())


def _digest_prefix(file: IO[bytes], length: int, digest: "hashlib._Hash") -> int:
    """Hashes the first length bytes that are already there, and stands behind them; length."""
    left = length
    while left and (chunk := file.read(min(CHUNK_BYTES, left))):
        digest.update(chunk)
        left -= len(chunk)
    return length


@dataclass(slots=True)
class _Sink:
    """Where the bytes go: file, hash and progress together."""

    file: IO[bytes]
    digest: "hashlib._Hash"
    progress: Progress
    done_bytes: int

    def write(self, chunk: bytes) -> None:
        self.file.write(chunk)
        self.digest.update(chunk)
        self.done_bytes += len(chunk)
        self.progress(self.done_bytes)


def _require_size(entry: CatalogueEntry, source: Source, opened: Opened) -> None:
    """Before a byte is written. A web page costs nothing that came before: the file may well be there another time."""
    if opened.size_bytes == entry.size_bytes:
        return
    if opened.is_web_page:
        raise PullFailed(
            f"{source} is a web page, not the file (a login, a proxy's notice, or a folder, whose address must end in "
            f"/): check the address, {OTHERWISE}"
        )
    if opened.is_pointer:
        raise WrongContent(
            f"{source} is the note that Git LFS left in the file's place: run `git lfs pull` there first"
        )
    if opened.size_bytes is not None:
        raise WrongContent(_size_text(entry, source, str(opened.size_bytes)))


def _copy(entry: CatalogueEntry, source: Source, opened: Opened, sink: _Sink) -> None:
    while chunk := opened.read(CHUNK_BYTES):
        if sink.done_bytes + len(chunk) > entry.size_bytes:
            raise WrongContent(_size_text(entry, source, f"more than {entry.size_bytes}"))
        sink.write(chunk)
    if sink.done_bytes < entry.size_bytes:
        raise Interrupted(
            f"{source} broke off after {sink.done_bytes} of {entry.size_bytes} bytes: run the same command again, "
            f"it goes on from there, {OTHERWISE}"
        )


def _require_hash(entry: CatalogueEntry, source: Source, sha256: str) -> None:
    if sha256 != entry.sha256:
        raise WrongContent(
            f"{source} has SHA-256 {sha256[:12]}…, the catalogue says {entry.sha256[:12]}…: it is not {entry.name} "
            f"as catalogued; get it from {entry.url}"
        )


def _size_text(entry: CatalogueEntry, source: Source, found: str) -> str:
    return (
        f"{source} has {found} bytes, {entry.name} as catalogued {entry.size_bytes}: it is another file or a damaged "
        f"copy; get it from {entry.url}"
    )
