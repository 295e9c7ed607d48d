"""Kafka sink: an idempotent producer with acks=all. The key is the source's ID, which keeps its messages in order."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from pydantic import BeforeValidator, WithJsonSchema

from penstock.outbound import OutboundPolicy
from penstock_video.errors import SinkFailed
from penstock_video.interfaces import SECRET
from penstock_video.sinks.broker import BrokerOptions, BrokerSink, SinkGauge
from penstock_video.sinks.broker_link import (
    NO_TIME_LEFT,
    DeliveryOutcome,
    LinkDown,
    client_library,
    require_allowed_host,
    scrub,
)
from penstock_video.sinks.spool import Message

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Producer
    from confluent_kafka import Message as Delivered


SILENT_AFTER_S = 5.0  # without an acknowledgement the broker counts as away
POLL_S = 0.1
LET_GO_S = 0.5
BATCH_MESSAGES = 1_000
Setting = str | int | bool
SETTINGS: dict[str, Setting] = {
    "acks": "all",
    "enable.idempotence": True,
    "message.timeout.ms": 0,  # no internal expiry, which would let the next message overtake
    "queue.buffering.max.messages": BATCH_MESSAGES,
    "queue.buffering.max.kbytes": 65_536,
    "linger.ms": 5,
    "reconnect.backoff.ms": 100,
    "reconnect.backoff.max.ms": 5_000,
    "socket.timeout.ms": 10_000,
    "log_level": 2,  # it writes to stderr; important events come by callbacks
}
BROKERS = ("bootstrap.servers", "metadata.broker.list")  # two names of one setting
NO_BROKERS = dict.fromkeys(BROKERS, "")  # with this, librdkafka opens no connection
TOKENS_FROM = "sasl.oauthbearer.token.endpoint.url"
TOKENS_OF_AZURE = ("sasl.oauthbearer.metadata.authentication.type", "azure_imds", "169.254.169.254")
SECRET_SETTINGS = ("password", "secret", "token", "jaas", "ssl.key.pem")


@dataclass(frozen=True, slots=True)
class KafkaOptions(BrokerOptions):
    """brokers: "host:port,host:port". settings: librdkafka's own, by name (security.protocol, sasl.…, ssl.…)."""

    brokers: Annotated[str, BeforeValidator(",".join), WithJsonSchema({"type": "array"})]
    topic: str
    settings: Annotated[
        tuple[tuple[str, str], ...],
        BeforeValidator(lambda given: tuple(given.items())),
        WithJsonSchema({"type": "object", **SECRET}),
    ] = field(default=(), repr=False)


def kafka_sink(options: KafkaOptions, gauge: SinkGauge | None = None) -> BrokerSink:
    """A sink that produces to a Kafka topic. Raises SinkFailed if the library is missing or rejects a setting."""
    return BrokerSink(KafkaLink(options), options, gauge)


