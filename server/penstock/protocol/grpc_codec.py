"""Reads the gateway's part of a serialised gRPC request without decoding tensors, and encodes its own responses."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from tritonclient.grpc import service_pb2

from penstock.protocol import errors
from penstock.protocol.call import GrpcAnswer, GrpcCall, InferHead, RegionUse
from penstock.protocol.decoded_request import DecodedRequest
from penstock.protocol.engine import UNMERGED, ModelState
from penstock.protocol.error_codes import codes_of, retry_after
from penstock.protocol.errors import InferenceError, InvalidRequest
from penstock.protocol.grpc_inference import (
    decode_infer_message,
    encode_response,
    index_message,
    parsed_request,
    serialised,
)
from penstock.protocol.inference import InferResponse
from penstock.protocol.protobuf import FIXED64, LENGTH, VARINT, WireReader, as_int64, read_varint
from penstock.protocol.request_checks import (
    CACHED_HEADS,
    MAX_CACHED_HEAD_BYTES,
    check_counts,
    check_shape,
    checked_name,
    refuse_file_setting,
)

MAX_SKIPPED_CONTENTS = 64
_RAW_CONTENTS = 7 << 3 | LENGTH
_INT64_PARAM, _STRING_PARAM, _UINT64_PARAM = 2, 3, 5
_KIND_OF_PARAMETER = {1: VARINT, _INT64_PARAM: VARINT, _STRING_PARAM: LENGTH, 4: FIXED64, _UINT64_PARAM: VARINT}
_REGION_KEY = "shared_memory_region"
_OFFSET_KEY, _SIZE_KEY = "shared_memory_offset", "shared_memory_byte_size"
_SHARED_PREFIX = "shared_memory_"

Span = tuple[int, int]
Entry = tuple[str, list[Span]]


def read_head(message: bytes) -> InferHead:
    """Head of a serialised ModelInferRequest. Raises InvalidRequest if malformed, or if a shape overflows.

    Triton computes a tensor's bytes modulo 2^64: [1, 2^62] of FP32 "fits" no bytes at all and crashes the model.
    """
    end = _end_of_head(message)
    return _read_head(message) if end is None else _read_repeated_head(message[:end])


def _end_of_head(message: bytes) -> int | None:
    """Where raw contents begin, if they follow a head that is short enough to cache; None otherwise."""
    position, stop, end, contents = 0, len(message), None, 0
    while position + 1 < stop and contents <= MAX_SKIPPED_CONTENTS:
        tag, size = message[position], message[position + 1]
        start = position + 2
        if size >= 0x80:
            try:
                size, start = read_varint(message, position + 1, stop)
            except InvalidRequest:
                return None
        if tag == _RAW_CONTENTS:
            contents += 1
            end = position if end is None else end
        elif end is not None or start + size > MAX_CACHED_HEAD_BYTES or tag & 7 != LENGTH or not 8 <= tag < 0x80:
            return None
        position = start + size
    return end if position == stop else None


def _read_head(message: bytes) -> InferHead:
    reader = WireReader(message)
    texts = {1: "", 2: "", 3: ""}
    parameters: list[Entry] = []
    classified: list[str] = []
    encoded: list[str] = []
    regions: list[RegionUse] = []
    input_count, outputs, rowless = 0, list[str](), ""
    for number, wire_type, start, end in reader.fields():
        if wire_type != LENGTH:
            continue
        if number in texts:
            texts[number] = reader.text(start, end)
        elif number == 4:
            parameters.append(_entry(reader, start, end))
        elif number == 5:
            name, is_bytes, has_rows = _scan_input(reader, start, end, regions)
            input_count += 1
            if is_bytes:
                encoded.append(name)
            rowless = rowless if has_rows else name
        elif number == 6:
            name, is_classified = _scan_output(reader, start, end, regions)
            outputs.append(name)
            if is_classified:
                classified.append(name)
    check_counts(input_count, outputs)
    given = dict(parameters)  # the last of duplicate keys counts
    timeout_us = _integer(reader, given.get("timeout", []))
    sequence = _sequence(reader, given["sequence_id"]) if "sequence_id" in given else None
    name = checked_name(texts[1])
    return InferHead(
        name,
        texts[2],
        texts[3],
        timeout_us,
        tuple(regions),
        tuple(encoded),
        rowless,
        sequence,
        classification_outputs=tuple(classified),
    )


# Repeated requests have equal bytes before the raw contents.
_read_repeated_head = lru_cache(CACHED_HEADS)(_read_head)


def parsed_bytes(call: GrpcCall) -> int:
    """Bytes that `decode` reads: the whole message, which protobuf copies."""
    return len(call.message)


def decode(call: GrpcCall, _: str, __: int) -> DecodedRequest:
    """The request with its tensors. Raises InvalidRequest, RegionNotFound, EngineFailed, with Triton's messages."""
    return decode_infer_message(parsed_request(service_pb2.ModelInferRequest, call.message))


