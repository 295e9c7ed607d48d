"""What both gRPC clients share: channels, metadata, and whether an answer is one."""

import re
from collections.abc import Set

import grpc
import grpc.aio

from loadtest.clients.client import Answer, Endpoint, TargetError
from loadtest.clients.replies import grpc_refusal, short
from loadtest.results import Status

SERVICE = "/inference.GRPCInferenceService"
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a connection a channel
    ("grpc.enable_retries", 0),  # an error is an error
    ("grpc.enable_http_proxy", 0),
    # A server that comes back is asked again within a second, not within two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
# A server that was told our deadline answers at it, too, and its word may come a moment before our own clock's.
DEADLINE_MARGIN_S = 0.05

GrpcMetadata = tuple[tuple[str, str], ...]


def open_channel(endpoint: Endpoint) -> grpc.aio.Channel:
    """A connection of its own, with TLS where the endpoint's http_url has it. Made inside the event loop."""
    if endpoint.http_url.startswith("https://"):
        return grpc.aio.secure_channel(endpoint.grpc_address, grpc.ssl_channel_credentials(), CHANNEL_OPTIONS)
    return grpc.aio.insecure_channel(endpoint.grpc_address, CHANNEL_OPTIONS)


def metadata_of(endpoint: Endpoint) -> GrpcMetadata:
    """The endpoint's headers as gRPC wants them: names in lower case.

    Raises TargetError for what it does not take: some signs of HTTP's names, names that end in -bin, tabs in values.
    """
    for name, value in endpoint.headers:
        if not re.fullmatch(r"[0-9a-z_.-]+(?<!-bin)", name.lower()) or not re.fullmatch("[ -~]*", value):
            raise TargetError(f"the header {name!r} cannot travel over gRPC: name and value are plain text there")
    return tuple((name.lower(), value) for name, value in endpoint.headers)


def judge(found: Set[str], wanted: frozenset[str], sizes: tuple[int, int]) -> Answer:
    """OK where an answer holds every wanted output. sizes: bytes sent and received."""
    missing = wanted - found
    if not missing:
        return Answer(Status.OK, "OK", "", *sizes)
    return Answer(Status.FAILED, "OK", short(f"the answer has no output {', '.join(sorted(missing))}"), *sizes)


def refusal(error: grpc.aio.AioRpcError, channel: grpc.aio.Channel, sent_bytes: int, *, left_s: float) -> Answer:
    """The answer of a call that did not end OK. left_s: until our own deadline, when it ended."""
    is_connected = channel.get_state() is grpc.ChannelConnectivity.READY
    return grpc_refusal(error, sent_bytes, is_connected=is_connected, is_late=left_s <= DEADLINE_MARGIN_S)


def closed(sent_bytes: int) -> Answer:
    """Of a request to a client that was closed under it."""
    return Answer(Status.FAILED, "", "the client was closed before the answer came", sent_bytes)
