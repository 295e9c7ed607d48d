"""One line of the tables: what is asked, and how the embedded engine's answer may differ from Triton's."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from google.protobuf.message import Message
from tritonclient.grpc import service_pb2

from penstock.protocol.call import GrpcCall, HttpCall

Json: TypeAlias = dict[str, Any]
SERVICE = "/inference.GRPCInferenceService/"
INFER = "/v2/models/{}/infer"
F123 = np.array([1, 2, 3], np.float32).tobytes()
X: Json = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}


@dataclass(frozen=True)
class Difference:
    """An accepted difference from Triton. code: our code, or None if it equals Triton's. aside: members not compared.

    If the codes differ, or if is_text, the error texts may differ, too.
    """

    why: str
    code: int | None = None
    is_text: bool = False
    aside: tuple[str, ...] = ()


@dataclass(frozen=True)
class HttpCase:
    """but: the accepted difference, or None if the answers must be equal."""

    name: str
    call: HttpCall
    but: Difference | None = None


@dataclass(frozen=True)
class GrpcCase:
    """but: the accepted difference, or None if the answers must be equal."""

    name: str
    method: str
    call: GrpcCall
    but: Difference | None = None


def get(target: str) -> HttpCall:
    """A GET of it."""
    return HttpCall("GET", target.encode(), (), b"")


def post(target: str, body: bytes | Json | list[Any] = b"", headers: Mapping[str, str] | None = None) -> HttpCall:
    """A POST of the body, JSON where it is no bytes."""
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = tuple((name.encode(), value.encode()) for name, value in (headers or {}).items())
    return HttpCall("POST", target.encode(), lines, sent)


def infer(model: str, body: bytes | Json, headers: Mapping[str, str] | None = None) -> HttpCall:
    """A POST to the model's infer."""
    return post(INFER.format(model), body, headers)


def infer_x(model: str = "plain", *, request: Json | None = None, **members: Any) -> HttpCall:
    """An inference with the usual input x, some of its members replaced; None takes one away."""
    tensor = {name: value for name, value in (X | members).items() if value is not None}
    return infer(model, {"inputs": [tensor], **(request or {})})


def infer_binary(
    model: str, head: Json, raw: bytes, headers: Mapping[str, str] | None = None, *, extra_length: int = 0
) -> HttpCall:
    """The head as JSON with the raw bytes behind it."""
    text = json.dumps(head).encode()
    length = {"inference-header-content-length": str(len(text) + extra_length)}
    return infer(model, text + raw, length | dict(headers or {}))


def strings(*items: bytes) -> bytes:
    """The binary form of a BYTES tensor."""
    return b"".join(struct.pack("<I", len(item)) + item for item in items)


def grpc_call(method: str, message: Message | bytes) -> GrpcCall:
    """A call of that method."""
    text = message if isinstance(message, bytes) else message.SerializeToString()
    return GrpcCall(SERVICE + method, text)


class Unsigned(int):
    """A number that gRPC has a kind of its own for."""


def set_parameter(slot: Any, value: bool | int | float | str | bytes) -> None:
    """By the value's type."""
    kinds: dict[type, str] = {bool: "bool", int: "int64", float: "double", str: "string", bytes: "bytes"}
    kinds[Unsigned] = "uint64"
    setattr(slot, f"{kinds[type(value)]}_param", value)


def infer_request(
    model: str = "plain", *, x: bytes | None = F123, shape: tuple[int, ...] = (1, 3), datatype: str = "FP32",
    name: str = "x", id: str = "", version: str = "", outputs: Mapping[str, Json] | None = None, **parameters: Any,
) -> service_pb2.ModelInferRequest:  # fmt: skip
    """With one input, raw; None for one without data. outputs: name → parameters."""
    request = service_pb2.ModelInferRequest(model_name=model, model_version=version, id=id)
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    if x is not None:
        request.raw_input_contents.append(x)
    for output, values in (outputs or {}).items():
        wanted = request.outputs.add(name=output)
        for key, value in values.items():
            set_parameter(wanted.parameters[key], value)
    for key, value in parameters.items():
        set_parameter(request.parameters[key], value)
    return request
