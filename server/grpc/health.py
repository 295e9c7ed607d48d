"""gRPC's own health protocol (grpc.health.v1), as Kubernetes' and Envoy's probes speak it."""

import asyncio
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2

from server.dataplane import DataPlane
from server.grpc.servicer import SERVICE as INFERENCE

SERVICE = "grpc.health.v1.Health"
WATCH_INTERVAL_S = 0.5

_Serving = health_pb2.HealthCheckResponse


class Health:
    """Says of the gateway as a whole ("") and of the inference service what the data plane's readiness says."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._stopping = asyncio.Event()

    def handlers(self) -> "grpc.GenericRpcHandler[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]":
        """Check and Watch."""
        parse = health_pb2.HealthCheckRequest.FromString
        serialise = _Serving.SerializeToString
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self._check, parse, serialise),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch, parse, serialise),
            },
        )

    def end_watches(self) -> None:
        """Tell every watcher that this server stops, and let it go: a drain must not wait for it."""
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
        """The status now, and again whenever it has changed, looked at twice a second."""
        told: int | None = None
        while True:
            is_last = self._stopping.is_set()
            status = self._status(request.service)
            if status != told:
                told = status
                yield _Serving(status=status)
            if is_last:
                return
            try:
                async with asyncio.timeout(WATCH_INTERVAL_S):
                    await self._stopping.wait()
            except TimeoutError:
                continue