class KafkaLink:
    """A BrokerLink to one Kafka cluster."""

    name = "kafka"
    max_messages = BATCH_MESSAGES
    max_bytes = 4 * 2**20
    over_at = float("inf")

    def __init__(self, options: KafkaOptions) -> None:
        self._kafka = client_library("confluent_kafka", "confluent-kafka", "kafka")
        errors = self._kafka.KafkaError
        self._never = {
            errors.MSG_SIZE_TOO_LARGE,
            errors.INVALID_MSG,
            errors.RECORD_LIST_TOO_LARGE,
            errors.INVALID_RECORD,
        }
        self._options, self._outbound = options, OutboundPolicy(options.allowed_outbound)
        self._secrets = [value for name, value in options.settings if any(word in name for word in SECRET_SETTINGS)]
        self.place = f"kafka {options.brokers}, topic {options.topic}"
        self._reports: dict[int, bool] = {}  # of this send's messages by identity: delivered, or refused
        self._refusal = self._failure = self._trouble = self._last_error = ""
        self._answered_at = 0.0
        given = {"bootstrap.servers": options.brokers, **SETTINGS, **dict(options.settings)}
        self._settings: Mapping[str, Setting] = given
        self._producer: Producer | None = None
        try:
            self._require_allowed(_token_hosts(self._settings))
        except LinkDown as refused:
            raise SinkFailed(f"{self.place}: {refused.message}") from None
        self._new_producer(NO_BROKERS)  # an invalid setting is an error at start

    def open(self, timeout_s: float) -> bool:
        """Requests the topic's metadata."""
        producer = self._live()
        try:
            cluster = producer.list_topics(self._options.topic, timeout=timeout_s)
        except self._kafka.KafkaException as error:
            producer.poll(0)
            raise LinkDown(self._last_error or self._said(error.args[0])) from None
        self._require_allowed(broker.host for broker in cluster.brokers.values())
        producer.poll(0)  # drops errors from before the broker answered
        self._trouble = self._last_error = ""
        self._answered_at = time.monotonic()
        return True

    def send(self, messages: Sequence[Message]) -> DeliveryOutcome:
        """Passes them to librdkafka and waits for its reports."""
        self._reports, self._failure, self._answered_at = {}, "", time.monotonic()
        sent, trouble = 0, ""
        while len(self._reports) < len(messages) and not trouble:
            sent += self._hand_over(messages[sent:])
            self._live().poll(POLL_S)
            trouble = self._failure or self._waits_for()
        left = [one for one in messages if id(one) not in self._reports]
        return DeliveryOutcome(
            [one for one in messages if self._reports.get(id(one)) is True],
            [one for one in messages if self._reports.get(id(one)) is False],
            self._refusal,
            left,
            trouble if left else "",
        )

    def idle(self) -> None:
        """Serves librdkafka's callbacks."""
        self._live().poll(0)
        if self._trouble:
            raise LinkDown(self._trouble)

    def close(self) -> None:
        """Drops the producer. Requests that it sent without an answer may still reach the broker."""
        self._failure = self._trouble = ""
        old, self._producer = self._producer, None
        if old is not None:
            old.purge()
            old.flush(LET_GO_S)  # the library frees only messages that were reported

    def _live(self) -> "Producer":
        if self._producer is None:
            self._require_allowed([*_broker_hosts(self._settings), *_token_hosts(self._settings)])
            self._producer = self._new_producer({})
        return self._producer

    def _require_allowed(self, hosts: Iterable[str]) -> None:
        for host in hosts:
            require_allowed_host(host, self._outbound)

    def _new_producer(self, instead: Mapping[str, Setting]) -> "Producer":
        try:
            producer: Producer = self._kafka.Producer({**self._settings, **instead, "error_cb": self._on_error})
        except (self._kafka.KafkaException, ValueError, TypeError) as error:
            raise SinkFailed(f"{self.place}: {scrub(str(error), self._secrets)}") from None
        return producer

    def _hand_over(self, messages: Sequence[Message]) -> int:
        """Passes messages on while librdkafka's queue has room; returns how many."""
        for number, one in enumerate(messages):
            try:
                self._live().produce(
                    self._options.topic,
                    one.body,
                    one.key,
                    on_delivery=partial(self._on_delivery, one),
                    headers=[("id", one.id.encode()), ("kind", one.kind.encode())],
                )
            except BufferError:
                return number
            except self._kafka.KafkaException as error:
                self._on_delivery(one, error.args[0], None)
        return len(messages)

    def _on_delivery(self, one: Message, error: "KafkaError | None", _: "Delivered | None") -> None:
        self._answered_at, self._trouble = time.monotonic(), ""
        if error is None:
            self._reports[id(one)] = True
        elif error.code() in self._never:
            self._reports[id(one)] = False
            self._refusal = self._said(error)
        else:
            self._failure = self._said(error)

    def _on_error(self, error: "KafkaError") -> None:
        if error.fatal():
            self._failure = self._said(error)
        elif error.code() == self._kafka.KafkaError._ALL_BROKERS_DOWN:
            self._trouble = self._last_error or self._said(error)
        else:
            self._last_error = self._said(error)  # perhaps of one broker of several

    def _waits_for(self) -> str:
        if self._trouble:
            return self._trouble
        if time.monotonic() >= self.over_at:
            return NO_TIME_LEFT
        silent_s = time.monotonic() - self._answered_at
        return f"no answer for {SILENT_AFTER_S:g} s" if silent_s > SILENT_AFTER_S else ""

    def _said(self, error: "KafkaError") -> str:
        return scrub(error.str(), self._secrets)


def _broker_hosts(settings: Mapping[str, Setting]) -> list[str]:
    """Hosts of "host:port" and "protocol://host:port" items, comma-separated."""
    listed = ",".join(str(settings.get(name, "")) for name in BROKERS)
    return [_host(one.strip().rpartition("//")[2]) for one in listed.split(",") if one.strip()]


def _token_hosts(settings: Mapping[str, Setting]) -> list[str]:
    """Hosts of the OAuth token endpoint, which librdkafka uses even without brokers."""
    name, azure, host_of_azure = TOKENS_OF_AZURE
    if url := str(settings.get(TOKENS_FROM, "")):
        return [_host(url.partition("//")[2])]
    return [host_of_azure] if settings.get(name) == azure else []


def _host(place: str) -> str:
    """The host; empty if invalid, which librdkafka then reports."""
    try:
        return urlsplit(f"//{place}").hostname or ""
    except ValueError:
        return ""
