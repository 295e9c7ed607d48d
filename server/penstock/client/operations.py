"""Builds requests for the gateway and decodes responses. Sans-IO, shared by all transports."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict, TypeVar
from urllib.parse import quote, urlencode

from penstock.client.pictures import Color, ImageSource, encoded_picture
from penstock.client.results import Result, result_of_response
from penstock.protocol.engine import ModelMetadata, ModelState
from penstock.protocol.errors import EngineFailed, InvalidRequest
from penstock.protocol.http_body import HEADER_LENGTH
from penstock.protocol.inference import Array, Datatype, InferRequest, Tensor, tensor_from_numpy

if TYPE_CHECKING:  # msgspec is imported for the first response
    import msgspec

    from penstock.protocol.batch_reports import ModelBatchReport
    from penstock.protocol.image_answer import ImageAnswer
    from penstock.protocol.model_addition import ModelAdded

EXPLAIN_HEADER, TIMEOUT_HEADER, API_KEY_HEADER = "x-penstock-explain", "x-request-timeout-ms", "x-api-key"
INDEX_TIMEOUT_S, LOAD_TIMEOUT_S, ADD_TIMEOUT_S = 5.0, 120.0, 3600.0
MAX_JSON_BYTES = 64 << 20  # enough for a response with many masks
GRPC = "gRPC"
_OK = frozenset((200,))
_BINARY = "application/octet-stream"
_OTHERS = re.compile(r"[^A-Za-z0-9._-]+")
MAX_NAME = 64
T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class InferOptions(TypedDict, total=False):
    """Options of the inference on an image. The model's own settings are the defaults.

    conf: score threshold in [0, 1]. iou: IoU threshold of NMS in [0, 1]. classes: class ids or labels to return.
    max_detections: maximum number of detections. masks: encoding of masks; `none` omits them. color: channel order of
    arrays (height, width, 3) uint8: `bgr` as in OpenCV, the default, or `rgb`. version: model version; empty for the
    default. explain: whether the result explains how its batch was formed.
    """

    conf: float
    iou: float
    classes: Sequence[int | str]
    max_detections: int
    masks: Literal["rle", "polygon", "none"]
    color: Color
    version: str
    explain: bool


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A complete response. headers: names in lower case."""

    status: int
    phrase: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Operation(Generic[T_co]):
    """A request, and the decoder of its response.

    method: HTTP method, or GRPC. target: path and query. body: bytes, or a file to send. decode: raises ValueError if
    the response is not a gateway's. is_idempotent: whether it may be retried. max_wait_s: timeout instead of the
    client's.
    """

    method: str
    target: str
    decode: Callable[[HttpReply], T_co]
    body: bytes | Path = field(default=b"", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict)
    accepts: frozenset[int] = _OK
    is_idempotent: bool = True
    max_wait_s: float | None = None
    max_response_bytes: int = MAX_JSON_BYTES

    @property
    def names_model(self) -> bool:
        """Whether 404 means that there is no such model."""
        return "/models/" in self.target


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the gateway is ready. reason: why it is not; empty if it is."""

    is_ready: bool
    reason: str = ""

    def __bool__(self) -> bool:
        """Whether it is ready."""
        return self.is_ready


@dataclass(frozen=True, slots=True)
class EngineVersion:
    """The engine's name (`triton`, `penstock-embedded`, …) and version."""

    name: str
    version: str = ""


def infer_picture(model: str, source: ImageSource, options: InferOptions) -> Operation[Result]:
    """Inference on one image. Blocks while it reads the file or URL, or encodes the array. Raises InvalidRequest."""
    sent: dict[str, Any] = dict(options)
    picture = encoded_picture(source, sent.pop("color", "bgr"))
    operation = post_picture(model, picture, **sent)
    return Operation(
        operation.method,
        operation.target,
        lambda reply: result_of_response(operation.decode(reply), picture),
        operation.body,
        operation.headers,
    )


def post_picture(  # noqa: PLR0913 - each is a query parameter of the endpoint
    model: str,
    picture: bytes,
    *,
    conf: float | None = None,
    iou: float | None = None,
    classes: Sequence[int | str] | None = None,
    max_detections: int | None = None,
    masks: str | None = None,
    version: str = "",
    explain: bool = False,
    content_type: str = _BINARY,
) -> "Operation[ImageAnswer]":
    """Inference on an encoded image. Returns the decoded JSON response."""
    named = classes if classes is None or isinstance(classes, str) else ",".join(map(str, classes))
    given = {"conf": conf, "iou": iou, "classes": named, "max_detections": max_detections, "masks": masks}
    query = urlencode({key: value for key, value in given.items() if value is not None})
    headers = {"content-type": content_type} | ({EXPLAIN_HEADER: "1"} if explain else {})
    target = model_path(model, "image", version) + (f"?{query}" if query else "")
    return Operation("POST", target, _image_answer, picture, headers)


