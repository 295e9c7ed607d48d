"""Webhook sink: HTTP POST of JSON with a deadline for the whole exchange, retries and a dead-letter file."""

import http.client
import io
import os
import random
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import unquote, urlsplit

import msgspec
import structlog
import urllib3
from pydantic import BeforeValidator, Field, WithJsonSchema
from urllib3 import HTTPConnectionPool, connection_from_url
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.response import BaseHTTPResponse
from urllib3.util import parse_url

from penstock.outbound import OutboundPolicy
from penstock_video.backoff import Backoff
from penstock_video.errors import SinkFailed
from penstock_video.interfaces import SECRET
from penstock_video.sinks.broker import BrokerOptions, BrokerSink, SinkGauge
from penstock_video.sinks.broker_link import DeliveryOutcome, LinkDown, address_of, require_allowed_peer
from penstock_video.sinks.schemas import iso_time
from penstock_video.sinks.spool import Message

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


AT_ONCE_S = 0.001  # 0 would mean non-blocking, with another kind of error


class TimelyPost:
    """A persistent connection to one address. Not thread-safe. timeout_s: from connecting to the end of the response,
    without the DNS lookup; each address of a host may take that long. outbound: allowed addresses."""

    def __init__(self, url: str, timeout_s: float, outbound: OutboundPolicy) -> None:
        self._deadline, self._timeout_s = _Deadline(), timeout_s
        self._target = parse_url(url).request_uri
        plain, with_tls = _connections(self._deadline, outbound)
        self._pool: HTTPConnectionPool = connection_from_url(url, maxsize=1, timeout=timeout_s, retries=False)
        self._pool.ConnectionCls = with_tls if self._pool.scheme == "https" else plain

    def post(self, body: bytes, headers: Mapping[str, str]) -> BaseHTTPResponse:
        """The response, with an unread body; no redirects. Raises urllib3's errors, OSError, and LinkDown."""
        self._deadline.begin(self._timeout_s)
        return self._pool.urlopen(
            "POST",
            self._target,
            body=body,
            headers=headers,
            redirect=False,
            preload_content=False,
            decode_content=False,
        )

    def close(self) -> None:
        self._pool.close()


class _Deadline:
    """When the current exchange must end."""

    def __init__(self) -> None:
        self._until = 0.0

    def begin(self, timeout_s: float) -> None:
        self._until = time.monotonic() + timeout_s

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until

    @property
    def left_s(self) -> float:
        """Timeout for the socket."""
        return max(self._until - time.monotonic(), AT_ONCE_S)


class _TimelyBytes(io.RawIOBase):
    """Receives until the deadline; then raises TimeoutError, even if bytes keep coming."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, deadline: _Deadline) -> None:
        self._raw, self._sock, self._deadline = raw, sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int | None:
        if self._deadline.is_over:
            raise TimeoutError("the answer takes too long")
        self._sock.settimeout(self._deadline.left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _connections(deadline: _Deadline, outbound: OutboundPolicy) -> tuple[type[HTTPConnection], type[HTTPSConnection]]:
    """urllib3's connection classes, without and with TLS, with the deadline and the check of addresses."""

    class Answer(http.client.HTTPResponse):
        def __init__(self, sock: socket.socket, debuglevel: int = 0, method: str | None = None) -> None:
            super().__init__(sock, debuglevel, method)
            self.fp = io.BufferedReader(_TimelyBytes(self.fp.detach(), sock, deadline))

    class Connection(HTTPConnection):
        response_class = Answer

        def _new_conn(self) -> socket.socket:
            self.timeout = deadline.left_s
            sock = super()._new_conn()
            require_allowed_peer(sock, self.host, outbound)
            sock.settimeout(deadline.left_s)
            return sock

        def send(self, data: object) -> None:
            if self.sock is not None:
                self.sock.settimeout(deadline.left_s)
            super().send(data)  # type: ignore[arg-type]

    class TlsConnection(Connection, HTTPSConnection):
        """The same: HTTPSConnection puts TLS on what Connection connects."""

    return Connection, TlsConnection


