"""Measures depth, objects and names of a JSON text without parsing it, and rejects texts over the limits."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.protocol.errors import InvalidRequest
from penstock.protocol.inference import Parameter

MAX_MEMBERS = 100_000
MAX_OBJECTS = 10_000

_SHORT_BYTES = 1 << 10
_CHUNK_BYTES = 1 << 20
_AS_ARRAYS = bytes.maketrans(b"{}", b"[]")
_STRINGS = re.compile(rb'"[^"]*"')
_QUOTE, _COLON, _OPEN_OBJECT = ord('"'), ord(":"), ord("{")
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}:'))
_STEPS = np.zeros(256, np.int8)
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1


@dataclass(frozen=True, slots=True)
class Outline:
    """depth: of nested arrays and objects. members: names in all objects, including duplicates."""

    depth: int
    objects: int
    members: int


def outline_of(text: bytes) -> Outline:
    """The outline of a JSON text; undefined for other texts. Extra memory: the text's structural bytes."""
    kept = _without_escapes(text).translate(None, _NOT_STRUCTURE)
    return _of_short(kept) if len(kept) <= _SHORT_BYTES else _of_long(kept)


def _of_short(kept: bytes) -> Outline:
    """For short texts, with a few bytes operations: a third of the time of arrays."""
    bare = _STRINGS.sub(b"", kept)
    brackets, depth = bare.translate(_AS_ARRAYS, b":"), 0
    while b"[]" in brackets:
        brackets, depth = brackets.replace(b"[]", b""), depth + 1
    # Unmatched brackets count as one level each.
    return Outline(depth + len(brackets), bare.count(b"{"), bare.count(b":"))


def _of_long(kept: bytes) -> Outline:
    is_inside, level, depth, objects, members = False, 0, 0, 0, 0
    for start in range(0, len(kept), _CHUNK_BYTES):
        piece = np.frombuffer(kept, np.uint8, min(_CHUNK_BYTES, len(kept) - start), start)
        quotes = piece == _QUOTE
        inside = _inside_strings(quotes) ^ is_inside
        structure = piece[~(inside | quotes)]
        levels = np.cumsum(_STEPS[structure], dtype=np.int32) + level
        depth = max(depth, int(levels.max(initial=0)))
        objects += int(np.count_nonzero(structure == _OPEN_OBJECT))
        members += int(np.count_nonzero(structure == _COLON))
        level, is_inside = int(levels[-1]) if levels.size else level, bool(inside[-1])
    return Outline(depth, objects, members)


def check_outline(outline: Outline, max_depth: int) -> None:
    """Raises InvalidRequest for a text that is expensive to parse: deep, or with too many objects or names."""
    if outline.depth > max_depth:
        raise InvalidRequest(f"JSON is nested {outline.depth} deep (limit {max_depth}); flatten it")
    if outline.objects > MAX_OBJECTS:
        raise InvalidRequest(f"JSON holds {outline.objects} objects (limit {MAX_OBJECTS}); send fewer")
    if outline.members > MAX_MEMBERS:
        raise InvalidRequest(f"JSON holds {outline.members} names (limit {MAX_MEMBERS}); send fewer")


def with_plain_numbers(text: bytes) -> bytes:
    """The text with NaN, Inf and Infinity as zeros of equal length: Triton accepts them, JSON does not."""
    source = np.frombuffer(text, np.uint8)
    inside = _inside_strings(np.frombuffer(_masked_escapes(text), np.uint8) == _QUOTE)
    outside = np.where(inside, np.uint8(0), source).tobytes()
    outside = outside.replace(b"NaN", b"0.0").replace(b"Infinity", b"0.000000").replace(b"Inf", b"0.0")
    return np.where(inside, source, np.frombuffer(outside, np.uint8)).tobytes()


def _inside_strings(quotes: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """True from each opening quote to before its closing one."""
    return np.bitwise_xor.accumulate(quotes)


def _without_escapes(text: bytes) -> bytes:
    if b"\\" not in text:
        return text
    return text.replace(b"\\\\", b"").replace(b'\\"', b"")


def _masked_escapes(text: bytes) -> bytes:
    return text.replace(b"\\\\", b"__").replace(b'\\"', b"__")


T = TypeVar("T")
Members = dict[str, msgspec.Raw]

_OBJECT = msgspec.json.Decoder(Members)
_OBJECTS = msgspec.json.Decoder(list[Members])
_PARAMETERS = msgspec.json.Decoder(dict[str, bool | int | float | str])
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class Document:
    """A well-formed JSON object within the limits. names: number of names in it, including duplicates."""

    members: Members
    names: int


def read_document(text: bytes, max_depth: int) -> Document:
    """Raises InvalidRequest if the text is no JSON object (with the byte), or exceeds a limit."""
    outline = outline_of(text)
    check_outline(outline, max_depth)
    try:
        members = _OBJECT.decode(text)
    except msgspec.DecodeError as error:
        if b"NaN" not in text and b"Inf" not in text:
            raise InvalidRequest(_malformed(error)) from error
        members = decode_json(_OBJECT, with_plain_numbers(text), "")
    except ValueError as error:
        raise InvalidRequest(_malformed(error)) from error
    return Document(members, outline.members)


def decode_json(decoder: msgspec.json.Decoder[T], text: bytes | msgspec.Raw, where: str) -> T:
    """The decoded text. Raises InvalidRequest that begins with `where`."""
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"{where}: {error}" if where else _malformed(error)) from error


def objects_at(members: Members, name: str, *, limit: int) -> list[Members]:
    """The array of objects of this name; empty if absent. Raises InvalidRequest also over the limit."""
    found = members.get(name)
    entries = decode_json(_OBJECTS, found, name) if found is not None else []
    if len(entries) > limit:
        raise InvalidRequest(f"{len(entries)} {name} (limit {limit}); send fewer")
    return entries


def parameters_at(members: Members, where: str) -> dict[str, Parameter]:
    """The member `parameters`; empty if absent."""
    found = members.get("parameters")
    return decode_json(_PARAMETERS, found, f"{where}: parameters") if found is not None else {}


def count_names(values: Iterable[msgspec.Raw]) -> int:
    """Number of names in the objects of skipped values."""
    texts = (bytes(value) for value in values)
    return sum(outline_of(text).members for text in texts if b"{" in text)


def quoted(name: str) -> str:
    """A client's text, quoted and shortened for a message."""
    return repr(name if len(name) <= _SHOWN_CHARACTERS else name[:_SHOWN_CHARACTERS] + "…")


def _malformed(error: Exception) -> str:
    text = str(error).removeprefix("JSON is malformed: ")
    return f"malformed JSON: {text}"
