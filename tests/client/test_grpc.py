"""Tensors over gRPC, with a fake server."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from penstock.protocol.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    EngineFailed,
    EngineUnavailable,
    GatewayUnreachable,
    InvalidRequest,
    ModelNotFound,
    TooLarge,
    Unauthenticated,
)
from penstock.protocol.grpc_inference import decode_request, encode_response
from penstock.protocol.inference import InferResponse, tensor_from_numpy
from tests.client.conftest import Make

Handler = Callable[[bytes, grpc.ServicerContext], bytes]
ONES = {"x": np.ones((1, 4), np.float32)}


@contextmanager
def grpc_server(handler: Handler) -> Iterator[str]:
    """The address of a server whose ModelInfer is `handler`."""
    method = grpc.unary_unary_rpc_method_handler(handler)
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelInfer": method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def doubled(message: bytes, context: grpc.ServicerContext) -> bytes:
    """ModelInfer of a model that doubles its input."""
    request = decode_request(message)
    output = tensor_from_numpy("y", request.inputs[0].to_numpy() * 2)
    return encode_response(InferResponse(request.model_name, "1", (output,)))


def client_of(make: Make, address: str, **options: Any) -> Any:
    """A client with protocol gRPC; nothing listens on its HTTP port."""
    return make("http://127.0.0.1:9", protocol="grpc", grpc_address=address, retries=0, **options)


def test_tensors_go_over_grpc_with_the_key(make: Make) -> None:
    """The deadline of a block becomes the deadline of the gRPC call; without one, the call has none."""
    seen: list[tuple[str, bool]] = []

    def handler(message: bytes, context: grpc.ServicerContext) -> bytes:
        metadata = dict(context.invocation_metadata())
        seen.append((metadata["x-api-key"], (context.time_remaining() or 1e9) < 60))
        return doubled(message, context)

    with grpc_server(handler) as address, client_of(make, address, api_key="secret") as client:
        assert client.infer_tensors("m", ONES)["y"].tolist() == [[2.0] * 4]
        with client.deadline(20.0):
            client.infer_tensors("m", ONES)
    assert seen == [("secret", False), ("secret", True)]


@pytest.mark.parametrize(
    ("code", "metadata", "kind", "sentence"),
    [
        (grpc.StatusCode.NOT_FOUND, (), ModelNotFound, "^the sentence$"),
        (grpc.StatusCode.INVALID_ARGUMENT, (), InvalidRequest, "^the sentence$"),
        (grpc.StatusCode.UNAUTHENTICATED, (), Unauthenticated, "requires an API key: give a valid key"),
        (grpc.StatusCode.UNAVAILABLE, (), ConnectionFailed, r"broke \(the sentence\)"),
        (
            grpc.StatusCode.UNAVAILABLE,
            (("x-penstock-reason", "engine_down"), ("retry-after", "0.25")),
            EngineUnavailable,
            "^the sentence$",
        ),
    ],
)
def test_grpc_status_raises_the_matching_error_class(
    make: Make, code: grpc.StatusCode, metadata: tuple[tuple[str, str], ...], kind: type[Exception], sentence: str
) -> None:
    """The status code and the reason select the class; retry-after is in seconds."""

    def handler(message: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_trailing_metadata(metadata)
        context.abort(code, "the sentence")

    refused = pytest.raises(kind, match=sentence)
    with grpc_server(handler) as address, client_of(make, address, api_key="") as client, refused as caught:
        client.infer_tensors("m", ONES)
    assert type(caught.value) is kind
    assert getattr(caught.value, "retry_after_s") == (0.25 if metadata else None)  # noqa: B009


def test_silent_and_absent_servers_end_within_the_deadline(make: Make) -> None:
    """A server that never responds and one that is not running both raise within the deadline."""

    def never(message: bytes, context: grpc.ServicerContext) -> bytes:
        while context.is_active():
            time.sleep(0.02)
        return b""

    with grpc_server(never) as address, client_of(make, address, timeout_s=0.3) as client:
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"did not answer within 0\.\d+ s"):
            client.infer_tensors("m", ONES)
        assert time.monotonic() - begin < 2
    with client_of(make, "127.0.0.1:9") as client, pytest.raises(GatewayUnreachable, match="over gRPC at 127"):
        client.infer_tensors("m", ONES)


def test_large_and_malformed_responses_are_errors(make: Make) -> None:
    """A response over the size limit and a malformed message raise an error of one sentence."""
    larger = pytest.raises(TooLarge, match=r"larger than max")
    with grpc_server(doubled) as address, client_of(make, address, max_response_bytes=1000) as client, larger:
        client.infer_tensors("m", {"x": np.ones(1000, np.float32)})
    malformed = pytest.raises(EngineFailed, match="answered bytes that are no ModelInferResponse")
    with grpc_server(lambda *_: b"\xff\xff") as address, client_of(make, address) as client, malformed:
        client.infer_tensors("m", ONES)
