"""Triton's REST paths in the embedded engine, including the generate extension."""

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from tritonclient.grpc import model_config_pb2

from penstock import VERSION
from penstock.engines.concurrency import in_thread
from penstock.engines.config_pbtxt import config_from_proto
from penstock.engines.embedded.inference import (
    CONFIG_PARAMETER,
    EXTENSIONS,
    NAME,
    NO_LOG_SETTINGS,
    NO_TRACE_SETTINGS,
    ServedModels,
    infer,
    refuse_load_parameter,
    refuse_repository,
    response_bytes,
)
from penstock.engines.model_io import raw_tensor
from penstock.protocol.call import HttpAnswer, HttpCall
from penstock.protocol.decoded_request import DecodedRequest, parse_error
from penstock.protocol.engine import ModelConfig
from penstock.protocol.errors import EngineFailed, InvalidRequest, ModelNotReady, NotSupported
from penstock.protocol.grpc_inference import metadata_message
from penstock.protocol.http_codec import IndexRequestBody, decode, encode, encode_text, index_row, parsed_bytes
from penstock.protocol.http_inference import JSON_TYPE
from penstock.protocol.inference import InferResponse, Parameter, Tensor
from penstock.protocol.json_tensors import tensor_data, tensor_text

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json]"


def json_of_message(message: Message) -> dict[str, Json]:
    """The message's fields as JSON in declared order. Protobuf's JSON writes 64-bit integers as strings."""
    fields: Sequence[FieldDescriptor] = message.DESCRIPTOR.fields  # type: ignore[assignment]  # upb's, of the same kind
    return {
        field.name: _field_value(field, getattr(message, field.name))
        for field in fields
        if not field.has_presence or message.HasField(field.name)
    }


def _field_value(field: FieldDescriptor, value: object) -> Json:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        return {str(key): _scalar_value(inner, item) for key, item in sorted(value.items())}  # type: ignore[attr-defined]
    if field.is_repeated:
        return [_scalar_value(field, item) for item in value]  # type: ignore[attr-defined]
    return _scalar_value(field, value)


def _scalar_value(field: FieldDescriptor, value: object) -> Json:
    if isinstance(value, Message):
        return json_of_message(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name  # type: ignore[index]
    if isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{field.full_name} holds a {type(value).__name__}, which JSON has no form for")


EVENTS_TYPE = (b"content-type", b"text/event-stream; charset=utf-8")
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STRING = msgspec.json.Decoder(str)
_ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])
_NESTED = "parameters"


def read_generate(body: bytes, proto: model_config_pb2.ModelConfig) -> DecodedRequest:
    """The request in a generate body: members that are inputs, others as parameters. Raises InvalidRequest."""
    members = _json_object(body, "failed to parse the request JSON buffer")
    config = config_from_proto(proto)
    inputs: dict[str, Tensor] = {}
    request_id = ""
    for name, value in members.items():
        if name == "id":
            request_id = _text(value)
        elif name == _NESTED:
            nested = _json_object(bytes(value), f"Expected JSON object for keyword: '{_NESTED}'")
            _add_inputs(nested, config, inputs, where=f"Converting keyword: '{_NESTED}': ")
        else:
            _add_inputs({name: value}, config, inputs, where="")
    return DecodedRequest(request_id, tuple(inputs.values()), ())


def generate_response(response: InferResponse) -> bytes:
    """The outputs as JSON, sorted by name; single elements without brackets. Raises InvalidRequest for FP16."""
    members: dict[str, msgspec.Raw | str] = {tensor.name: _json_value(tensor) for tensor in response.outputs}
    members |= {"model_name": response.model_name, "model_version": response.model_version}
    if response.id:
        members["id"] = response.id
    return msgspec.json.encode(dict(sorted(members.items())))


def as_answer(text: bytes, *, status: int, is_stream: bool) -> HttpAnswer:
    """The JSON text, or a stream with it as single event."""
    if is_stream:
        return HttpAnswer(status, (EVENTS_TYPE,), b"data: %s\n\n" % text)
    return HttpAnswer(status, (JSON_TYPE,), text)


def _json_object(text: bytes, wrong: str) -> dict[str, msgspec.Raw]:
    try:
        return _MEMBERS.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        if b"NaN" in text or b"Infinity" in text:
            return _json_object_with_nan(text, wrong)
        raise InvalidRequest(f"{wrong}: {error}") from error


def _json_object_with_nan(text: bytes, wrong: str) -> dict[str, msgspec.Raw]:
    """Accepts NaN and infinities as Triton does; the fast parser rejects them."""
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
        raise parse_error("id", "attempt to access JSON non-string as string") from error


