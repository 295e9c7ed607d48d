"""Reads a v2 HTTP request without decoding tensors. Rejects with 400 what crashes Triton 2.51 or is ambiguous."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from types import NoneType

import msgspec

from penstock.protocol import errors
from penstock.protocol.call import HttpAnswer, HttpCall, InferHead, RegionUse
from penstock.protocol.decoded_request import DecodedRequest
from penstock.protocol.engine import UNMERGED, ModelState
from penstock.protocol.error_codes import codes_of, http_retry_after
from penstock.protocol.errors import InferenceError, InvalidRequest, ModelRefused
from penstock.protocol.http_body import HEADER_LENGTH, NOT_ENCODED, header_length_of, inflate
from penstock.protocol.http_inference import JSON_TYPE, accepted_encoding, decode_infer_body, encode_infer_response
from penstock.protocol.inference import Datatype, InferResponse, Parameter
from penstock.protocol.json_outline import (
    Document,
    Members,
    count_names,
    decode_json,
    objects_at,
    parameters_at,
    quoted,
    read_document,
)
from penstock.protocol.request_checks import (
    CACHED_HEADS,
    MAX_CACHED_HEAD_BYTES,
    MAX_ELEMENTS,
    MAX_TENSORS,
    refuse_file_setting,
)

MAX_RANK = 64
_MAX_DIGITS_OF_SHAPE = 4096
_REPEATED = "a name stands twice in one JSON object; give each member once"

_MAX_INFLATION = 1032  # of gzip
_MAX_INFLATED_BYTES = 1 << 31  # the gateway has already read the body, within its own limit
_OBJECT = msgspec.json.Decoder(Members)
_STRING = msgspec.json.Decoder(str)
_SHAPE = msgspec.json.Decoder(list[int])


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    """An item of inputs[] or outputs[]. where: its name in messages."""

    where: str
    name: str
    members: Members
    parameters: Mapping[str, Parameter]


def read_head(body: bytes, header_length: int | None, model: InferHead, max_depth: int) -> InferHead:
    """The head of a decompressed infer body. Builds no array.

    header_length: bytes of JSON at the body's start, None for all. 0, or an empty body, is a raw binary request. model:
    name and version, from the path. Raises InvalidRequest for requests that the engine must not get.
    """
    if header_length is None:
        header_length = len(body)
    if header_length < 0 or header_length > len(body):
        raise InvalidRequest(f"Inference-Header-Content-Length is {header_length}, but the body has {len(body)} bytes")
    if header_length == 0:
        return replace(model, is_raw=True)
    text, binary_bytes = body[:header_length] if header_length < len(body) else body, len(body) - header_length
    scan = _read_repeated_head if binary_bytes and header_length <= MAX_CACHED_HEAD_BYTES else _read_head
    return scan(text, binary_bytes, model, max_depth)


def _read_head(text: bytes, binary_bytes: int, model: InferHead, max_depth: int) -> InferHead:
    document = read_document(text, max_depth)
    top = document.members
    if "inputs" not in top:
        raise InvalidRequest("the request has no `inputs`")
    parameters = parameters_at(top, "the request")
    inputs, outputs = _entries(top, "input"), _entries(top, "output")
    _refuse_repeated_names(document, parameters, [*inputs, *outputs])
    rowless = _check_inputs(inputs, binary_bytes)
    return InferHead(
        model.model_name,
        model.model_version,
        _request_id(top),
        _timeout_us(parameters),
        _regions([*inputs, *outputs]),
        tuple(entry.name for entry in inputs if _datatype(entry) is Datatype.BYTES),
        rowless,
        _sequence(parameters),
        len(text),
        tuple(output.name for output in outputs if _wants_classes(output)),
    )


# Requests with binary tensors repeat the same JSON.
_read_repeated_head = lru_cache(CACHED_HEADS)(_read_head)


def parsed_bytes(call: HttpCall) -> int:
    """Maximum bytes that `decode` reads: the JSON, or a decompressed body. Binary tensors are not copied."""
    if _encoding(call) not in NOT_ENCODED:
        return len(call.body) * _MAX_INFLATION
    length = header_length_of(call.header(HEADER_LENGTH))
    return len(call.body) if length is None else length


def decode(call: HttpCall, model_name: str, max_body_bytes: int) -> DecodedRequest:
    """The request with its tensors. max_body_bytes: after decompression. Raises InvalidRequest, RegionNotFound."""
    body = inflate(call.body, _encoding(call), max_body_bytes)
    return decode_infer_body(body, header_length_of(call.header(HEADER_LENGTH)), model_name)


def _encoding(call: HttpCall) -> str:
    return call.header("content-encoding") or ""


def encode(response: InferResponse, ask: DecodedRequest, call: HttpCall) -> HttpAnswer:
    """The response as the call accepts it. Raises InvalidRequest for a datatype that JSON cannot represent."""
    return encode_infer_response(response, ask, accepted_encoding(call.header("accept-encoding") or ""))


def encode_error(error: InferenceError) -> HttpAnswer:
    """{"error": text} with its status, and retry-after if waiting helps."""
    answer, seconds = encode_text(codes_of(error).http, error.message), http_retry_after(error)
    return answer if seconds is None else replace(answer, headers=(*answer.headers, (b"retry-after", b"%d" % seconds)))


def encode_text(status: int, text: str) -> HttpAnswer:
    """The form of every error over HTTP."""
    return HttpAnswer(status, (JSON_TYPE,), msgspec.json.encode({"error": text}))


def with_sequence(call: HttpCall, sequence: int | str) -> HttpCall:
    """The inference, decompressed, with this sequence ID; unchanged for 0 and "", which mean no sequence."""
    if not sequence:
        return call
    body = inflate(call.body, _encoding(call), _MAX_INFLATED_BYTES)
    length = header_length_of(call.header(HEADER_LENGTH))
    members = _OBJECT.decode(body[:length])
    parameters = _OBJECT.decode(members["parameters"]) | {"sequence_id": msgspec.Raw(msgspec.json.encode(sequence))}
    text = msgspec.json.encode(members | {"parameters": parameters})
    added = () if length is None else ((HEADER_LENGTH, str(len(text))),)
    call = call.with_headers(added, dropped=("content-encoding", HEADER_LENGTH))
    return replace(call, body=text if length is None else text + body[length:])


def read_generate_head(body: bytes, model: InferHead, max_depth: int) -> InferHead:
    """The head of a generate call: the model's inputs and parameters by name, and `id`.

    `timeout` is a model parameter there, as in Triton. Raises InvalidRequest for invalid or too deep JSON (100,000
    nested arrays crash Triton 2.51), and for duplicate names.
    """
    document = read_document(body, max_depth)
    _refuse_repeats(document)
    request_id = document.members.get("id")
    return InferHead(model.model_name, model.model_version, "" if request_id is None else _id_of(request_id))


def check_settings_body(body: bytes, max_depth: int) -> None:
    """Checks a change of trace or log settings. Raises InvalidRequest, and NotSupported for a file."""
    document = read_document(body, max_depth)
    _refuse_repeats(document)
    for name in document.members:
        refuse_file_setting(name)


def check_repository_body(body: bytes, max_depth: int) -> None:
    """Checks the JSON of a load, unload or index request. Raises InvalidRequest."""
    if not body:
        return
    document = read_document(body, max_depth)
    parameters = parameters_at(document.members, "the request")
    _refuse_repeated_names(document, parameters, [])


def _entries(top: Members, kind: str) -> list[_TensorEntry]:
    """inputs[] or outputs[]. Raises InvalidRequest for duplicate names."""
    entries = [
        _entry(members, f"{kind}s[{index}]", kind)
        for index, members in enumerate(objects_at(top, f"{kind}s", limit=MAX_TENSORS))
    ]
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise InvalidRequest(f"{entry.where} is given twice")
        seen.add(entry.name)
    return entries


def _entry(members: Members, where: str, kind: str) -> _TensorEntry:
    name = decode_json(_STRING, _required(members, "name", where), f"{where}: name")
    named = f"{kind} {quoted(name)}"
    return _TensorEntry(named, name, members, parameters_at(members, named))


def _required(members: Members, name: str, where: str) -> msgspec.Raw:
    found = members.get(name)
    if found is None:
        raise InvalidRequest(f"{where} has no `{name}`")
    return found


def _refuse_repeated_names(
    document: Document, parameters: Mapping[str, Parameter], entries: list[_TensorEntry]
) -> None:
    """Rejects duplicate member names: the engine reads the first, other parsers the last."""
    read = len(document.members) + len(parameters)
    opened = {"parameters", "inputs", "outputs"} if entries else {"parameters"}
    unread = [value for name, value in document.members.items() if name not in opened]
    for entry in entries:
        read += len(entry.members) + len(entry.parameters)
        unread += [value for name, value in entry.members.items() if name != "parameters"]
    if read + count_names(unread) != document.names:
        raise InvalidRequest(_REPEATED)


def _check_inputs(inputs: list[_TensorEntry], binary_bytes: int) -> str:
    """Checks shapes, and sizes against the JSON and the binary data. Returns the name of a rowless input, or ""."""
    left, rowless = binary_bytes, ""
    for entry in inputs:
        datatype, (rows, elements) = _datatype(entry), _counts(entry)
        if not rows:
            rowless = entry.name
        size = entry.parameters.get("binary_data_size")
        if size is not None:
            left -= _check_binary(entry, size, left, datatype, elements)
        elif "shared_memory_region" not in entry.parameters:
            _check_json(entry, elements)
    if left:
        raise InvalidRequest(
            f"{left} of {binary_bytes} bytes after the JSON belong to no input; "
            "the inputs' binary_data_size must add up"
        )
    return rowless


def _check_binary(entry: _TensorEntry, size: Parameter, left: int, datatype: Datatype, elements: int) -> int:
    """The number of bytes of this input."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise InvalidRequest(f"{entry.where}: binary_data_size is {size!r}; it must be a number of bytes")
    if size > left:
        raise InvalidRequest(f"{entry.where}: binary_data_size is {size}, but only {left} bytes are left in the body")
    needed = elements * (datatype.size_bytes or 4)
    if size < needed if datatype is Datatype.BYTES else size != needed:
        least = "at least " if datatype is Datatype.BYTES else ""
        raise InvalidRequest(
            f"{entry.where}: {datatype} of {elements} elements needs {least}{needed} bytes; binary_data_size is {size}"
        )
    return size


