"""A front's calls to the core end with the core's own word, or with its silence."""

import asyncio
from pathlib import Path

import grpc

from penstock.engines.call_options import CallTimeouts
from penstock.engines.triton.http2_protocol import FrameKind, frame
from penstock.gateway.workers.core_relay import GRPC_SOCKET, CoreRelay
from penstock.protocol.call import GrpcAnswer, GrpcCall
from penstock.protocol.errors import EngineUnavailable
from penstock.protocol.identity import ANONYMOUS

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]
METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


async def refuse(_: object, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is not ready: loading models")


async def test_stream_that_the_core_refuses_while_it_is_written_to_ends_with_its_word(tmp_path: Path) -> None:
    """Whatever gRPC makes of a write that the refusal overtook, the client gets UNAVAILABLE with the reason."""
    core = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(refuse)
    service, _, method = METHOD[1:].partition("/")
    core.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    core.add_insecure_port(f"unix:{tmp_path / GRPC_SOCKET}")
    await core.start()
    relay = CoreRelay(tmp_path, max_connections=2)

    async def ask() -> tuple[int, str]:
        stream = relay.open_stream(METHOD, (), ANONYMOUS)
        for _ in range(20):
            await stream.send(bytes(1 << 16))
        while await stream.receive() is not None:
            pass
        end = await stream.end()
        return end.code, end.details

    try:
        ends = await asyncio.gather(*[ask() for _ in range(40)])
    finally:
        await relay.aclose()
        await core.stop(0)
    assert set(ends) == {(grpc.StatusCode.UNAVAILABLE.value[0], "the engine is not ready: loading models")}


class Stopped(asyncio.Protocol):
    """A core that is stopped once a front is connected: it answers nothing, pings neither, and accepts no other."""

    def __init__(self, connections: list[asyncio.BaseTransport]) -> None:
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if not self._connections:
            transport.write(frame(FrameKind.SETTINGS, 0, 0, b""))
        self._connections.append(transport)


async def test_calls_of_a_core_that_falls_silent_end_though_they_have_no_deadline(tmp_path: Path) -> None:
    """UNAVAILABLE after unanswered pings, in our words or in gRPC's own, not clients that wait for ever."""
    connections: list[asyncio.BaseTransport] = []
    loop = asyncio.get_running_loop()
    core = await loop.create_unix_server(lambda: Stopped(connections), str(tmp_path / GRPC_SOCKET))
    relay = CoreRelay(tmp_path, max_connections=1, timeouts=CallTimeouts(keepalive_s=0.3, keepalive_timeout_s=0.3))

    async def stream() -> GrpcAnswer:
        passed = relay.open_stream(METHOD, (), ANONYMOUS)
        assert await passed.receive() is None
        return await passed.end()

    try:
        async with asyncio.timeout(60):
            call = relay.send(GrpcCall(METHOD, b""), ANONYMOUS, deadline=None)
            ends = await asyncio.gather(call, stream(), return_exceptions=True)
    finally:
        await relay.aclose()
        core.close()
        for connection in connections:
            connection.close()
    for end in ends:
        assert isinstance(end, EngineUnavailable) or (isinstance(end, GrpcAnswer) and end.code == UNAVAILABLE), end
