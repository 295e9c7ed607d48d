"""No sink sends anything to a cloud's metadata service unless it is allowed. FAULTS 95.

A listener on loopback acts as the service: 127.0.0.1 counts as a metadata address here. No data leaves the machine.
"""

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest

from penstock_video.errors import SinkFailed
from penstock_video.sink_set import allowing
from penstock_video.sinks.broker_link import BrokerLink, LinkDown
from penstock_video.sinks.hls import HlsOptions
from penstock_video.sinks.kafka import KafkaLink, KafkaOptions
from penstock_video.sinks.mqtt import MqttLink, MqttOptions
from penstock_video.sinks.osd import Osd, OsdOptions
from penstock_video.sinks.redis_stream import RedisLink, RedisOptions
from penstock_video.sinks.rtsp_out import RtspOutOptions, RtspOutSink
from penstock_video.sinks.spool import Message
from penstock_video.sinks.webhook import WebhookLink, WebhookOptions
from tests.deepstream_pipeline.brokers import kafka_broker
from tests.deepstream_pipeline.sinks.results import result
from tests.support.waiting import wait_for

METADATA, NAME = "127.0.0.1", "service.example"
MESSAGE = Message("cam", "1", "objects", b"{}")
Allowed = tuple[str, ...]
Made = Callable[[str, int, Allowed], BrokerLink]
LINKS: dict[str, Made] = {
    "http": lambda host, port, allowed: WebhookLink(
        WebhookOptions(f"http://{host}:{port}/", allowed_outbound=allowed, timeout_s=5.0)
    ),
    "https": lambda host, port, allowed: WebhookLink(
        WebhookOptions(f"https://{host}:{port}/", allowed_outbound=allowed, timeout_s=5.0)
    ),
    "redis": lambda host, port, allowed: RedisLink(RedisOptions(f"redis://{host}:{port}/0", allowed_outbound=allowed)),
    "rediss": lambda host, port, allowed: RedisLink(
        RedisOptions(f"rediss://{host}:{port}/0", allowed_outbound=allowed)
    ),
    "mqtt": lambda host, port, allowed: MqttLink(MqttOptions(host, port, allowed_outbound=allowed)),
    "mqtts": lambda host, port, allowed: MqttLink(MqttOptions(host, port, is_tls=True, allowed_outbound=allowed)),
    "kafka": lambda host, port, allowed: KafkaLink(
        KafkaOptions(f"192.0.2.1:9,PLAINTEXT://{host}:{port}", "topic", allowed_outbound=allowed)
    ),
}
# rtsp_push is a separate process, which gets the same addresses and names
PUSH = f"""
import socket
from ipaddress import ip_address
from penstock import outbound
outbound.METADATA = {{ip_address("{METADATA}")}}
look_up = socket.getaddrinfo
socket.getaddrinfo = lambda host, *more, **named: look_up("{METADATA}" if host == "{NAME}" else host, *more, **named)
from penstock_video.sinks.rtsp_push import main
raise SystemExit(main())
"""


class Service:
    """Records what each connection sends first, then closes it."""

    def __init__(self) -> None:
        self._listener = socket.create_server((METADATA, 0))
        self.port = int(self._listener.getsockname()[1])
        self._received: list[bytes] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def received(self) -> bytes:
        """The data of all earlier connections; stops the service."""
        with socket.create_connection((METADATA, self.port)) as last:
            last.sendall(b"over")
            self._thread.join()
        return b"".join(self._received)

    def close(self) -> None:
        if self._thread.is_alive():
            self.received()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection:
                chunk = connection.recv(4096)
                if chunk == b"over":
                    return
                self._received.append(chunk)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """The service, which has an address and a name."""
    look_up = socket.getaddrinfo

    def fake(host: str, *more: object, **named: object) -> object:
        return look_up(METADATA if host == NAME else host, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("penstock.outbound.METADATA", {ip_address(METADATA)})
    monkeypatch.setattr("socket.getaddrinfo", fake)
    made = Service()
    try:
        yield made
    finally:
        made.close()


def trouble_of(link: BrokerLink) -> str:
    """The reason why the sink delivers nothing."""
    try:
        link.open(1.0)
        return link.send([MESSAGE]).trouble
    except LinkDown as down:
        return down.message
    finally:
        link.close()


def refusal(host: str) -> str:
    """The complete message."""
    shown = METADATA if host == METADATA else f"{host} ({METADATA})"
    return f"{shown} is a cloud's metadata service; to allow connections to it: --allow-outbound {METADATA}"


@pytest.mark.parametrize("host", [METADATA, NAME])
@pytest.mark.parametrize("kind", LINKS)
def test_sink_sends_nothing_to_a_metadata_service(kind: str, host: str, service: Service) -> None:
    """This holds for address and name, before TLS; the reason has the host, the address and the flag."""
    assert trouble_of(LINKS[kind](host, service.port, (host,) if host == NAME else ())) == refusal(host)
    assert service.received() == b""


@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <ssl.SSLSocket:pytest.PytestUnraisableExceptionWarning"
)  # paho
@pytest.mark.parametrize("kind", LINKS)
def test_sink_connects_to_a_metadata_address_that_is_allowed(kind: str, service: Service) -> None:
    """The sink then sends its usual first data."""
    trouble = trouble_of(LINKS[kind](METADATA, service.port, (METADATA,)))
    assert "metadata" not in trouble
    assert service.received()