def _check_json(entry: _TensorEntry, elements: int) -> None:
    """Checks the elements against the commas: an array cannot have more, however nested."""
    found = entry.members.get("data")
    if found is None:
        raise InvalidRequest(f"{entry.where} has neither `data` nor a binary_data_size")
    most = bytes(found).count(b",") + 1
    if elements > most:
        raise InvalidRequest(f"{entry.where}: its shape asks for {elements} elements; its data holds {most} at most")


def _regions(entries: list[_TensorEntry]) -> tuple[RegionUse, ...]:
    return tuple(_region(entry.parameters) for entry in entries if "shared_memory_region" in entry.parameters)


def _region(parameters: Mapping[str, Parameter]) -> RegionUse:
    """Raises InvalidRequest for a member of the wrong type."""
    name, size = parameters["shared_memory_region"], parameters.get("shared_memory_byte_size")
    offset = parameters.get("shared_memory_offset", 0)
    if not isinstance(name, str):
        raise InvalidRequest(f"shared_memory_region is {name!r}; it must be a region's name")
    if type(offset) is not int or type(size) not in (int, NoneType):
        raise InvalidRequest(f"region {quoted(name)}: shared_memory_offset and …_byte_size must be numbers of bytes")
    return RegionUse(name, offset, size if isinstance(size, int) else None)


