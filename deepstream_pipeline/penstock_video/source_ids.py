"""IDs of sources: which are valid, how they are derived from a URI, and which replica reads which source."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from penstock_video.errors import SourceNotAllowed

ID_PATTERN = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}"  # begins with no dot, because it names a folder
ID_FORM = "1 to 64 of A-Z a-z 0-9 . _ - are needed, the first no dot"
_LONGEST = 64
_RESERVED = {"objects.jsonl", "events.jsonl", "annotated.mp4", "hls", "recordings", "spool"}  # names beside its folder


def is_source_id(text: str) -> bool:
    """Whether the text can name a source."""
    return re.fullmatch(ID_PATTERN, text) is not None and text not in _RESERVED


def require_source_id(text: str) -> None:
    """Raises SourceNotAllowed for an invalid ID, such as the name of a file beside its folder."""
    if not is_source_id(text):
        raise SourceNotAllowed(f"{text!r} cannot be a source's id: {ID_FORM}, and no file's name beside it")


def id_of(uri: str) -> str:
    """An ID from a file name, a host and the last path segment, or a device, without user, password or query."""
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
    """Unique IDs in the same order; the second `cam` is `cam-2`."""
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


SHARD_VARIABLE, COUNT_VARIABLE = "PENSTOCK_SHARD", "PENSTOCK_SHARDS"
MAX_SHARDS = 10_000


@dataclass(frozen=True, slots=True)
class Shard:
    """This replica is number `index`, from 0, of `count`."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count <= MAX_SHARDS:
            raise ValueError(f"shard {self.index}/{self.count}: 0 ≤ i < n ≤ {MAX_SHARDS} is needed")

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def has(self, source_id: str) -> bool:
        """Whether this replica reads the source."""
        return owner(source_id, self.count) == self.index


ALONE = Shard()


def owner(source_id: str, count: int) -> int:
    """The replica with the highest weight for this source. Another replica takes 1/(n+1) of each; no other source
    moves."""
    return max(range(count), key=lambda ordinal: _weight(source_id, ordinal))


def shard_of(text: str) -> Shard:
    """Parses i/n. Raises ValueError with the allowed form."""
    found = re.fullmatch(r"(\d{1,5})/(\d{1,5})", text)
    if not found:
        raise ValueError(f"{text!r}: i/n is needed, such as 0/3 for the first of three")
    return Shard(int(found[1]), int(found[2]))


def shard_here(environ: Mapping[str, str], hostname: str) -> Shard:
    """This replica's shard: PENSTOCK_SHARD=i/n, or a StatefulSet's NAME-i with PENSTOCK_SHARDS=n; otherwise the only
    one. Raises ValueError with the variable and the allowed form."""
    if text := environ.get(SHARD_VARIABLE, ""):
        if "/" not in text and COUNT_VARIABLE in environ:
            text = f"{text}/{environ[COUNT_VARIABLE]}"
        return _named(SHARD_VARIABLE, text)
    if count := environ.get(COUNT_VARIABLE, ""):
        ordinal = re.fullmatch(r".*-(\d+)", hostname.partition(".")[0])
        if not ordinal:
            if count == "1":
                return ALONE
            raise ValueError(
                f"{COUNT_VARIABLE} is {count!r}, but {hostname!r} ends in no ordinal as a StatefulSet's pods do; "
                f"set {SHARD_VARIABLE}=i/n"
            )
        return _named(COUNT_VARIABLE, f"{ordinal[1]}/{count}")
    return ALONE


def _named(variable: str, text: str) -> Shard:
    try:
        return shard_of(text)
    except ValueError as error:
        raise ValueError(f"{variable}: {error}") from None


def _weight(source_id: str, ordinal: int) -> bytes:
    return hashlib.blake2b(f"{ordinal}/{source_id}".encode(), digest_size=8).digest()
