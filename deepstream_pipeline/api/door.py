"""Which requests the control API serves, before anything is read: key, Host, Origin, type and size of the body.

Requests of browsers are checked by the gateway's rules (server.core.browser_policy), as on ports 8000 and 8002.
"""

import base64
import binascii
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deepstream_pipeline.api.answers import Refusal, error_answer
from deepstream_pipeline.api.audit import HAS_KEY
from deepstream_pipeline.api.options import ApiOptions
from server.core.browser_policy import host_fault
from server.core.errors import HostNotAllowed, OriginNotAllowed, UnsupportedMedia

OPEN_PATHS = ("/health/live", "/health/ready")  # for probes, which have no key
_ALWAYS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)
_STATUS = {HostNotAllowed: 421, OriginNotAllowed: 403, UnsupportedMedia: 415}
Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request's head says. Names of headers are in lower case."""

    method: str
    path: str
    headers: Headers
    http_version: str = "1.1"

    def one(self, name: bytes) -> str:
        """A header's value, empty where it is not there. Raises Refusal where it is there twice."""
        found = [value for key, value in self.headers if key == name]
        if len(found) > 1:
            raise Refusal(400, f"the header {name.decode()} is there {len(found)} times; send it once")
        return found[0].decode("latin-1").strip() if found else ""

    @property
    def is_changing(self) -> bool:
        return self.method not in ("GET", "HEAD", "OPTIONS")


def check(asked: Asked, options: ApiOptions, local_address: str) -> None:
    """Raises Refusal for a request that is not served. local_address: the connection's, on this machine."""
    if fault := host_fault(b"", asked.http_version, asked.headers):
        raise Refusal(400, fault)
    is_open = asked.path in OPEN_PATHS
    if not is_open:
        _check_key(asked, options)
    try:
        options.browser_policy.check(
            asked.method, asked.headers, local_address=local_address, is_trusted=is_open or bool(options.api_key)
        )
    except (HostNotAllowed, OriginNotAllowed, UnsupportedMedia) as error:
        raise Refusal(_STATUS[type(error)], str(error)) from None
    length = asked.one(b"content-length")
    if length.isdecimal() and int(length) > options.max_body_bytes:
        raise Refusal(413, f"a body of {length} bytes (at most {options.max_body_bytes})")


def _check_key(asked: Asked, options: ApiOptions) -> None:
    if not options.api_key:
        return
    presented = asked.one(b"x-api-key") or _from_authorization(asked.one(b"authorization"))
    if not presented:
        raise Refusal(401, "an API key is needed: x-api-key, Bearer, or the password of Basic")
    if not hmac.compare_digest(presented.encode(), options.api_key.encode()):
        raise Refusal(401, "the API key is not the right one")


def _from_authorization(value: str) -> str:
    scheme, _, rest = value.partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(rest.strip(), validate=True).decode("utf-8", "replace").partition(":")[2]
    except (binascii.Error, ValueError):
        return ""


class Door:
    """Lets a request in to the app, with its whole body read and bounded, or refuses it."""

    def __init__(self, app: ASGIApp, options: ApiOptions) -> None:
        self._app, self._options = app, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_more(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_ALWAYS]
            await send(message)

        asked = Asked(scope["method"], scope["path"], scope["headers"], scope["http_version"])
        try:
            check(asked, self._options, str((scope.get("server") or ("",))[0]))
            scope[HAS_KEY] = bool(self._options.api_key) and asked.path not in OPEN_PATHS
            body = await _read(receive, self._options.max_body_bytes) if asked.is_changing else b""
        except Refusal as refusal:
            await error_answer(refusal.status, refusal.text, is_last=True)(scope, receive, send_more)
            return
        if body is None:
            return
        if asked.is_changing:  # `curl -d` sends JSON as a form; forms from browsers were refused before
            others = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
            scope = {**scope, "headers": [*others, (b"content-type", b"application/json")]}
        await self._app(scope, _Replayed(body, receive) if asked.is_changing else receive, send_more)


async def _read(receive: Receive, limit: int) -> bytes | None:
    """The whole body; None where the client left. Raises Refusal where it is too long."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise Refusal(413, f"a body of more than {limit} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


class _Replayed:
    """Gives the body that was read, once, and then what the connection says."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}
