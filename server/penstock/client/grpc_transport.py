"""gRPC transports for tensors: one for threads, one for an event loop. Imports grpc."""

import asyncio
from typing import Any

import grpc
import grpc.aio

from penstock.client.operations import TIMEOUT_HEADER, HttpReply
from penstock.client.options import ClientOptions
from penstock.client.replies import Attempt, error_of_status, late
from penstock.network import client_certificate, trusted_roots
from penstock.protocol.errors import InferenceError


class GrpcTransport:
    """Sends messages to one gateway. Thread-safe."""

    def __init__(self, options: ClientOptions) -> None:
        """Opens no connection. Raises InvalidRequest for an unusable client certificate."""
        self._options = options
        if options.is_tls:
            self._channel = grpc.secure_channel(options.grpc_address, _credentials(), _channel_options(options))
        else:
            self._channel = grpc.insecure_channel(options.grpc_address, _channel_options(options))

    def send(self, attempt: Attempt) -> HttpReply:
        """The serialized response message, as the reply's body. Raises InferenceError."""
        method = self._channel.unary_unary(attempt.target, None, None)
        call = method.future(attempt.operation.body, timeout=_deadline_s(attempt), metadata=_metadata(attempt))
        try:
            return HttpReply(200, "", {}, call.result(attempt.timeout_s))
        except grpc.FutureTimeoutError:
            call.cancel()  # type: ignore[no-untyped-call]
            raise late(self._options, attempt.timeout_s) from None
        except grpc.RpcError as error:
            raise _failure(error, self._options, attempt) from None  # the message contains the cause

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()


class AioGrpcTransport:
    """Sends messages to one gateway from one event loop."""

    def __init__(self, options: ClientOptions) -> None:
        """Opens no connection. Raises InvalidRequest for an unusable client certificate."""
        self._options = options
        if options.is_tls:
            self._channel = grpc.aio.secure_channel(options.grpc_address, _credentials(), _channel_options(options))
        else:
            self._channel = grpc.aio.insecure_channel(options.grpc_address, _channel_options(options))

    async def send(self, attempt: Attempt) -> HttpReply:
        """The serialized response message, as the reply's body. Raises InferenceError."""
        method = self._channel.unary_unary(attempt.target, None, None)
        try:
            async with asyncio.timeout(attempt.timeout_s):
                call = method(attempt.operation.body, timeout=_deadline_s(attempt), metadata=_metadata(attempt))
                return HttpReply(200, "", {}, await call)
        except TimeoutError:
            raise late(self._options, attempt.timeout_s) from None
        except grpc.RpcError as error:
            raise _failure(error, self._options, attempt) from None  # the message contains the cause

    async def aclose(self) -> None:
        """Closes the channel."""
        await self._channel.close(None)


def _credentials() -> grpc.ChannelCredentials:
    certificate = client_certificate()
    return grpc.ssl_channel_credentials(trusted_roots(), certificate, certificate)


def _channel_options(options: ClientOptions) -> list[tuple[str, Any]]:
    """Ignores proxy environment variables: a proxy would receive the API key."""
    return [
        ("grpc.max_receive_message_length", min(options.max_response_bytes, (1 << 31) - 1)),
        ("grpc.max_send_message_length", -1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
    ]


def _deadline_s(attempt: Attempt) -> float | None:
    """A deadline is sent to the gateway only if the caller set one."""
    return attempt.timeout_s if TIMEOUT_HEADER in attempt.headers else None


def _metadata(attempt: Attempt) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in attempt.headers.items() if name != TIMEOUT_HEADER)


def _failure(error: Any, options: ClientOptions, attempt: Attempt) -> InferenceError:
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and not error.trailing_metadata():
        return late(options, attempt.timeout_s)
    metadata = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
    return error_of_status(code.value[0], details, metadata, options)
