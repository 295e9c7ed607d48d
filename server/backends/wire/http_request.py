"""The body of POST …/infer: JSON, JSON with binary tensors behind it, or one raw tensor."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from server.backends.wire.asks import (
    RESERVED_PREFIX,
    InferAsk,
    OutputAsk,
    unreadable,
)
from server.backends.wire.json_tensors import tensor_data
from server.backends.wire.regions import http_region
from server.core.contract import KEPT_HEAD_BYTES, KEPT_HEADS
from server.core.errors import InvalidRequest
from server.core.infer import Parameter
from server.core.tensor import Datatype, Tensor

_LEADING_NUMBER = re.compile(rb"\s*([+-]?[0-9]+)")
_ONE_SOURCE = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But "
)
_KINDS: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "sequence_id": ((int, str), "unsigned-integer"),
    "sequence_start": (bool, "boolean"),
    "sequence_end": (bool, "boolean"),
    "priority": (int, "unsigned-integer"),
    "timeout": (int, "unsigned-integer"),
    "binary_data_output": (bool, "boolean"),
}


class _Input(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: msgspec.Raw = msgspec.Raw()
    parameters: dict[str, Parameter] = {}


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Parameter] = {}


class _Request(msgspec.Struct):
    inputs: list[_Input]
    id: str = ""
    outputs: list[_Output] = []
    parameters: dict[str, Parameter] = {}


_DECODER = msgspec.json.Decoder(_Request)


def header_length_of(header: bytes | None) -> int | None:
    """The JSON's bytes as Triton reads the header's value: a leading number, 0 without one; None without a header."""
    if header is None:
        return None
    number = _LEADING_NUMBER.match(header)
    return int(number[1]) if number else 0


def read_infer(body: bytes, header_length: int | None, model_name: str) -> InferAsk:
    """What the body asks for; tensors are views of it where they are binary. Builds arrays of JSON numbers.

    body: as it was before compression. header_length: of the JSON, None for all of it. A length of 0, or an empty
    body, makes it a raw binary request. Raises InvalidRequest, RegionNotFound.
    """
    length = len(body) if header_length is None else header_length
    if not 0 <= length <= len(body):
        raise InvalidRequest(f"inference header size should be in range (0, {len(body)}), got: {length}")
    if length == 0:
        return InferAsk("", (), (), is_binary=True, raw=memoryview(body))
    if length == len(body):
        return _read(body, 0, model_name).with_binary(memoryview(b""))
    read = _read_known if length <= KEPT_HEAD_BYTES else _read
    return read(body[:length], len(body) - length, model_name).with_binary(memoryview(body)[length:])


@dataclass(frozen=True, slots=True)
class _Head:
    """What a request's JSON says. sizes_bytes: of each input that stands behind it, None for the others."""

    ask: InferAsk
    sizes_bytes: tuple[int | None, ...]

    def with_binary(self, binary: memoryview) -> InferAsk:
        """Binary tensors take their bytes one behind the other."""
        if not binary:
            return self.ask
        ask, start, inputs = self.ask, 0, []
        for tensor, size_bytes in zip(ask.inputs, self.sizes_bytes, strict=True):
            if size_bytes is None:
                inputs.append(tensor)
            else:
                data = binary[start : start + size_bytes]
                inputs.append(Tensor(tensor.name, tensor.datatype, tensor.shape, data))
                start += size_bytes
        shared, parameters = ask.shared, ask.parameters
        return InferAsk(ask.id, tuple(inputs), ask.outputs, ask.is_binary, shared=shared, parameters=parameters)


def _read(text: bytes, binary_bytes: int, model_name: str) -> _Head:
    """binary_bytes: what stands behind the text."""
    request = _parsed(text)
    _check_parameters(request.parameters)
    inputs, sizes_bytes = _inputs(request.inputs, binary_bytes, model_name)
    shared = {entry.name: use for entry in request.inputs if (use := http_region(entry.parameters)) is not None}
    outputs = {output.name: _output(output) for output in request.outputs}
    is_binary = request.parameters.get("binary_data_output") is True
    ask = InferAsk(request.id, inputs, tuple(outputs.values()), is_binary, shared=shared, parameters=request.parameters)
    return _Head(ask, sizes_bytes)


# What has its tensors behind the JSON says the same JSON again and again.
_read_known = lru_cache(KEPT_HEADS)(_read)


