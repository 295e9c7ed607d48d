"""A blocking REST client of the running gateway for commands, and the flags and defaults that find it."""

import http
import http.client
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec
import typer

from penstock.cli.terminal import fail, print_failure
from penstock.gateway.settings import Settings
from penstock.gateway.settings_sources import SettingsError, read_settings
from penstock.network import CA_VARIABLE, CERTIFICATE_VARIABLE, client_context
from penstock.protocol.batch_reports import EXPLAIN_HEADER, ModelBatchReport
from penstock.protocol.engine import ModelMetadata
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.http_body import HEADER_LENGTH
from penstock.protocol.inference import Datatype, InferRequest, Tensor

if TYPE_CHECKING:  # it imports OpenCV, which most commands do not need
    from penstock.protocol.image_answer import ImageAnswer

INFER_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 120.0
INDEX_TIMEOUT_S = 5.0
TIMEOUT_HEADER = "x-request-timeout-ms"
API_KEY_HEADER = "x-api-key"
EMBEDDED_ENGINE = "penstock-embedded"
_ADVICE_START = "start it with `penstock up`, or give its address with --url"
T = TypeVar("T")


class GatewayError(Exception):
    """The gateway rejected the request, or the server is not a gateway. str() is a sentence for the user."""


class GatewayUnreachable(GatewayError):
    """No gateway listens there."""


class GatewayAccessDenied(GatewayError):
    """The API key is missing or unknown, or its roles do not allow the request."""


class GatewayModelNotFound(GatewayError):
    """The engine has no version of the model. refusal: the engine's message."""

    def __init__(self, refusal: str) -> None:
        super().__init__(f"{refusal}; `penstock models list` shows what there is")
        self.refusal = refusal


class IndexRow(msgspec.Struct, frozen=True):
    """A row of the repository index; state is empty for a model that was never loaded."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


class EngineVersion(msgspec.Struct, frozen=True):
    """The engine's name and version."""

    name: str
    version: str = ""


class _OutputTensor(msgspec.Struct, frozen=True):
    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    parameters: dict[str, bool | int | float | str] = {}


class _InferenceBody(msgspec.Struct, frozen=True):
    outputs: tuple[_OutputTensor, ...]


class _ParameterValue(msgspec.Struct, frozen=True):
    string_value: str = ""


class _Config(msgspec.Struct, frozen=True):
    parameters: dict[str, _ParameterValue] = {}


class _ErrorBody(msgspec.Struct, frozen=True):
    error: str


_INDEX = msgspec.json.Decoder(tuple[IndexRow, ...])
_ENGINE_VERSION = msgspec.json.Decoder(EngineVersion)
_CONFIG = msgspec.json.Decoder(_Config)
_METADATA = msgspec.json.Decoder(ModelMetadata)
_INFERENCE_BODY = msgspec.json.Decoder(_InferenceBody)
_MODEL_EXPLAINED = msgspec.json.Decoder(ModelBatchReport)
_ERROR_BODY = msgspec.json.Decoder(_ErrorBody)


