"""The gRPC server: GRPCInferenceService, grpc.health.v1 and reflection on one port."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer
from tritonclient.grpc import service_pb2

from penstock.gateway.auth.authenticator import Authenticator
from penstock.gateway.dataplane import DataPlane
from penstock.gateway.grpc.aio_server import MAX_METADATA_BYTES, create_aio_server
from penstock.gateway.grpc.connections import ConnectionGuard, FloodGuard
from penstock.gateway.grpc.forwarding import StreamForwarder
from penstock.gateway.grpc.interceptors import AuthenticationInterceptor, ForwardedIdentityInterceptor, needs_key
from penstock.gateway.grpc.relay import CallRelay
from penstock.gateway.grpc.servicer import INFERENCE_SERVICE as INFERENCE
from penstock.gateway.grpc.servicer import inference_handlers, worker_handlers
from penstock.gateway.grpc.stream import StreamLimits, StreamRelay
from penstock.gateway.metrics import Metrics
from penstock.gateway.workers.core_relay import CoreRelay
from penstock.port_policy import PortLimits
from penstock.protocol.errors import Unauthenticated
from penstock.tls import Certificates

HEALTH_SERVICE = "grpc.health.v1.Health"
WATCH_INTERVAL_S = 0.5

_Serving = health_pb2.HealthCheckResponse


class Health:
    """grpc.health.v1 for the gateway ("") and the inference service, by the data plane's readiness."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._stopping = asyncio.Event()

    def handlers(self) -> "grpc.GenericRpcHandler[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]":
        parse = health_pb2.HealthCheckRequest.FromString
        serialise = _Serving.SerializeToString
        return grpc.method_handlers_generic_handler(
            HEALTH_SERVICE,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self._check, parse, serialise),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch, parse, serialise),
            },
        )

    def end_watches(self) -> None:
        """Informs every watcher that this server stops, and ends its call, so that a drain does not wait for it."""
        self._stopping.set()

    def _status(self, service: str) -> int:
        if service not in ("", INFERENCE):
            return int(_Serving.SERVICE_UNKNOWN)
        is_serving = self._plane.readiness().is_ready and not self._stopping.is_set()
        return int(_Serving.SERVING if is_serving else _Serving.NOT_SERVING)

    async def _check(
        self,
        request: health_pb2.HealthCheckRequest,
        context: "grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]",
    ) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status == _Serving.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:80]!r} here")
        return _Serving(status=status)

    async def _watch(
        self,
        request: health_pb2.HealthCheckRequest,
        _: "grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]",
    ) -> "AsyncIterator[health_pb2.HealthCheckResponse]":
        """The status now, and whenever it has changed, checked twice a second."""
        reported: int | None = None
        while True:
            is_last = self._stopping.is_set()
            status = self._status(request.service)
            if status != reported:
                reported = status
                yield _Serving(status=status)
            if is_last:
                return
            try:
                async with asyncio.timeout(WATCH_INTERVAL_S):
                    await self._stopping.wait()
            except TimeoutError:
                continue


REFLECTION_SERVICE = "grpc.reflection.v1alpha.ServerReflection"


def reflection_handlers() -> (
    "grpc.GenericRpcHandler[reflection_pb2.ServerReflectionRequest, reflection_pb2.ServerReflectionResponse]"
):
    """Lists and describes the inference service, the health service and itself."""
    servicer = ReflectionServicer((INFERENCE, HEALTH_SERVICE, REFLECTION_SERVICE))
    return grpc.method_handlers_generic_handler(
        REFLECTION_SERVICE,
        {
            "ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(
                servicer.ServerReflectionInfo,
                reflection_pb2.ServerReflectionRequest.FromString,
                reflection_pb2.ServerReflectionResponse.SerializeToString,
            )
        },
    )