def _parsed(text: bytes) -> _Request:
    try:
        return _DECODER.decode(text)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"Unable to parse the request: {error}") from error
    except msgspec.DecodeError as error:
        if b"NaN" in text or b"Infinity" in text:
            return _parsed_with_odd_numbers(text)
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from error
    except (RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from error


def _parsed_with_odd_numbers(text: bytes) -> _Request:
    """NaN and infinities, which Triton takes and the quick parser does not."""
    try:
        document: Any = json.loads(text)
        for tensor in document.get("inputs", []) if isinstance(document, dict) else []:
            if isinstance(tensor, dict) and "data" in tensor:
                tensor["data"] = msgspec.Raw(json.dumps(tensor["data"]).encode())
        return msgspec.convert(document, _Request)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from error


def _inputs(
    entries: list[_Input], binary_bytes: int, model_name: str
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """The tensors, and how many bytes each takes of what stands behind the JSON; what is left over is nobody's."""
    tensors, sizes = [], []
    for entry in entries:
        tensor, size = _input(entry, binary_bytes, model_name)
        tensors.append(tensor)
        sizes.append(size)
        binary_bytes -= size or 0
    if binary_bytes:
        raise InvalidRequest(f"unexpected additional input data for model '{model_name}'")
    return tuple(tensors), tuple(sizes)


def _input(entry: _Input, binary_bytes: int, model_name: str) -> tuple[Tensor, int | None]:
    """The tensor, without its bytes where they stand behind the JSON, and how many they are."""
    text, size = bytes(entry.data), entry.parameters.get("binary_data_size")
    _check_source(entry, has_data=bool(text))
    if entry.shape and min(entry.shape) < 0:
        raise unreadable("shape", "attempt to access JSON non-unsigned-integer as unsigned-integer")
    empty = Tensor(entry.name, _datatype(entry), tuple(entry.shape), memoryview(b""))
    if http_region(entry.parameters) is not None:
        return empty, None
    if size is None:
        data = tensor_data(text, empty.datatype, name=entry.name, element_count=empty.element_count)
        return Tensor(entry.name, empty.datatype, empty.shape, data), None
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise unreadable("binary_data_size", "attempt to access JSON non-unsigned-integer as unsigned-integer")
    if size > binary_bytes:
        lacking = size - binary_bytes
        raise InvalidRequest(
            f"unexpected size for input '{entry.name}', expecting {lacking} additional bytes for model '{model_name}'"
        )
    return empty, size


def _check_source(entry: _Input, *, has_data: bool) -> None:
    """One of the three places where a tensor can be."""
    found = ["'data'"] if has_data else []
    found += [f"'{name}'" for name in ("binary_data_size", "shared_memory_region") if name in entry.parameters]
    if len(found) != 1:
        raise InvalidRequest(_ONE_SOURCE + (f"set {' '.join(found)}" if found else "no field is set"))


def _datatype(entry: _Input) -> Datatype:
    try:
        return Datatype(entry.datatype)
    except ValueError:
        raise InvalidRequest(f"invalid datatype for input {entry.name}") from None


def _output(entry: _Output) -> OutputAsk:
    region = http_region(entry.parameters)
    for other in ("binary_data", "classification") if region is not None else ():
        if entry.parameters.get(other):
            raise InvalidRequest(f"Output can't set both 'shared_memory_region' and '{other}'")
    classes, is_binary = entry.parameters.get("classification", 0), entry.parameters.get("binary_data", False)
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 0:
        reason = "attempt to access JSON non-unsigned-integer as unsigned-integer"
        raise InvalidRequest(f"Unable to set 'classification': {reason}")
    if not isinstance(is_binary, bool):
        raise unreadable("binary_data", "attempt to access JSON non-boolean as boolean")
    return OutputAsk(entry.name, classes, is_binary, region)


def _check_parameters(parameters: Mapping[str, Parameter]) -> None:
    """Their names and kinds. None of them changes what the models that this engine serves would answer."""
    for name, value in parameters.items():
        kind, word = _KINDS.get(name, (object, ""))
        is_wrong = not isinstance(value, kind) or (kind is not bool and word and isinstance(value, bool))
        if is_wrong or (word == "unsigned-integer" and isinstance(value, int) and value < 0):
            raise unreadable(name, f"attempt to access JSON non-{word} as {word}")
        if name.startswith(RESERVED_PREFIX):
            raise InvalidRequest(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
            )