def _datatype(entry: _TensorEntry) -> Datatype:
    name = decode_json(_STRING, _required(entry.members, "datatype", entry.where), f"{entry.where}: datatype")
    try:
        return Datatype(name)
    except ValueError as error:
        raise InvalidRequest(f"{entry.where}: {quoted(name)} is no datatype of KServe v2") from error


def _counts(entry: _TensorEntry) -> tuple[int, int]:
    """The first dimension, and the product of all dimensions."""
    text = bytes(_required(entry.members, "shape", entry.where))
    if len(text) > _MAX_DIGITS_OF_SHAPE:
        raise InvalidRequest(f"{entry.where}: its shape is {len(text)} characters long (limit {_MAX_DIGITS_OF_SHAPE})")
    shape = decode_json(_SHAPE, text, f"{entry.where}: shape")
    if not shape or len(shape) > MAX_RANK:
        raise InvalidRequest(f"{entry.where}: its shape has {len(shape)} dimensions; 1 to {MAX_RANK} can be")
    if min(shape) < 0:
        raise InvalidRequest(f"{entry.where}: its shape {quoted(str(shape))} has a negative dimension")
    # A dimension of 0 does not make the others harmless: the engine multiplies from the left.
    if math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        raise InvalidRequest(
            f"{entry.where}: its shape {quoted(str(shape))} asks for more than {MAX_ELEMENTS} elements"
        )
    return shape[0], math.prod(shape)


