"""EmbeddedRelay: the KServe v2 wire over the embedded engine, as Triton would answer it."""

from collections.abc import AsyncGenerator

from server.backends.embedded.engine import EmbeddedEngine
from server.backends.embedded.wire.grpc_methods import GrpcMethods
from server.backends.embedded.wire.grpc_stream import OrderedStream
from server.backends.embedded.wire.http_routes import HttpRoutes
from server.backends.wire.errors import ANSWERED, grpc_error, http_error
from server.core.backend import GrpcStream
from server.core.errors import NotSupported
from server.core.relay import GrpcAnswer, GrpcCall, GrpcMetadata, HttpAnswer, HttpCall, HttpStream

STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
MAX_BODY_BYTES = 2**31 - 1  # Triton's own; what is less is the transport's to say


class EmbeddedRelay:
    """Relay over the engine: bytes in, bytes out. Call it from the engine's event loop; long bodies go to threads.

    Raises Overloaded besides what Relay says: the transport knows what to tell of it. max_body_bytes: of a compressed
    body, once decompressed.
    """

    def __init__(self, engine: EmbeddedEngine, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._http = HttpRoutes(engine, max_body_bytes)
        self._grpc = GrpcMethods(engine)

    async def http(self, call: HttpCall, *, deadline: float | None) -> HttpAnswer:
        """See Relay. Cancelling cancels the engine's work."""
        try:
            return await self._http.answer(call, deadline)
        except ANSWERED as error:
            return http_error(error)

    async def http_stream(self, call: HttpCall, *, deadline: float | None) -> HttpStream:
        """See Relay: the whole answer as one piece, since no model here answers more than once."""
        answer = await self.http(call, deadline=deadline)
        return HttpStream(answer.status, answer.headers, _one_piece(answer.body))

    async def grpc_stream(self, method: str, metadata: GrpcMetadata, *, deadline: float | None) -> GrpcStream:
        """Answers one request each, in their order. Raises NotSupported for a method that has no stream."""
        if method != STREAM_INFER:
            raise NotSupported(f"the embedded engine has no {method.rpartition('/')[2]} that streams")
        return OrderedStream(lambda message: self._grpc.infer(message, deadline), deadline=deadline)

    async def grpc(self, call: GrpcCall, *, deadline: float | None) -> GrpcAnswer:
        """See Relay. Cancelling cancels the engine's work."""
        try:
            return GrpcAnswer(0, await self._grpc.answer(call.method, call.message, deadline))
        except ANSWERED as error:
            return grpc_error(error)


async def _one_piece(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body
