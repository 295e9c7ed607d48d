"""Decodes POST …/infer: JSON followed by binary tensors, or one raw tensor only. Encodes its response."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from penstock.protocol.call import HttpAnswer, HttpHeaders
from penstock.protocol.decoded_request import RESERVED_PREFIX, DecodedRequest, RequestedOutput, http_region, parse_error
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.http_body import HEADER_LENGTH, deflate
from penstock.protocol.inference import Datatype, InferResponse, Parameter, Tensor
from penstock.protocol.json_tensors import tensor_data, tensor_text
from penstock.protocol.request_checks import CACHED_HEADS, MAX_CACHED_HEAD_BYTES

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


class _InputJson(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: msgspec.Raw = msgspec.Raw()
    parameters: dict[str, Parameter] = {}


class _OutputJson(msgspec.Struct):
    name: str
    parameters: dict[str, Parameter] = {}


class _RequestJson(msgspec.Struct):
    inputs: list[_InputJson]
    id: str = ""
    outputs: list[_OutputJson] = []
    parameters: dict[str, Parameter] = {}


_DECODER = msgspec.json.Decoder(_RequestJson)


def decode_infer_body(body: bytes, header_length: int | None, model_name: str) -> DecodedRequest:
    """The decoded request; binary tensors are views of the body. Builds arrays of JSON numbers.

    body: decompressed. header_length: of the JSON, None for all. 0, or an empty body, is a raw binary request. Raises
    InvalidRequest, RegionNotFound.
    """
    length = len(body) if header_length is None else header_length
    if not 0 <= length <= len(body):
        raise InvalidRequest(f"inference header size should be in range (0, {len(body)}), got: {length}")
    if length == 0:
        return DecodedRequest("", (), (), is_binary=True, raw=memoryview(body))
    if length == len(body):
        return _read(body, 0, model_name).with_binary(memoryview(b""))
    read = _read_known if length <= MAX_CACHED_HEAD_BYTES else _read
    return read(body[:length], len(body) - length, model_name).with_binary(memoryview(body)[length:])


@dataclass(frozen=True, slots=True)
class _Head:
    """A request's JSON. sizes_bytes: of each input after the JSON, None for the others."""

    ask: DecodedRequest
    sizes_bytes: tuple[int | None, ...]

    def with_binary(self, binary: memoryview) -> DecodedRequest:
        """The request with its binary tensors, which follow each other."""
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
        return DecodedRequest(ask.id, tuple(inputs), ask.outputs, ask.is_binary, shared=shared, parameters=parameters)


def _read(text: bytes, binary_bytes: int, model_name: str) -> _Head:
    """binary_bytes: size of the data after the JSON."""
    request = _parsed(text)
    _check_json_parameters(request.parameters)
    inputs, sizes_bytes = _inputs(request.inputs, binary_bytes, model_name)
    shared = {entry.name: use for entry in request.inputs if (use := http_region(entry.parameters)) is not None}
    outputs = {output.name: _requested_output(output) for output in request.outputs}
    is_binary = request.parameters.get("binary_data_output") is True
    ask = DecodedRequest(
        request.id, inputs, tuple(outputs.values()), is_binary, shared=shared, parameters=request.parameters
    )
    return _Head(ask, sizes_bytes)


# Requests with binary tensors repeat the same JSON.
_read_known = lru_cache(CACHED_HEADS)(_read)


def _parsed(text: bytes) -> _RequestJson:
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


def _parsed_with_odd_numbers(text: bytes) -> _RequestJson:
    """Parses NaN and infinities, which Triton accepts and the fast parser does not."""
    try:
        document: Any = json.loads(text)
        for tensor in document.get("inputs", []) if isinstance(document, dict) else []:
            if isinstance(tensor, dict) and "data" in tensor:
                tensor["data"] = msgspec.Raw(json.dumps(tensor["data"]).encode())
        return msgspec.convert(document, _RequestJson)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from error


