"""The client interface, the endpoint under test, and the mapping from HTTP and gRPC codes to Status."""

import re
from typing import Protocol

import grpc
import grpc.aio
import msgspec

from penstock_load.results import Stages, Status


class TargetError(Exception):
    """The target cannot be asked this at all (nothing listens, no such model, no such extension). One sentence."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A server under test. grpc_address: host:port. image_path may hold {model}. headers go with every request."""

    http_url: str
    grpc_address: str
    image_path: str = "/v2/models/{model}/image"
    headers: tuple[tuple[str, str], ...] = ()


def without_user(url: str) -> str:
    """The URL without user:password@, to be shown and kept."""
    return re.sub(r"(?<=//)[^/?#]*@", "", url, count=1)


class Answer(msgspec.Struct, frozen=True):
    """What became of one request. code: HTTP's or gRPC's, empty where none came. error: at most 200 characters."""

    status: Status
    code: str = ""
    error: str = ""
    sent_bytes: int = 0
    received_bytes: int = 0
    batch_size: int = 0
    stages: Stages | None = None


class Client(Protocol):
    """Sends requests of one kind to one endpoint; many at once."""

    async def send(self, number: int) -> Answer:
        """The request with that number (it chooses the payload), and what became of it; deadlines are kept here."""
        ...

    async def aclose(self) -> None:
        """Closes the connections."""
        ...


REFUSING_HTTP = frozenset((429, 503, 504))
REFUSING_GRPC = frozenset((grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED))
LONGEST_ERROR = 200
_LONGEST_BODY_READ = 4096


class _ErrorBody(msgspec.Struct):
    """Errors as v2 servers ({"error": …}) and FastAPI ({"detail": …}) write them."""

    error: msgspec.Raw = msgspec.Raw(b"")
    detail: msgspec.Raw = msgspec.Raw(b"")


def is_good(status: int) -> bool:
    """Any 2xx."""
    return 200 <= status < 300


def http_refusal(status: int, body: bytes, sent_bytes: int, *, location: str = "") -> Answer:
    """The answer of a status that is no 2xx: refused (429, 503, 504) or failed. location: where a 3xx points to."""
    kind = Status.REFUSED if status in REFUSING_HTTP else Status.FAILED
    reason = short(f"redirects to {location}, which is not followed") if location else reason_of(body)
    return Answer(kind, str(status), reason, sent_bytes, len(body))


# gRPC's own sentences for a connection that ends (chttp2_transport.cc and its endpoints): a server that shuts down is
# reported to the call a moment before the channel knows of it.
_CONNECTION_ENDED = re.compile(
    "Cancelling all calls|Socket closed|GOAWAY received|Connection reset|Broken pipe|Stream removed|Transport closed|"
    "Endpoint read failed|keepalive watchdog timeout|ping timeout|[Ff]ailed to connect"
)


def grpc_refusal(error: grpc.aio.AioRpcError, sent_bytes: int, *, is_connected: bool, is_late: bool) -> Answer:
    """The answer of a call that did not end OK.

    is_connected: whether the connection outlived the call: only then a refusal is the server's word, and not gRPC's
    own for a connection that broke or never was. is_late: whether our own deadline has passed.
    """
    code = error.code()
    kind = Status.FAILED
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        kind = Status.TIMEOUT if is_late else Status.REFUSED
    elif code in REFUSING_GRPC and is_connected and not _is_of_the_connection(error):
        kind = Status.REFUSED
    return Answer(kind, code.name, short(error.details() or ""), sent_bytes)


def _is_of_the_connection(error: grpc.aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.UNAVAILABLE and _CONNECTION_ENDED.match(error.details() or "") is not None


def reason_of(body: bytes) -> str:
    """The sentence in an error's body, at most 200 characters: its JSON's error or detail, else the body itself."""
    try:
        error_body = msgspec.json.decode(body, type=_ErrorBody)
        raw = bytes(error_body.error) or bytes(error_body.detail) or body
        return short(msgspec.json.decode(raw, type=str))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return short(body[:_LONGEST_BODY_READ].decode("utf-8", "replace"))


def short(text: str) -> str:
    """The text in one line of at most 200 characters."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_ERROR else line[: LONGEST_ERROR - 1] + "…"
