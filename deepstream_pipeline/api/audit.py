"""Writes the control API's audit log: a line for every request that changes something or whose key is refused."""

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

CERTIFICATE = "penstock.certificate"  # key in a scope: the connection's client certificate (DER)
HAS_KEY = "penstock.has_key"  # key in a scope: whether the client sent the API key
KEY_CLIENT = "api-key"  # name of the client with the API key; there is only one key


class Record(Protocol):
    """Writes a line; see server.access.audit.AuditLog."""

    def __call__(self, client: str, address: str, action: str, target: str, outcome: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Audit:
    """client_of: returns the name of a client certificate (DER) for the log."""

    record: Record
    client_of: Callable[[bytes], str]


class Audited:
    """The app; writes a line after each request that belongs in the audit log."""

    def __init__(self, app: ASGIApp, audit: Audit) -> None:
        self._app, self._audit = app, audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        finally:
            if scope["type"] == "http":
                self._note(scope, status)

    def _note(self, scope: Scope, status: int) -> None:
        method, path = scope["method"], scope["path"]
        is_denied = status == HTTPStatus.UNAUTHORIZED
        if not is_denied and method in ("GET", "HEAD", "OPTIONS"):
            return
        certificate: bytes = scope.get(CERTIFICATE, b"")
        client = self._audit.client_of(certificate) if certificate else ""
        client = KEY_CLIENT if scope.get(HAS_KEY) else client
        address = scope["client"][0] if scope.get("client") else ""
        if is_denied:
            self._audit.record(client, address, "access", f"{method} {path}", "unauthenticated")
        else:
            self._audit.record(client, address, method.lower(), path, _outcome(status))


def _outcome(status: int) -> str:
    if not status:
        return "cancelled"
    if status < HTTPStatus.BAD_REQUEST:
        return "ok"
    return "refused" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "failed"