@pytest.mark.parametrize(("host", "allowed"), [(NAME, ()), (METADATA, (METADATA,))])
def test_pushed_stream_goes_to_no_metadata_service(host: str, allowed: Allowed, service: Service) -> None:
    """The RTSP host is resolved in the process that pushes, just before FFmpeg connects."""
    url = f"rtsp://user:secret@{host}:{service.port}/live"
    options = RtspOutOptions(url, allowed_outbound=allowed)
    sink = RtspOutSink(options, Osd(OsdOptions()), is_single=True, command=(sys.executable, "-c", PUSH))
    reported: list[str] = []

    def has_reported() -> bool:
        try:
            sink.write(result(len(reported)))
        except SinkFailed as failure:
            reported.append(failure.message)
        return bool(reported)

    wait_for(has_reported, 60.0)
    sink.close()
    if allowed:
        assert "metadata" not in reported[0]
        assert service.received()
    else:
        where = f"rtsp://{host}:{service.port}/live"
        assert reported == [f"{where}: {refusal(host)}; tried again with growing pauses"]
        assert service.received() == b""


def test_kafka_checks_the_brokers_that_the_cluster_names(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name in the settings resolves to another host; the cluster then names 127.0.0.1."""
    look_up = socket.getaddrinfo

    def fake(host: str, *more: object, **named: object) -> object:
        return look_up("192.0.2.1" if host == "localhost" else host, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("socket.getaddrinfo", fake)
    with kafka_broker() as cluster:
        brokers = cluster.brokers.replace("127.0.0.1", "localhost")
        with pytest.raises(LinkDown, match=r"127\.0\.0\.1 is a cloud's metadata service"):
            KafkaLink(KafkaOptions(brokers, "topic")).open(10.0)
        link = KafkaLink(KafkaOptions(brokers, "topic", allowed_outbound=(METADATA,)))
        assert link.open(10.0)
        link.close()


@pytest.mark.parametrize("host", [METADATA, NAME])
def test_kafka_asks_no_metadata_service_for_tokens(host: str, service: Service) -> None:
    """librdkafka would do so when a producer is created, so the program does not start."""
    settings = {
        "security.protocol": "sasl_plaintext",
        "sasl.mechanisms": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": "id",
        "sasl.oauthbearer.client.secret": "secret",
        "sasl.oauthbearer.token.endpoint.url": f"http://{host}:{service.port}/token",
    }
    with pytest.raises(SinkFailed, match="is a cloud's metadata service") as refused:
        KafkaLink(KafkaOptions("192.0.2.1:9", "topic", tuple(settings.items())))
    assert refused.value.message == f"kafka 192.0.2.1:9, topic topic: {refusal(host)}"
    assert service.received() == b""


def test_kafka_tokens_of_azure_need_its_metadata_address_allowed() -> None:
    """librdkafka has this address built in."""
    settings = (("sasl.oauthbearer.metadata.authentication.type", "azure_imds"),)
    with pytest.raises(SinkFailed, match=r"--allow-outbound 169\.254\.169\.254"):
        KafkaLink(KafkaOptions("192.0.2.1:9", "topic", settings))


def test_what_is_allowed_reaches_every_sink_that_connects() -> None:
    """Sinks that write to disk do not have the option."""
    connecting = [
        WebhookOptions("http://hook"),
        KafkaOptions("broker:9092", "topic"),
        MqttOptions("broker"),
        RedisOptions("redis://broker"),
        RtspOutOptions("rtsp://server/live"),
    ]
    made = allowing([*connecting, HlsOptions(Path("out"))], ("10.0.0.0/8",))
    assert [getattr(one, "allowed_outbound", None) for one in made] == [("10.0.0.0/8",)] * 5 + [None]
