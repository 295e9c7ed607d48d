"""Headers that go with every call to an engine whose APIs are restricted: a shared secret, or a proxy's credentials."""

import re
from dataclasses import replace
from pathlib import Path

from server.core.relay import GrpcMetadata, HttpCall

GRPC_PREFIX = "triton-grpc-protocol-"  # what Triton's --grpc-restricted-protocol puts before the name
_MAX_BYTES = 16_384
_LINE = re.compile(r"(?P<name>[A-Za-z0-9_.-]+):[ \t]*(?P<value>[!-~]([ -~]*[!-~])?)")


class HeaderFileError(Exception):
    """The file cannot be read, or contains no headers. The text names the file, never a value."""


class EngineHeaders:
    """Headers for calls to the engine: over HTTP by their names; over gRPC also with Triton's prefix.

    They replace what a client sent under the same names. The repr shows no values.
    """

    def __init__(self, headers: tuple[tuple[str, str], ...] = ()) -> None:
        named = {name.lower(): value for name, value in headers}
        self._http = tuple((name.encode(), value.encode()) for name, value in named.items())
        self._grpc = tuple((prefix + name, value) for name, value in named.items() for prefix in ("", GRPC_PREFIX))
        self._names = frozenset(name for name, _ in self._grpc)

    @property
    def names_and_values(self) -> tuple[tuple[str, str], ...]:
        """Every header by its own name and with Triton's prefix, names in lower case."""
        return self._grpc

    def over_http(self, call: HttpCall) -> HttpCall:
        """The call as it is sent to the engine."""
        if not self._http:
            return call
        others = tuple(pair for pair in call.headers if pair[0].lower().decode("latin-1") not in self._names)
        return replace(call, headers=(*others, *self._http))

    def over_grpc(self, metadata: GrpcMetadata) -> GrpcMetadata:
        """The metadata as it is sent to the engine."""
        if not self._grpc:
            return metadata
        return (*(pair for pair in metadata if pair[0] not in self._names), *self._grpc)

    def __repr__(self) -> str:
        return f"EngineHeaders({', '.join(name.decode() for name, _ in self._http)})"


def read_header_file(path: Path) -> tuple[tuple[str, str], ...]:
    """The headers in a file, one `NAME: VALUE` per line; empty lines and lines that begin with # are skipped.

    Raises HeaderFileError.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1).decode("ascii")
    except OSError as error:
        raise HeaderFileError(f"{path}: cannot be read ({error.strerror}); give an existing file") from error
    except UnicodeDecodeError as error:
        raise HeaderFileError(f"{path}: HTTP headers are ASCII text; write lines of NAME: VALUE") from error
    if len(text) > _MAX_BYTES:
        raise HeaderFileError(f"{path}: more than {_MAX_BYTES} bytes; write lines of NAME: VALUE")
    headers = [
        _header(line.strip(), f"{path}:{number}")
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.startswith("#")
    ]
    if not headers:
        raise HeaderFileError(f"{path}: no header in it; write lines of NAME: VALUE")
    return tuple(headers)


def _header(line: str, where: str) -> tuple[str, str]:
    found = _LINE.fullmatch(line)
    if found is None:
        raise HeaderFileError(f"{where}: not a header; write NAME: VALUE")
    return found["name"], found["value"]
