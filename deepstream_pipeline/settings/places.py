"""What a source's uri stands for: an address, a device, a file, a folder of files, a pattern of them."""

import difflib
import glob
import re
from collections.abc import Iterable
from pathlib import Path

from deepstream_pipeline.decode.uri import FILE_SUFFIXES, UriKind, kind_of, path_of
from deepstream_pipeline.errors import SourceNotAllowed
from deepstream_pipeline.settings.complaints import shown

SCHEMES = ("rtsp", "rtsps", "http", "https", "file")
VIDEO_SUFFIXES = {*FILE_SUFFIXES, ".mjpeg", ".mjpg"}
MAX_FILES = 10_000
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?")
_ALLOWED = "a video file, a folder of them, rtsp://, rtsps://, http://, https://, file:// or /dev/videoN is needed"


class PlaceRefused(Exception):
    """The uri stands for nothing that can be read. The text is for a person, without user and password."""


def places(uri: str, folder: Path) -> tuple[str, ...]:
    """The uris that it stands for: itself, or the video files of a folder or pattern, sorted.

    folder: against which relative paths are meant. Raises PlaceRefused.
    """
    scheme = _SCHEME.match(uri)
    if scheme and (scheme[2] or scheme[1].lower() in SCHEMES):
        return (_address(uri, scheme[1].lower()),)
    try:
        return _files(uri, folder)
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a NUL, an unknown ~user
        reason = getattr(error, "strerror", None) or "no path"
        raise PlaceRefused(f"{shown(uri)} cannot be looked up ({reason}); {_ALLOWED}") from None


def _address(uri: str, scheme: str) -> str:
    if scheme not in SCHEMES:
        close = difflib.get_close_matches(scheme, SCHEMES, n=1)
        hint = f"did you mean {close[0]}://?" if close else _ALLOWED
        raise PlaceRefused(f"{scheme[:16]}:// is no protocol that is read; {hint}")
    try:
        kind = kind_of(uri)
        path = path_of(uri) if kind is UriKind.FILE else ""
    except SourceNotAllowed as refused:
        raise PlaceRefused(refused.message) from None
    if path and not Path(path).exists():
        raise PlaceRefused(f"there is no file {shown(path)}")
    return uri


def _files(uri: str, folder: Path) -> tuple[str, ...]:
    own = Path(uri).expanduser()
    path = folder / own
    if path.is_dir():
        return _some(sorted(path.iterdir()), f"the folder {shown(uri)} has no video file")
    if path.exists():
        return (_written(path),)
    if glob.has_magic(uri):
        pattern = Path(glob.escape(str(folder))) / own  # the folder's name is not a pattern
        return _some(map(Path, sorted(glob.glob(str(pattern)))), f"no video file matches {shown(uri)}")
    if re.fullmatch(r"/dev/video\d+", str(path)):
        raise PlaceRefused(f"this machine has no {path}; `ls /dev/video*` shows its cameras")
    raise PlaceRefused(f"there is no file {shown(uri)}{_close_name(path)}")


def _some(found: Iterable[Path], complaint: str) -> tuple[str, ...]:
    files = tuple(_written(path) for path in found if path.suffix.lower() in VIDEO_SUFFIXES and path.is_file())
    if not files:
        raise PlaceRefused(f"{complaint} ({', '.join(sorted(VIDEO_SUFFIXES)[:8])}, …)")
    if len(files) > MAX_FILES:
        raise PlaceRefused(f"{len(files)} files are more than {MAX_FILES}; take them in parts")
    return files


def _written(path: Path) -> str:
    """As it is; whole where it would look like an address. Raises PlaceRefused where no decoder would take it."""
    text = str(path.absolute()) if ":" in str(path) else str(path)
    try:
        kind_of(text)
    except SourceNotAllowed as refused:
        raise PlaceRefused(refused.message) from None
    return text


def _close_name(path: Path) -> str:
    try:
        names = [item.name for item in path.parent.iterdir()]
    except OSError:
        return f"; {_ALLOWED}"
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; {_ALLOWED}"
