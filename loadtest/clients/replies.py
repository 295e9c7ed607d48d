"""What an answer over HTTP or gRPC means: the one mapping from codes to Status, and the text that goes with it."""

import re

import grpc
import grpc.aio
import msgspec

from loadtest.clients.client import Answer
from loadtest.results import Status

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
# heard by the call a moment before the channel knows of it.
_CONNECTION_ENDED = re.compile(
    "Cancelling all calls|Socket closed|GOAWAY received|Connection reset|Broken pipe|Stream removed|Transport closed|"
    "Endpoint read failed|keepalive watchdog timeout|ping timeout|[Ff]ailed to connect",
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
        told = msgspec.json.decode(body, type=_ErrorBody)
        raw = bytes(told.error) or bytes(told.detail) or body
        return short(msgspec.json.decode(raw, type=str))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return short(body[:_LONGEST_BODY_READ].decode("utf-8", "replace"))


def short(text: str) -> str:
    """The text in one line of at most 200 characters."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_ERROR else line[: LONGEST_ERROR - 1] + "…"
