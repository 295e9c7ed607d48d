"""HTTP: one session per client, prepared requests, model metadata, the image endpoint and v2 REST inference."""

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import quote

import aiohttp
import aiohttp.payload
import msgspec
import numpy as np
from tritonclient.utils import triton_to_np_dtype
from yarl import URL

from penstock_load.clients.client import Answer, Endpoint, TargetError, http_refusal, is_good, reason_of, short
from penstock_load.clients.payloads import (
    IndexedModel,
    InputSpec,
    InputTensor,
    ModelSignature,
    Picture,
    ServerIdentity,
    https_question,
    no_model,
    nothing_answers,
    ready_names,
)
from penstock_load.results import Stages, Status

# Shorter than the 5 s after which uvicorn and its like close an idle connection: none is used while it is closed.
KEEP_ALIVE_S = 4.0
# The generator has run out of something: descriptors, ports, memory. The server was never asked.
_OURS = frozenset((errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM))

MOST_BYTES = 256 << 20  # of an answer, as of a tensor that is asked: many at once must fit into the generator's memory

Judge = Callable[["HttpReply"], Answer]


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One POST, ready to be sent again and again."""

    url: URL
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A 2xx, read to its end. sent_bytes: the request's body."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    sent_bytes: int

    def good(self) -> Answer:
        """An OK of which nothing more is known."""
        return Answer(Status.OK, str(self.status), "", self.sent_bytes, len(self.body))

    def bad(self, why: str) -> Answer:
        """A 2xx whose content is wrong."""
        return Answer(Status.FAILED, str(self.status), short(why), self.sent_bytes, len(self.body))


class _TooLarge(aiohttp.ClientError):
    """An answer that is not read to its end. One sentence."""


class _Body(aiohttp.payload.BytesPayload):
    """Bytes of any size, sent as they are: aiohttp's own warns above 1 MiB that to send them takes a moment."""

    def __init__(self, content: bytes) -> None:
        aiohttp.payload.Payload.__init__(self, content, content_type="application/octet-stream")
        self._size = len(content)


class HttpPort:
    """Opens as many connections as there are requests at once. Made inside the event loop that uses it."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._url = endpoint.http_url.rstrip("/")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(timeout_s, sock_connect=None, ceil_threshold=float("inf")),
            headers=[
                ("Accept-Encoding", "identity"),
                *endpoint.headers,
            ],  # to compress costs a server more than to infer
            skip_auto_headers=("User-Agent", "Accept"),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def post(self, request: HttpRequest, judge: Judge) -> Answer:
        """What became of the request; judge says it of a 2xx."""
        sent_bytes = len(request.body)
        try:
            async with self._session.post(
                request.url, data=_Body(request.body), headers=request.headers, allow_redirects=False
            ) as answer:
                body = await _whole(answer)
        except TimeoutError:
            return Answer(Status.TIMEOUT, "", f"no answer within {self._timeout_s:g} s", sent_bytes)
        except aiohttp.ClientError as error:
            return _broken(error, sent_bytes)
        except RuntimeError as error:  # aiohttp's word for a session that is closed
            return Answer(Status.FAILED, "", short(str(error)), sent_bytes)
        if not is_good(answer.status):
            return http_refusal(answer.status, body, sent_bytes, location=answer.headers.get("Location", ""))
        return judge(HttpReply(answer.status, answer.headers, body, sent_bytes))

    async def call(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body of a control request, sent as JSON. Raises TargetError without an answer."""
        headers = {"content-type": "application/json"} if body else None
        try:
            url = URL(self._url + path, encoded=True)
            async with self._session.request(
                method, url, data=body or None, headers=headers, allow_redirects=False
            ) as answer:
                return answer.status, await _whole(answer)
        except TimeoutError as error:
            raise TargetError(
                nothing_answers(self._url, f"{method} {path} took longer than {self._timeout_s:g} s")
            ) from error
        except (aiohttp.ClientError, ValueError) as error:
            why = short(str(error) or type(error).__name__)
            if isinstance(
                error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError | aiohttp.ClientResponseError
            ) and (not isinstance(error, aiohttp.ClientConnectorError)):
                raise TargetError(f"the connection to {self._url} broke ({why}){https_question(self._url)}") from error
            raise TargetError(nothing_answers(self._url, why)) from error

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._session.close()


async def _whole(answer: aiohttp.ClientResponse) -> bytes:
    """The body. Raises _TooLarge, whereupon the connection is closed."""
    chunks, size_bytes = [], 0
    while chunk := await answer.content.readany():
        chunks.append(chunk)
        size_bytes += len(chunk)
        if size_bytes > MOST_BYTES:
            answer.close()
            raise _TooLarge(f"the answer is larger than {MOST_BYTES:,} bytes, and the rest was not read")
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _broken(error: aiohttp.ClientError, sent_bytes: int) -> Answer:
    is_ours = isinstance(error, OSError) and error.errno in _OURS
    why = short(str(error) or type(error).__name__)
    return Answer(Status.NOT_SENT if is_ours else Status.FAILED, "", why, 0 if is_ours else sent_bytes)


TellT = TypeVar("TellT")


class _Server(msgspec.Struct):
    name: str
    version: str = ""
    extensions: tuple[str, ...] = ()


class _Tensor(msgspec.Struct):
    name: str
    datatype: str = ""
    shape: tuple[int, ...] = ()


