"""Requests that pass through as bytes, and the answers to them."""

import re
from functools import lru_cache
from urllib.parse import unquote_to_bytes

from starlette.requests import Request
from starlette.responses import Response

from server.core.errors import InvalidRequest
from server.core.headers import HOP_BY_HOP, OF_THE_CONNECTION, end_to_end
from server.core.relay import HttpAnswer, HttpCall, InferHead

# Triton answers 500 to JSON that it cannot read and to the load of a model that its repository has not, and 503 to a
# log format that it does not know, by these texts.
_UNREADABLE = re.compile(
    rb'\{"error":"(Unable to (parse|set)|failed to parse the request JSON|attempt to (access|get)|'
    rb"Expected JSON object for keyword|invalid argument for --log_format|failed to load '[^\"]*', failed to poll|"
    rb"unexpected error on creating Triton parameter|"
    rb"(Converting keyword: 'parameters': )?parameter key '.*' was not found in the JSON)"  # it holds U+0000
)
KEPT_NAMES = 256
_SAID_ANEW = HOP_BY_HOP | {b"content-length"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class AnswerResponse(Response):
    """An engine's answer as it came."""

    def __init__(self, answer: HttpAnswer) -> None:
        self.status_code = answer.status
        self.body = answer.body
        self.background = None
        self.raw_headers = list(end_to_end(answer.headers, _SAID_ANEW))
        self.raw_headers.append((b"content-length", b"%d" % len(answer.body)))


def model_of(request: Request) -> InferHead:
    """Name and version as the path has them, not decoded. Raises InvalidRequest for a name that nothing can have."""
    name = str(request.path_params.get("model", ""))
    _check_name(name)
    return InferHead(name, str(request.path_params.get("version", "")))


@lru_cache(KEPT_NAMES)
def _check_name(name: str) -> None:
    try:
        decoded = unquote_to_bytes(name).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest("the model name in the path is not UTF-8") from error
    if _CONTROL.search(decoded):
        raise InvalidRequest("the model name in the path has control characters")
    if decoded in (".", ".."):
        raise InvalidRequest(f"the model name in the path is {decoded!r}, which names a folder")


def with_client_errors(answer: HttpAnswer) -> HttpAnswer:
    """400 instead of a 5xx for a request that the engine could not read; nothing else changes."""
    if answer.status >= 500 and _UNREADABLE.match(answer.body):
        return HttpAnswer(400, answer.headers, answer.body)
    return answer


def call_of(request: Request, body: bytes) -> HttpCall:
    """The request as it stood on the wire, but for what belongs to the connection."""
    scope = request.scope
    query: bytes = scope["query_string"]
    target: bytes = scope["raw_path"] + (b"?" + query if query else b"")
    return HttpCall(scope["method"], target, end_to_end(tuple(scope["headers"]), OF_THE_CONNECTION), body)