def infer_tensors(request: InferRequest) -> Operation[tuple[Tensor, ...]]:
    """Inference on tensors over HTTP. Inputs and outputs are sent as binary tensors."""
    inputs = [
        {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        | {"parameters": {"binary_data_size": tensor.data.nbytes}}
        for tensor in request.inputs
    ]
    document: dict[str, object] = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    if request.outputs:
        document["outputs"] = [{"name": name} for name in request.outputs]
    head = json.dumps(document).encode()
    body = b"".join((head, *(tensor.data for tensor in request.inputs)))
    headers = {"content-type": _BINARY, HEADER_LENGTH: str(len(head))}
    target = model_path(request.model_name, "infer", request.model_version)
    return Operation("POST", target, _tensors_of_reply, body, headers, max_response_bytes=1 << 62)


def infer_tensors_by_grpc(request: InferRequest) -> Operation[tuple[Tensor, ...]]:
    """Inference on tensors over gRPC. Raises InvalidRequest for a number that protobuf cannot represent."""
    from penstock.protocol.grpc_messages import decode_response, encode_request

    def read(reply: HttpReply) -> tuple[Tensor, ...]:
        return decode_response(reply.body, request, 0.0).outputs

    return Operation(GRPC, "/inference.GRPCInferenceService/ModelInfer", read, encode_request(request))


def tensor_request(
    model: str, inputs: Mapping[str, Array], *, outputs: Sequence[str] = (), version: str = ""
) -> InferRequest:
    """Raises InvalidRequest if there is no input, or if a dtype has no KServe v2 datatype."""
    if not inputs:
        raise InvalidRequest("no inputs: pass a dict with an array for each input of the model")
    tensors = tuple(tensor_from_numpy(name, array) for name, array in inputs.items())
    return InferRequest(model, tensors, version, outputs=tuple(outputs))


def repository_index() -> Operation[tuple[ModelState, ...]]:
    """All models and versions in the repository."""
    read = partial(_decoded, tuple[ModelState, ...])
    return Operation("POST", "/v2/repository/index", read, max_wait_s=INDEX_TIMEOUT_S)


def model_metadata(model: str, version: str = "") -> Operation[ModelMetadata]:
    """Shapes include the batch dimension; -1 for variable dimensions."""
    return page(model_path(model, "", version), ModelMetadata)


def model_parameters(model: str) -> Operation[dict[str, str]]:
    """The parameters of the model's config.pbtxt."""
    return Operation("GET", model_path(model, "config"), _parameters_of_reply, max_wait_s=INDEX_TIMEOUT_S)


def explain_model(model: str) -> "Operation[ModelBatchReport]":
    """How the model's batches are formed, with statistics."""
    from penstock.protocol.batch_reports import ModelBatchReport

    return page(model_path(model, "explain"), ModelBatchReport)


def engine_version() -> Operation[EngineVersion]:
    """Name and version of the engine."""
    return page("/v2", EngineVersion)


def health() -> Operation[Health]:
    """Readiness. A gateway that is not ready also returns a value, not an error."""
    accepts = frozenset((200, 503))
    return Operation("GET", "/v2/health/ready", _health_of_reply, accepts=accepts, max_wait_s=INDEX_TIMEOUT_S)


def load_model(model: str) -> Operation[None]:
    """Loads or reloads the model. The response arrives when it is ready."""
    return _repository_call(model, "load")


def unload_model(model: str) -> Operation[None]:
    """Unloads the model."""
    return _repository_call(model, "unload")


def add_model(
    file: Path, name: str = "", *, replace: bool = False, settings: Mapping[str, str | float]
) -> "Operation[ModelAdded]":
    """Adds an ONNX file. settings: query parameters of the endpoint, such as layout. Raises InvalidRequest."""
    if not file.is_file():
        raise InvalidRequest(f"there is no file {file}: give the path of an ONNX file")
    name = name or _OTHERS.sub("-", file.stem).strip("-._")[:MAX_NAME] or "model"
    query = urlencode({**settings, **({"replace": "1"} if replace else {})})
    target = f"/v2/repository/models/{quote(name, safe='')}/add" + (f"?{query}" if query else "")
    headers = {"content-type": _BINARY}
    return Operation("POST", target, _model_added, file, headers, is_idempotent=False, max_wait_s=ADD_TIMEOUT_S)


def model_path(model: str, page: str = "", version: str = "") -> str:
    """The URL path of a model's endpoint. page: such as `infer`; empty for the metadata."""
    of_version = f"/versions/{quote(version, safe='')}" if version else ""
    return f"/v2/models/{quote(model, safe='')}{of_version}{page and f'/{page}'}"


def _repository_call(model: str, action: str) -> Operation[None]:
    target = f"/v2/repository/models/{quote(model, safe='')}/{action}"
    return Operation("POST", target, lambda reply: None, is_idempotent=False, max_wait_s=LOAD_TIMEOUT_S)


def page(target: str, kind: type[T], *, max_wait_s: float = INDEX_TIMEOUT_S) -> Operation[T]:
    """A GET request with a JSON response of type `kind`."""
    return Operation("GET", target, partial(_decoded, kind), max_wait_s=max_wait_s)


@cache
def _decoder(kind: Any) -> "msgspec.json.Decoder[Any]":
    import msgspec

    return msgspec.json.Decoder(kind)


def _decoded(kind: Any, reply: HttpReply) -> Any:
    """Raises msgspec.DecodeError."""
    return _decoder(kind).decode(reply.body)


def _image_answer(reply: HttpReply) -> "ImageAnswer":
    from penstock.protocol.image_answer import ImageAnswer

    answer: ImageAnswer = _decoded(ImageAnswer, reply)
    if not answer.results:
        raise ValueError("the response has no result")
    return answer


def _model_added(reply: HttpReply) -> "ModelAdded":
    from penstock.protocol.model_addition import ModelAdded

    added: ModelAdded = _decoded(ModelAdded, reply)
    return added


@dataclass(frozen=True, slots=True)
class _HealthBody:
    ready: bool
    reason: str = ""


def _health_of_reply(reply: HttpReply) -> Health:
    body: _HealthBody = _decoded(_HealthBody, reply)
    return Health(body.ready and reply.status == 200, body.reason)


@dataclass(frozen=True, slots=True)
class _ParameterValue:
    string_value: str = ""


@dataclass(frozen=True, slots=True)
class _Config:
    parameters: dict[str, _ParameterValue] = field(default_factory=dict)


def _parameters_of_reply(reply: HttpReply) -> dict[str, str]:
    config: _Config = _decoded(_Config, reply)
    return {key: value.string_value for key, value in config.parameters.items()}


@dataclass(frozen=True, slots=True)
class _OutputTensor:
    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    parameters: dict[str, bool | int | float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _InferenceBody:
    outputs: tuple[_OutputTensor, ...]


def _tensors_of_reply(reply: HttpReply) -> tuple[Tensor, ...]:
    length = reply.headers.get(HEADER_LENGTH, "")
    head_bytes = int(length) if length.isascii() and length.isdecimal() else len(reply.body)
    from msgspec import DecodeError

    try:
        body: _InferenceBody = _decoder(_InferenceBody).decode(memoryview(reply.body)[:head_bytes])
    except DecodeError as error:
        raise EngineFailed(f"the response is not a KServe v2 inference response: {error}") from error
    return tuple(_tensors(body.outputs, memoryview(reply.body)[head_bytes:]))


def _tensors(outputs: tuple[_OutputTensor, ...], data: memoryview) -> Iterator[Tensor]:
    """Splits binary data into tensors. Raises EngineFailed if their sizes do not add up to the data's."""
    begin = 0
    for output in outputs:
        size_bytes = output.parameters.get("binary_data_size")
        if not isinstance(size_bytes, int) or size_bytes < 0:
            raise EngineFailed(f"output {output.name!r} has no binary data")
        if begin + size_bytes > data.nbytes:
            left = data.nbytes - begin
            raise EngineFailed(
                f"the response is truncated: output {output.name!r} has {size_bytes} bytes, {left} received"
            )
        yield Tensor(output.name, output.datatype, output.shape, data[begin : begin + size_bytes])
        begin += size_bytes
    if begin != data.nbytes:
        raise EngineFailed(f"the response has {data.nbytes - begin} bytes after the last output")
