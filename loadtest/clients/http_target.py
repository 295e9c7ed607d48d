"""A target's word over HTTP: GET /v2, a model's metadata, the repository index."""

from typing import TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from loadtest.clients.client import TargetError
from loadtest.clients.http_port import HttpPort
from loadtest.clients.replies import is_good, reason_of, short
from loadtest.clients.target import IndexedModel, ModelFace, ServerIdentity, no_model, nothing_answers, ready_names
from loadtest.clients.tensors import InputSpec

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
        status, body = await self._ask("GET", "/v2")
        told = _decoded(status, body, _Server)
        return ServerIdentity(told.name, told.version, told.extensions) if told else ServerIdentity()

    async def model(self, name: str) -> ModelFace:
        """The model's inputs and outputs. Raises TargetError where it is not served."""
        status, body = await self._ask("GET", f"/v2/models/{quote(name, safe='')}")
        if told := _decoded(status, body, _Model):
            inputs = tuple(InputSpec(tensor.name, tensor.datatype, tensor.shape) for tensor in told.inputs)
            return ModelFace(inputs, frozenset(tensor.name for tensor in told.outputs))
        if not (await self.identity()).name:
            raise TargetError(f"{self._url} is no KServe v2 server: GET /v2/models/{name} answered {status}")
        raise TargetError(no_model(self._url, name, await self.models(), f"{status}: {reason_of(body)}"))

    async def models(self) -> tuple[str, ...]:
        """The ready models' names; none where the server has no repository index."""
        status, body = await self._ask("POST", "/v2/repository/index")
        return ready_names(_decoded(status, body, list[IndexedModel]) or ())

    async def _ask(self, method: str, path: str) -> tuple[int, bytes]:
        try:
            return await self._port.call(method, URL(self._url.rstrip("/") + path, encoded=True))
        except TimeoutError as error:
            raise TargetError(nothing_answers(self._url, "it took too long")) from error
        except (aiohttp.ClientError, ValueError) as error:
            raise TargetError(nothing_answers(self._url, short(str(error) or type(error).__name__))) from error


def _decoded(status: int, body: bytes, kind: type[TellT]) -> TellT | None:
    try:
        return msgspec.json.decode(body, type=kind) if is_good(status) else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
