"""A front's stream to the core ends with the core's own word."""

import asyncio
from pathlib import Path

import grpc

from server.backends.core_relay import GRPC_SOCKET, CoreRelay
from server.core.caller import NOBODY

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


async def refuse(_: object, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is not ready: loading models")


async def test_stream_that_the_core_refuses_while_it_is_written_to_ends_with_its_word(tmp_path: Path) -> None:
    """Whatever gRPC makes of a write that the refusal overtook, the client is told UNAVAILABLE, and why."""
    core = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(refuse)
    service, _, method = METHOD[1:].partition("/")
    core.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    core.add_insecure_port(f"unix:{tmp_path / GRPC_SOCKET}")
    await core.start()
    relay = CoreRelay(tmp_path, max_connections=2)

    async def ask() -> tuple[int, str]:
        stream = relay.grpc_stream(METHOD, (), NOBODY)
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
