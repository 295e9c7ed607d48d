"""A KServe v2 REST client with binary tensors, used by `penstock models check`."""

import http
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar
from urllib.parse import quote

import msgspec

from penstock.engines.call_options import CallTimeouts
from penstock.engines.triton.http_client import TritonHttpClient, parse_engine_url
from penstock.protocol.call import HttpAnswer, HttpCall, HttpHeaders
from penstock.protocol.engine import ModelMetadata, TensorSpec
from penstock.protocol.errors import EngineFailed, InferenceError, InvalidRequest, ModelNotFound, ModelNotReady
from penstock.protocol.inference import Datatype, InferRequest, InferResponse, Tensor

T = TypeVar("T")
_HEADER_LENGTH = b"inference-header-content-length"
_ERROR_BY_STATUS: dict[int, type[InferenceError]] = {400: InvalidRequest, 404: ModelNotFound, 503: ModelNotReady}


class _OutputTensor(msgspec.Struct, frozen=True):
    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    parameters: dict[str, bool | int | float | str] = {}


class _InferenceBody(msgspec.Struct, frozen=True):
    model_name: str
    outputs: tuple[_OutputTensor, ...]
    model_version: str = ""
    id: str = ""


class _Spec(msgspec.Struct, frozen=True):
    name: str
    datatype: Datatype
    shape: tuple[int, ...]

    def noun(self) -> TensorSpec:
        return TensorSpec(self.name, self.datatype, self.shape)


class _Metadata(msgspec.Struct, frozen=True):
    name: str
    inputs: tuple[_Spec, ...]
    outputs: tuple[_Spec, ...]
    versions: tuple[str, ...] = ()
    platform: str = ""


class _ServerMetadata(msgspec.Struct, frozen=True):
    name: str
    version: str


class _ErrorBody(msgspec.Struct, frozen=True):
    error: str


_INFERENCE_BODY = msgspec.json.Decoder(_InferenceBody)
_METADATA = msgspec.json.Decoder(_Metadata)
_SERVER_METADATA = msgspec.json.Decoder(_ServerMetadata)
_ERROR_BODY = msgspec.json.Decoder(_ErrorBody)


class RestClient:
    """Client of one server. Create it inside the running loop. Raises only InferenceError and its subclasses."""

    def __init__(self, url: str, *, timeouts: CallTimeouts | None = None, headers: HttpHeaders = ()) -> None:
        """headers: sent with every call; names in lower case."""
        self._headers = headers
        self._http = TritonHttpClient(parse_engine_url(url), max_connections=1, timeouts=timeouts or CallTimeouts())

    async def aclose(self) -> None:
        await self._http.aclose()

    async def server_name(self) -> str:
        """The server's name and version."""
        found = _decoded(_SERVER_METADATA, (await self._ask(HttpCall("GET", b"/v2", (), b""))).body)
        return f"{found.name} {found.version}"

    async def model_metadata(self, model_name: str) -> ModelMetadata:
        """Shapes include the batch dimension; -1 for variable dimensions."""
        answer = await self._ask(HttpCall("GET", _target(model_name, ""), (), b""))
        found = _decoded(_METADATA, answer.body)
        inputs, outputs = (tuple(spec.noun() for spec in specs) for specs in (found.inputs, found.outputs))
        return ModelMetadata(found.name, found.versions, found.platform, inputs, outputs)

    async def infer(self, request: InferRequest) -> InferResponse:
        """Requests all outputs. Respects request.deadline."""
        return decode_answer(await self._ask(encode_request(request), deadline=request.deadline))

    async def _ask(self, call: HttpCall, *, deadline: float | None = None) -> HttpAnswer:
        call = replace(call, headers=(*call.headers, *self._headers))
        answer = await self._http.relay(call, deadline=deadline)
        if answer.status == http.HTTPStatus.OK:
            return answer
        try:
            text = _ERROR_BODY.decode(answer.body).error
        except msgspec.DecodeError:
            text = f"HTTP {answer.status}, without the words of an inference server"
        raise _ERROR_BY_STATUS.get(answer.status, EngineFailed)(text)


def encode_request(request: InferRequest) -> HttpCall:
    """The HTTP call: JSON that describes the inputs, then their bytes. Requests binary outputs."""
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype.value,
            "shape": tensor.shape,
            "parameters": {"binary_data_size": tensor.data.nbytes},
        }
        for tensor in request.inputs
    ]
    head = msgspec.json.encode({"inputs": inputs, "parameters": {"binary_data_output": True}})
    body = b"".join((head, *(tensor.data for tensor in request.inputs)))
    headers = ((b"content-type", b"application/octet-stream"), (_HEADER_LENGTH, b"%d" % len(head)))
    return HttpCall("POST", _target(request.model_name, request.model_version) + b"/infer", headers, body)


def decode_answer(answer: HttpAnswer) -> InferResponse:
    """Raises EngineFailed if the binary data does not match the JSON header."""
    length = dict(answer.headers).get(_HEADER_LENGTH, b"")
    head_bytes = int(length) if length.isdigit() else len(answer.body)
    found = _decoded(_INFERENCE_BODY, answer.body[:head_bytes])
    outputs = tuple(_tensors(found.outputs, memoryview(answer.body)[head_bytes:]))
    return InferResponse(found.model_name, found.model_version, outputs, found.id)


def _tensors(outputs: tuple[_OutputTensor, ...], data: memoryview) -> Iterator[Tensor]:
    begin = 0
    for output in outputs:
        size_bytes = output.parameters.get("binary_data_size")
        if not isinstance(size_bytes, int) or size_bytes < 0:
            raise EngineFailed(f"output {output.name!r} came without its bytes")
        if begin + size_bytes > data.nbytes:
            left = data.nbytes - begin
            raise EngineFailed(f"the answer is truncated: {output.name!r} has {size_bytes} bytes, {left} came")
        yield Tensor(output.name, output.datatype, output.shape, data[begin : begin + size_bytes])
        begin += size_bytes
    if begin != data.nbytes:
        raise EngineFailed(f"{data.nbytes - begin} bytes of the answer belong to no output")


def _target(model_name: str, model_version: str) -> bytes:
    version = f"/versions/{quote(model_version, safe='')}" if model_version else ""
    return f"/v2/models/{quote(model_name, safe='')}{version}".encode()


def _decoded(decoder: "msgspec.json.Decoder[T]", body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise EngineFailed(f"the answer is not KServe v2's: {error}") from error
