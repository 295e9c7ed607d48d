"""What befalls a running video program by chance, and who looks at it meanwhile."""

import contextlib
import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.deepstream_pipeline.brokers import Server
from tests.deepstream_pipeline.rtsp.cameras import RtspServer
from tests.deepstream_pipeline.rtsp.rubbish import Rubbish, rubbish_server
from tests.integration.video_chaos import Program
from tests.support.http import call

MAX_ADDED = 6  # sources that are added and removed, at most at one time
MARK = "added-"  # what their names begin with
_OUT_OF_ORDER_S = 8.0  # at most


@dataclass
class Troubles:
    """One thing at a time, undone after some seconds. servers: of the sources troubled-0, troubled-1, …

    addresses: of sources that are added. done: how often each was. hit: how often each server was taken down, so
    that its source must have begun anew. gave: added sources that had given frames when they were taken out.
    """

    program: Program
    servers: Sequence[RtspServer]
    broker: Server
    addresses: Sequence[str]
    dice: random.Random
    done: Counter[str] = field(default_factory=Counter)
    hit: Counter[str] = field(default_factory=Counter)
    gave: int = 0
    present: set[str] = field(default_factory=set)

    @property
    def names(self) -> list[str]:
        """Of the sources whose servers these are."""
        return [f"troubled-{number}" for number in range(len(self.servers))]

    def one(self) -> None:
        """The next one."""
        ways: list[Callable[[], None]] = [self.add, self.remove, self.kill, self.freeze, self.rubbish, self.pause]
        way = self.dice.choices([*ways, self.take_broker_down], weights=(4, 3, 1, 1, 1, 1, 1))[0]
        way()
        self.done[way.__name__] += 1

    def add(self) -> None:
        """A source comes; where there are too many, another goes."""
        if len(self.present) >= MAX_ADDED:
            self.remove()
        name = f"{MARK}{self.done['add']}-{self.dice.randrange(1 << 16)}"
        row = {"source_id": name, "uri": self.dice.choice(self.addresses), "is_loop": True, "is_realtime": True}
        answer = self.program.ask("POST", "/v1/streams", row | {"reconnect_interval_s": 2, "open_timeout_s": 4})
        assert answer.status == 201, answer.body
        self.present.add(name)

    def remove(self) -> None:
        """One of those that came goes, in whatever state it is."""
        if self.present:
            name = self.dice.choice(sorted(self.present))
            self.gave += self.program.stream(name)["frames"] > 0
            assert self.program.ask("DELETE", f"/v1/streams/{name}").status == 204
            self.present.remove(name)

    def kill(self) -> None:
        """A camera is gone."""
        server = self._down()
        self.wait(_OUT_OF_ORDER_S)
        server.restart()

    def freeze(self) -> None:
        """A camera stands still."""
        server = self.dice.choice(self.servers)
        server.freeze()
        self.wait(_OUT_OF_ORDER_S)
        server.thaw()

    def rubbish(self) -> None:
        """In a camera's place something answers that is none."""
        server = self._down()
        kind = self.dice.choice([Rubbish.BYTES, Rubbish.RTP, Rubbish.HANGUP])
        with rubbish_server(kind, port=server.port):
            self.wait(_OUT_OF_ORDER_S)
        server.restart()

    def pause(self) -> None:
        """A camera is left for a while."""
        name = self.dice.choice(self.names)
        assert self.program.ask("POST", f"/v1/streams/{name}/pause").status == 204
        self.wait(3.0)
        assert self.program.ask("POST", f"/v1/streams/{name}/resume").status == 204

    def take_broker_down(self) -> None:
        """What it should have waits meanwhile."""
        self.broker.take_down()
        self.wait(_OUT_OF_ORDER_S)
        self.broker.bring_up()

    def wait(self, most_s: float) -> None:
        """By chance, a second at least."""
        time.sleep(self.dice.uniform(1.0, most_s))

    def clear(self) -> None:
        """No source but those of the settings is there."""
        while self.present:
            self.remove()

    def _down(self) -> RtspServer:
        name = self.dice.choice(self.names)
        self.hit[name] += 1
        server = self.servers[self.names.index(name)]
        server.kill()
        return server


@dataclass
class Viewers:
    """answers: by status, and what came instead of one."""

    answers: Counter[str] = field(default_factory=Counter)

    @property
    def pictures(self) -> int:
        """That they got."""
        return self.answers["200"]


@contextlib.contextmanager
def viewers(program: Program, names: Sequence[str], seed: int) -> Iterator[Viewers]:
    """Two who look at previews of these sources while the block runs, hang up and come again."""
    seen, over = Viewers(), threading.Event()

    def look(dice: random.Random) -> None:
        while not over.wait(dice.uniform(0.2, 2.0)):
            try:
                status = call("GET", f"{program.url}/v1/streams/{dice.choice(names)}/preview.jpg").status
                seen.answers[str(status)] += 1
            except (OSError, http.client.HTTPException) as error:
                seen.answers[type(error).__name__] += 1

    threads = [threading.Thread(target=look, args=(random.Random(seed + n),), daemon=True) for n in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield seen
        assert all(thread.is_alive() for thread in threads), seen.answers
    finally:
        over.set()
        for thread in threads:
            thread.join(40.0)
    assert not any(thread.is_alive() for thread in threads), "a preview hangs"
