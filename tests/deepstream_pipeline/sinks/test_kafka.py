"""Kafka: keys, headers and what a broker or librdkafka can refuse."""

import json
import sys
import time
from collections.abc import Iterator

import pytest

from penstock_video.errors import SinkFailed
from penstock_video.sinks.broker import ResultKind
from penstock_video.sinks.broker_link import LinkDown
from penstock_video.sinks.kafka import KafkaLink, KafkaOptions, kafka_sink
from penstock_video.sinks.spool import Message
from tests.deepstream_pipeline.brokers import KafkaBroker, kafka_broker
from tests.deepstream_pipeline.sinks.results import crossing, result
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def broker() -> Iterator[KafkaBroker]:
    """One mock cluster for all of these."""
    with kafka_broker() as mock:
        yield mock


def test_kafka_message_has_the_source_as_key_and_its_id_as_header(broker: KafkaBroker) -> None:
    """The key keeps a source's order; the id lets consumers drop repetitions."""
    broker.topic = "events"
    sink = kafka_sink(KafkaOptions(broker.brokers, "events"))
    sink.write(result(4, source_id="gate", has_image=False, events=(crossing(4, source_id="gate"),)))
    sink.close()
    (arrived,) = broker.arrived(1)
    assert arrived.key == "gate"
    assert arrived.id.startswith("gate:4:line-crossing:0:")
    assert json.loads(arrived.body)["frame_num"] == 4


def test_kafka_message_larger_than_is_allowed_costs_only_itself(broker: KafkaBroker) -> None:
    """It is refused, counted, and the others arrive in order."""
    broker.topic = "small"
    settings = (("message.max.bytes", "2000"),)
    sink = kafka_sink(KafkaOptions(broker.brokers, "small", settings, what=ResultKind.OBJECTS))
    for number in range(5):
        sink.write(result(number, has_image=False, objects=40 if number == 2 else 1))
    wait_for(lambda: sink.statistics().depth == 0)
    with pytest.raises(SinkFailed, match=r"^1 message for kafka .* was not delivered: "):
        sink.close()
    assert (sink.statistics().sent, sink.statistics().refused) == (4, 1)
    assert [json.loads(one.body)["frame_num"] for one in broker.arrived(4)] == [0, 1, 3, 4]


def test_kafka_queue_of_librdkafka_that_is_smaller_than_a_batch_delivers_all(broker: KafkaBroker) -> None:
    """A full inner queue makes the sender wait; nothing overtakes and nothing is lost."""
    broker.topic = "narrow"
    settings = (("queue.buffering.max.messages", "7"),)
    sink = kafka_sink(KafkaOptions(broker.brokers, "narrow", settings, what=ResultKind.OBJECTS))
    for number in range(300):
        sink.write(result(number, has_image=False, objects=1))
    wait_for(lambda: sink.statistics().sent == 300)
    sink.close()
    assert [json.loads(one.body)["frame_num"] for one in broker.arrived(300)] == list(range(300))


def test_kafka_link_that_is_closed_with_messages_underway_lets_go_of_them(broker: KafkaBroker) -> None:
    """What is given up is neither reported as delivered later, nor sent by a producer that no one asks any more."""
    broker.topic = "later"
    link = KafkaLink(KafkaOptions(broker.brokers, "later", what=ResultKind.OBJECTS))
    assert link.open(5.0)
    broker.take_down()
    outcome = link.send([Message("gate", "given up", "objects", b"{}")])
    assert (list(outcome.delivered), [one.id for one in outcome.left]) == ([], ["given up"])
    link.close()
    broker.bring_up()
    wait_for(lambda: opens(link))
    assert [one.id for one in link.send([Message("gate", "wanted", "objects", b"{}")]).delivered] == ["wanted"]
    link.close()
    assert [one.id for one in broker.arrived(1)] == ["wanted"]


def test_kafka_link_of_a_closing_sink_waits_no_longer_than_the_sink(broker: KafkaBroker) -> None:
    """What a silent broker has not answered when the sink's time is over is left, so that it is counted as lost."""
    link = KafkaLink(KafkaOptions(broker.brokers, "closing", what=ResultKind.OBJECTS))
    assert link.open(5.0)
    broker.stop()
    link.over_at = time.monotonic() + 0.2
    outcome = link.send([Message("gate", "late", "objects", b"{}")])
    broker.go_on()
    link.close()
    assert ([one.id for one in outcome.left], outcome.trouble) == (["late"], "no time was left")


def opens(link: KafkaLink) -> bool:
    """Whether it does now."""
    try:
        return link.open(1.0)
    except LinkDown:
        return False


@pytest.mark.parametrize(
    "settings", [(("acks", "perhaps"),), (("no.such.setting", "1"),), (("sasl.password", "s3cret"), ("x", "s3cret"))]
)
def test_kafka_setting_that_cannot_be_meant_is_refused_at_the_start(settings: tuple[tuple[str, str], ...]) -> None:
    """A mistake is reported before anything runs, without the password."""
    with pytest.raises(SinkFailed) as refused:
        kafka_sink(KafkaOptions("localhost:1", "t", settings))
    assert "s3cret" not in str(refused.value)
    assert "s3cret" not in repr(KafkaOptions("localhost:1", "t", settings))


def test_kafka_sink_without_the_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, with the extra's name."""
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(SinkFailed, match=r"needs the library confluent-kafka: install penstock\[kafka\]"):
        kafka_sink(KafkaOptions("localhost:1", "t"))
