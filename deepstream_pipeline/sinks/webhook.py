"""HTTP POST of JSON to an address of the user's: one message, or a list of several.

What cannot be delivered goes to a dead-letter file, a line each: {"time", "reason", "id", "message"}.
* Nothing listens there, its address is not allowed, the connection fails, or 502, 503, 504, 408, 429: the receiver is
  unavailable or overloaded. The message waits, as with any broker, and at least as long as Retry-After says; the spool
  is the limit.
* Another 5xx, 425, no answer in time, a broken answer: it may be the message's fault. It is tried again, `attempts`
  times in all, pausing 1, 2, 4, 8, then 16 s (jittered) and at least as long as Retry-After says, then dead letter. All
  messages share one budget of second tries: a few a minute and one for each five messages sent. When it is spent, a
  message has one try only.
* Any other status: dead letter at once. Redirects are not followed.
The header Idempotency-Key identifies the message (for a list: its first message and its length), and is the same on
every attempt. A list that failed is resent unchanged, without the messages that came after it.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec
import structlog

from deepstream_pipeline.errors import SinkFailed
from deepstream_pipeline.sinks.broker import Backoff, BrokerOptions, BrokerSink, SinkGauge
from deepstream_pipeline.sinks.link import LinkDown, Outcome, missing
from deepstream_pipeline.sinks.schemas import iso_time
from deepstream_pipeline.sinks.spool import Message
from server.core.outbound import Outbound

if TYPE_CHECKING:
    from urllib3.response import BaseHTTPResponse


AWAY = frozenset({408, 429, 502, 503, 504})
TRY_AGAIN = frozenset({425})
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 16.0  # between the attempts of one message
LONGEST_RETRY_AFTER_S = 60.0
DEAD_LETTER_BYTES = 64 * 2**20  # the file grows no further
READ_BYTES = 4096  # of an answer's body; of a longer one the connection is not used again
BUDGET, BUDGET_PER_S, BUDGET_PER_MESSAGE = 20.0, 0.1, 0.2

log = structlog.get_logger(component="video")


@dataclass(frozen=True, slots=True)
class WebhookOptions(BrokerOptions):
    """url: http or https, may hold user and password. headers: added to each request. timeout_s: of one
    POST, from connecting to the end of its answer. attempts: of one message. dead_letters: a file, None to only count
    them. batch: of 1 the body is the message itself, of more a list of up to so many."""

    url: str = field(repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    timeout_s: float = 5.0
    attempts: int = 5
    dead_letters: Path | None = None
    batch: int = 1


def webhook_sink(options: WebhookOptions, gauge: SinkGauge | None = None) -> BrokerSink:
    """A sink that posts to an address. Raises SinkFailed where the library is absent or the address is none."""
    return BrokerSink(WebhookLink(options), options, gauge)


class RetryBudget:
    """How many second tries all messages have together: a bucket, filled by time and by what is delivered. Sans-IO."""

    def __init__(self) -> None:
        self._saved = BUDGET
        self._filled_at: float | None = None

    def delivered(self, count: int) -> None:
        """So many messages arrived."""
        self._saved = min(BUDGET, self._saved + count * BUDGET_PER_MESSAGE)

    def take(self, now: float) -> bool:
        """Whether one more second try is left; it is taken for used. now: monotonic seconds."""
        if self._filled_at is not None:
            self._saved = min(BUDGET, self._saved + (now - self._filled_at) * BUDGET_PER_S)
        self._filled_at = now
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True


class DeadLetters:
    """A file of messages that nobody took, bounded in bytes."""

    def __init__(self, path: Path | None, max_bytes: int = DEAD_LETTER_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._told = ""

    def add(self, messages: Sequence[Message], reason: str) -> None:
        """Appends them. Where the file is full or cannot be written they are lost, which is logged once."""
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
            self._told = ""
        except OSError as error:
            self._tell(os.strerror(error.errno) if error.errno else type(error).__name__)

    def _tell(self, trouble: str) -> None:
        if self._told != trouble:
            self._told = trouble
            log.error("dead letters are lost", file=str(self._path), reason=trouble)


class WebhookLink:
    """A Link (of link.py) to one address."""

    name = "webhook"

    def __init__(self, options: WebhookOptions) -> None:
        try:
            import urllib3
        except ImportError as error:
            raise missing("urllib3", "video") from error
        from deepstream_pipeline.sinks.timely_http import TimelyPost

        self._urllib3 = urllib3
        self._options = options
        self.max_messages, self.max_bytes = options.batch, 4 * 2**20
        parts = urlsplit(options.url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and _has_port(parts)
        if not is_address or options.batch < 1 or options.attempts < 1:
            raise SinkFailed(
                "a webhook wants an address of http:// or https:// with a host, attempts and batch of 1 up"
            )
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
        self._tried = ("", 0)  # the message at the head, and how often
        self._waits = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S)
        self._new_connection = partial(TimelyPost, self._url, options.timeout_s, Outbound(options.allowed_outbound))
        self._connection: TimelyPost | None = None

    def open(self, timeout_s: float) -> bool:
        """Nothing is asked of an address but to take messages."""
        return False

    def send(self, messages: Sequence[Message]) -> Outcome:
        """One POST."""
        if not messages:
            return Outcome()
        outcome = self._sent(messages)
        self.max_messages = len(messages) if outcome.left else self._options.batch
        return outcome

    def _sent(self, messages: Sequence[Message]) -> Outcome:
        errors = self._urllib3.exceptions
        try:
            answer = self._post(messages)
        except LinkDown as refused:
            return Outcome(left=messages, trouble=refused.message)
        except (errors.NewConnectionError, errors.ConnectTimeoutError, errors.SSLError, errors.ProxyError) as error:
            return Outcome(left=messages, trouble=_what_failed(error))
        except (errors.HTTPError, OSError, ValueError) as error:
            return self._again(messages, _what_failed(error), 0.0)
        self._drain(answer)
        if 200 <= answer.status < 300:
            self._budget.delivered(len(messages))
            return Outcome(delivered=messages)
        reason = f"answered {answer.status}" + (": redirects are not followed" if answer.status < 400 else "")
        pause_s = retry_after_s(answer.headers.get("Retry-After", ""), time.time())
        if answer.status in AWAY:
            return Outcome(left=messages, trouble=reason, pause_s=pause_s)
        if answer.status >= 500 or answer.status in TRY_AGAIN:
            return self._again(messages, reason, pause_s)
        self._dead_letters.add(messages, reason)
        return Outcome(refused=messages, refusal=reason)

    def idle(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _post(self, messages: Sequence[Message]) -> "BaseHTTPResponse":
        connection = self._connection = self._connection or self._new_connection()
        body, key = messages[0].body, messages[0].id
        if self._options.batch > 1:
            body, key = b"[" + b",".join(one.body for one in messages) + b"]", f"{key}+{len(messages)}"
        return connection.post(body, {**self._headers, "Idempotency-Key": key})

    def _drain(self, answer: "BaseHTTPResponse") -> None:
        """An answer that is short and there is read, for its connection to be used again; any other closes it."""
        try:
            answer.read1(READ_BYTES)
        except (self._urllib3.exceptions.HTTPError, OSError):
            answer.close()
            return
        if getattr(answer, "length_remaining", None) == 0:
            answer.release_conn()
        else:
            answer.close()

    def _again(self, messages: Sequence[Message], trouble: str, pause_s: float) -> Outcome:
        head, tries = self._tried
        tries = tries + 1 if head == messages[0].id else 1
        if tries == 1:
            self._waits.reset()
        self._tried = (messages[0].id, tries)
        reason = ""
        if tries >= self._options.attempts:
            reason = f"{trouble}, at attempt {tries} of {self._options.attempts}"
        elif not self._budget.take(time.monotonic()):
            reason = f"{trouble}, and the budget of second tries is spent"
        if not reason:
            return Outcome(left=messages, trouble=trouble, pause_s=max(pause_s, self._waits.next_s()))
        self._dead_letters.add(messages, reason)
        return Outcome(refused=messages, refusal=reason, trouble=trouble, pause_s=pause_s)


def retry_after_s(header: str, unix_s: float) -> float:
    """What a Retry-After header asks for, seconds or a date; at most a minute, 0 where it says nothing usable."""
    try:
        seconds = float(header)
    except ValueError:
        try:
            date = parsedate_to_datetime(header)
        except ValueError:
            return 0.0
        seconds = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - unix_s
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER_S) if seconds == seconds else 0.0


def _has_port(parts: SplitResult) -> bool:
    """Whether its port is a number, or left out."""
    try:
        return parts.port != 0
    except ValueError:
        return False


def _what_failed(error: Exception) -> str:
    """In our words: urllib3's name the address, whose path may be a secret."""
    words = {
        "NewConnectionError": "cannot be reached",
        "NameResolutionError": "its name is not known",
        "ConnectTimeoutError": "no connection in time",
        "ReadTimeoutError": "no answer in time",
        "SSLError": "its certificate or TLS is not accepted",
        "ProtocolError": "the connection broke",
    }
    return words.get(type(error).__name__, type(error).__name__)
