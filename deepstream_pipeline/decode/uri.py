"""What a source's URI means, and how it may be shown. Pure: nothing is opened, no name is looked up."""

import re
from enum import StrEnum
from urllib.parse import unquote, urlsplit

from deepstream_pipeline.errors import SourceNotAllowed

MAX_URI_CHARACTERS = 4096

# Files over HTTP, which end; whatever else HTTP gives (MJPEG, HLS, a camera's own address) is taken for a camera.
FILE_SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".3gp", ".mkv", ".webm", ".avi", ".ts", ".m2ts", ".mts", ".mpg", ".mpeg", ".flv"),
    *(".h264", ".264", ".h265", ".265", ".hevc", ".ivf", ".obu", ".asf", ".wmv", ".ogv", ".ogg", ".mxf", ".dav"),
)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_DEVICE = re.compile(r"/dev/video\d+")
_HIDDEN = "***"
_ADDRESS = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*:/{1,2})(.*)", re.DOTALL)
_PLAIN_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]*\]|[^:@/?#\[\]]*)(:\d*)?(?=[/?#]|\Z)")
_SECRET_PARAMETER = re.compile(
    r"(?i)([?&;](?:user|username|usr|login|pass|password|passwd|pwd|token|access_token|auth|key|api_?key|secret"
    r"|sig|signature)=)[^&;#]*"
)
_ESCAPES = "in a user name or password write # as %23, / as %2F, ? as %3F, @ as %40"
_SCHEMES = "a path, file:, rtsp:, rtsps:, http:, https: or /dev/videoN"


class UriKind(StrEnum):
    """From where a source comes."""

    FILE = "file"
    RTSP = "rtsp"
    HTTP = "http"
    DEVICE = "device"


def kind_of(uri: str) -> UriKind:
    """What the URI names. Raises SourceNotAllowed, saying what is wrong with it, where it cannot be a source."""
    _refuse_characters(uri)
    scheme = _scheme_of(uri)
    if not scheme or scheme == "file":
        return UriKind.DEVICE if _DEVICE.fullmatch(path_of(uri)) else UriKind.FILE
    if scheme not in {"rtsp", "rtsps", "http", "https"}:
        raise SourceNotAllowed(f"{scheme!r} of {redacted(uri)} is no protocol that is read; give {_SCHEMES}")
    _refuse_address(uri)
    return UriKind.RTSP if scheme.startswith("rtsp") else UriKind.HTTP


def is_file(uri: str) -> bool:
    """Whether it is a file of this machine: read as fast as its frames are taken, and then over."""
    return kind_of(uri) is UriKind.FILE


def is_live(uri: str) -> bool:
    """Whether its frames come when they come, as a camera's do: what is not taken in time is lost.

    Of http: all but addresses that end like a file's name. What the stream says of itself when it is open
    (Opened.is_live) is nearer to the truth.
    """
    kind = kind_of(uri)
    if kind is UriKind.HTTP:
        return not urlsplit(uri).path.lower().endswith(FILE_SUFFIXES)
    return kind is not UriKind.FILE


def path_of(uri: str) -> str:
    """The path that a path, or a file: URI, names. Raises SourceNotAllowed where it names another host."""
    if _scheme_of(uri) != "file":
        return uri
    rest = uri[len("file:") :]
    if not rest.startswith("//"):
        return unquote(rest)
    host, slash, path = rest[2:].partition("/")
    if host not in {"", "localhost"}:
        raise SourceNotAllowed(f"{redacted(uri)} names a file of another host; write file:///path")
    return unquote(slash + path)


def redacted(uri: str) -> str:
    """The URI without user, password and what looks like a token; rather too much is hidden than too little.

    A password may hold any character, whatever it should be written as: where the host is not plainly one, all until
    the last @ is taken for user and password.
    """
    found = _ADDRESS.fullmatch(uri)
    before, at, after = found[2].rpartition("@") if found else ("", "", "")
    if found and ("#" in before or not _PLAIN_HOST.match(found[2])):
        uri = f"{found[1]}{_HIDDEN}@{after}" if at else f"{found[1]}{_HIDDEN}"
    return _SECRET_PARAMETER.sub(rf"\g<1>{_HIDDEN}", uri)


def _scheme_of(uri: str) -> str:
    """Lower case; empty for a path."""
    found = _SCHEME.match(uri)
    return found[1].lower() if found else ""


def _refuse_characters(uri: str) -> None:
    if not uri:
        raise SourceNotAllowed(f"a source without an address; give {_SCHEMES}")
    if len(uri) > MAX_URI_CHARACTERS:
        raise SourceNotAllowed(f"an address of {len(uri)} characters (at most {MAX_URI_CHARACTERS})")
    if any(ord(character) < 32 or ord(character) == 127 for character in uri):
        raise SourceNotAllowed(f"{redacted(uri)!r} has a control character in it")


def _refuse_address(uri: str) -> None:
    try:
        parts = urlsplit(uri)
        host, _ = parts.hostname, parts.port
    except ValueError:  # its text holds a part of the address
        hint = f"; {_ESCAPES}" if "@" in uri else ""
        raise SourceNotAllowed(f"{redacted(uri)} is no address: its host or port cannot be parsed{hint}") from None
    if "@" in parts.fragment:
        raise SourceNotAllowed(f"{redacted(uri)} has # before @; {_ESCAPES}")
    if not host:
        raise SourceNotAllowed(f"{redacted(uri)} names no host; write {parts.scheme}://HOST/PATH")
