"""Interceptors that authenticate gRPC calls before their message is read, and the client of the current call."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypeAlias, cast

import grpc

from penstock.gateway.auth.api_keys import CREDENTIAL_NAMES, credentials_of
from penstock.gateway.auth.authenticator import CERTIFICATE_PREFIX, Authenticator
from penstock.gateway.grpc.connections import FloodGuard, host_of
from penstock.gateway.grpc.status_codes import refusal_of
from penstock.gateway.metrics import Metrics
from penstock.protocol.call import GrpcMetadata
from penstock.protocol.errors import InferenceError, PermissionDenied, Unauthenticated
from penstock.protocol.identity import IDENTITY_HEADER, Identity, Role, decode_identity
from penstock.tls import subject_of

CACHED_CALLERS = 1024  # by connection, each of which makes many calls
_INFERENCE = "/inference.GRPCInferenceService/"
_OPEN = frozenset(
    (
        f"{_INFERENCE}ServerLive",
        f"{_INFERENCE}ServerReady",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/List",
        "/grpc.health.v1.Health/Watch",
    )
)
# One method reads and changes trace and log settings: the data plane checks which of the two it is.
_ROLE = {f"{_INFERENCE}{name}": Role.INFER for name in ("ModelInfer", "ModelStreamInfer")} | {
    f"{_INFERENCE}{name}": Role.READ
    for name in (
        *("ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex"),
        *("SystemSharedMemoryStatus", "CudaSharedMemoryStatus", "TraceSetting", "LogSettings"),
    )
}
_OR_ROLE = {f"{_INFERENCE}ModelReady": Role.INFER}  # role that is also sufficient
_READ_SERVICES = ("/grpc.reflection.",)

Details = grpc.HandlerCallDetails
Handler: TypeAlias = "grpc.RpcMethodHandler[object, object]"  # generic in the stubs only
Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"
# Results of the interceptor for the handler: both run in the call's task.
_authenticated_caller: ContextVar[Identity | None] = ContextVar("admitted", default=None)
_forwarded_caller: ContextVar[Identity | None] = ContextVar("forwarded_caller", default=None)
_certificate_subject: ContextVar[str] = ContextVar("certified", default="")  # subject of the client's certificate


class AuthenticationInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Authenticates calls by the metadata `authorization: Bearer …` and `x-api-key: …`, before their message is read.

    On a port that requires client certificates, a call without a key is admitted by its certificate. Only the
    handler's context has the certificate, so the check runs there; the connection itself was verified before.

    door: None if every client may do everything. floods: counts calls without a valid key; None on a Unix socket,
    which cannot be flooded from outside.
    """

    def __init__(
        self,
        door: Authenticator | None,
        record: Metrics,
        floods: FloodGuard | None = None,
        *,
        takes_certificates: bool = False,
    ) -> None:
        self._door = door
        self._record = record
        self._floods = floods
        self._takes_certificates = takes_certificates

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], handler_call_details: Details
    ) -> Handler:
        """The method's own handler, or one that refuses or checks first."""
        if self._takes_certificates:
            return _entering(await continuation(handler_call_details), partial(self._enter, handler_call_details))
        try:
            await self._admit(handler_call_details, "")
        except InferenceError as error:
            # A stream's handler runs before a message is read.
            return grpc.stream_stream_rpc_method_handler(partial(self._refuse, error, handler_call_details.method, ""))
        return await continuation(handler_call_details)

    async def _enter(self, details: Details, context: Context) -> None:
        certificate = _certificate_of(context)
        _certificate_subject.set(certificate)
        try:
            await self._admit(details, certificate)
        except InferenceError as error:
            await self._refuse(error, details.method, certificate, None, context)

    async def _admit(self, details: Details, certificate: str) -> None:
        role = role_needed(details.method)
        if self._door is not None and role is not None:
            credentials, or_role = _credentials(details.invocation_metadata or ()), _OR_ROLE.get(details.method)
            _authenticated_caller.set(
                await self._door.admit(credentials, role, or_role=or_role, certificate=certificate)
            )

    async def _refuse(self, error: InferenceError, method: str, certificate: str, _: object, context: Context) -> None:
        peer = context.peer()
        if self._floods is not None and isinstance(error, Unauthenticated | PermissionDenied) and not error.client:
            self._floods.note(peer)
        if self._door is not None:
            self._door.note_refused(error, host_of(peer), method, certificate=certificate)
        await context.abort(*refusal_of(self._record, error))


class ForwardedIdentityInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """For a core, whose only clients are the workers, which have authenticated the forwarded client."""

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], handler_call_details: Details
    ) -> Handler:
        for name, value in handler_call_details.invocation_metadata or ():
            if name == IDENTITY_HEADER and isinstance(value, str):
                _forwarded_caller.set(decode_identity(value))
        return await continuation(handler_call_details)


def role_needed(method: str) -> Role | None:
    """Role required for "/service/Method", or None. Unlisted methods require the highest role."""
    if method in _OPEN:
        return None
    if method.startswith(_READ_SERVICES):
        return Role.READ
    return _ROLE.get(method, Role.ADMIN)


def needs_key(method: str, open_to: frozenset[Role]) -> bool:
    """Whether "/service/Method" refuses clients without a key. open_to: the roles of anonymous clients."""
    role = role_needed(method)
    return role is not None and role not in open_to and _OR_ROLE.get(method) not in open_to


def caller_of(context: "grpc.aio.ServicerContext[bytes, bytes]") -> Identity:
    """The client of the current call."""
    forwarded = _forwarded_caller.get()
    if forwarded is not None:
        return forwarded
    peer = context.peer()
    admitted = _authenticated_caller.get()
    if admitted is None:
        return _anonymous(peer, _certificate_subject.get())
    return replace(admitted, connection=peer, address=host_of(peer))


@lru_cache(CACHED_CALLERS)
def _anonymous(peer: str, certificate: str) -> Identity:
    name = CERTIFICATE_PREFIX + certificate if certificate else ""
    return Identity(name, connection=peer, address=host_of(peer))


def metadata_of(context: "grpc.aio.ServicerContext[bytes, bytes]") -> GrpcMetadata:
    """The call's metadata for the engine, without API keys if they are required."""
    metadata = context.invocation_metadata() or ()
    if _forwarded_caller.get() is not None:
        return tuple((key, value) for key, value in metadata if key != IDENTITY_HEADER)
    if _authenticated_caller.get() is None:
        return tuple((key, value) for key, value in metadata)
    return tuple((key, value) for key, value in metadata if key not in CREDENTIAL_NAMES)


def _credentials(metadata: GrpcMetadata) -> Iterator[str]:
    return credentials_of(
        (name, value if isinstance(value, str) else value.decode("latin-1"))
        for name, value in metadata
        if name in CREDENTIAL_NAMES
    )


def _certificate_of(context: Context) -> str:
    """The subject of the connection's verified client certificate; "" for none."""
    certificate = next(iter(context.auth_context().get("x509_pem_cert", ())), b"")
    return subject_of(certificate) if certificate else ""


def _entering(handler: Handler, enter: Callable[[Context], Awaitable[None]]) -> Handler:
    """The handler of a unary or a streamed method, run once `enter` has returned."""
    function: Any = handler.stream_stream or handler.unary_stream or handler.unary_unary

    async def answer(request: object, context: Context) -> object:
        await enter(context)
        return await function(request, context)

    async def stream(request: object, context: Context) -> None:
        await enter(context)
        answers = function(request, context)
        if not isinstance(answers, AsyncIterator):
            await answers  # it writes to the context itself
            return
        async for message in answers:
            await context.write(message)

    coders = handler.request_deserializer, handler.response_serializer
    if not handler.response_streaming:
        return cast(Handler, grpc.unary_unary_rpc_method_handler(answer, *coders))
    make = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
    return cast(Handler, make(stream, *coders))
