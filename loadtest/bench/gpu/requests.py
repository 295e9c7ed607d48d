"""The bench's requests as bytes made beforehand (tensors in shared memory, pictures), and calls beside the laps."""

import json
import math
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from loadtest.bench.wire import BadAnswer, HttpRequest

ADMIN_S = 60.0
_BYTES = {"TYPE_FP32": 4, "TYPE_FP16": 2, "TYPE_UINT8": 1, "TYPE_INT32": 4, "TYPE_INT64": 8}


@dataclass(frozen=True, slots=True)
class TensorFace:
    """An input or output without its batch dimension. row_bytes: of one row."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    row_bytes: int


@dataclass(frozen=True, slots=True)
class Face:
    """What a model takes and gives: one tensor each, their dims fixed."""

    input: TensorFace
    output: TensorFace
    has_batch: bool


@dataclass(frozen=True, slots=True)
class Region:
    """A registered shared-memory region: input rows from 0, output rows behind them. kind: system or cuda."""

    name: str
    kind: str


def read_config(folder: Path) -> model_config_pb2.ModelConfig:
    """The model folder's config.pbtxt. Raises BadAnswer."""
    try:
        return text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    except (OSError, text_format.ParseError) as error:
        raise BadAnswer(f"{folder} is no model folder: {error}") from error


def face_of(config: model_config_pb2.ModelConfig) -> Face:
    """Raises BadAnswer for more than one input, or dims that are free."""
    if len(config.input) != 1:
        raise BadAnswer(f"model {config.name!r} takes {len(config.input)} inputs; the bench asks models of one")
    return Face(_tensor(config.input[0]), _tensor(config.output[0]), config.max_batch_size > 0)


def _tensor(spec: "model_config_pb2.ModelInput | model_config_pb2.ModelOutput") -> TensorFace:
    datatype = model_config_pb2.DataType.Name(spec.data_type)
    if datatype not in _BYTES or min(spec.dims) < 1:
        raise BadAnswer(
            f"tensor {spec.name!r} is {datatype} {list(spec.dims)}; the bench takes numbers of a fixed shape"
        )
    row_bytes = math.prod(spec.dims) * _BYTES[datatype]
    return TensorFace(spec.name, datatype.removeprefix("TYPE_"), tuple(spec.dims), row_bytes)


def region_bytes(face: Face, rows: int) -> int:
    """How large a region for so many rows is."""
    return rows * (face.input.row_bytes + face.output.row_bytes)


def tensor_request(model: str, face: Face, region: Region, rows: int) -> bytes:
    """An inference of so many rows, in and out by the region."""
    in_bytes, out_bytes = rows * face.input.row_bytes, rows * face.output.row_bytes
    shape = [rows, *face.input.dims] if face.has_batch else list(face.input.dims)
    asked = {
        "inputs": [
            {"name": face.input.name, "datatype": face.input.datatype, "shape": shape}
            | {"parameters": _place(region, 0, in_bytes)}
        ],
        "outputs": [{"name": face.output.name, "parameters": _place(region, in_bytes, out_bytes)}],
    }
    return http_post(f"/v2/models/{model}/infer", json.dumps(asked).encode(), "application/json")


def _place(region: Region, offset: int, size_bytes: int) -> dict[str, object]:
    return {
        "shared_memory_region": region.name,
        "shared_memory_offset": offset,
        "shared_memory_byte_size": size_bytes,
    }


def picture_request(model: str, picture: bytes) -> bytes:
    """A JPEG to the image endpoint."""
    return http_post(f"/v2/models/{model}/image", picture, "image/jpeg")


def http_post(path: str, body: bytes, media_type: str) -> bytes:
    """A whole HTTP/1.1 request."""
    return as_sent(HttpRequest(path, {"Content-Type": media_type}, body))


def as_sent(request: HttpRequest) -> bytes:
    """The request as it goes over a socket."""
    headers = {"Host": "localhost", "Content-Length": str(len(request.body))} | request.headers
    lines = [f"POST {request.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode() + request.body


def ask(port: int, path: str, body: object | None = None, *, timeout_s: float = ADMIN_S) -> bytes:
    """A call outside the measured stretches: GET, or POST where there is a body. Raises BadAnswer."""
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", content, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        raise BadAnswer(f"{path} answered {error.code}: {error.read()[:500].decode(errors='replace')}") from error
    except OSError as error:
        raise BadAnswer(f"{path} was not answered: {error}") from error
