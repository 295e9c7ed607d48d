"""Tensors as JSON has them: the array `data`, flat or nested in any way, read and written as Triton does."""

import json
import re
import struct

import msgspec
import numpy as np

from server.core.errors import InvalidRequest
from server.core.tensor import Array, Datatype, Tensor

BINARY_ONLY = (Datatype.FP16, Datatype.BF16)
_INTEGERS = {
    Datatype.UINT8: np.uint8,
    Datatype.UINT16: np.uint16,
    Datatype.UINT32: np.uint32,
    Datatype.UINT64: np.uint64,
    Datatype.INT8: np.int8,
    Datatype.INT16: np.int16,
    Datatype.INT32: np.int32,
    Datatype.INT64: np.int64,
}
_UNSIGNED = (Datatype.UINT8, Datatype.UINT16, Datatype.UINT32, Datatype.UINT64)
_FLOATS = {Datatype.FP32: np.float32, Datatype.FP64: np.float64}
_NESTING = b"[] \t\r\n"
_OF_NUMBERS = b"0123456789+-.eE,NaInfity"  # NaN, Infinity and -Infinity are numbers to Triton
_FRACTION = re.compile(rb"[.eE]")
_PERHAPS_OVER_64_BITS = re.compile(rb"[0-9]{19}")
_EMPTY_ARRAYS = re.compile(rb",{2,}")
_STRINGS = msgspec.json.Decoder(list[str])
_ANYTHING = msgspec.json.Decoder()


def tensor_data(text: bytes, datatype: Datatype, *, name: str, element_count: int) -> memoryview:
    """The tensor's bytes. text: the JSON array, known to be well-formed.

    Integers are cut to the datatype's width, as there. Raises InvalidRequest, in Triton's words.
    """
    if datatype in BINARY_ONLY:
        raise InvalidRequest(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}"
        )
    if text[:1] != b"[":
        raise _unreadable("attempt to access JSON non-array as array")
    if datatype is Datatype.BYTES:
        return memoryview(_strings(text))
    array = _booleans(text) if datatype is Datatype.BOOL else _numbers(text, datatype)
    if array.size != element_count:
        raise _unreadable("Shape does not match true shape of 'data' field")
    return array.view(np.uint8).data


def tensor_text(tensor: Tensor) -> bytes:
    """The tensor as a flat JSON array. Raises InvalidRequest for the datatypes that JSON does not carry."""
    if tensor.datatype in BINARY_ONLY:
        raise InvalidRequest(
            f"sending {tensor.datatype} data via JSON is not supported. "
            f"Please use the binary data format for output {tensor.name}"
        )
    array = tensor.to_numpy().reshape(-1)
    if tensor.datatype is Datatype.BYTES:
        texts = [item.decode("utf-8", "surrogateescape") for item in array]
        return json.dumps(texts, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape")
    if tensor.datatype in _FLOATS and not np.isfinite(array).all():
        return json.dumps(array.tolist(), separators=(",", ":")).encode()  # msgspec would write null
    return msgspec.json.encode(array.tolist())


def _numbers(text: bytes, datatype: Datatype) -> Array:
    flat = _flat(text)
    if flat.translate(None, _OF_NUMBERS):
        raise _unreadable("attempt to access JSON non-number as number")
    if datatype in _FLOATS:
        return _floats(flat, datatype)
    if _FRACTION.search(flat) or b"N" in flat or b"I" in flat:
        raise _unreadable("attempt to access JSON non-integer as integer")
    if datatype in _UNSIGNED and b"-" in flat:
        raise _unreadable("attempt to access JSON non-unsigned-integer as unsigned-integer")
    wide = np.uint64 if datatype in _UNSIGNED else np.int64
    if _PERHAPS_OVER_64_BITS.search(flat):
        return _long_integers(flat, wide).astype(_INTEGERS[datatype])
    return np.fromstring(flat, wide, sep=",").astype(_INTEGERS[datatype])


def _floats(flat: bytes, datatype: Datatype) -> Array:
    wide = np.fromstring(flat, np.float64, sep=",")
    if b"I" not in flat and np.isinf(wide).any():
        raise _unreadable("Number too big to be stored in double")
    with np.errstate(over="ignore"):  # what FP32 cannot hold is an infinity, as in C++
        return wide.astype(_FLOATS[datatype])


def _long_integers(flat: bytes, wide: type[np.int64 | np.uint64]) -> Array:
    """Numbers of which one may fit no 64 bits, for which numpy's text reader has no word."""
    numbers = [int(word) for word in flat.split(b",")]
    limits = np.iinfo(wide)
    if min(numbers) < limits.min or max(numbers) > limits.max:
        raise _unreadable("an integer fits no 64 bits")
    return np.array(numbers, wide)


def _booleans(text: bytes) -> Array:
    flat = _flat(text)
    words = flat.split(b",") if flat else []
    if any(word not in (b"true", b"false") for word in words):
        raise _unreadable("attempt to access JSON non-boolean as boolean")
    return np.array([word == b"true" for word in words], np.bool_)


def _strings(text: bytes) -> bytes:
    try:
        words = _STRINGS.decode(text)
    except msgspec.ValidationError:
        words = _leaves(_ANYTHING.decode(text))
    return b"".join(struct.pack("<I", len(item)) + item for item in (word.encode() for word in words))


def _leaves(found: object) -> list[str]:
    """The strings of an array however nested."""
    if isinstance(found, list):
        return [leaf for item in found for leaf in _leaves(item)]
    if not isinstance(found, str):
        raise InvalidRequest("Unable to parse JSON bytes array: attempt to access JSON non-string as string")
    return [found]


def _flat(text: bytes) -> bytes:
    """The elements of an array of anything but strings, parted by commas."""
    flat = text.translate(None, _NESTING)
    return _EMPTY_ARRAYS.sub(b",", flat).strip(b",")


def _unreadable(reason: str) -> InvalidRequest:
    return InvalidRequest(f"Unable to parse 'data': {reason}")
