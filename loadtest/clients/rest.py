"""v2 inference over HTTP: tensors as binary data where the server takes them, else as JSON; bytes made beforehand."""

from collections.abc import Sequence
from urllib.parse import quote

import msgspec
import numpy as np
from tritonclient.utils import triton_to_np_dtype
from yarl import URL

from loadtest.clients.client import Answer
from loadtest.clients.http_port import HttpPort, HttpReply, HttpRequest
from loadtest.clients.tensors import InputTensor

BINARY_EXTENSION = "binary_tensor_data"
_HEADER_LENGTH = "Inference-Header-Content-Length"


class RestClient:
    """Sends prepared tensors in turn, by number."""

    def __init__(self, port: HttpPort, requests: Sequence[HttpRequest]) -> None:
        self._port = port
        self._requests = requests

    async def send(self, number: int) -> Answer:
        """The tensors with that number, counted round, and what became of them."""
        return await self._port.post(self._requests[number % len(self._requests)], _judge)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._port.aclose()


def binary_request(http_url: str, model: str, tensors: Sequence[InputTensor]) -> HttpRequest:
    """JSON with the tensors' bytes behind it; the outputs are asked for as bytes, too."""
    inputs = [_head(tensor) | {"parameters": {"binary_data_size": len(tensor.content)}} for tensor in tensors]
    head = msgspec.json.encode({"inputs": inputs, "parameters": {"binary_data_output": True}})
    headers = {_HEADER_LENGTH: str(len(head)), "Content-Type": "application/octet-stream"}
    return HttpRequest(_url(http_url, model), headers, b"".join((head, *(tensor.content for tensor in tensors))))


def json_request(http_url: str, model: str, tensors: Sequence[InputTensor]) -> HttpRequest:
    """Everything as JSON. Raises ValueError where a tensor has no such form: BYTES that are pictures, FP16, BF16."""
    body = msgspec.json.encode({"inputs": [_head(tensor) | {"data": _values(tensor)} for tensor in tensors]})
    return HttpRequest(_url(http_url, model), {"Content-Type": "application/json"}, body)


def _judge(reply: HttpReply) -> Answer:
    # Found or not within the first bytes of a right answer; the tensors themselves would cost more than the request.
    if b'"outputs"' not in reply.body:
        return reply.bad(f"no outputs in {reply.body[:100].decode(errors='replace')}")
    return reply.good()


def _url(http_url: str, model: str) -> URL:
    return URL(f"{http_url.rstrip('/')}/v2/models/{quote(model, safe='')}/infer", encoded=True)


def _head(tensor: InputTensor) -> dict[str, object]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}


def _values(tensor: InputTensor) -> list[object]:
    if tensor.datatype in ("BYTES", "FP16", "BF16"):
        raise ValueError(
            f"input {tensor.name} is of type {tensor.datatype}, which the server takes only with the extension "
            f"{BINARY_EXTENSION}, and that it does not advertise; ask the model over gRPC"
        )
    values: list[object] = np.frombuffer(tensor.content, triton_to_np_dtype(tensor.datatype)).tolist()
    return values
