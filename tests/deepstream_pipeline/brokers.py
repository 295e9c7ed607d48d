"""Real brokers of a test's own, on loopback and free ports, that can be stopped, killed and started again.

Each tells what arrived as `Arrived`, in the order in which it has it.
"""

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deepstream_pipeline import kafka_mock
from tests.support.ports import free_port
from tests.support.waiting import becomes_true, wait_for

START_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Arrived:
    """A message as a consumer sees it."""

    key: str
    id: str
    body: bytes


def first_of_each(arrived: list[Arrived]) -> list[Arrived]:
    """Without repetitions: what a consumer that knows ids keeps."""
    seen: dict[str, Arrived] = {}
    for one in arrived:
        seen.setdefault(one.id, one)
    return list(seen.values())


class Server:
    """A child process that listens on a port."""

    def __init__(self, command: list[str], port: int) -> None:
        self._command, self.port = command, port
        self.process: subprocess.Popen[bytes] | None = None
        self.bring_up()

    def stop(self) -> None:
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        self._send(signal.SIGCONT)

    def take_down(self, how: signal.Signals = signal.SIGKILL) -> None:
        self._send(signal.SIGCONT)
        self._send(how)
        if self.process is not None:
            self.process.wait(START_TIMEOUT_S)
            self.process = None

    def bring_up(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(self._listens, START_TIMEOUT_S, f"{self._command[0]} does not listen")

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1.0):
            return True
        return False

    def _send(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


def program(name: str) -> str:
    """Where it is; a test that needs it skips where it is not."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip(f"no {name} here")
    return found


class RedisBroker(Server):
    """redis-server; every write is on the disk before it is acknowledged."""

    def __init__(self, folder: Path, *more: str) -> None:
        port = free_port()
        kept = ["--appendonly", "yes", "--appendfsync", "always", "--save", "", "--dir", str(folder)]
        command = [program("redis-server"), "--port", str(port), "--bind", "127.0.0.1", *kept, *more]
        super().__init__(command, port)
        self.stream = "penstock"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def arrived(self, count: int, timeout_s: float = 15.0) -> list[Arrived]:
        import redis

        client = redis.Redis(port=self.port)
        with contextlib.closing(client):
            becomes_true(lambda: self._length(client) >= count, timeout_s)
            seen = -1
            while seen != client.xlen(self.stream):
                seen = client.xlen(self.stream)
                time.sleep(0.2)
            rows = client.xrange(self.stream)
        return [Arrived(row[b"source_id"].decode(), row[b"id"].decode(), row[b"body"]) for _, row in rows]

    def _length(self, client: object) -> int:
        import redis

        with contextlib.suppress(redis.RedisError):
            return len({row[b"id"] for _, row in client.xrange(self.stream)})  # type: ignore[attr-defined]
        return 0


class MqttBroker(Server):
    """mosquitto, with a subscriber of its own whose session outlives the broker."""

    def __init__(self, folder: Path, *more: str) -> None:
        port = free_port()
        lines = [f"listener {port} 127.0.0.1", "user root", "persistence true", f"persistence_location {folder}/"]
        lines += ["max_queued_messages 0"]
        (folder / "mosquitto.conf").write_text("\n".join([*lines, *(more or ["allow_anonymous true"])]) + "\n")
        super().__init__([program("mosquitto"), "-c", str(folder / "mosquitto.conf")], port)
        self._arrived: list[Arrived] = []
        self.topics: list[str] = []
        self._is_subscribed = threading.Event()
        self._subscriber: object = None

    def subscribe(self, username: str = "", password: str = "") -> None:
        """From now on everything is taken down."""
        import paho.mqtt.client as paho
        from paho.mqtt.packettypes import PacketTypes
        from paho.mqtt.properties import Properties

        client = paho.Client(paho.CallbackAPIVersion.VERSION2, "taker", protocol=paho.MQTTv5)
        client.on_connect = lambda *_: client.subscribe("#", qos=2)
        client.on_subscribe = lambda *_: self._is_subscribed.set()
        client.on_message = self._take
        client.reconnect_delay_set(1, 1)
        if username:
            client.username_pw_set(username, password)
        session = Properties(PacketTypes.CONNECT)
        session.SessionExpiryInterval = 600
        client.connect("127.0.0.1", self.port, clean_start=False, properties=session)
        client.loop_start()
        self._subscriber = client
        assert self._is_subscribed.wait(START_TIMEOUT_S)

    def take_down(self, how: signal.Signals = signal.SIGTERM) -> None:
        """In order: mosquitto keeps what it acknowledged only if it may write it down."""
        super().take_down(how)

    def close(self) -> None:
        if self._subscriber is not None:
            self._subscriber.disconnect()  # type: ignore[attr-defined]
            self._subscriber.loop_stop()  # type: ignore[attr-defined]

    def arrived(self, count: int, timeout_s: float = 15.0) -> list[Arrived]:
        becomes_true(lambda: len({one.id for one in list(self._arrived)}) >= count, timeout_s)
        seen = -1
        while seen != len(self._arrived):
            seen = len(self._arrived)
            time.sleep(0.2)
        return list(self._arrived)

    def _take(self, client: object, _: object, message: object) -> None:
        said = dict(getattr(message.properties, "UserProperty", []))  # type: ignore[attr-defined]
        topic: str = message.topic  # type: ignore[attr-defined]
        self.topics.append(topic)
        self._arrived.append(Arrived(topic.split("/")[1], said.get("id", ""), message.payload))  # type: ignore[attr-defined]


class KafkaBroker:
    """librdkafka's mock cluster."""

    topic = "penstock"

    def __init__(self) -> None:
        found = kafka_mock.library()
        if found is None:
            pytest.skip("no librdkafka of confluent-kafka's wheel here")
        command = [sys.executable, str(Path(kafka_mock.__file__)), str(found)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        self.brokers = self.process.stdout.readline().strip()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def take_down(self) -> None:
        self._order("down")

    def bring_up(self) -> None:
        self._order("up")

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(START_TIMEOUT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def arrived(self, count: int, timeout_s: float = 15.0) -> list[Arrived]:
        """Of every partition, one after the other: a source's messages are all in one."""
        import confluent_kafka as kafka

        consumer = kafka.Consumer({"bootstrap.servers": self.brokers, "group.id": "taker", "log_level": 2})
        try:
            parts = consumer.list_topics(self.topic, timeout=timeout_s).topics[self.topic].partitions
            consumer.assign([kafka.TopicPartition(self.topic, part, kafka.OFFSET_BEGINNING) for part in parts])
            found: list[Arrived] = []
            end = time.monotonic() + timeout_s
            while time.monotonic() < end:
                more = consumer.consume(1000, timeout=0.5)
                found += [_of_kafka(one) for one in more]
                if not more and len({one.id for one in found}) >= count:
                    break
            return found
        finally:
            consumer.close()

    def _order(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()


def _of_kafka(one: object) -> Arrived:
    assert one.error() is None, one.error()  # type: ignore[attr-defined]
    headers = dict(one.headers() or [])  # type: ignore[attr-defined]
    return Arrived(one.key().decode(), headers["id"].decode(), one.value())  # type: ignore[attr-defined]


Broker = RedisBroker | MqttBroker | KafkaBroker


@contextlib.contextmanager
def redis_broker(folder: Path, *more: str) -> Iterator[RedisBroker]:
    """A redis-server until the block ends."""
    broker = RedisBroker(folder, *more)
    try:
        yield broker
    finally:
        broker.take_down()


@contextlib.contextmanager
def mqtt_broker(folder: Path, *more: str) -> Iterator[MqttBroker]:
    """A mosquitto until the block ends."""
    broker = MqttBroker(folder, *more)
    try:
        yield broker
    finally:
        broker.go_on()
        broker.close()
        broker.take_down(signal.SIGKILL)


@contextlib.contextmanager
def kafka_broker() -> Iterator[KafkaBroker]:
    """A mock cluster until the block ends."""
    broker = KafkaBroker()
    try:
        yield broker
    finally:
        broker.close()