@dataclass(frozen=True, slots=True)
class GatewayClient:
    """A gateway by its http:// address. Every call raises GatewayError.

    api_key: goes with every call; empty for none.
    """

    url: str
    api_key: str = field(default="", repr=False)

    def infer_image(
        self,
        model_name: str,
        image: bytes,
        content_type: str,
        *,
        timeout_ms: int | None = None,
        with_explanation: bool = False,
        query: Mapping[str, str] = MappingProxyType({}),
    ) -> "ImageAnswer":
        """The results of an encoded picture.

        timeout_ms: the request's deadline, None for the model's own. with_explanation: whether the response explains
        its batch. query: the endpoint's query parameters, such as conf.
        """
        from penstock.protocol.image_answer import ImageAnswer

        headers = {"content-type": content_type}
        if with_explanation:
            headers[EXPLAIN_HEADER] = "1"
        if timeout_ms is not None:
            headers[TIMEOUT_HEADER] = str(timeout_ms)
        wait_s = INFER_TIMEOUT_S if timeout_ms is None else timeout_ms / 1000 + 5.0
        target = _model(model_name, "image") + (f"?{urlencode(query)}" if query else "")
        answer = self._ask("POST", target, msgspec.json.Decoder(ImageAnswer), wait_s, image, headers)
        if not answer.results:
            raise GatewayError(f"{self.url} answered without a result: check that it is a gateway")
        return answer

    def infer(self, request: InferRequest, timeout_s: float) -> tuple[Tensor, ...]:
        """All outputs of the model. Inputs and outputs are sent as binary tensors."""
        inputs = [
            {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
            | {"parameters": {"binary_data_size": tensor.data.nbytes}}
            for tensor in request.inputs
        ]
        head = msgspec.json.encode({"inputs": inputs, "parameters": {"binary_data_output": True}})
        body = b"".join((head, *(tensor.data for tensor in request.inputs)))
        headers = {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(head))}
        version = f"/versions/{quote(request.model_version, safe='')}" if request.model_version else ""
        target = f"{_model(request.model_name)}{version}/infer"
        answer, answered = self._exchange("POST", target, body, headers, timeout_s)
        length = answered.get(HEADER_LENGTH, "")
        head_bytes = int(length) if length.isdecimal() else len(answer)
        try:
            outputs = _INFERENCE_BODY.decode(answer[:head_bytes]).outputs
        except msgspec.DecodeError as error:
            raise GatewayError(f"the answer is not KServe v2's: {error}") from error
        return tuple(_tensors(outputs, memoryview(answer)[head_bytes:]))

    def model_metadata(self, model_name: str) -> ModelMetadata:
        """Shapes include the batch dimension; -1 for variable dimensions."""
        return self._ask("GET", _model(model_name), _METADATA)

    def model_parameters(self, model_name: str) -> dict[str, str]:
        """The parameters of the model's config.pbtxt."""
        config = self._ask("GET", _model(model_name, "config"), _CONFIG)
        return {key: value.string_value for key, value in config.parameters.items()}

    def explain_model(self, model_name: str) -> ModelBatchReport:
        """How the model's batches are formed, with statistics."""
        return self._ask("GET", _model(model_name, "explain"), _MODEL_EXPLAINED)

    def read(self, target: str, kind: type[T], timeout_s: float = INDEX_TIMEOUT_S) -> T:
        """The JSON answer to a GET. target: path and query."""
        return self._ask("GET", target, msgspec.json.Decoder(kind), timeout_s)

    def engine(self) -> EngineVersion:
        """Name (`triton`, EMBEDDED_ENGINE, …) and version of the engine."""
        return self._ask("GET", "/v2", _ENGINE_VERSION)

    def repository_index(self) -> tuple[IndexRow, ...]:
        """Every model and version that the engine knows."""
        return self._ask("POST", "/v2/repository/index", _INDEX)

    def load(self, model_name: str) -> None:
        """Load or reload; returns when the model takes requests."""
        self._exchange("POST", f"/v2/repository/models/{quote(model_name, safe='')}/load", b"", {}, LOAD_TIMEOUT_S)

    def unload(self, model_name: str) -> None:
        """Take the model out of service."""
        self._exchange("POST", f"/v2/repository/models/{quote(model_name, safe='')}/unload", b"", {}, LOAD_TIMEOUT_S)

    def _ask(
        self,
        method: str,
        target: str,
        decoder: msgspec.json.Decoder[T],
        timeout_s: float = INDEX_TIMEOUT_S,
        body: bytes = b"",
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> T:
        answer, _ = self._exchange(method, target, body, headers, timeout_s)
        try:
            return decoder.decode(answer)
        except msgspec.DecodeError as error:
            raise GatewayError(f"the server at {self.url} is not a gateway ({error}): check the address") from error

    def _exchange(
        self, method: str, target: str, body: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[bytes, http.client.HTTPMessage]:
        """Body and headers of a response with status 200."""
        connection, prefix = _connection(self.url, timeout_s)
        identity = {API_KEY_HEADER: self.api_key} if self.api_key else {}
        try:
            with suppress(
                BrokenPipeError, ConnectionResetError
            ):  # refused before the body was read: the answer is there
                connection.request(method, prefix + target, body, {**headers, **identity})
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise _failure_of(self.url, error, timeout_s) from error
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            names_model, has_key = "/models/" in target, bool(self.api_key)
            raise _error_of(self.url, response, answer, names_model=names_model, has_key=has_key)
        return answer, response.headers


def _model(name: str, page: str = "") -> str:
    return f"/v2/models/{quote(name, safe='')}{page and f'/{page}'}"


def _tensors(outputs: tuple[_OutputTensor, ...], data: memoryview) -> Iterator[Tensor]:
    begin = 0
    for output in outputs:
        size_bytes = output.parameters.get("binary_data_size")
        if not isinstance(size_bytes, int) or size_bytes < 0:
            raise GatewayError(f"output {output.name!r} came without its bytes")
        if begin + size_bytes > data.nbytes:
            left = data.nbytes - begin
            raise GatewayError(f"the answer is truncated: {output.name!r} has {size_bytes} bytes, {left} came")
        yield Tensor(output.name, output.datatype, output.shape, data[begin : begin + size_bytes])
        begin += size_bytes
    if begin != data.nbytes:
        raise GatewayError(f"{data.nbytes - begin} bytes of the answer belong to no output")


def _failure_of(url: str, error: Exception, timeout_s: float) -> GatewayError:
    """Why there is no answer."""
    match error:
        case ConnectionRefusedError() | socket.gaierror():
            return GatewayUnreachable(f"nothing answers at {url}: {_ADVICE_START}")
        case TimeoutError():
            return GatewayError(f"{url} did not answer within {timeout_s:g} s")
        case http.client.RemoteDisconnected():
            return GatewayError(f"{url} closed the connection without an answer: {_advice(url)}")
        case http.client.BadStatusLine():
            return GatewayError(f"the server at {url} does not speak HTTP: {_address_advice(url)}")
        case ssl.SSLCertVerificationError():
            remedy = f"set {CA_VARIABLE} to the file of the CA that signed it"
            return GatewayError(f"the certificate of {url} is not trusted ({error.verify_message}): {remedy}")
        case ssl.SSLError():
            return GatewayError(f"TLS with {url} failed ({error.reason}): {_advice(url)}")
    advice = f"try again; if that does not help, {_address_advice(url)}"
    return GatewayError(f"the connection to {url} broke ({error}): {advice}")


def _connection(url: str, timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
    """The connection, not yet made, and the path that the address itself has."""
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if parts.scheme not in ("http", "https") or not host:
        raise GatewayError(f"{url!r} is not a gateway's address: give one such as http://127.0.0.1:8000")
    if parts.scheme == "https":
        try:
            context = client_context()
        except InvalidRequest as error:
            raise GatewayError(error.message) from error
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context), parts.path.rstrip("/")
    return http.client.HTTPConnection(host, port, timeout=timeout_s), parts.path.rstrip("/")


def _address_advice(url: str) -> str:
    """Advice for an address that may be wrong. A server with TLS resets plain connections or sends an alert."""
    return "check the address: does it take https?" if url.startswith("http://") else "check the address"


def _advice(url: str) -> str:
    """Advice if the server closed the connection during the TLS handshake, or if TLS was expected but not used."""
    if url.startswith("http://"):
        return "try again, with https:// if the server uses TLS"
    return (
        "check the address (http:// if the server has no TLS); "
        f"if it requires client certificates, set {CERTIFICATE_VARIABLE}"
    )


def _error_of(
    url: str, response: http.client.HTTPResponse, answer: bytes, *, names_model: bool, has_key: bool
) -> GatewayError:
    """The gateway's message, with its Retry-After."""
    try:
        text = _ERROR_BODY.decode(answer).error
    except msgspec.DecodeError:
        why = f"HTTP {response.status} {response.reason}"
        return GatewayError(f"the server at {url} is not a gateway ({why}): check the address")
    if response.status == http.HTTPStatus.NOT_FOUND and not names_model:
        return GatewayError(f"the server at {url} is not a gateway ({text}): check the address")
    if response.status == http.HTTPStatus.NOT_FOUND:
        return GatewayModelNotFound(text)
    if response.status == http.HTTPStatus.UNAUTHORIZED:
        wanted = f"refused the API key ({text.partition(';')[0]})" if has_key else "requires an API key"
        return GatewayAccessDenied(f"{url} {wanted}: give a valid key with --api-key or PENSTOCK_API_KEY")
    if response.status == http.HTTPStatus.FORBIDDEN:
        return GatewayAccessDenied(text)
    wait_s = response.headers.get("retry-after")
    return GatewayError(f"{text} (retry after {wait_s} s)" if wait_s else text)


DEFAULT_HTTP_PORT = 8000
API_KEY_VARIABLE = "PENSTOCK_API_KEY"
GATEWAY_VARIABLE = "PENSTOCK_GATEWAY_URL"

Url = Annotated[
    str | None,
    typer.Option(
        envvar=GATEWAY_VARIABLE,
        show_default=False,
        help="the gateway [the stack that runs here, else http://127.0.0.1:8000]",
    ),
]
VideoUrl = Annotated[
    str, typer.Option("--video-url", envvar="PENSTOCK_VIDEO_URL", help="the video program's control API")
]
ApiKey = Annotated[
    str, typer.Option("--api-key", envvar=API_KEY_VARIABLE, show_default=False, help="of a gateway that asks for one")
]


def settings_or_fail(home: Path | None = None) -> Settings:
    """The settings that `penstock up` would start with here; one sentence and exit code 2 where they are wrong."""
    try:
        return read_settings({"home": home})
    except SettingsError as error:
        fail(str(error))


def gateway_url(given: str | None) -> str:
    """The address that was given, else that of a gateway of this machine."""
    return local_url(settings_or_fail()) if given is None else given


def local_url(settings: Settings) -> str:
    """The address of this user's newest running stack; without one, the address that `penstock up` would use.

    A port in the settings selects one of several stacks. Without it, a line on standard error names the one used.
    """
    from penstock.gateway.workers.running_stacks import is_bound, running_stacks  # takes 60 ms, which --url saves

    urls = [stack.http_url for stack in running_stacks() if not is_bound(stack)]
    if "http_port" in settings.model_fields_set and settings.http_port:
        urls = [url for url in urls if urlsplit(url).port == settings.http_port]
    if not urls:
        return url_of(settings)
    if len(urls) > 1:
        print_failure(
            f"{len(urls)} stacks run here; the newest is used, {urls[0]}. --url or PENSTOCK_HTTP_PORT selects one"
        )
    return urls[0]


def url_of(settings: Settings) -> str:
    """The address of the gateway that `penstock up` starts with these settings."""
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    return f"http://{host}:{settings.http_port or DEFAULT_HTTP_PORT}"


def gateway_of(url: str | None, api_key: str) -> GatewayClient:
    """The gateway at that address, else that of this machine."""
    if not api_key.isascii() or not api_key.isprintable():
        fail(f"--api-key (or {API_KEY_VARIABLE}) has characters that no HTTP header allows: give the key as shown")
    return GatewayClient(gateway_url(url), api_key)