AWAY = frozenset({408, 429, 502, 503, 504})
TRY_AGAIN = frozenset({425})
BACKOFF = Backoff(1.0, 16.0)  # between the attempts of one message
LONGEST_RETRY_AFTER_S = 60.0
DEAD_LETTER_BYTES = 64 * 2**20  # maximum size of the file
READ_BYTES = 4096  # of a response's body; after a longer one the connection is not reused
BUDGET, BUDGET_PER_S, BUDGET_PER_MESSAGE = 20.0, 0.1, 0.2

log = structlog.get_logger(component="video")


@dataclass(frozen=True, slots=True)
class WebhookOptions(BrokerOptions):
    """url: http or https, may contain user and password. headers: of each request. timeout_s: of one POST, from
    connecting to the end of its response. attempts: per message. dead_letters: a file, None to only count."""

    url: Annotated[str, address_of("http", "https"), Field(json_schema_extra=SECRET)] = field(repr=False)
    headers: Annotated[
        tuple[tuple[str, str], ...],
        BeforeValidator(lambda given: tuple(given.items())),
        WithJsonSchema({"type": "object", **SECRET}),
    ] = field(default=(), repr=False)
    timeout_s: Annotated[float, Field(alias="timeout", ge=0.1, le=120)] = 5.0
    attempts: Annotated[int, Field(ge=1, le=100)] = 5
    dead_letters: Annotated[Path | None, Field(alias="dead-letters")] = None


def webhook_sink(options: WebhookOptions, gauge: SinkGauge | None = None) -> BrokerSink:
    """A sink that posts to a URL. Raises SinkFailed if a header is invalid."""
    return BrokerSink(WebhookLink(options), options, gauge)


class RetryBudget:
    """Retry budget of all messages: a token bucket filled by time and by deliveries. Sans-IO."""

    def __init__(self) -> None:
        self._saved = BUDGET
        self._filled_at: float | None = None

    def delivered(self, count: int) -> None:
        self._saved = min(BUDGET, self._saved + count * BUDGET_PER_MESSAGE)

    def take(self, now: float) -> bool:
        """Takes a token for a retry; returns whether there was one. now: monotonic seconds."""
        if self._filled_at is not None:
            self._saved = min(BUDGET, self._saved + (now - self._filled_at) * BUDGET_PER_S)
        self._filled_at = now
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True