def encode(response: InferResponse, _: DecodedRequest, __: GrpcCall) -> GrpcAnswer:
    """The response, with raw tensors."""
    return GrpcAnswer(0, encode_response(response))


def encode_error(error: InferenceError) -> GrpcAnswer:
    """The status code and its details, and retry-after in seconds if waiting helps."""
    seconds = retry_after(error)
    trailing = () if seconds is None else (("retry-after", f"{seconds:g}"),)
    return GrpcAnswer(codes_of(error).grpc, details=error.message, trailing_metadata=trailing)


def with_sequence(call: GrpcCall, sequence: int | str) -> GrpcCall:
    """The inference with this sequence ID: protobuf uses the last of duplicate parameters."""
    added = service_pb2.ModelInferRequest()
    if isinstance(sequence, str):
        added.parameters["sequence_id"].string_param = sequence
    else:
        added.parameters["sequence_id"].int64_param = sequence
    return replace(call, message=call.message + added.SerializeToString())


def read_model_name(message: bytes) -> str:
    """The model's name in field 1: ready, metadata, config, statistics. Raises InvalidRequest."""
    return _scan_repository_fields(message, name_field=1)


def read_repository_model_name(message: bytes) -> str:
    """The model's name in a load or unload request. Raises InvalidRequest."""
    return _scan_repository_fields(message, name_field=2)


def changes_settings(message: bytes) -> bool:
    """Whether a TraceSetting or LogSettings request changes settings, or only reads them."""
    try:
        return any(number == 1 for number, *_ in WireReader(message).fields())
    except InvalidRequest:
        return False  # reported by read_settings_model_name


def read_settings_model_name(message: bytes) -> str:
    """The model's name in a TraceSetting or LogSettings request, or "". Raises InvalidRequest, NotSupported."""
    reader = WireReader(message)
    name = ""
    for number, wire_type, start, end in reader.fields():
        if wire_type != LENGTH:
            continue
        if number == 2:
            name = reader.text(start, end)
        elif number == 1:
            refuse_file_setting(_entry(reader, start, end)[0])
    return checked_name(name)


def unblocked_metadata(answer: bytes, blocked: frozenset[str]) -> bytes:
    """The engine's ServerMetadataResponse without the blocked extensions."""
    metadata = service_pb2.ServerMetadataResponse.FromString(answer)
    extensions = [name for name in metadata.extensions if name not in blocked]
    del metadata.extensions[:]
    metadata.extensions.extend(extensions)
    serialised: bytes = metadata.SerializeToString()
    return serialised


def _scan_repository_fields(message: bytes, *, name_field: int) -> str:
    """The string field of this number; the last one, if repeated, as in protobuf."""
    reader = WireReader(message)
    name = ""
    for number, wire_type, start, end in reader.fields():
        if wire_type == LENGTH and number == name_field:
            name = reader.text(start, end)
    return checked_name(name)


def _entry(reader: WireReader, start: int, end: int) -> tuple[str, list[Span]]:
    """Key and value of a map<string, message> entry; the value may be in several parts, which are merged."""
    key = ""
    value: list[Span] = []
    for number, wire_type, first, last in reader.fields(start, end):
        if number == 1 and wire_type == LENGTH:
            key = reader.text(first, last)
        elif number == 2 and wire_type == LENGTH:
            value.append((first, last))
    return key, value


def _integer(reader: WireReader, value: list[Span]) -> int | None:
    """An InferParameter's integer; None if it has another type, which the engine reports."""
    held: int | None = None
    for start, end in value:
        for number, wire_type, bits, _ in reader.fields(start, end):
            if wire_type == _KIND_OF_PARAMETER.get(number):
                held = {_INT64_PARAM: as_int64(bits), _UINT64_PARAM: bits}.get(number)
    return held


