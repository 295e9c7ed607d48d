"""Who and what is let in to the control API, before anything is read: key, Host, Origin, type and size of the body.

A page in somebody's browser can send requests here, from another site or under a name that was made to point here
(DNS rebinding): what changes something has to come from this API's own page, or from no page.
"""

import base64
import binascii
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deepstream_pipeline.api.answers import Refusal, error_answer
from deepstream_pipeline.api.audit import HAS_KEY
from deepstream_pipeline.api.options import ApiOptions, is_loopback

OPEN_PATHS = ("/health/live", "/health/ready")  # for probes, which have no key
DEEPSTREAM = "/api/v1/"
_ALWAYS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)
Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request's head says. Names of headers are in lower case."""

    method: str
    path: str
    headers: Headers

    def one(self, name: bytes) -> str:
        """A header's value, empty where it is not there. Raises Refusal where it is there twice."""
        found = [value for key, value in self.headers if key == name]
        if len(found) > 1:
            raise Refusal(400, f"the header {name.decode()} is there {len(found)} times; send it once")
        return found[0].decode("latin-1").strip() if found else ""

    @property
    def is_changing(self) -> bool:
        return self.method not in ("GET", "HEAD", "OPTIONS")


def check(asked: Asked, options: ApiOptions) -> None:
    """Raises Refusal for a request that is not let in."""
    _check_host(asked.one(b"host"), options)
    if asked.path not in OPEN_PATHS:
        _check_key(asked, options)
    if asked.is_changing:
        _check_origin(asked)
        _check_type(asked)
    length = asked.one(b"content-length")
    if length.isdecimal() and int(length) > options.max_body_bytes:
        raise Refusal(413, f"a body of {length} bytes (at most {options.max_body_bytes})")


def _check_host(host: str, options: ApiOptions) -> None:
    if options.api_key:  # a key is asked for: a name that was made to point here gets no further
        return
    name = urlsplit(f"//{host}").hostname or "" if host else ""
    if not is_loopback(name) and name not in {allowed.lower() for allowed in options.allowed_hosts}:
        raise Refusal(403, "the Host header is not one of this machine's names; use localhost, or allow the name")


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


def _check_origin(asked: Asked) -> None:
    origin = asked.one(b"origin")
    if origin and urlsplit(origin).netloc.lower() != asked.one(b"host").lower():
        raise Refusal(403, "a page of another site asked for this; its Origin is not this API's")
    if asked.one(b"sec-fetch-site") not in ("", "same-origin", "none"):
        raise Refusal(403, "a page of another site asked for this")


def _check_type(asked: Asked) -> None:
    """JSON, or nothing where there is no body; DeepStream's paths are asked by plain `curl -d`, which says a form."""
    kind = asked.one(b"content-type").partition(";")[0].strip().lower()
    if kind == "application/json" or (not kind and not _has_body(asked)):
        return
    if asked.path.startswith(DEEPSTREAM) and not asked.one(b"origin"):
        return
    raise Refusal(415, f"the body's content-type is {kind or 'missing'}; send application/json")


def _has_body(asked: Asked) -> bool:
    return asked.one(b"content-length") not in ("", "0") or bool(asked.one(b"transfer-encoding"))


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

        asked = Asked(scope["method"], scope["path"], scope["headers"])
        try:
            check(asked, self._options)
            scope[HAS_KEY] = bool(self._options.api_key) and asked.path not in OPEN_PATHS
            body = await _read(receive, self._options.max_body_bytes) if asked.is_changing else b""
        except Refusal as refusal:
            await error_answer(refusal.status, refusal.text, is_last=True)(scope, receive, send_more)
            return
        if body is None:
            return
        if asked.is_changing and asked.path.startswith(DEEPSTREAM):
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
