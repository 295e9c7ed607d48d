"""MQTT sink: version 5, or 3.1.1 if the broker supports nothing newer; QoS 1 by default."""

import re
import secrets
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field

from penstock.outbound import OutboundPolicy
from penstock_video.interfaces import SECRET
from penstock_video.sinks.broker import BrokerOptions, BrokerSink, SinkGauge
from penstock_video.sinks.broker_link import (
    NO_TIME_LEFT,
    DeliveryOutcome,
    LinkDown,
    client_library,
    require_allowed_peer,
    scrub,
)
from penstock_video.sinks.spool import Message

if TYPE_CHECKING:
    from paho.mqtt.client import Client, ConnectFlags, DisconnectFlags
    from paho.mqtt.properties import Properties
    from paho.mqtt.reasoncodes import ReasonCode


SILENT_AFTER_S = 10.0  # without an acknowledgement the connection is closed
POLL_S = 0.1
KEEPALIVE_S = 15
HEADER_BYTES = 512  # maximum of a packet: topic, ID and MQTT's header
INFLIGHT = 50  # maximum unacknowledged messages
OFFLINE, ONLINE = b"offline", b"online"
PLACEHOLDERS = ("{source_id}", "{kind}")


@dataclass(frozen=True, slots=True)
class MqttOptions(BrokerOptions):
    """port: 1883, or 8883 with TLS. topic: may have {source_id} and {kind}. status_topic: "" for none."""

    host: str
    port: Annotated[int, Field(ge=1, le=65_535)] = 0
    topic: Annotated[str, AfterValidator(lambda topic: _checked_topic(topic, PLACEHOLDERS))] = (
        "penstock/{source_id}/{kind}"
    )
    username: Annotated[str, Field(json_schema_extra=SECRET)] = field(default="", repr=False)
    password: Annotated[str, Field(json_schema_extra=SECRET)] = field(default="", repr=False)
    qos: Annotated[int, Field(ge=0, le=2)] = 1
    is_tls: Annotated[bool, Field(alias="tls")] = False
    status_topic: Annotated[
        str, AfterValidator(lambda topic: _checked_topic(topic, ())), Field(alias="status-topic")
    ] = ""

    def __post_init__(self) -> None:
        if not self.port:
            object.__setattr__(self, "port", 8883 if self.is_tls else 1883)


def _checked_topic(topic: str, placeholders: Sequence[str]) -> str:
    if set(topic) & set("+#\0"):
        raise ValueError("a topic to publish to has no wildcard (+ or #)")
    rest = topic
    for known in placeholders:
        rest = rest.replace(known, "")
    if found := re.search(r"\{[^{}]*\}|[{}]", rest):
        wrong = f"{found[0]} is no placeholder" if len(found[0]) > 1 else f"a {found[0]} stands alone"
        takes = f"there are {' and '.join(placeholders)}" if placeholders else "it takes none"
        raise ValueError(f"{wrong}; {takes}")
    return topic


def mqtt_sink(options: MqttOptions, gauge: SinkGauge | None = None) -> BrokerSink:
    """A sink that publishes to an MQTT broker. Raises SinkFailed if the library is missing or an option is invalid."""
    return BrokerSink(MqttLink(options), options, gauge)


