"""Asks, and writes down what became of it: the part that open and closed loop share."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from loadtest.clients.client import Answer, Client
from loadtest.driver.protocol import DriverError
from loadtest.results import Record, Side, Stages, Status
from loadtest.scenario import Ask

_SLOTS = 1009  # a prime, so that no count of pictures or processes runs in step with the mix
_NO_STAGES = Stages()


@dataclass(frozen=True, slots=True)
class Lane:
    """One kind of request, its name in the records, and the client that sends it."""

    label: str
    client: Client


def mix(asks: Sequence[Ask], *, seed: int) -> list[int]:
    """Which ask a request is, by its number modulo the list's length: shares kept within a thousandth, order by seed.

    Each ask has a place, however small its share.
    """
    total = sum(ask.share for ask in asks)
    slots = [index for index, ask in enumerate(asks) for _ in range(max(1, round(_SLOTS * ask.share / total)))]
    random.Random(seed).shuffle(slots)
    return slots


@dataclass(slots=True)
class Asking:
    """One phase's requests against one side. records: what ended and was not taken yet; clock: monotonic seconds."""

    round: int
    phase: str
    side: Side
    lanes: Sequence[Lane]
    slots: Sequence[int]
    epoch_s: float
    clock: Callable[[], float]
    records: list[Record] = field(default_factory=list)
    in_flight: int = 0
    count: int = 0

    async def ask(self, number: int, intended_s: float) -> Answer:
        """Sends the request with that number, which was due at intended_s of the clock; keeps its record."""
        lane = self.lanes[self.slots[number % len(self.slots)]]
        self.in_flight += 1
        sent_s = self.clock()
        try:
            answer = await lane.client.send(number)
        finally:
            self.in_flight -= 1
        self._keep(lane.label, (intended_s, sent_s, self.clock()), answer)
        return answer

    def give_up(self, number: int, intended_s: float, why: str) -> None:
        """Writes down that the request was not sent at all."""
        now = self.clock()
        label = self.lanes[self.slots[number % len(self.slots)]].label
        self._keep(label, (intended_s, now, now), Answer(Status.NOT_SENT, error=why))

    def take(self, most: int) -> list[Record]:
        """The oldest records that were not taken yet, at most so many."""
        taken, self.records = self.records[:most], self.records[most:]
        return taken

    def _keep(self, label: str, moments: tuple[float, float, float], answer: Answer) -> None:
        stages = answer.stages or _NO_STAGES
        self.count += 1
        self.records.append(
            Record(
                round=self.round,
                phase=self.phase,
                side=self.side,
                request=label,
                intended_s=moments[0] - self.epoch_s,
                sent_s=moments[1] - self.epoch_s,
                done_s=moments[2] - self.epoch_s,
                status=answer.status,
                code=answer.code,
                error=answer.error,
                sent_bytes=answer.sent_bytes,
                received_bytes=answer.received_bytes,
                batch_size=answer.batch_size,
                decode_ms=stages.decode_ms,
                preprocess_ms=stages.preprocess_ms,
                queue_ms=stages.queue_ms,
                infer_ms=stages.infer_ms,
                postprocess_ms=stages.postprocess_ms,
                total_ms=stages.total_ms,
            )
        )


@asynccontextmanager
async def answered_in_time(asking: Asking) -> AsyncIterator[asyncio.Timeout]:
    """A limit to set for the requests under way. Raises DriverError where it passes: a client forgot its deadline."""
    limit = asyncio.timeout(None)
    try:
        async with limit:
            yield limit
    except TimeoutError:
        if not limit.expired():
            raise
        raise DriverError(
            f"requests of {', '.join(lane.label for lane in asking.lanes)} were still under way "
            f"in phase {asking.phase!r} after their deadline"
        ) from None
