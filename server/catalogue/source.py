"""Where a model's file comes from: a folder, a file, an address; opened at a byte offset, its errors made ours."""

import http
import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, cast
from urllib.parse import unquote, urlsplit

from server.catalogue.catalogue import CatalogueEntry
from server.catalogue.errors import PullFailed, WrongContent

SILENCE_TIMEOUT_S = 30.0  # to connect, and without a byte


@dataclass(frozen=True, slots=True)
class Source:
    """A file of this machine (path) or of another (url): one of the two is set."""

    path: Path | None = None
    url: str = ""

    def __str__(self) -> str:
        return str(self.path) if self.path is not None else self.url


class ModelFile(Protocol):
    """The open source."""

    def read(self, size: int) -> bytes:
        """At most size bytes, empty at the end. Raises PullFailed."""
        ...


@dataclass(frozen=True, slots=True)
class Opened:
    """file: the bytes from offset on; offset: 0 where the other side cannot resume.

    size_bytes: of the whole file, None where the other side does not say.
    """

    file: ModelFile
    offset: int
    size_bytes: int | None


def find_source(entry: CatalogueEntry, given: Path | str | None) -> Source:
    """The source that a person means by a folder, a file, a file:// or http(s):// address, or nothing.

    In a folder the file is looked for under its own name and as NAME.onnx. Raises PullFailed where there is none.
    """
    if given is None:
        return Source(url=entry.url)
    parts = urlsplit(str(given))
    if parts.scheme in ("http", "https"):
        return Source(url=f"{given}{entry.file_name}" if parts.path.endswith("/") else str(given))
    path = Path(unquote(parts.path)) if parts.scheme == "file" else Path(given).expanduser()
    if path.is_file():
        return Source(path=path)
    names = list(dict.fromkeys((entry.file_name, f"{entry.name}.onnx")))
    if not path.is_dir():
        raise PullFailed(f"there is no {path}: give the folder that holds {names[0]}, the file itself, or an address")
    found = next((path / name for name in names if (path / name).is_file()), None)
    if found is None:
        raise PullFailed(f"{path} has neither {' nor '.join(names)}: download {entry.url} into it")
    return Source(path=found)


@contextmanager
def open_source(source: Source, offset: int) -> Iterator[Opened]:
    """The bytes from offset on, where the source can; from the start where it cannot. Raises PullFailed."""
    if source.path is not None:
        with _open_file(source.path) as file:
            file.seek(offset)
            yield Opened(file, offset, source.path.stat().st_size)
        return
    with closing(_open_url(source.url, offset)) as response:
        begin = _begin_of(response, offset)
        yield Opened(_RemoteFile(source.url, response), begin, _size_of(response, begin))


def _open_file(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise PullFailed(f"{path} cannot be read ({error.strerror}): check its permissions") from error


def _open_url(url: str, offset: int) -> http.client.HTTPResponse:
    request = urllib.request.Request(url, headers={"Range": f"bytes={offset}-"} if offset else {})
    try:
        return cast(http.client.HTTPResponse, urllib.request.urlopen(request, timeout=SILENCE_TIMEOUT_S))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise WrongContent(f"{url} has no byte {offset}: it is another file than the one that was begun") from error
        raise PullFailed(
            f"{url} answered {error.code} {error.reason}: get the file by other means and give it with --from"
        ) from error
    except (http.client.HTTPException, OSError) as error:
        raise _broken(url, error) from error


class _RemoteFile:
    """The body of an answer, its errors made ours."""

    def __init__(self, url: str, response: http.client.HTTPResponse) -> None:
        self._url = url
        self._response = response

    def read(self, size: int) -> bytes:
        try:
            return self._response.read1(size)
        except (http.client.HTTPException, OSError) as error:
            raise _broken(self._url, error) from error


def _begin_of(response: http.client.HTTPResponse, asked: int) -> int:
    """Where the answer begins: only a 206 that names the byte asked for continues."""
    content_range = response.headers.get("Content-Range", "")
    return asked if response.status == 206 and content_range.startswith(f"bytes {asked}-") else 0


def _size_of(response: http.client.HTTPResponse, begin: int) -> int | None:
    length = response.headers.get("Content-Length", "")
    return begin + int(length) if length.isdecimal() else None


def _broken(url: str, error: Exception) -> PullFailed:
    reason = getattr(error, "reason", None) or error
    why = f"nothing came for {SILENCE_TIMEOUT_S:g} s" if isinstance(reason, TimeoutError) else str(reason)
    return PullFailed(
        f"{url} cannot be reached or broke off ({why}): run the same command again, it goes on from there, "
        "or fetch the file otherwise and name its folder with --from"
    )