def _refuse_repeats(document: Document) -> None:
    if len(document.members) + count_names(document.members.values()) != document.names:
        raise InvalidRequest(_REPEATED)


def _id_of(value: msgspec.Raw) -> str:
    return decode_json(_STRING, value, "id")


def _request_id(top: Members) -> str:
    return _id_of(top["id"]) if "id" in top else ""


def _timeout_us(parameters: Mapping[str, Parameter]) -> int | None:
    timeout = parameters.get("timeout")
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int) or timeout < 0:
        raise InvalidRequest("the parameter `timeout` must be a whole number of microseconds, 0 for none")
    return timeout


def _sequence(parameters: Mapping[str, Parameter]) -> int | str | None:
    """The sequence ID; None also for an invalid one, which the engine reports."""
    found = parameters.get("sequence_id")
    if isinstance(found, str) or (isinstance(found, int) and not isinstance(found, bool) and found >= 0):
        return found
    return None


def _wants_classes(output: _TensorEntry) -> bool:
    count = output.parameters.get("classification", 0)
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise InvalidRequest(f"{output.where}: classification must be a number of classes, 0 for none")
    return count > 0


class IndexRequestBody(msgspec.Struct):
    """Body of a repository index request. ready: only served models."""

    ready: bool = False


def wants_ready_only(call: HttpCall) -> bool:
    """Whether a request for the index asks for served models only."""
    try:
        return msgspec.json.decode(call.body, type=IndexRequestBody).ready
    except msgspec.DecodeError:  # the engine accepted it, so it asked for all
        return False


def with_index(answer: HttpAnswer, change: Callable[[list[ModelState]], list[ModelState]]) -> HttpAnswer:
    """The engine's index with changed rows."""
    rows = change(msgspec.json.decode(answer.body, type=list[ModelState]))
    return replace(answer, body=msgspec.json.encode([index_row(row) for row in rows]))


def index_row(row: ModelState) -> dict[str, str]:
    """As Triton writes it: without empty members, except the name."""
    return {key: value for key, value in asdict(row).items() if value or key == "name"}


def not_ready(error: InferenceError) -> HttpAnswer:
    """Why a model is not ready: 400 for a refused one, as Triton answers for a model that failed to load."""
    if isinstance(error, ModelRefused):
        return encode_text(400, error.message)
    return encode_error(error)


def with_unmerged(answer: HttpAnswer, reason: str) -> HttpAnswer:
    """The model's config with the reason why the gateway does not merge its requests."""
    config = msgspec.json.decode(answer.body)
    config.setdefault("parameters", {})[UNMERGED] = {"string_value": reason}
    return replace(answer, body=msgspec.json.encode(config))


def without_traceback(answer: HttpAnswer) -> HttpAnswer:
    """An error without the traceback of a Python backend; other bodies unchanged."""
    try:
        text = msgspec.json.decode(answer.body, type=_ErrorText).error
    except (msgspec.DecodeError, ValueError):
        return answer
    shorter = errors.without_traceback(text)
    return answer if shorter == text else replace(answer, body=msgspec.json.encode({"error": shorter}))


class _ErrorText(msgspec.Struct):
    error: str
