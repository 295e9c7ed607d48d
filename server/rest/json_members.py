"""JSON read one level at a time: members stay raw until somebody asks for one."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from server.core.errors import InvalidRequest
from server.core.infer import Parameter
from server.rest.outline import outline_of, refuse_unreasonable, with_plain_numbers

T = TypeVar("T")
Members = dict[str, msgspec.Raw]

_OBJECT = msgspec.json.Decoder(Members)
_OBJECTS = msgspec.json.Decoder(list[Members])
_PARAMETERS = msgspec.json.Decoder(dict[str, bool | int | float | str])
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class Document:
    """A JSON object that is well-formed and of reasonable depth. names: all that stand in it, repeats counted."""

    members: Members
    names: int


def read_document(text: bytes, max_depth: int) -> Document:
    """Raises InvalidRequest where the text is no JSON object (with the byte), or an unreasonable one."""
    outline = outline_of(text)
    refuse_unreasonable(outline, max_depth)
    try:
        members = _OBJECT.decode(text)
    except msgspec.DecodeError as error:
        if b"NaN" not in text and b"Inf" not in text:
            raise InvalidRequest(_malformed(error)) from error
        members = decode(_OBJECT, with_plain_numbers(text), "")
    except ValueError as error:
        raise InvalidRequest(_malformed(error)) from error
    return Document(members, outline.members)


def decode(decoder: msgspec.json.Decoder[T], text: bytes | msgspec.Raw, where: str) -> T:
    """What the decoder makes of the text. Raises InvalidRequest that begins with where."""
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"{where}: {error}" if where else _malformed(error)) from error


def objects_at(members: Members, name: str, *, limit: int) -> list[Members]:
    """The array of objects of that name; empty where there is none. Raises InvalidRequest over the limit too."""
    found = members.get(name)
    entries = decode(_OBJECTS, found, name) if found is not None else []
    if len(entries) > limit:
        raise InvalidRequest(f"{len(entries)} {name} (limit {limit}); send fewer")
    return entries


def parameters_at(members: Members, where: str) -> dict[str, Parameter]:
    """The member `parameters`; empty where there is none."""
    found = members.get("parameters")
    return decode(_PARAMETERS, found, f"{where}: parameters") if found is not None else {}


def names_within(values: Iterable[msgspec.Raw]) -> int:
    """How many names stand in the objects of values that nobody reads."""
    texts = (bytes(value) for value in values)
    return sum(outline_of(text).members for text in texts if b"{" in text)


def shown(name: str) -> str:
    """A client's word, quoted, short enough for a message."""
    return repr(name if len(name) <= _SHOWN_CHARACTERS else name[:_SHOWN_CHARACTERS] + "…")


def _malformed(error: Exception) -> str:
    text = str(error).removeprefix("JSON is malformed: ")
    return f"malformed JSON: {text}"
