"""Brokers that stop and go under a running pipeline. FAULTS 57, 58, 61 in a running program."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.deepstream_pipeline.brokers import Arrived, Broker, first_of_each, kafka_broker, mqtt_broker, redis_broker
from tests.integration.video_chaos import (
    FPS,
    LINE,
    Program,
    Row,
    counts_of,
    engine_at,
    lines_of,
    program_at,
    rates,
    settings_of,
    spot_clip,
)
from tests.integration.video_runs import Place
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.xdist_group("video-chaos"), pytest.mark.timeout(300), pytest.mark.long]

SOURCES = ("gate", "yard")
BROKERS = ("redis", "mqtt", "kafka")
SPOOL = 100  # messages: five seconds of both sources
WINDOW_S, AWAY_S, WINDOWS = 8.0, 10.0, 3


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Where the programs of this file run, with one engine."""
    with engine_at(tmp_path_factory.mktemp("e")) as place:
        yield place


@contextlib.contextmanager
def broken_webhook() -> Iterator[tuple[str, list[bytes]]]:
    """(the address of one that answers 500 to everything, what it was sent)."""
    sent: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(500)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/hook", sent
    finally:
        server.shutdown()
        thread.join(10.0)
        server.server_close()


def rate_of(program: Program, seconds: float) -> float:
    """Answered frames a second of the slower source."""
    began = counts_of(program, SOURCES)
    time.sleep(seconds)
    return min(rates(began, counts_of(program, SOURCES)).values())


def steady_rate(program: Program) -> float:
    """Of a window in which the machine did not stand still: the clips play at FPS."""
    seen = []
    for _ in range(WINDOWS):
        seen.append(rate_of(program, WINDOW_S))
        if seen[-1] >= 0.97 * FPS:
            break
    return max(seen)


def depths(program: Program) -> dict[str, float]:
    """Messages that wait, by sink."""
    return {name: program.metric("sink_queue_results", sink=name) for name in BROKERS}


def expect_in_order(arrived: list[Arrived], lines: list[Row], dropped: float) -> None:
    """Each source's messages are in the order of their frames, and no more are missing than were counted."""
    kept = [one for one in first_of_each(arrived) if one.key in SOURCES]
    for source_id in SOURCES:
        numbers = [json.loads(one.body)["frame_num"] for one in kept if one.key == source_id]
        assert numbers == sorted(numbers), source_id
        last = max(line["frame_num"] for line in lines if line["source_id"] == source_id)
        assert numbers[-1] == last, f"the newest of {source_id} is missing"
    assert len(lines) - dropped <= len(kept) <= len(lines)


def test_brokers_that_stop_and_go_under_a_running_pipeline_cost_only_messages(place: Place, tmp_path: Path) -> None:
    """Redis is stopped, MQTT killed, Kafka away, and a webhook answers 500 all the time: the frame rate stays within
    5 % of before, what does not fit the spools is counted, and the rest arrives in order."""
    clip = spot_clip(tmp_path / "spot.mp4")
    held: Row = {"what": "both", "spool-messages": SPOOL}
    with contextlib.ExitStack() as stack:
        folders = [tmp_path / name for name in BROKERS]
        for folder in folders:
            folder.mkdir()
        redis = stack.enter_context(redis_broker(folders[0]))
        mqtt = stack.enter_context(mqtt_broker(folders[1]))
        kafka = stack.enter_context(kafka_broker())
        hook, posted = stack.enter_context(broken_webhook())
        mqtt.subscribe()
        sinks: list[Row] = [
            {"type": "jsonl", "folder": str(tmp_path / "out")},
            {"type": "redis", "url": redis.url, **held},
            {"type": "mqtt", "host": "127.0.0.1", "port": mqtt.port, **held},
            {"type": "kafka", "brokers": kafka.brokers, "topic": kafka.topic, **held},
            {"type": "webhook", "url": hook, "attempts": 2, "dead-letters": str(tmp_path / "dead.jsonl"), **held},
        ]
        sources = [{"uri": str(clip), "camera_id": name, "loop": True, "realtime": True} for name in SOURCES]
        settings = settings_of(sources, sink=sinks, analytics=LINE)
        program = stack.enter_context(program_at(place, tmp_path / "run", settings))
        program.wait_for_states(dict.fromkeys(SOURCES, "running"))
        wait_for(lambda: not any(depths(program).values()), 30.0, lambda: depths(program))
        before = steady_rate(program)
        redis.stop()
        mqtt.take_down()
        kafka.take_down()
        gone_at = time.monotonic()
        during = steady_rate(program)
        time.sleep(max(AWAY_S - (time.monotonic() - gone_at), 0.0))
        assert during >= 0.95 * before, (before, during)
        wait_for(lambda: all(dropped(program, name) > 0 for name in BROKERS), 30.0, lambda: depths(program))
        bring_back(redis.go_on, mqtt.bring_up, kafka.bring_up)
        after = steady_rate(program)
        assert after >= 0.95 * before, (before, after)
        wait_for(lambda: max(depths(program).values()) < 10, 60.0, lambda: (depths(program), program.log[-12:]))
        assert dropped(program, "webhook") > 0
        assert program.metric("sink_errors_total", sink="webhook") > 0
        assert set(program.states().values()) == {"running"}
        for name in SOURCES:
            program.ask("POST", f"/v1/streams/{name}/pause")
        wait_for(lambda: not any(depths(program).values()), 30.0, lambda: depths(program))
        lost = {name: dropped(program, name) for name in BROKERS}
        program.stop()
        out = tmp_path / "out"
        lines = lines_of(out / "objects.jsonl") + lines_of(out / "events.jsonl")
        of_each: dict[str, Broker] = {"redis": redis, "mqtt": mqtt, "kafka": kafka}
        for name, broker in of_each.items():
            least = len(lines) - int(lost[name])
            expect_in_order(broker.arrived(least), lines, lost[name])
        assert posted
        assert lines_of(tmp_path / "dead.jsonl")
    assert "Traceback" not in program.text


def dropped(program: Program, sink: str) -> float:
    """What a sink lost so far."""
    return program.metric("sink_dropped_total", sink=sink)


def bring_back(*ways: object) -> None:
    """One after the other."""
    for way in ways:
        assert callable(way)
        way()