def _add_inputs(
    members: Mapping[str, msgspec.Raw], config: ModelConfig, inputs: dict[str, Tensor], *, where: str
) -> None:
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
        shape = _shape([-1, *spec.shape] if config.max_batch_size else spec.shape, _element_count(data))
        if shape is None:
            raise InvalidRequest(f"{where}The schema can not convert input '{name}' to tensor with proper shape")
        count = Tensor(name, spec.datatype, shape, memoryview(b"")).element_count
        content = tensor_data(data, spec.datatype, name=name, element_count=count)
        inputs[name] = Tensor(name, spec.datatype, shape, content)


def _element_count(array: bytes) -> int:
    """Number of elements; nested lists count as one."""
    try:
        return len(_ELEMENTS.decode(array))
    except (msgspec.DecodeError, ValueError):
        return array.count(b",") + 1  # NaN and infinities, in a flat list


def _shape(dims: Sequence[int], elements: int) -> tuple[int, ...] | None:
    """Solves for the last variable dimension; None if the element count is not divisible."""
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


def _json_value(tensor: Tensor) -> msgspec.Raw:
    text = tensor_text(tensor)
    return msgspec.Raw(text[1:-1] if tensor.element_count == 1 else text)


T = TypeVar("T")

_MODEL = rb"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[0-9]+))?"
_REPOSITORY = rb"/v2/repository(?:/(?P<repository>[^/]+))?"


class _Load(msgspec.Struct):
    parameters: dict[str, Parameter] = {}


@dataclass(frozen=True, slots=True)
class RoutedCall:
    """A call with the values from its path; empty if absent."""

    call: HttpCall
    deadline: float | None
    model: str = ""
    version: str = ""
    repository: str = ""

    def header(self, name: bytes) -> bytes | None:
        """The first header of that name, in lower case."""
        return next((value for known, value in self.call.headers if known == name), None)


class HttpRoutes:
    """The engine's REST routes. Raises InferenceError."""

    def __init__(self, engine: ServedModels, max_body_bytes: int) -> None:
        self._engine = engine
        self._max_body_bytes = max_body_bytes

    async def answer(self, call: HttpCall, deadline: float | None) -> HttpAnswer:
        """Dispatches by path; 404 and 405 as Triton."""
        path = call.target.partition(b"?")[0]
        is_somewhere = False
        for method, pattern, handle in _ROUTES:
            found = pattern.fullmatch(path)
            if found is None:
                continue
            if call.method != method:
                is_somewhere = True
                continue
            texts = {name: text.decode("utf-8", "replace") for name, text in found.groupdict(b"").items()}
            return await handle(self, RoutedCall(call, deadline, **texts))
        return encode_text(405, "Method Not Allowed") if is_somewhere else encode_text(404, "Not Found")

    async def server(self, _: RoutedCall) -> HttpAnswer:
        return _json({"name": NAME, "version": VERSION, "extensions": EXTENSIONS})

    async def live(self, _: RoutedCall) -> HttpAnswer:
        return HttpAnswer(200, (JSON_TYPE,), b"")

    async def ready(self, _: RoutedCall) -> HttpAnswer:
        is_ready = await self._engine.ready()
        return HttpAnswer(200 if is_ready else 400, (JSON_TYPE,), b"")

    async def metadata(self, visit: RoutedCall) -> HttpAnswer:
        metadata = await self._engine.model_metadata(visit.model, visit.version)
        return _json(json_of_message(metadata_message(metadata)))

    async def model_ready(self, visit: RoutedCall) -> HttpAnswer:
        if await self._engine.ready(visit.model, visit.version):
            return HttpAnswer(200, (JSON_TYPE,), b"")
        return encode_text(400, "Model version not ready")

    async def config(self, visit: RoutedCall) -> HttpAnswer:
        config = self._engine.config_message(visit.model, visit.version)
        return _json(json_of_message(config))

    async def statistics(self, visit: RoutedCall) -> HttpAnswer:
        found = self._engine.statistics(visit.model, visit.version)
        return _json({"model_stats": [json_of_message(entry) for entry in found]})

    async def infer(self, visit: RoutedCall) -> HttpAnswer:
        config = self._engine.config_message(visit.model, visit.version)  # first: an unknown model matters more
        call, coding = visit.call, visit.call.header("content-encoding") or ""
        if coding != coding.lower():  # content codings have no case in HTTP; Triton knows those in lower case only
            call = call.with_headers((("content-encoding", coding.lower()),), dropped=("content-encoding",))
        ask = await in_thread(parsed_bytes(call), decode, call, visit.model, self._max_body_bytes)
        if ask.raw is not None:
            ask = replace(ask, inputs=(raw_tensor(ask.raw, config),))
        response = await infer(self._engine, ask, model=visit.model, version=visit.version, deadline=visit.deadline)
        return await in_thread(response_bytes(response), encode, response, ask, call)

    async def index(self, visit: RoutedCall) -> HttpAnswer:
        is_ready_only = _decoded_body(visit.call.body, IndexRequestBody).ready
        rows = await self._engine.repository_index()
        return _json([index_row(row) for row in rows if row.state == "READY" or not is_ready_only])

    async def load(self, visit: RoutedCall) -> HttpAnswer:
        refuse_repository(visit.repository)
        parameters = _decoded_body(visit.call.body, _Load).parameters
        for name in parameters:
            refuse_load_parameter(name)
        config = parameters.get(CONFIG_PARAMETER)
        if config is not None and not isinstance(config, str):
            raise InvalidRequest("the load parameter 'config' must be a string that holds the configuration as JSON")
        try:
            await self._engine.load(visit.model, config)
        except ModelNotReady as error:
            return encode_text(400, error.message)
        return HttpAnswer(200, (JSON_TYPE,), b"")

    async def unload(self, visit: RoutedCall) -> HttpAnswer:
        refuse_repository(visit.repository)
        await self._engine.unload(visit.model)
        return HttpAnswer(200, (JSON_TYPE,), b"")

    async def generate(self, visit: RoutedCall) -> HttpAnswer:
        return await self._generated(visit, is_stream=False)

    async def generate_stream(self, visit: RoutedCall) -> HttpAnswer:
        """A stream of one event, because models here answer only once."""
        return await self._generated(visit, is_stream=True)

    async def _generated(self, visit: RoutedCall, *, is_stream: bool) -> HttpAnswer:
        """Errors of the model have the response's form (JSON or event stream), with Triton's status 400."""
        config = self._engine.config_message(visit.model, visit.version)
        if (visit.header(b"content-encoding") or b"identity") != b"identity":
            raise InvalidRequest("Unsupported content-encoding, only 'identity' is supported.")
        body = visit.call.body
        ask = await in_thread(len(body), read_generate, body, config)
        try:
            response = await infer(self._engine, ask, model=visit.model, version=visit.version, deadline=visit.deadline)
        except EngineFailed as error:
            return as_answer(msgspec.json.encode({"error": error.message}), status=400, is_stream=is_stream)
        text = await in_thread(response_bytes(response), generate_response, response)
        return as_answer(text, status=200, is_stream=is_stream)

    async def trace_settings(self, _: RoutedCall) -> HttpAnswer:
        """Raises NotSupported."""
        raise NotSupported(NO_TRACE_SETTINGS)

    async def log_settings(self, _: RoutedCall) -> HttpAnswer:
        """Raises NotSupported."""
        raise NotSupported(NO_LOG_SETTINGS)


