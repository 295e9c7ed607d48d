"""Redis streams: what stands in them, and what a server can refuse."""

import json
import sys
from pathlib import Path

import pytest
import redis
from structlog.testing import capture_logs

from penstock_video.errors import SinkFailed
from penstock_video.sinks.broker import BrokerSink, ResultKind
from penstock_video.sinks.redis_stream import RedisOptions, redis_sink
from tests.deepstream_pipeline.brokers import redis_broker
from tests.deepstream_pipeline.sinks.results import crossing, result
from tests.support.waiting import wait_for

SECRET = "pass-w0rd/with:signs"
QUOTED = "pass-w0rd%2Fwith%3Asigns"


def write(sink: BrokerSink, first: int, count: int) -> None:
    """So many frames, each one message."""
    for number in range(first, first + count):
        sink.write(result(number, has_image=False, objects=1))


def test_redis_entry_of_an_event_has_its_fields(tmp_path: Path) -> None:
    """id, source_id, kind and the JSON line, as documented."""
    with redis_broker(tmp_path) as broker:
        sink = redis_sink(RedisOptions(broker.url, "alerts"))
        sink.write(result(4, source_id="gate", has_image=False, events=(crossing(4, source_id="gate"),)))
        sink.close()
        with redis.Redis(port=broker.port, decode_responses=True) as client:
            ((_, fields),) = client.xrange("alerts")
            assert client.info("commandstats")["cmdstat_exec"]["calls"] == 1  # a batch is a transaction
    assert fields["id"].startswith("gate:4:line-crossing:0:")
    assert (fields["source_id"], fields["kind"]) == ("gate", "events")
    assert json.loads(fields["body"])["rule"] == crossing(4).rule


def test_redis_stream_is_trimmed_to_about_its_length(tmp_path: Path) -> None:
    """MAXLEN bounds the stream, in whole nodes of a hundred."""
    with redis_broker(tmp_path) as broker:
        sink = redis_sink(RedisOptions(broker.url, "penstock", 300, what=ResultKind.OBJECTS))
        write(sink, 0, 2_000)
        sink.close()
        with redis.Redis(port=broker.port) as client:
            assert 300 <= client.xlen("penstock") <= 500


def test_redis_that_wants_another_password_is_reported_without_it_and_tried_again(tmp_path: Path) -> None:
    """The state says why; neither log, statistics nor options show the secret; when it is accepted, all arrives."""
    with redis_broker(tmp_path, "--requirepass", "another") as broker, capture_logs() as lines:
        options = RedisOptions(f"redis://:{QUOTED}@127.0.0.1:{broker.port}/0", what=ResultKind.OBJECTS)
        sink = redis_sink(options)
        write(sink, 0, 5)
        wait_for(lambda: sink.statistics().errors > 0)
        assert sink.statistics().reason == "the server refuses the user or password"
        with redis.Redis(port=broker.port, password="another") as client:
            client.config_set("requirepass", SECRET)
        wait_for(lambda: sink.statistics().sent == 5)
        sink.close()
    for text in (repr(lines), repr(options), repr(sink.statistics()), sink._link.place):
        assert SECRET not in text
        assert QUOTED not in text


def test_redis_that_is_out_of_memory_is_waited_for(tmp_path: Path) -> None:
    """OOM is not the message's fault: it waits, in order, and goes when there is room."""
    with redis_broker(tmp_path, "--maxmemory", "1", "--maxmemory-policy", "noeviction") as broker:
        sink = redis_sink(RedisOptions(broker.url, what=ResultKind.OBJECTS))
        write(sink, 0, 20)
        wait_for(lambda: sink.statistics().errors > 1)
        assert not sink.statistics().is_connected
        assert "memory" in sink.statistics().reason
        with redis.Redis(port=broker.port) as client:
            client.config_set("maxmemory", 0)
        wait_for(lambda: sink.statistics().sent == 20)
        sink.close()
        arrived = broker.arrived(20)
    assert [json.loads(one.body)["frame_num"] for one in arrived] == list(range(20))


def test_redis_key_that_is_no_stream_is_said_and_nothing_is_lost(tmp_path: Path) -> None:
    """A key of another type is the user's to move away; meanwhile the spool holds."""
    with redis_broker(tmp_path) as broker, redis.Redis(port=broker.port) as client:
        client.set("penstock", "mine")
        sink = redis_sink(RedisOptions(broker.url, what=ResultKind.OBJECTS))
        write(sink, 0, 3)
        wait_for(lambda: "WRONGTYPE" in sink.statistics().reason)
        client.delete("penstock")
        wait_for(lambda: sink.statistics().sent == 3)
        sink.close()


def test_redis_that_goes_while_nothing_is_sent_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle sink asks now and then, so that its state is true before the next message."""
    monkeypatch.setattr("penstock_video.sinks.redis_stream.PING_EVERY_S", 0.1)
    with redis_broker(tmp_path) as broker:
        sink = redis_sink(RedisOptions(broker.url))
        wait_for(lambda: sink.statistics().is_connected)
        broker.take_down()
        wait_for(lambda: not sink.statistics().is_connected)
        broker.bring_up()
        wait_for(lambda: sink.statistics().is_connected)
        sink.close()


def test_redis_sink_without_the_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, with the extra's name."""
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(SinkFailed, match=r"needs the library redis: install penstock\[video\]"):
        redis_sink(RedisOptions("redis://localhost"))
