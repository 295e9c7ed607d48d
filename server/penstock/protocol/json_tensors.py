"""Reads and writes a tensor's `data` array in JSON, flat or nested, as Triton does."""

import json
import math
import re
import struct
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from penstock.protocol.errors import InvalidRequest
from penstock.protocol.inference import FLOATS, Array, Datatype, Tensor

BINARY_ONLY = (Datatype.FP16, Datatype.BF16)
_UNSIGNED = (Datatype.UINT8, Datatype.UINT16, Datatype.UINT32, Datatype.UINT64)
_NESTING = b"[] \t\r\n"
_ODD_NUMBERS = {b"NaN": math.nan, b"Infinity": math.inf, b"-Infinity": -math.inf}
_EMPTY_ARRAYS = re.compile(rb",{2,}")
_OF_FLOATS = msgspec.json.Decoder(list[float])
_OF_INTEGERS = msgspec.json.Decoder(list[int])
_OF_BOOLEANS = msgspec.json.Decoder(list[bool])
_OF_STRINGS = msgspec.json.Decoder(list[str])
_OF_ANYTHING = msgspec.json.Decoder()
# Size of a chunk that is read or written at once: some milliseconds in which no other thread runs.
_PIECE_BYTES, _PIECE_ELEMENTS = 1 << 20, 1 << 16


def tensor_data(text: bytes, datatype: Datatype, *, name: str, element_count: int) -> memoryview:
    """The bytes of a well-formed JSON array; integers are truncated, as in Triton. Raises InvalidRequest."""
    if datatype in BINARY_ONLY:
        raise InvalidRequest(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}"
        )
    if text[:1] != b"[":
        raise _json_error("attempt to access JSON non-array as array")
    if datatype is Datatype.BYTES:
        return memoryview(_strings(text))
    array = _array(text, datatype)
    if array.size != element_count:
        raise _json_error("Shape does not match true shape of 'data' field")
    return array.view(np.uint8).data


def tensor_text(tensor: Tensor) -> bytes:
    """The tensor as a flat JSON array. Raises InvalidRequest for datatypes that JSON cannot represent."""
    if tensor.datatype in BINARY_ONLY:
        raise InvalidRequest(
            f"sending {tensor.datatype} data via JSON is not supported. "
            f"Please use the binary data format for output {tensor.name}"
        )
    array = tensor.to_numpy().reshape(-1)
    pieces = (array[start : start + _PIECE_ELEMENTS] for start in range(0, array.size, _PIECE_ELEMENTS))
    return b"[" + b",".join(_text(piece)[1:-1] for piece in pieces) + b"]"


def _text(array: Array) -> bytes:
    if array.dtype == np.object_:
        texts = [item.decode("utf-8", "surrogateescape") for item in array]
        return json.dumps(texts, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return json.dumps(array.tolist(), separators=(",", ":")).encode()  # msgspec would write null
    return msgspec.json.encode(array.tolist())


def _array(text: bytes, datatype: Datatype) -> Array:
    """All elements, in one dimension."""
    if datatype is Datatype.BOOL:
        return _joined(text, lambda piece: np.array(_OF_BOOLEANS.decode(piece), np.bool_))
    if datatype in FLOATS:
        with np.errstate(over="ignore"):  # values beyond FP32 become infinity, as in C++
            return _joined(text, _floats).astype(datatype.dtype)
    wide = np.uint64 if datatype in _UNSIGNED else np.int64
    return _joined(text, lambda piece: np.array(_OF_INTEGERS.decode(piece), wide)).astype(datatype.dtype)


def _joined(text: bytes, read: Callable[[bytes], Array]) -> Array:
    """Raises InvalidRequest if `read` fails on a chunk."""
    try:
        arrays = [read(b"[" + piece + b"]") for piece in _pieces(_flat(text))]
    except (msgspec.DecodeError, OverflowError) as error:
        raise _json_error(str(error)) from error
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _pieces(flat: bytes) -> Iterator[bytes]:
    """The text, cut at commas."""
    start = 0
    while len(flat) - start > _PIECE_BYTES:
        end = flat.find(b",", start + _PIECE_BYTES)
        if end < 0:
            break
        yield flat[start:end]
        start = end + 1
    yield flat[start:]


def _floats(piece: bytes) -> Array:
    """Also accepts NaN, Infinity and -Infinity, as Triton does; the fast parser does not."""
    try:
        return np.array(_OF_FLOATS.decode(piece), np.float64)
    except msgspec.DecodeError:
        words = piece[1:-1].split(b",")
        odd = {index: _ODD_NUMBERS[word] for index, word in enumerate(words) if word in _ODD_NUMBERS}
        if not odd:
            raise
    for index in odd:
        words[index] = b"0"
    array = np.array(_OF_FLOATS.decode(b"[" + b",".join(words) + b"]"), np.float64)
    array[list(odd)] = list(odd.values())
    return array


def _strings(text: bytes) -> bytes:
    """Raises InvalidRequest for invalid UTF-8: Triton passes it on, and ONNX Runtime rejects it."""
    try:
        words = _tokens(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"Unable to parse JSON bytes array: {error}") from error
    return b"".join(struct.pack("<I", len(item)) + item for item in (word.encode() for word in words))


def _tokens(text: bytes) -> list[str]:
    try:
        return _OF_STRINGS.decode(text)
    except msgspec.ValidationError:
        return _leaves(_OF_ANYTHING.decode(text))


def _leaves(found: object) -> list[str]:
    """The strings of an array, however nested."""
    if isinstance(found, list):
        return [leaf for item in found for leaf in _leaves(item)]
    if not isinstance(found, str):
        raise InvalidRequest("Unable to parse JSON bytes array: attempt to access JSON non-string as string")
    return [found]


def _flat(text: bytes) -> bytes:
    """The comma-separated elements of an array without strings."""
    flat = text.translate(None, _NESTING)
    return _EMPTY_ARRAYS.sub(b",", flat).strip(b",")


def _json_error(reason: str) -> InvalidRequest:
    return InvalidRequest(f"Unable to parse 'data': {reason}")