MIN_PING_INTERVAL_MS = 5_000
CLIENT_SILENCE_MS = 60_000
PONG_TIMEOUT_MS = 20_000
ABORT_MARGIN_S = 1.0
METHODS = tuple(
    f"/{service.full_name}/{method.name}"
    for file in (service_pb2, health_pb2, reflection_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
)


class AddressTaken(OSError):
    """An address cannot be listened on. The message names it, and the flag to change it."""


@dataclass(frozen=True, slots=True)
class GrpcLimits:
    """max_message_bytes: of a request, compressed and decompressed; at most INT32_MAX, Triton's limit.

    max_calls: concurrent calls on a connection, including streams; further ones wait in the client. connections: None
    for a Unix socket, whose clients are our processes. max_connection_age_s: older connections (±10 %) take no new
    calls, so that clients reconnect, perhaps to another replica; 0 for any age.
    """

    max_message_bytes: int = 64 << 20
    max_calls: int = 1024
    max_connection_age_s: float = 0.0
    streams: StreamLimits = field(default_factory=StreamLimits)
    connections: PortLimits | None = field(default_factory=PortLimits)


class GrpcServer:
    """A listening server."""

    def __init__(
        self,
        server: grpc.aio.Server,
        port: int,
        *,
        relay: CallRelay,
        streams: StreamRelay | StreamForwarder,
        health: Health,
        guard: ConnectionGuard | None,
    ) -> None:
        self.port = port
        self._server = server
        self._guard = guard
        self._guarding = asyncio.create_task(guard.run()) if guard is not None else None
        self._relay = relay
        self._streams = streams
        self._health = health

    @property
    def connection_count(self) -> int:
        return self._guard.count if self._guard is not None else 0

    async def stop(self, grace_s: float) -> bool:
        """Drains calls and streams. Returns whether all ended; the others get UNAVAILABLE."""
        self._health.end_watches()
        self._streams.drain()
        stopping = asyncio.create_task(self._server.stop(grace_s + ABORT_MARGIN_S))
        done, _ = await asyncio.wait({stopping}, timeout=grace_s)
        if not done:
            self._relay.cut()
            self._streams.cut()
        await stopping
        if self._guarding is not None:
            self._guarding.cancel()
        return bool(done)


@dataclass(frozen=True, slots=True)
class ProcessRole:
    """The part of a gateway of several processes that this one is.

    core: of a worker, whose port all workers share; it forwards calls there. None for the core, which trusts its
    workers' client identities.
    """

    core: CoreRelay | None


@dataclass(frozen=True, slots=True)
class GrpcEndpoint:
    """Where the server listens: addresses "host:port" with one port (0: the system picks it), or "unix:/path"."""

    addresses: tuple[str, ...]
    certificates: Certificates | None = None


async def serve(
    plane: DataPlane,
    limits: GrpcLimits,
    endpoint: GrpcEndpoint,
    record: Metrics,
    *,
    door: Authenticator | None = None,
    share: ProcessRole | None = None,
) -> GrpcServer:
    """Listens and serves. door: None allows every call. share: None for a single process. Raises AddressTaken."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(is_worth_logging)
    core = share.core if share is not None else None
    is_core = share is not None and core is None
    relay = CallRelay(plane, record, reader_timeout_s=limits.streams.reader_timeout_s, is_counting=not is_core)
    health = Health(plane)
    streams: StreamRelay | StreamForwarder
    if core is not None:
        streams = StreamForwarder(core)
        inference = worker_handlers(plane, relay, streams, core)
    else:
        streams = StreamRelay(plane, record, limits.streams)
        inference = inference_handlers(plane, relay, streams)
    handlers = (inference, health.handlers(), reflection_handlers())
    floods = _flood_guard(door, limits.connections, record)
    server = create_aio_server(
        handlers,
        METHODS,
        interceptors=_interceptors(door, share, record, endpoint.certificates, floods),
        options=_options(limits, is_shared=core is not None),
        drop_policy=floods,
    )
    ports = [_listen(server, address, endpoint.certificates) for address in endpoint.addresses]
    await server.start()
    counted = limits.connections
    guard = ConnectionGuard(ports[0], counted, record.rejected, floods) if counted is not None else None
    return GrpcServer(server, ports[0], relay=relay, streams=streams, health=health, guard=guard)


def _listen(server: grpc.aio.Server, address: str, certificates: Certificates | None) -> int:
    try:
        if certificates is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, _credentials_of(certificates))
    except RuntimeError as error:
        raise AddressTaken(
            f"cannot listen on {address} for gRPC; stop what holds it, or choose another port with --grpc-port"
        ) from error


def _flood_guard(door: Authenticator | None, connections: PortLimits | None, record: Metrics) -> FloodGuard | None:
    """None if no client needs a key, or if all clients are processes of this gateway."""
    if door is None or connections is None:
        return None
    return FloodGuard(
        connections, lambda method: needs_key(method, door.open_to), lambda: record.rejected(Unauthenticated.reason)
    )


def _interceptors(
    door: Authenticator | None,
    share: ProcessRole | None,
    record: Metrics,
    certificates: Certificates | None,
    floods: FloodGuard | None,
) -> "tuple[grpc.aio.ServerInterceptor[object, object], ...]":
    if share is not None and share.core is None:
        return (ForwardedIdentityInterceptor(),)
    if certificates is not None and certificates.wants_client_certificates:
        return (AuthenticationInterceptor(door, record, takes_certificates=True),)
    return () if door is None else (AuthenticationInterceptor(door, record, floods),)


def _credentials_of(certificates: Certificates) -> grpc.ServerCredentials:
    """Credentials that gRPC updates at each handshake if the certificate changed."""

    def configuration(files: tuple[bytes, bytes, bytes | None]) -> grpc.ServerCertificateConfiguration:
        certificate, key, client_ca = files
        return grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca)

    used = [certificates.pem()]

    def changed() -> grpc.ServerCertificateConfiguration | None:
        files = certificates.pem()
        if files == used[0]:
            return None
        used[0] = files
        return configuration(files)

    return grpc.dynamic_ssl_server_credentials(
        configuration(used[0]),
        changed,  # type: ignore[arg-type]  # gRPC documents None for no change; its stubs omit it
        require_client_authentication=certificates.wants_client_certificates,
    )


def is_worth_logging(record: logging.LogRecord) -> bool:
    """False for errors of clients that left, do not read or send invalid metadata: gRPC logs tracebacks for them."""
    error = record.exc_info[0] if record.exc_info else None
    return error is None or error.__name__ not in ("ExecuteBatchError", "UnicodeDecodeError", "CancelledError")


def _options(limits: GrpcLimits, *, is_shared: bool) -> list[tuple[str, int]]:
    """gRPC's channel options.

    A used port is an error, unless workers share it. Clients may ping every 5 s, also without calls. Responses have no
    limit. A connection that is too old gets GOAWAY and ends with its last call.
    """
    aged = [("grpc.max_connection_age_ms", math.ceil(limits.max_connection_age_s * 1000))]
    counted = limits.connections
    return [
        *(aged if limits.max_connection_age_s else []),
        *([("grpc.max_allowed_incoming_connections", counted.max_connections)] if counted is not None else []),
        ("grpc.so_reuseport", int(is_shared)),
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", limits.max_calls),
        ("grpc.server.max_pending_requests", 4096),
        ("grpc.server.max_pending_requests_hard_limit", 8192),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.keepalive_time_ms", CLIENT_SILENCE_MS),
        ("grpc.keepalive_timeout_ms", PONG_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", PONG_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    ]
