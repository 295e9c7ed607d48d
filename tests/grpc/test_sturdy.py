"""A call of a name that is not served, valid UTF-8 or not, fails without effect on other calls."""

import asyncio

import grpc
import h2.config
import h2.connection
import pytest
from tritonclient.grpc import service_pb2

from tests.grpc.harness import Front

LIVE = "/inference.GRPCInferenceService/ServerLive"


def call_of(path: bytes) -> bytes:
    """A gRPC call as it stands on the wire, whatever its name."""
    given = h2.config.H2Configuration(
        header_encoding=None, validate_outbound_headers=False, normalize_outbound_headers=False
    )
    connection = h2.connection.H2Connection(given)
    connection.initiate_connection()
    headers = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"a")]
    connection.send_headers(1, [*headers, (b"te", b"trailers"), (b"content-type", b"application/grpc")])
    connection.send_data(1, bytes(5), end_stream=True)
    sent: bytes = connection.data_to_send()
    return sent


async def is_live(front: Front) -> bool:
    answer = await front.channel.unary_unary(LIVE)(b"", timeout=10)
    return bool(service_pb2.ServerLiveResponse.FromString(answer).live)


@pytest.mark.parametrize("path", [b"/\xd5J", b"/inference.GRPCInferenceService/\xff", b"\xc3", b"/", b"/a/b/c"])
async def test_call_of_an_unreadable_name_does_not_end_the_server(front: Front, path: bytes) -> None:
    """grpcio alone stops for good at a name that is no UTF-8; here the call is answered, and the next one too."""
    reader, writer = await asyncio.open_connection(*front.address.rsplit(":", 1))
    writer.write(call_of(path))
    async with asyncio.timeout(30):
        answer = b""
        while b"grpc-status" not in answer and (piece := await reader.read(1 << 16)):
            answer += piece
    writer.close()
    assert await is_live(front)


async def test_call_of_an_unserved_name_is_unimplemented(front: Front) -> None:
    """Of our services and of others; again and again."""
    for name in ("/inference.GRPCInferenceService/Nothing", "/another.Service/Method", "/\u00e9/\u4e2d") * 3:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await front.channel.unary_unary(name)(b"", timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert await is_live(front)