def _text(reader: WireReader, value: list[Span]) -> str | None:
    """An InferParameter's string; None if it has another type."""
    held: str | None = None
    for start, end in value:
        for number, wire_type, first, last in reader.fields(start, end):
            if wire_type == _KIND_OF_PARAMETER.get(number):
                held = reader.text(first, last) if number == _STRING_PARAM else None
    return held


def _sequence(reader: WireReader, value: list[Span]) -> int | str:
    """The sequence ID. Raises InvalidRequest for other types, which programs may read differently."""
    number, text = _integer(reader, value), _text(reader, value)
    if number is not None:
        return number
    if text is None:
        raise InvalidRequest("the parameter `sequence_id` must be an int64, a uint64 or a string")
    return text


def _note_region(reader: WireReader, entries: list[Entry], regions: list[RegionUse]) -> None:
    """entries: the tensor's parameters about shared memory; the last of duplicate keys counts."""
    values = dict(entries)
    name = _text(reader, values[_REGION_KEY]) if _REGION_KEY in values else None
    if name is not None:
        offset = _integer(reader, values[_OFFSET_KEY]) if _OFFSET_KEY in values else None
        size = _integer(reader, values[_SIZE_KEY]) if _SIZE_KEY in values else None
        regions.append(RegionUse(name, offset or 0, size))


def _scan_input(reader: WireReader, start: int, end: int, regions: list[RegionUse]) -> tuple[str, bool, bool]:
    """Name, whether the datatype is BYTES, and whether it has rows. Raises InvalidRequest if its shape overflows."""
    name, datatype = "", ""
    shape: list[int] = []
    shared: list[Entry] = []
    for number, wire_type, value, stop in reader.fields(start, end):
        if number == 1 and wire_type == LENGTH:
            name = reader.text(value, stop)
        elif number == 2 and wire_type == LENGTH:
            datatype = reader.text(value, stop)
        elif number == 3 and wire_type == VARINT:
            shape.append(as_int64(value))
        elif number == 3 and wire_type == LENGTH:
            shape.extend(reader.packed(value, stop))
        elif number == 4 and wire_type == LENGTH:
            entry = _entry(reader, value, stop)
            if entry[0].startswith(_SHARED_PREFIX):
                shared.append(entry)
    if shared:
        _note_region(reader, shared, regions)
    check_shape(name, shape)
    return name, datatype == "BYTES", shape[:1] != [0]


def _scan_output(reader: WireReader, start: int, end: int, regions: list[RegionUse]) -> tuple[str, bool]:
    name, is_classified = "", False
    shared: list[Entry] = []
    for number, wire_type, first, last in reader.fields(start, end):
        if number == 1 and wire_type == LENGTH:
            name = reader.text(first, last)
        elif number == 2 and wire_type == LENGTH:
            entry = _entry(reader, first, last)
            is_classified |= entry[0] == "classification"
            if entry[0].startswith(_SHARED_PREFIX):
                shared.append(entry)
    if shared:
        _note_region(reader, shared, regions)
    return name, is_classified


def wants_ready_only(call: GrpcCall) -> bool:
    """Whether a request for the index asks for served models only."""
    return bool(service_pb2.RepositoryIndexRequest.FromString(call.message).ready)


def with_index(answer: GrpcAnswer, change: Callable[[list[ModelState]], list[ModelState]]) -> GrpcAnswer:
    """The engine's index with changed rows."""
    index = service_pb2.RepositoryIndexResponse.FromString(answer.message)
    rows = change([ModelState(row.name, row.version, row.state, row.reason) for row in index.models])
    return replace(answer, message=serialised(index_message(rows)))


def not_ready(_: InferenceError) -> GrpcAnswer:
    """Says that a model is not ready."""
    return GrpcAnswer(0, serialised(service_pb2.ModelReadyResponse(ready=False)))


def with_unmerged(answer: GrpcAnswer, reason: str) -> GrpcAnswer:
    """The model's config with the reason why the gateway does not merge its requests."""
    response = service_pb2.ModelConfigResponse.FromString(answer.message)
    response.config.parameters[UNMERGED].string_value = reason
    return replace(answer, message=serialised(response))


def without_traceback(answer: GrpcAnswer) -> GrpcAnswer:
    """An error without the traceback of a Python backend."""
    return replace(answer, details=errors.without_traceback(answer.details))
