"""Real brokers that stop, go away and come back under load. FAULTS 57 and 58."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock_video.errors import SinkFailed
from penstock_video.sinks.broker import BrokerSink, ResultKind
from penstock_video.sinks.kafka import KafkaOptions, kafka_sink
from penstock_video.sinks.mqtt import MqttOptions, mqtt_sink
from penstock_video.sinks.redis_stream import RedisOptions, redis_sink
from penstock_video.types import FrameResult
from tests.deepstream_pipeline.brokers import Arrived, Broker, first_of_each, kafka_broker, mqtt_broker, redis_broker
from tests.deepstream_pipeline.sinks.results import result
from tests.support.waiting import becomes_true, wait_for

SOURCES = ("gate", "yard")
HELD: dict[str, Any] = {"what": ResultKind.OBJECTS}


@dataclass
class Scene:
    """A broker, and how a sink for it is made."""

    broker: Broker
    make: Callable[..., BrokerSink]


@pytest.fixture(params=["redis", "mqtt", "kafka"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    """One after the other, each of them."""
    if request.param == "redis":
        with redis_broker(tmp_path) as redis:
            yield Scene(redis, lambda **held: redis_sink(RedisOptions(redis.url, **{**HELD, **held})))
    elif request.param == "mqtt":
        with mqtt_broker(tmp_path) as mosquitto:
            mosquitto.subscribe()
            yield Scene(
                mosquitto, lambda **held: mqtt_sink(MqttOptions("127.0.0.1", mosquitto.port, **{**HELD, **held}))
            )
    else:
        with kafka_broker() as kafka:
            yield Scene(kafka, lambda **held: kafka_sink(KafkaOptions(kafka.brokers, "penstock", **{**HELD, **held})))


def frames(first: int, count: int) -> list[FrameResult]:
    """Of two sources in turn; each result becomes one message."""
    made = range(first, first + count)
    return [result(number, source_id=SOURCES[number % 2], has_image=False, objects=1) for number in made]


def write(sink: BrokerSink, results: list[FrameResult], pause_s: float = 0.0) -> float:
    """All of them; the longest that one took, in seconds."""
    longest_s = 0.0
    for one in results:
        began = time.perf_counter()
        sink.write(one)
        longest_s = max(longest_s, time.perf_counter() - began)
        time.sleep(pause_s)
    return longest_s


def numbers(arrived: list[Arrived], source_id: str) -> list[int]:
    """The frames of a source, in the order of their first arrival."""
    return [json.loads(one.body)["frame_num"] for one in first_of_each(arrived) if one.key == source_id]


def expect_in_order(arrived: list[Arrived], kept: range) -> None:
    """Every one of those frames arrived, each source's in order."""
    for parity, source_id in enumerate(SOURCES):
        assert numbers(arrived, source_id) == [number for number in kept if number % 2 == parity]


def connected(sink: BrokerSink) -> bool:
    """Waited for."""
    return becomes_true(lambda: sink.statistics().is_connected)


def test_sink_whose_broker_is_stopped_under_load_stays_quick_and_loses_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes to a broker that is SIGSTOPped do not wait; what fits the spool arrives, in order."""
    monkeypatch.setattr("penstock_video.sinks.mqtt.SILENT_AFTER_S", 3.0)
    monkeypatch.setattr("penstock_video.sinks.kafka.SILENT_AFTER_S", 3.0)
    sink = scene.make()
    write(sink, frames(0, 20))
    assert connected(sink)
    scene.broker.stop()
    longest_s = write(sink, frames(20, 300))
    wait_for(lambda: not sink.statistics().is_connected, 20.0)
    scene.broker.go_on()
    wait_for(lambda: sink.statistics().depth == 0, 20.0, sink.statistics)
    sink.close()
    expect_in_order(scene.broker.arrived(320), range(320))
    assert longest_s < 2.0  # an answer would be waited for for 3 s
    assert sink.statistics().dropped == 0


def test_sink_whose_broker_goes_and_comes_back_under_load_loses_nothing(scene: Scene) -> None:
    """A broker that is taken down and started again while messages come gets all of them, each source's in order."""
    sink = scene.make()
    write(sink, frames(0, 20), pause_s=0.002)
    write(sink, frames(20, 400))  # the broker goes while these are on their way
    scene.broker.take_down()
    write(sink, frames(420, 150))
    write(sink, frames(570, 20), pause_s=0.002)
    wait_for(lambda: not sink.statistics().is_connected)
    scene.broker.bring_up()
    write(sink, frames(590, 60), pause_s=0.002)
    wait_for(lambda: sink.statistics().depth == 0, 20.0, sink.statistics)
    sink.close()
    expect_in_order(scene.broker.arrived(650), range(650))
    said = sink.statistics()
    assert (said.sent, said.dropped) == (650, 0)


def test_sink_whose_broker_is_away_for_longer_than_the_spool_holds_drops_the_oldest(scene: Scene) -> None:
    """What does not fit is counted exactly, and what arrives at last is the newest, in order."""
    sink = scene.make(spool_messages=100)
    write(sink, frames(0, 20))
    wait_for(lambda: sink.statistics().sent == 20)
    scene.broker.take_down()
    write(sink, frames(20, 500))
    wait_for(lambda: not sink.statistics().is_connected)
    assert sink.statistics().depth == 100
    scene.broker.bring_up()
    wait_for(lambda: sink.statistics().depth == 0, 20.0, sink.statistics)
    with pytest.raises(SinkFailed, match=f"^{sink.statistics().dropped} messages for .*: no room in its spool$"):
        sink.close()
    said = sink.statistics()
    assert (said.written, said.sent + said.dropped, said.depth) == (520, 520, 0)
    arrived = scene.broker.arrived(said.sent)
    assert len(first_of_each(arrived)) == said.sent
    for source_id in SOURCES:
        kept = numbers(arrived, source_id)
        assert kept == sorted(kept)
        assert kept[-1] >= 518


def test_sink_whose_broker_is_stopped_closes_within_its_deadline_and_says_what_was_left(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing tries for its deadline (5 s, here 2), then says how many messages were not delivered."""
    monkeypatch.setattr("penstock_video.sinks.broker.CLOSE_S", 2.0)
    sink = scene.make()
    write(sink, frames(0, 10))
    wait_for(lambda: sink.statistics().sent == 10)
    scene.broker.stop()
    write(sink, frames(10, 50))
    began = time.monotonic()
    with pytest.raises(SinkFailed, match=r"50 messages for .* were not delivered"):
        sink.close()
    assert time.monotonic() - began < 4.0
    scene.broker.go_on()


def test_sink_whose_broker_is_away_at_the_start_connects_when_it_comes(scene: Scene) -> None:
    """Nothing is lost, and no one is stopped, by a broker that starts later."""
    scene.broker.take_down()
    sink = scene.make()
    write(sink, frames(0, 50))
    wait_for(lambda: sink.statistics().errors > 0)
    assert "not connected yet" not in sink.statistics().reason
    scene.broker.bring_up()
    wait_for(lambda: sink.statistics().depth == 0, 20.0, sink.statistics)
    assert sink.statistics().is_connected
    sink.close()
    expect_in_order(scene.broker.arrived(50), range(50))