_ROUTES: tuple[tuple[str, re.Pattern[bytes], Callable[[HttpRoutes, RoutedCall], Awaitable[HttpAnswer]]], ...] = tuple(
    (method, re.compile(path), handle)
    for method, path, handle in (
        ("POST", _MODEL + rb"/infer", HttpRoutes.infer),
        ("GET", rb"/v2", HttpRoutes.server),
        ("GET", rb"/v2/health/live", HttpRoutes.live),
        ("GET", rb"/v2/health/ready", HttpRoutes.ready),
        ("GET", rb"/v2/models/stats", HttpRoutes.statistics),
        ("GET", _MODEL, HttpRoutes.metadata),
        ("GET", _MODEL + rb"/ready", HttpRoutes.model_ready),
        ("GET", _MODEL + rb"/config", HttpRoutes.config),
        ("GET", _MODEL + rb"/stats", HttpRoutes.statistics),
        ("POST", _REPOSITORY + rb"/index", HttpRoutes.index),
        ("POST", _REPOSITORY + rb"/models/(?P<model>[^/]+)/load", HttpRoutes.load),
        ("POST", _REPOSITORY + rb"/models/(?P<model>[^/]+)/unload", HttpRoutes.unload),
        ("POST", _MODEL + rb"/generate", HttpRoutes.generate),
        ("POST", _MODEL + rb"/generate_stream", HttpRoutes.generate_stream),
        ("GET", rb"/v2(?:/models/[^/]+)?/trace/setting", HttpRoutes.trace_settings),
        ("GET", rb"/v2/logging", HttpRoutes.log_settings),
        ("POST", rb"/v2(?:/models/[^/]+)?/trace/setting", HttpRoutes.trace_settings),
        ("POST", rb"/v2/logging", HttpRoutes.log_settings),
    )
)


def _json(content: object) -> HttpAnswer:
    return HttpAnswer(200, (JSON_TYPE,), msgspec.json.encode(content))


def _decoded_body(body: bytes, kind: type[T]) -> T:
    """The body as that type; defaults for an empty body. Raises InvalidRequest."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from error
