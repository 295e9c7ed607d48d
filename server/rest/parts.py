"""multipart/form-data, cut into its files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from server.core.errors import InvalidRequest

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks


@dataclass(frozen=True, slots=True)
class FilePart:
    """One file. content_type: of its part, empty if the part has a filename only; content: its bytes."""

    name: str
    content_type: str
    content: bytes


def files_of(body: bytes, content_type: str, max_parts: int) -> list[FilePart]:
    """The files in order, one at least. Raises InvalidRequest for anything else."""
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise InvalidRequest("multipart/form-data without a boundary in its content-type")
    collected = _Collected(max_parts)
    try:
        parser = MultipartParser(boundary, collected.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequest(f"malformed multipart body: {error}") from error
    if not collected.is_ended:
        raise InvalidRequest("malformed multipart body: its last boundary is missing")
    if not collected.parts:
        raise InvalidRequest("the multipart body has no parts; send one file at least")
    return [part.as_file(number) for number, part in enumerate(collected.parts, start=1)]


@dataclass(slots=True)
class _Part:
    headers: dict[bytes, bytes] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)

    def as_file(self, number: int) -> FilePart:
        options = parse_options_header(self.headers.get(b"content-disposition"))[1]
        name = options.get(b"name", b"").decode("utf-8", "replace")
        content_type = self.headers.get(b"content-type", b"").decode("latin-1")
        if b"filename" not in options and not content_type:
            raise InvalidRequest(
                f"part {number} ({name[:80]!r}) of the multipart body is a form field: it has neither a filename nor a "
                "content-type; send files only"
            )
        return FilePart(name, content_type, b"".join(self.chunks))


class _Collected:
    """What the parser calls back."""

    def __init__(self, max_parts: int) -> None:
        self.parts: list[_Part] = []
        self.is_ended = False
        self._max_parts = max_parts
        self._field = b""
        self._value = b""

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_part_data": self._data,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        if len(self.parts) == self._max_parts:
            raise InvalidRequest(f"the multipart body has more than {self._max_parts} parts, the limit; send fewer")
        self.parts.append(_Part())

    def _header_field(self, text: bytes, start: int, end: int) -> None:
        self._field += text[start:end]

    def _header_value(self, text: bytes, start: int, end: int) -> None:
        self._value += text[start:end]

    def _header_end(self) -> None:
        self.parts[-1].headers[self._field.lower()] = self._value
        self._field = self._value = b""

    def _data(self, text: bytes, start: int, end: int) -> None:
        self.parts[-1].chunks.append(text[start:end])

    def _end(self) -> None:
        self.is_ended = True