class DeadLetters:
    """A file of undelivered messages, bounded in bytes."""

    def __init__(self, path: Path | None, max_bytes: int = DEAD_LETTER_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._logged = ""

    def add(self, messages: Sequence[Message], reason: str) -> None:
        """Appends messages. If the file is full or not writable they are lost, which is logged once."""
        if self._path is None:
            return
        now = iso_time(time.time())
        try:
            with open(self._path, "ab") as file:
                for one in messages:
                    line = msgspec.json.encode(
                        {"time": now, "reason": reason, "id": one.id, "message": msgspec.Raw(one.body)}
                    )
                    if file.tell() + len(line) >= self._max_bytes:
                        self._tell(f"it has its {self._max_bytes} bytes: move it away")
                        return
                    file.write(line + b"\n")
            self._logged = ""
        except OSError as error:
            self._tell(os.strerror(error.errno) if error.errno else type(error).__name__)

    def _tell(self, trouble: str) -> None:
        if self._logged != trouble:
            self._logged = trouble
            log.error("dead letters are lost", file=str(self._path), reason=trouble)


class WebhookLink:
    """A BrokerLink to one URL."""

    name = "webhook"
    max_messages, max_bytes = 1, 4 * 2**20
    over_at = float("inf")

    def __init__(self, options: WebhookOptions) -> None:
        self._options = options
        parts = urlsplit(options.url)
        self.place = f"webhook {parts.scheme}://{parts.netloc.rpartition('@')[2]}"  # a path is often a secret, too
        self._url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        self._headers = {"Content-Type": "application/json", "User-Agent": "penstock", **dict(options.headers)}
        if parts.username:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers |= urllib3.make_headers(basic_auth=login)
        if any(set(name + value) & set("\r\n\0") for name, value in self._headers.items()):
            raise SinkFailed(f"{self.place}: a header's name or value has a line break")
        self._budget = RetryBudget()
        self._dead_letters = DeadLetters(options.dead_letters)
        self._tried = ("", 0)  # the message at the head, and its attempts
        self._failures = 0  # consecutive
        self._new_connection = partial(
            TimelyPost, self._url, options.timeout_s, OutboundPolicy(options.allowed_outbound)
        )
        self._connection: TimelyPost | None = None

    def open(self, timeout_s: float) -> bool:
        """Does nothing: a URL can only be tested by a message."""
        return False

    def send(self, messages: Sequence[Message]) -> DeliveryOutcome:
        """Posts the one message."""
        errors = urllib3.exceptions
        try:
            answer = self._post(messages)
        except LinkDown as refused:
            return DeliveryOutcome(left=messages, trouble=refused.message)
        except (errors.NewConnectionError, errors.ConnectTimeoutError, errors.SSLError, errors.ProxyError) as error:
            return DeliveryOutcome(left=messages, trouble=_what_failed(error))
        except (errors.HTTPError, OSError, ValueError) as error:
            return self._again(messages, _what_failed(error), 0.0)
        self._drain(answer)
        if 200 <= answer.status < 300:
            self._budget.delivered(len(messages))
            return DeliveryOutcome(delivered=messages)
        reason = f"answered {answer.status}" + (": redirects are not followed" if answer.status < 400 else "")
        pause_s = retry_after_s(answer.headers.get("Retry-After", ""), time.time())
        if answer.status in AWAY:
            return DeliveryOutcome(left=messages, trouble=reason, pause_s=pause_s)
        if answer.status >= 500 or answer.status in TRY_AGAIN:
            return self._again(messages, reason, pause_s)
        self._dead_letters.add(messages, reason)
        return DeliveryOutcome(refused=messages, refusal=reason)

    def idle(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _post(self, messages: Sequence[Message]) -> "BaseHTTPResponse":
        connection = self._connection = self._connection or self._new_connection()
        return connection.post(messages[0].body, {**self._headers, "Idempotency-Key": messages[0].id})

    def _drain(self, answer: "BaseHTTPResponse") -> None:
        """Reads a short response to reuse its connection; closes any other."""
        try:
            answer.read1(READ_BYTES)
        except (urllib3.exceptions.HTTPError, OSError):
            answer.close()
            return
        if getattr(answer, "length_remaining", None) == 0:
            answer.release_conn()
        else:
            answer.close()

    def _again(self, messages: Sequence[Message], trouble: str, pause_s: float) -> DeliveryOutcome:
        head, tries = self._tried
        tries = tries + 1 if head == messages[0].id else 1
        if tries == 1:
            self._failures = 0
        self._tried = (messages[0].id, tries)
        reason = ""
        if tries >= self._options.attempts:
            reason = f"{trouble}, at attempt {tries} of {self._options.attempts}"
        elif not self._budget.take(time.monotonic()):
            reason = f"{trouble}, and the budget of second tries is spent"
        if not reason:
            self._failures += 1
            pause_s = max(pause_s, BACKOFF.delay_s(self._failures, random.random()))
            return DeliveryOutcome(left=messages, trouble=trouble, pause_s=pause_s)
        self._dead_letters.add(messages, reason)
        return DeliveryOutcome(refused=messages, refusal=reason, trouble=trouble, pause_s=pause_s)


def retry_after_s(header: str, unix_s: float) -> float:
    """Seconds of a Retry-After header, a number or a date; at most a minute, 0 if unusable."""
    try:
        seconds = float(header)
    except ValueError:
        try:
            date = parsedate_to_datetime(header)
        except ValueError:
            return 0.0
        seconds = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - unix_s
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER_S) if seconds == seconds else 0.0


def _what_failed(error: Exception) -> str:
    """Our text for the failure: urllib3's text contains the URL, whose path may be secret."""
    words = {
        "NewConnectionError": "cannot be reached",
        "NameResolutionError": "its name is not known",
        "ConnectTimeoutError": "no connection in time",
        "ReadTimeoutError": "no answer in time",
        "SSLError": "its certificate or TLS is not accepted",
        "ProtocolError": "the connection broke",
    }
    return words.get(type(error).__name__, type(error).__name__)
