"""Redis streams sink: XADD in batches, each one transaction."""

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated
from urllib.parse import unquote, urlsplit

from pydantic import Field

from penstock.outbound import OutboundPolicy
from penstock_video.errors import SinkFailed
from penstock_video.interfaces import SECRET
from penstock_video.sinks.broker import BrokerOptions, BrokerSink, SinkGauge
from penstock_video.sinks.broker_link import (
    DeliveryOutcome,
    LinkDown,
    address_of,
    client_library,
    require_allowed_peer,
    scrub,
)
from penstock_video.sinks.spool import Message

if TYPE_CHECKING:
    from redis import Connection, Redis
    from redis.typing import EncodableT, FieldT


ANSWER_TIMEOUT_S = 3.0
PING_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class RedisOptions(BrokerOptions):
    """url: redis://[user:password@]host:port/db, rediss:// for TLS, or unix://. max_length: approximate."""

    url: Annotated[str, address_of("redis", "rediss", "unix"), Field(json_schema_extra=SECRET)] = field(repr=False)
    stream: str = "penstock"
    max_length: Annotated[int, Field(alias="max-length", ge=1, le=1_000_000_000)] = 100_000


def redis_sink(options: RedisOptions, gauge: SinkGauge | None = None) -> BrokerSink:
    """A sink that adds to a Redis stream. Raises SinkFailed if the library is missing or the URL is invalid."""
    return BrokerSink(RedisLink(options), options, gauge)


class RedisLink:
    """A BrokerLink to one Redis server."""

    name = "redis"
    max_messages = 500
    max_bytes = 4 * 2**20
    over_at = float("inf")

    def __init__(self, options: RedisOptions) -> None:
        self._redis = client_library("redis", "redis", "video")
        self._options = options
        parts = urlsplit(options.url)
        self._secrets = [word for raw in (parts.password, options.url) if raw for word in (raw, unquote(raw))]
        where = parts.path if parts.scheme == "unix" else parts.netloc.rpartition("@")[2]
        self.place = f"redis {where}, stream {options.stream}"
        self._client: Redis | None = None
        self._asked_at = 0.0
        self._connect()  # an invalid URL fails at the start

    def open(self, timeout_s: float) -> bool:
        """Connects and sends PING."""
        self._ask(self._connect())
        return True

    def send(self, messages: Sequence[Message]) -> DeliveryOutcome:
        """Adds them all, or none."""
        try:
            pipeline = self._connect().pipeline(transaction=True)
            for one in messages:
                fields: dict[FieldT, EncodableT] = {
                    "id": one.id,
                    "source_id": one.key,
                    "kind": one.kind,
                    "body": one.body,
                }
                pipeline.xadd(self._options.stream, fields, maxlen=self._options.max_length)
            pipeline.execute()
        except (self._redis.RedisError, OSError) as error:
            return DeliveryOutcome(left=messages, trouble=self._said(error))
        self._asked_at = time.monotonic()
        return DeliveryOutcome(delivered=messages)

    def idle(self) -> None:
        """Sends PING at intervals, so that a lost broker is detected before the next message."""
        if time.monotonic() - self._asked_at > PING_EVERY_S:
            self._ask(self._connect())

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _ask(self, client: "Redis") -> None:
        try:
            client.ping()
        except (self._redis.RedisError, OSError) as error:
            raise LinkDown(self._said(error)) from None
        self._asked_at = time.monotonic()

    def _connect(self) -> "Redis":
        if self._client is None:
            from redis.backoff import NoBackoff
            from redis.retry import Retry

            try:
                self._client = self._redis.Redis.from_url(
                    self._options.url,
                    **_checked(urlsplit(self._options.url).scheme, OutboundPolicy(self._options.allowed_outbound)),
                    socket_timeout=ANSWER_TIMEOUT_S,
                    socket_connect_timeout=ANSWER_TIMEOUT_S,
                    retry=Retry(NoBackoff(), 0),  # it would repeat a batch by itself
                    max_connections=1,
                )
            except (ValueError, TypeError) as error:
                raise SinkFailed(f"{self.place}: {scrub(str(error), self._secrets)}") from None
        return self._client

    def _said(self, error: Exception) -> str:
        if isinstance(error, self._redis.AuthenticationError):
            return "the server refuses the user or password"
        if isinstance(error, self._redis.TimeoutError | TimeoutError):
            return f"no answer within {ANSWER_TIMEOUT_S:g} s"
        return scrub(str(error), self._secrets) or type(error).__name__


def _checked(scheme: str, outbound: OutboundPolicy) -> "dict[str, type[Connection]]":
    """For Redis.from_url: a connection class that checks addresses. Empty for Unix sockets."""
    from redis import Connection, SSLConnection

    class CheckedConnection(Connection):
        def _connect(self) -> socket.socket:
            connected: socket.socket = super()._connect()  # type: ignore[no-untyped-call]
            require_allowed_peer(connected, self.host, outbound)
            return connected

    class CheckedTlsConnection(SSLConnection, CheckedConnection):
        """The same with TLS: SSLConnection uses the socket that CheckedConnection connects."""

    kinds: dict[str, type[Connection]] = {"redis": CheckedConnection, "rediss": CheckedTlsConnection}
    return {"connection_class": kinds[scheme]} if scheme in kinds else {}