def _inputs(
    entries: list[_InputJson], binary_bytes: int, model_name: str
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """The tensors, and the binary size of each."""
    tensors, sizes = [], []
    for entry in entries:
        tensor, size = _input(entry, binary_bytes, model_name)
        tensors.append(tensor)
        sizes.append(size)
        binary_bytes -= size or 0
    if binary_bytes:
        raise InvalidRequest(f"unexpected additional input data for model '{model_name}'")
    return tuple(tensors), tuple(sizes)


def _input(entry: _InputJson, binary_bytes: int, model_name: str) -> tuple[Tensor, int | None]:
    """The tensor, without its bytes if they are binary, and their number."""
    text, size = bytes(entry.data), entry.parameters.get("binary_data_size")
    _check_source(entry, has_data=bool(text))
    if entry.shape and min(entry.shape) < 0:
        raise parse_error("shape", "attempt to access JSON non-unsigned-integer as unsigned-integer")
    empty = Tensor(entry.name, _input_datatype(entry), tuple(entry.shape), memoryview(b""))
    if http_region(entry.parameters) is not None:
        return empty, None
    if size is None:
        data = tensor_data(text, empty.datatype, name=entry.name, element_count=empty.element_count)
        return Tensor(entry.name, empty.datatype, empty.shape, data), None
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise parse_error("binary_data_size", "attempt to access JSON non-unsigned-integer as unsigned-integer")
    if size > binary_bytes:
        lacking = size - binary_bytes
        raise InvalidRequest(
            f"unexpected size for input '{entry.name}', expecting {lacking} additional bytes for model '{model_name}'"
        )
    return empty, size


def _check_source(entry: _InputJson, *, has_data: bool) -> None:
    """Checks that the tensor is in exactly one of three places."""
    found = ["'data'"] if has_data else []
    found += [f"'{name}'" for name in ("binary_data_size", "shared_memory_region") if name in entry.parameters]
    if len(found) != 1:
        raise InvalidRequest(_ONE_SOURCE + (f"set {' '.join(found)}" if found else "no field is set"))


def _input_datatype(entry: _InputJson) -> Datatype:
    try:
        return Datatype(entry.datatype)
    except ValueError:
        raise InvalidRequest(f"invalid datatype for input {entry.name}") from None


def _requested_output(entry: _OutputJson) -> RequestedOutput:
    region = http_region(entry.parameters)
    for other in ("binary_data", "classification") if region is not None else ():
        if entry.parameters.get(other):
            raise InvalidRequest(f"Output can't set both 'shared_memory_region' and '{other}'")
    classes, is_binary = entry.parameters.get("classification", 0), entry.parameters.get("binary_data", False)
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 0:
        reason = "attempt to access JSON non-unsigned-integer as unsigned-integer"
        raise InvalidRequest(f"Unable to set 'classification': {reason}")
    if not isinstance(is_binary, bool):
        raise parse_error("binary_data", "attempt to access JSON non-boolean as boolean")
    return RequestedOutput(entry.name, classes, is_binary, region)


def _check_json_parameters(parameters: Mapping[str, Parameter]) -> None:
    """Checks names and types. No parameter changes the results of this engine's models."""
    for name, value in parameters.items():
        kind, word = _KINDS.get(name, (object, ""))
        is_wrong = not isinstance(value, kind) or (kind is not bool and word and isinstance(value, bool))
        if is_wrong or (word == "unsigned-integer" and isinstance(value, int) and value < 0):
            raise parse_error(name, f"attempt to access JSON non-{word} as {word}")
        if name.startswith(RESERVED_PREFIX):
            raise InvalidRequest(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
            )


JSON_TYPE = (b"content-type", b"application/json")
_BINARY_TYPE = (b"content-type", b"application/octet-stream")


def encode_infer_response(response: InferResponse, ask: DecodedRequest, encoding: str) -> HttpAnswer:
    """encoding: from `accepted_encoding`. Raises InvalidRequest for a datatype that needs the binary form."""
    head: dict[str, object] = {"id": response.id} if response.id else {}
    head |= {"model_name": response.model_name, "model_version": response.model_version}
    if response.parameters:
        head["parameters"] = response.parameters
    outputs, binary = [], []
    for tensor in response.outputs:
        entry: dict[str, object] = {"name": tensor.name, "datatype": tensor.datatype.value, "shape": tensor.shape}
        wanted = ask.output(tensor.name)
        if wanted.region is not None:
            pass  # it was written there
        elif wanted.is_binary:
            entry["parameters"] = {"binary_data_size": tensor.data.nbytes}
            if tensor.data.nbytes:  # without binary data the type is plain JSON, as in Triton
                binary.append(tensor.data)
        else:
            entry["data"] = msgspec.Raw(tensor_text(tensor))
        outputs.append(entry)
    text = msgspec.json.encode(head | {"outputs": outputs})
    headers: HttpHeaders = (JSON_TYPE,)
    if binary:
        headers = (_BINARY_TYPE, (HEADER_LENGTH.encode(), b"%d" % len(text)))
    if encoding:
        headers = (*headers, (b"content-encoding", encoding.encode()))
    return HttpAnswer(200, headers, deflate(b"".join((text, *binary)), encoding))


def accepted_encoding(header: str) -> str:
    """gzip or deflate, by the highest weight in accept-encoding, or else the first; "" for neither."""
    best, weight = "", 0.0
    for entry in header.split(","):
        name, _, quality = entry.strip().partition(";q=")
        value = _weight(quality) if quality else 1.0
        if name in ("gzip", "deflate", "identity") and value > weight:
            best, weight = name, value
    return "" if best == "identity" else best


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