class _Model(msgspec.Struct):
    inputs: tuple[_Tensor, ...]
    outputs: tuple[_Tensor, ...]


class HttpTarget:
    """Every method raises TargetError where nothing answers."""

    def __init__(self, port: HttpPort, http_url: str) -> None:
        self._port = port
        self._url = http_url

    async def identity(self) -> ServerIdentity:
        """Empty where there is no v2 server."""
        status, body = await self._port.call("GET", "/v2")
        server = _decoded(status, body, _Server)
        return ServerIdentity(server.name, server.version, server.extensions) if server else ServerIdentity()

    async def model(self, name: str) -> ModelSignature:
        """The model's inputs and outputs. Raises TargetError where it is not served."""
        status, body = await self._port.call("GET", f"/v2/models/{quote(name, safe='')}")
        if model := _decoded(status, body, _Model):
            inputs = tuple(InputSpec(tensor.name, tensor.datatype, tensor.shape) for tensor in model.inputs)
            return ModelSignature(inputs, frozenset(tensor.name for tensor in model.outputs))
        if not (await self.identity()).name:
            raise TargetError(f"{self._url} is no KServe v2 server: GET /v2/models/{name} answered {status}")
        raise TargetError(no_model(self._url, name, await self.models(), f"{status}: {reason_of(body)}"))

    async def models(self) -> tuple[str, ...]:
        """The ready models' names; none if the server has no repository index."""
        status, body = await self._port.call("POST", "/v2/repository/index")
        return ready_names(_decoded(status, body, list[IndexedModel]) or ())


def _decoded(status: int, body: bytes, kind: type[TellT]) -> TellT | None:
    try:
        return msgspec.json.decode(body, type=kind) if is_good(status) else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


PENSTOCKS_PATH = "/v2/models/{model}/image"
_BOUNDARY = b"penstock-load-7f3a19c2d45b"
_MULTIPART = f"multipart/form-data; boundary={_BOUNDARY.decode()}"


class _Timings(msgspec.Struct):
    decode: float = 0.0
    preprocess: float = 0.0
    queue: float = 0.0
    infer: float = 0.0
    postprocess: float = 0.0
    total: float = 0.0


class _Results(msgspec.Struct):
    results: list[msgspec.Raw]


class _PenstockAnswer(msgspec.Struct):
    timings_ms: _Timings
    batch_size: int


_RESULTS = msgspec.json.Decoder(_Results)
_PENSTOCK_ANSWER = msgspec.json.Decoder(_PenstockAnswer)


class ImageClient:
    """Posts prepared requests in turn, by number."""

    def __init__(self, port: HttpPort, requests: Sequence[HttpRequest], *, results: int) -> None:
        """results: how many an answer must hold; 0: whatever the answer holds is fine."""
        self._port = port
        self._requests = requests
        self._results = results

    async def send(self, number: int) -> Answer:
        """The picture with that number, counted round, and what became of it."""
        return await self._port.post(self._requests[number % len(self._requests)], self._judge)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._port.aclose()

    def _judge(self, reply: HttpReply) -> Answer:
        if self._results and (count := _count_of_results(reply.body)) != self._results:
            return reply.bad(
                f"{count} results for {self._results} pictures in {reply.body[:100].decode(errors='replace')}"
            )
        try:
            answer = _PENSTOCK_ANSWER.decode(reply.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return reply.good()
        timings = answer.timings_ms
        stages = Stages(
            timings.decode, timings.preprocess, timings.queue, timings.infer, timings.postprocess, timings.total
        )
        code = str(reply.status)
        return Answer(Status.OK, code, "", reply.sent_bytes, len(reply.body), answer.batch_size, stages)


def results_wanted(endpoint: Endpoint, batch: int) -> int:
    """How many results an answer must hold: one a picture behind Penstock's path; 0 (unknown) behind another."""
    return batch if endpoint.image_path == PENSTOCKS_PATH else 0


def image_requests(endpoint: Endpoint, model: str, pictures: Sequence[Picture], *, batch: int) -> list[HttpRequest]:
    """A request a picture, or with a batch multipart/form-data of that many, each beginning with another picture."""
    url = URL(image_url(endpoint, model), encoded=True)
    if batch == 1:
        return [HttpRequest(url, {"Content-Type": one.media_type}, one.content) for one in pictures]
    turns = range(len(pictures))
    headers = {"Content-Type": _MULTIPART}
    return [
        HttpRequest(url, headers, _multipart([pictures[(turn + row) % len(pictures)] for row in range(batch)]))
        for turn in turns
    ]


def image_url(endpoint: Endpoint, model: str) -> str:
    """Where the pictures go."""
    return endpoint.http_url.rstrip("/") + endpoint.image_path.replace("{model}", quote(model, safe=""))


def _multipart(pictures: Sequence[Picture]) -> bytes:
    parts = []
    for number, picture in enumerate(pictures):
        head = f'Content-Disposition: form-data; name="file"; filename="{number}"\r\nContent-Type: {picture.media_type}'
        parts.append(b"--" + _BOUNDARY + b"\r\n" + head.encode() + b"\r\n\r\n" + picture.content + b"\r\n")
    return b"".join(parts) + b"--" + _BOUNDARY + b"--\r\n"


def _count_of_results(body: bytes) -> int:
    try:
        return len(_RESULTS.decode(body).results)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return 0


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
