"""URIs of sources: their kind, whether they are live, and how they are shown without secrets. Opens nothing."""

import re
from enum import StrEnum
from urllib.parse import unquote, urlsplit

from penstock_video.errors import SourceNotAllowed
from penstock_video.types import DropPolicy, SourceConfig

MAX_URI_CHARACTERS = 4096

# Files over HTTP, which end; other HTTP (MJPEG, HLS, a camera's address) counts as a camera.
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
    """Kind of a source."""

    FILE = "file"
    RTSP = "rtsp"
    HTTP = "http"
    DEVICE = "device"


def kind_of(uri: str) -> UriKind:
    """The URI's kind. Raises SourceNotAllowed, with the reason, for an invalid source."""
    _refuse_characters(uri)
    scheme = _scheme_of(uri)
    if not scheme or scheme == "file":
        return UriKind.DEVICE if _DEVICE.fullmatch(path_of(uri)) else UriKind.FILE
    if scheme not in {"rtsp", "rtsps", "http", "https"}:
        raise SourceNotAllowed(f"{scheme!r} of {redacted(uri)} is no protocol that is read; give {_SCHEMES}")
    _refuse_address(uri)
    return UriKind.RTSP if scheme.startswith("rtsp") else UriKind.HTTP


def is_file(uri: str) -> bool:
    """Whether it is a local file: read at full speed, with an end."""
    return kind_of(uri) is UriKind.FILE


def is_live(uri: str) -> bool:
    """Whether frames are lost if not taken. For http: no file extension; Opened.is_live is exact."""
    kind = kind_of(uri)
    if kind is UriKind.HTTP:
        return not urlsplit(uri).path.lower().endswith(FILE_SUFFIXES)
    return kind is not UriKind.FILE


def path_of(uri: str) -> str:
    """The path of a path or a file: URI. Raises SourceNotAllowed for another host."""
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
    """The URI without user, password and possible tokens. A password may contain any character: unless the host is
    clearly one, everything before the last @ is hidden."""
    found = _ADDRESS.fullmatch(uri)
    before, at, after = found[2].rpartition("@") if found else ("", "", "")
    if found and ("#" in before or not _PLAIN_HOST.match(found[2])):
        uri = f"{found[1]}{_HIDDEN}@{after}" if at else f"{found[1]}{_HIDDEN}"
    return _SECRET_PARAMETER.sub(rf"\g<1>{_HIDDEN}", uri)


def _scheme_of(uri: str) -> str:
    """In lower case; "" for a path."""
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
    except ValueError:  # its text has a part of the address
        hint = f"; {_ESCAPES}" if "@" in uri else ""
        raise SourceNotAllowed(f"{redacted(uri)} is no address: its host or port cannot be parsed{hint}") from None
    if "@" in parts.fragment:
        raise SourceNotAllowed(f"{redacted(uri)} has # before @; {_ESCAPES}")
    if not host:
        raise SourceNotAllowed(f"{redacted(uri)} names no host; write {parts.scheme}://HOST/PATH")


_MOST_LETTERS = 400


def seems_live(uri: str) -> bool:
    """As is_live; False for an invalid source, which its process reports."""
    try:
        return is_live(uri)
    except SourceNotAllowed:
        return False


def policy_of(config: SourceConfig) -> DropPolicy:
    """The configured policy, else the default for its kind."""
    if config.policy is not None:
        return config.policy
    drops = config.is_realtime or seems_live(config.uri)
    return DropPolicy.DROP_OLDEST if drops else DropPolicy.BLOCK


class Secrets:
    """The user and password of one address."""

    def __init__(self, uri: str) -> None:
        try:
            parts = urlsplit(uri)
            userinfo, password = parts.netloc.rpartition("@")[0], parts.password or ""
        except ValueError:
            userinfo = password = ""
        hidden = {uri: redacted(uri), f"{userinfo}@": "***@", unquote(password): "***", password: "***"}
        self._hidden = {secret: shown for secret, shown in hidden.items() if len(secret) > 1 and secret != shown}

    def hidden_in(self, text: str) -> str:
        """A foreign text as one printable line without the secrets, shortened for a log."""
        for secret, shown in self._hidden.items():
            text = text.replace(secret, shown)
        return "".join(letter if letter.isprintable() else " " for letter in text[:_MOST_LETTERS])
