"""The generate extension: a model's inputs by their names in JSON, its outputs likewise, one element bare."""

import json
from collections.abc import Mapping, Sequence

import msgspec
from tritonclient.grpc import model_config_pb2

from server.backends.config_pbtxt import config_from_proto
from server.backends.wire.asks import InferAsk, unreadable
from server.backends.wire.http_response import JSON_TYPE
from server.backends.wire.json_tensors import tensor_data, tensor_text
from server.core.errors import InvalidRequest
from server.core.infer import InferResponse
from server.core.model import ModelConfig
from server.core.relay import HttpAnswer
from server.core.tensor import Tensor

EVENTS_TYPE = (b"content-type", b"text/event-stream; charset=utf-8")
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STRING = msgspec.json.Decoder(str)
_ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])
_NESTED = "parameters"


def read_generate(body: bytes, proto: model_config_pb2.ModelConfig) -> InferAsk:
    """What the body asks of the model with this config: members that are inputs, all others parameters.

    Raises InvalidRequest, in Triton's words.
    """
    members = _object(body, "failed to parse the request JSON buffer")
    config = config_from_proto(proto)
    inputs: dict[str, Tensor] = {}
    request_id = ""
    for name, value in members.items():
        if name == "id":
            request_id = _text(value)
        elif name == _NESTED:
            nested = _object(bytes(value), f"Expected JSON object for keyword: '{_NESTED}'")
            _take(nested, config, inputs, where=f"Converting keyword: '{_NESTED}': ")
        else:
            _take({name: value}, config, inputs, where="")
    return InferAsk(request_id, tuple(inputs.values()), ())


def generated(response: InferResponse) -> bytes:
    """The outputs as JSON, names sorted; one element stands without brackets. Raises InvalidRequest for FP16."""
    told: dict[str, msgspec.Raw | str] = {tensor.name: _value(tensor) for tensor in response.outputs}
    told |= {"model_name": response.model_name, "model_version": response.model_version}
    if response.id:
        told["id"] = response.id
    return msgspec.json.encode(dict(sorted(told.items())))


def as_answer(text: bytes, *, status: int, is_stream: bool) -> HttpAnswer:
    """The JSON text, or the one event of a stream that holds it."""
    if is_stream:
        return HttpAnswer(status, (EVENTS_TYPE,), b"data: %s\n\n" % text)
    return HttpAnswer(status, (JSON_TYPE,), text)


def _object(text: bytes, wrong: str) -> dict[str, msgspec.Raw]:
    try:
        return _MEMBERS.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        if b"NaN" in text or b"Infinity" in text:
            return _object_with_odd_numbers(text, wrong)
        raise InvalidRequest(f"{wrong}: {error}") from error


def _object_with_odd_numbers(text: bytes, wrong: str) -> dict[str, msgspec.Raw]:
    """NaN and infinities, which Triton takes and the quick parser does not."""
    try:
        members: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{wrong}: {error}") from error
    if not isinstance(members, dict):
        raise InvalidRequest(f"{wrong}: it is no object")
    return {str(name): msgspec.Raw(json.dumps(value).encode()) for name, value in members.items()}


def _text(value: msgspec.Raw) -> str:
    try:
        return _STRING.decode(value)
    except (msgspec.DecodeError, ValueError) as error:
        raise unreadable("id", "attempt to access JSON non-string as string") from error


def _take(members: Mapping[str, msgspec.Raw], config: ModelConfig, inputs: dict[str, Tensor], *, where: str) -> None:
    """Adds the members that are inputs; checks that the others could be parameters."""
    known = {spec.name: spec for spec in config.inputs}
    for name, value in members.items():
        text = bytes(value)
        if name not in known:
            if text[:1] in b"[{n":
                raise InvalidRequest(
                    f"{where}parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'."
                )
            continue
        if name in inputs:
            raise InvalidRequest(f"{where}[request id: <id_unknown>] input '{name}' already exists in request")
        spec = known[name]
        data = text if text[:1] == b"[" else b"[" + text + b"]"
        shape = _shape([-1, *spec.shape] if config.max_batch_size else spec.shape, _length(data))
        if shape is None:
            raise InvalidRequest(f"{where}The schema can not convert input '{name}' to tensor with proper shape")
        count = Tensor(name, spec.datatype, shape, memoryview(b"")).element_count
        content = tensor_data(data, spec.datatype, name=name, element_count=count)
        inputs[name] = Tensor(name, spec.datatype, shape, content)


def _length(array: bytes) -> int:
    """How many members it has, nested ones counted once."""
    try:
        return len(_ELEMENTS.decode(array))
    except (msgspec.DecodeError, ValueError):
        return array.count(b",") + 1  # NaN and infinities, in a flat list


def _shape(dims: Sequence[int], elements: int) -> tuple[int, ...] | None:
    """The last dimension that may vary takes what the others leave; None where that does not come out even."""
    varying = [index for index, size in enumerate(dims) if size < 0]
    fixed = 1
    for size in dims:
        fixed *= size if size >= 0 else 1
    if not fixed or elements % fixed or (not varying and elements != fixed):
        return None
    shape = [1 if size < 0 else size for size in dims]
    if varying:
        shape[varying[-1]] = elements // fixed
    return tuple(shape)


def _value(tensor: Tensor) -> msgspec.Raw:
    text = tensor_text(tensor)
    return msgspec.Raw(text[1:-1] if tensor.element_count == 1 else text)
