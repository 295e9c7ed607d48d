"""Where a model's file comes from: a folder, a file, an address; opened at a byte offset, its errors made ours."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from server.catalogue.catalogue import CatalogueEntry
from server.catalogue.errors import PullFailed
from server.catalogue.remote import open_url

_POINTER = b"version https://git-lfs"
_OF_PATHS = "/%:@!$&'()*+,;=~[]"  # what an address's path may hold as it is; % is a sign that somebody quoted already


@dataclass(frozen=True, slots=True)
class Source:
    """A file of this machine (path) or of another (url): one of the two is set."""

    path: Path | None = None
    url: str = ""

    def __str__(self) -> str:
        return str(self.path) if self.path is not None else self.url


@dataclass(frozen=True, slots=True)
class Opened:
    """read: at most that many bytes, from offset on; empty at the end; raises PullFailed.

    offset: 0 where the other side cannot resume. size_bytes: of the whole file, None where the other side does not say.
    is_web_page: the other side says that it sends HTML. is_pointer: Git LFS left a note in the file's place.
    """

    read: Callable[[int], bytes]
    offset: int
    size_bytes: int | None
    is_web_page: bool = False
    is_pointer: bool = False


def find_source(entry: CatalogueEntry, given: Path | str | None) -> Source:
    """The source that a person means by a folder, a file, a file:// or http(s):// address, or nothing.

    In a folder the file is looked for under its own name, as NAME.onnx, and as what a model folder or a repository has.
    An address that ends in / is a folder's: the file's own name is appended. Raises PullFailed where there is none.
    """
    if given is None:
        return Source(url=entry.url)
    scheme, mark, _ = str(given).partition("://")
    if not mark:
        return _local_source(entry, _expanded(Path(given)))
    try:
        parts = urlsplit(str(given))
    except ValueError as error:
        raise PullFailed(f"{given} is no address ({error}): give one such as http://mirror.example/models/") from error
    if scheme.lower() in ("http", "https"):
        path = f"{parts.path}{entry.file_name}" if parts.path.endswith("/") else parts.path
        return Source(url=parts._replace(path=quote(path, safe=_OF_PATHS)).geturl())
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


def _local_source(entry: CatalogueEntry, path: Path) -> Source:
    try:
        if path.is_file():
            return Source(path=path)
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
    return Source(path=(right or found)[0])


@contextmanager
def open_source(source: Source, offset: int) -> Iterator[Opened]:
    """The bytes from offset on, where the source can; from the start where it cannot. Raises PullFailed."""
    if source.path is None:
        with open_url(source.url, offset) as answer:
            yield Opened(answer.read, answer.begin, answer.size_bytes, is_web_page=answer.is_web_page)
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
        yield Opened(read, offset, path.stat().st_size, is_pointer=is_pointer)


def _unreadable(path: Path, error: OSError) -> PullFailed:
    return PullFailed(f"{path} cannot be read ({error.strerror}): check its permissions and its disk")
