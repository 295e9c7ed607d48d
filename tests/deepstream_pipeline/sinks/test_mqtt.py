"""MQTT: topics, properties, the status topic, and what a broker can refuse."""

import json
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock_video.errors import SinkFailed
from penstock_video.sinks.broker import BrokerSink, ResultKind
from penstock_video.sinks.mqtt import MqttLink, MqttOptions, mqtt_sink
from tests.deepstream_pipeline.brokers import MqttBroker, mqtt_broker, program
from tests.deepstream_pipeline.sinks.results import crossing, result
from tests.support.waiting import wait_for

SECRET = "s3cret-pass"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[MqttBroker]:
    """A mosquitto with a subscriber to everything."""
    with mqtt_broker(tmp_path) as mosquitto:
        mosquitto.subscribe()
        yield mosquitto


def write(sink: BrokerSink, count: int, objects: int = 1) -> None:
    """So many frames, each one message."""
    for number in range(count):
        sink.write(result(number, has_image=False, objects=objects))


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_mqtt_message_comes_under_its_topic_with_its_id(broker: MqttBroker, qos: int) -> None:
    """Source and kind stand in the topic, the id in a user property, at every quality of service."""
    sink = mqtt_sink(MqttOptions("127.0.0.1", broker.port, qos=qos, what=ResultKind.BOTH))
    sink.write(result(4, source_id="gate", has_image=False, events=(crossing(4, source_id="gate"),)))
    sink.close()
    objects, event = broker.arrived(2)
    assert broker.topics == ["penstock/gate/objects", "penstock/gate/events"]
    assert objects.id.startswith("gate:4:objects:0:")
    assert event.id.startswith("gate:4:line-crossing:0:")
    assert json.loads(event.body)["source_id"] == "gate"


def test_mqtt_to_a_broker_with_a_limit_refuses_only_what_is_larger(tmp_path: Path) -> None:
    """The broker says how large a packet may be (MQTT 5): one that is larger is counted, the others arrive."""
    with mqtt_broker(tmp_path, "allow_anonymous true", "max_packet_size 3000") as broker:
        broker.subscribe()
        sink = mqtt_sink(MqttOptions("127.0.0.1", broker.port, what=ResultKind.OBJECTS))
        sink.write(result(0, has_image=False, objects=1))
        sink.write(result(1, has_image=False, objects=40))
        sink.write(result(2, has_image=False, objects=1))
        wait_for(lambda: sink.statistics().depth == 0)
        with pytest.raises(SinkFailed, match=r"^1 message .*: larger than the broker's 3000 bytes$"):
            sink.close()
        assert sink.statistics().refused == 1
        assert [json.loads(one.body)["frame_num"] for one in broker.arrived(2)] == [0, 2]


def test_mqtt_that_refuses_the_password_is_reported_without_it_and_tried_again(tmp_path: Path) -> None:
    """The state says why; the secret is in no log line, no statistics and no repr."""
    import subprocess

    keys = tmp_path / "passwords"
    subprocess.run([program("mosquitto_passwd"), "-c", "-b", str(keys), "cam", "another"], check=True)
    with mqtt_broker(tmp_path, "allow_anonymous false", f"password_file {keys}") as broker, capture_logs() as lines:
        options = MqttOptions("127.0.0.1", broker.port, username="cam", password=SECRET, what=ResultKind.OBJECTS)
        sink = mqtt_sink(options)
        write(sink, 3)
        wait_for(lambda: sink.statistics().errors > 0)
        assert "Not authorized" in sink.statistics().reason or "user name" in sink.statistics().reason
        subprocess.run([program("mosquitto_passwd"), "-b", str(keys), "cam", SECRET], check=True)
        broker.take_down()
        broker.bring_up()
        wait_for(lambda: sink.statistics().sent == 3)
        sink.close()
    assert SECRET not in repr(lines) + repr(options) + repr(sink.statistics())


def test_mqtt_status_topic_says_online_and_offline(broker: MqttBroker) -> None:
    """A client of the status topic sees the sink come and go."""
    sink = mqtt_sink(MqttOptions("127.0.0.1", broker.port, status_topic="penstock/status"))
    wait_for(lambda: sink.statistics().is_connected)
    wait_for(lambda: [one.body for one in broker._arrived] == [b"online"])
    sink.close()
    wait_for(lambda: [one.body for one in broker._arrived] == [b"online", b"offline"])


def test_mqtt_sink_that_dies_is_reported_by_its_will(broker: MqttBroker) -> None:
    """A program that ends without a word is said to be offline by the broker."""
    link = MqttLink(MqttOptions("127.0.0.1", broker.port, status_topic="penstock/status"))
    assert link.open(5.0)
    link.idle()
    assert link._client is not None
    connection = link._client.socket()
    assert isinstance(connection, socket.socket)
    connection.shutdown(socket.SHUT_RDWR)
    wait_for(lambda: [one.body for one in broker._arrived] == [b"online", b"offline"])
    link.close()


def test_mqtt_broker_that_knows_only_version_3_is_spoken_to_in_that() -> None:
    """A broker that answers MQTT 5 with "unsupported version" is asked again with 3.1.1."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        versions: list[int] = []
        thread = threading.Thread(target=answer_as_version_3, args=(server, versions))
        thread.start()
        sink = mqtt_sink(MqttOptions("127.0.0.1", server.getsockname()[1]))
        wait_for(lambda: sink.statistics().is_connected)
        sink.close()
        thread.join(10.0)
    assert versions == [5, 4]


def answer_as_version_3(server: socket.socket, versions: list[int]) -> None:
    """Refuses the first CONNECT as an old broker does, accepts the second."""
    server.settimeout(10.0)
    for answer in (b"\x20\x02\x00\x01", b"\x20\x02\x00\x00"):
        connection, _ = server.accept()
        with connection:
            connection.settimeout(10.0)
            versions.append(connection.recv(1024)[8])
            connection.sendall(answer)
            connection.recv(1024)  # until it hangs up, or says good-bye


def test_mqtt_sink_without_the_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, with the extra's name."""
    monkeypatch.setitem(sys.modules, "paho.mqtt.client", None)
    with pytest.raises(SinkFailed, match=r"needs the library paho-mqtt: install penstock\[video\]"):
        mqtt_sink(MqttOptions("localhost"))
