"""Names for sources that were given without one: safe in file names and addresses, and unique."""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from deepstream_pipeline.errors import SourceNotAllowed

ID_PATTERN = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}"  # begins with no dot: it names a folder
ID_FORM = "1 to 64 of A-Z a-z 0-9 . _ - are needed, the first no dot"
_LONGEST = 64
_RESERVED = {"objects.jsonl", "events.jsonl", "annotated.mp4", "hls", "recordings", "spool"}  # stand beside its folder


def is_source_id(text: str) -> bool:
    """Whether the text can name a source."""
    return re.fullmatch(ID_PATTERN, text) is not None and text not in _RESERVED


def require_source_id(text: str) -> None:
    """Raises SourceNotAllowed for what no source can be called, as a file that stands beside its folder."""
    if not is_source_id(text):
        raise SourceNotAllowed(f"{text!r} cannot be a source's id: {ID_FORM}, and no file's name beside it")


def id_of(uri: str) -> str:
    """From a file's name, a host and the last part of its path, or a device. Nothing of a user, password or query."""
    if "://" not in uri:
        return _safe(PurePosixPath(uri).stem)
    try:
        parts = urlsplit(uri)
        host = parts.hostname or ""
    except ValueError:
        return "source"
    if parts.scheme == "file":
        return _safe(PurePosixPath(unquote(parts.path)).stem)
    return _safe("-".join(filter(None, (host, PurePosixPath(unquote(parts.path)).stem))))


def unique_ids(wanted: Iterable[str]) -> tuple[str, ...]:
    """In the same order; the second `cam` is `cam-2`."""
    taken: dict[str, None] = {}
    for name in wanted:
        candidate, number = name, 1
        while candidate in taken or candidate in _RESERVED:
            number += 1
            candidate = f"{name[: _LONGEST - len(str(number)) - 1]}-{number}"
        taken[candidate] = None
    return tuple(taken)


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:_LONGEST].rstrip("-.") or "source"