class MqttLink:
    """A BrokerLink to one MQTT broker."""

    name = "mqtt"
    max_messages = 200
    max_bytes = 4 * 2**20
    over_at = float("inf")

    def __init__(self, options: MqttOptions) -> None:
        self._paho = client_library("paho.mqtt.client", "paho-mqtt", "video")
        self._options = options
        self.place = f"mqtt {options.host}:{options.port}, topic {options.topic}"
        self._protocol = self._paho.MQTTv5
        self._client_id = f"penstock-{secrets.token_hex(6)}"
        self._client: Client | None = None
        self._unacknowledged: dict[int, Message] = {}  # by packet ID, in the order of sending
        self._delivered: list[Message] = []
        self._is_connected = False
        self._trouble = ""
        self._largest_bytes = 0  # the broker's maximum packet size; 0 if not given
        self._window = INFLIGHT
        self._answered_at = 0.0

    def open(self, timeout_s: float) -> bool:
        """Connects and waits for the broker's CONNACK."""
        until = time.monotonic() + timeout_s
        client = self._client = self._new_client(timeout_s)
        try:
            client.connect(self._options.host, self._options.port, keepalive=KEEPALIVE_S)
        except (OSError, ValueError) as error:
            raise LinkDown(self._said(error)) from None
        while not self._is_connected and not self._trouble and time.monotonic() < until:
            self._serve(POLL_S)
        if not self._is_connected:
            raise LinkDown(self._trouble or f"no answer within {timeout_s:.1f} s")
        if self._options.status_topic:
            client.publish(self._options.status_topic, ONLINE, qos=1, retain=True)
        return True

    def send(self, messages: Sequence[Message]) -> DeliveryOutcome:
        """Publishes them and serves the connection until all are acknowledged."""
        self._answered_at, self._delivered = time.monotonic(), []
        unsent = deque(one for one in messages if not self._is_too_large(one))
        is_over = False
        while (unsent or self._unacknowledged) and not (self._trouble or is_over):
            while unsent and len(self._unacknowledged) < self._window:
                self._publish(unsent.popleft())
            self._serve(POLL_S if self._unacknowledged else 0.0)
            if self._unacknowledged and time.monotonic() - self._answered_at > SILENT_AFTER_S:
                self._trouble = f"no answer for {SILENT_AFTER_S:g} s"
            is_over = time.monotonic() >= self.over_at
        left = [*self._unacknowledged.values(), *unsent]
        return DeliveryOutcome(
            self._delivered,
            [one for one in messages if self._is_too_large(one)],  # the broker would disconnect
            f"larger than the broker's {self._largest_bytes} bytes",
            left,
            self._trouble or (NO_TIME_LEFT if left else ""),
        )

    def _is_too_large(self, one: Message) -> bool:
        return 0 < self._largest_bytes < len(one.body) + HEADER_BYTES

    def idle(self) -> None:
        """Reads, and sends keep-alive pings."""
        self._serve(0.0)
        if self._trouble:
            raise LinkDown(self._trouble)

    def close(self) -> None:
        """Publishes the offline status, since the broker then publishes no last will, and disconnects."""
        client, self._client = self._client, None
        if client is None:
            return
        if self._is_connected and not self._trouble:
            if self._options.status_topic:
                client.publish(self._options.status_topic, OFFLINE, qos=0, retain=True)
            client.disconnect()
        client.on_disconnect = client.on_publish = client.on_connect = None
        connection = client.socket()
        if connection is not None:
            connection.close()
        self._is_connected, self._trouble = False, ""
        self._unacknowledged.clear()

    def _new_client(self, timeout_s: float) -> "Client":
        options, paho = self._options, self._paho
        client: Client = _checked(options)(
            paho.CallbackAPIVersion.VERSION2,
            self._client_id,
            clean_session=None if self._protocol == paho.MQTTv5 else True,
            protocol=self._protocol,
            reconnect_on_failure=False,
        )
        client.connect_timeout = timeout_s
        client.max_inflight_messages_set(0)  # we limit it: the broker's limit is known once connected
        if options.username:
            client.username_pw_set(options.username, options.password or None)
        if options.is_tls:
            client.tls_set_context(ssl.create_default_context())
        if options.status_topic:
            client.will_set(options.status_topic, OFFLINE, qos=1, retain=True)
        client.on_connect, client.on_disconnect = self._on_connect, self._on_disconnect
        client.on_publish = self._on_publish
        return client

    def _publish(self, one: Message) -> None:
        assert self._client is not None, "sent before it was opened"
        properties = None
        if self._protocol == self._paho.MQTTv5:
            from paho.mqtt.packettypes import PacketTypes
            from paho.mqtt.properties import Properties

            properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
            properties.UserProperty = [("id", one.id), ("kind", one.kind)]
        topic = self._options.topic.replace("{source_id}", one.key).replace("{kind}", one.kind)
        published = self._client.publish(topic, one.body, self._options.qos, properties=properties)
        if self._options.qos == 0 and not published.rc and published.is_published():
            self._delivered.append(one)  # written; QoS 0 promises no more
        else:
            self._unacknowledged[published.mid] = one

    def _serve(self, timeout_s: float) -> None:
        """Lets paho read, write and ping. Uses poll, since paho's select supports no descriptor above 1023."""
        client = self._client
        connection = client.socket() if client is not None else None
        if client is None or connection is None:
            self._trouble = self._trouble or "the connection is closed"
            return
        poll = select.poll()
        poll.register(connection, select.POLLIN | (select.POLLOUT if client.want_write() else 0))
        if isinstance(connection, ssl.SSLSocket) and connection.pending():
            timeout_s = 0.0
        ready = poll.poll(timeout_s * 1000.0)
        client.loop_read()
        if ready and client.want_write():
            client.loop_write()
        client.loop_misc()

    def _on_connect(
        self, client: "Client", _: object, flags: "ConnectFlags", code: "ReasonCode", said: "Properties | None"
    ) -> None:
        if code.is_failure:
            self._trouble = f"the broker refuses: {code}"
            if str(code) == "Unsupported protocol version":
                self._protocol = self._paho.MQTTv311
            return
        self._is_connected, self._answered_at = True, time.monotonic()
        self._largest_bytes = int(getattr(said, "MaximumPacketSize", 0))
        self._window = min(INFLIGHT, int(getattr(said, "ReceiveMaximum", INFLIGHT)))

    def _on_disconnect(
        self, client: "Client", _: object, flags: "DisconnectFlags", code: "ReasonCode", said: "Properties | None"
    ) -> None:
        why = "" if str(code) == "Unspecified error" else f" ({code})"
        self._trouble = self._trouble or f"the connection was lost{why}"

    def _on_publish(self, client: "Client", _: object, mid: int, code: "ReasonCode", said: "Properties | None") -> None:
        one = self._unacknowledged.get(mid)
        if one is None:
            return
        if code.is_failure:
            self._trouble = f"the broker refuses a message: {code}"
            return
        self._answered_at = time.monotonic()
        self._delivered.append(self._unacknowledged.pop(mid))

    def _said(self, error: Exception) -> str:
        return scrub(str(error), (self._options.password, self._options.username)) or type(error).__name__


def _checked(options: MqttOptions) -> "type[Client]":
    """paho's client with a check of addresses, since its on_socket_open is called only after the TLS handshake."""
    from paho.mqtt.client import Client

    outbound = OutboundPolicy(options.allowed_outbound)

    class CheckedClient(Client):
        def _create_socket_connection(self) -> socket.socket:
            connected = super()._create_socket_connection()
            require_allowed_peer(connected, options.host, outbound)
            return connected

    return CheckedClient
