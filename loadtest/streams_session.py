"""Composes a search for the number of streams that a running video program holds, over its control API."""

import asyncio
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from loadtest.clients.client import TargetError
from loadtest.clients.video import Stream, VideoClient
from loadtest.measure.buckets import Buckets, latency_in
from loadtest.measure.measures import measurement_of
from loadtest.order import Order, Watch
from loadtest.results import Measurement, Run
from loadtest.session import Gathered, SessionError, ending_in_complaints, finished, head_of
from loadtest.stream_search import StreamSearch, Trial
from loadtest.targets import UNITS

ASK_S, START_S, LOOK_S, SETTLE_S = 10.0, 30.0, 0.25, 3.0
PREFIX = "load-"


async def run_streams(order: Order, watch: Watch) -> Run:
    """The run of a scenario of streams, unjudged. Raises SessionError where the video program cannot be asked.

    Streams that it has already stay, and count as its load; the test's own are gone afterwards.
    """
    gathered, found = Gathered(), []
    began_at = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        async with VideoClient(order.target, ASK_S) as client:
            others = await client.streams()
            if others:
                watch.note(f"{len(others)} streams were there already; they are part of what is measured")
            async with ending_in_complaints(gathered):
                for number in range(1, order.rounds + 1):
                    found.append(await _Search(order, watch, client).run(number))
    except TargetError as error:
        raise SessionError(str(error)) from error
    run = head_of(order, began_at, "the video program")
    return finished(run, gathered, measured([one for one in found if one], run.machine.cores if run.is_local else 0))


def measured(found: "list[tuple[int, Stream]]", cores: int) -> Iterator[Measurement]:
    """The rounds' numbers as figures; those of a size and rate that targets speak of have names of their own."""
    if not found:
        return
    held = [float(count) for count, _ in found]
    names = {"streams_held": held}
    if cores:
        names["streams_per_core"] = [count / cores for count in held]
    stream = found[-1][1]
    names[f"streams_{stream.height}p{stream.fps:.0f}_{stream.codec}"] = held
    for name, values in names.items():
        if name in UNITS:
            yield measurement_of(name, UNITS[name], values)


class _Search:
    def __init__(self, order: Order, watch: Watch, client: VideoClient) -> None:
        phase = order.scenario.phases[0]
        self._seconds, self._search = phase.seconds, StreamSearch(phase.streams)
        self._uri = order.scenario.requests[0].uri
        self._slo_p99_ms = order.scenario.slo_p99_ms
        self._watch, self._client = watch, client
        self._names: list[str] = []
        self._stream: Stream | None = None

    async def run(self, number: int) -> tuple[int, Stream] | None:
        """How many were held, and what one of them was; None where not one ran."""
        try:
            while (count := self._search.next_count()) is not None:
                is_held = await self._is_held(number, count) or await self._is_held(number, count)
                self._search.record(count, is_held=is_held)
            return (self._search.held, self._stream) if self._stream is not None else None
        finally:
            await asyncio.shield(self._have(0))

    async def _is_held(self, number: int, count: int) -> bool:
        """By one trial; a number is only given up after two, since machines stand still at times."""
        trial = await self._try(count)
        complaint = trial.complaint(self._slo_p99_ms)
        figures = f"{trial.rate:.1f} frames/s, p99 {trial.p99_ms:.0f} ms, {trial.dropped_share:.1%} dropped"
        self._watch.note(f"round {number}: {count} streams: {figures}: {complaint or 'held'}")
        return not complaint

    async def _try(self, count: int) -> Trial:
        await self._have(count)
        trouble = await self._until_running()
        if trouble:
            return Trial(count, float("nan"), 0.0, 0.0, 0.0, trouble)
        await asyncio.sleep(SETTLE_S)
        began, before, page = time.monotonic(), await self._own(), await self._latency()
        await asyncio.sleep(self._seconds)
        seconds, after, later = time.monotonic() - began, await self._own(), await self._latency()
        self._stream = self._stream or next(iter(after.values()), None)
        return trial_of(before, after, later.since(page), seconds)

    async def _have(self, count: int) -> None:
        while len(self._names) > count:
            await self._client.remove(self._names.pop())
        while len(self._names) < count:
            name = (
                f"{PREFIX}{len(self._names)}-{time.monotonic_ns() // 1000}"  # an id that is being removed is not free
            )
            await self._client.add(name, self._uri)
            self._names.append(name)

    async def _until_running(self) -> str:
        """Why not every stream runs within the time; empty where they do."""
        until = time.monotonic() + START_S
        while True:
            waiting = [one for one in (await self._own()).values() if one.state != "running" or not one.inferred]
            if not waiting:
                return ""
            if time.monotonic() >= until:
                return f"a stream is {waiting[0].state}: {waiting[0].reason or 'no answer yet'}"
            await asyncio.sleep(LOOK_S)

    async def _own(self) -> dict[str, Stream]:
        found = {one.source_id: one for one in await self._client.streams()}
        missing = next((name for name in self._names if name not in found), "")
        if missing:
            raise TargetError(f"the video program lost the stream {missing}")
        return {name: found[name] for name in self._names}

    async def _latency(self) -> Buckets:
        return latency_in(await self._client.metrics(), self._names)


def trial_of(before: dict[str, Stream], after: dict[str, Stream], latency: Buckets, seconds: float) -> Trial:
    """What two looks at the same streams come to."""
    pairs = [(before[name], after[name]) for name in after]
    frames = sum(b.frames - a.frames for a, b in pairs)
    dropped = _dropped(after.values()) - _dropped(before.values())
    ill = next((b for _, b in pairs if b.state != "running"), None)
    return Trial(
        streams=len(after),
        p99_ms=latency.percentile_ms(0.99),
        dropped_share=dropped / max(frames, 1),
        played_share=min((b.position_s - a.position_s) / seconds for a, b in pairs),
        rate=sum(b.inferred - a.inferred for a, b in pairs) / seconds,
        trouble=f"a stream is {ill.state}: {ill.reason}" if ill is not None else "",
    )


def _dropped(streams: Iterable[Stream]) -> int:
    return sum(sum(stream.drops.values()) for stream in streams)
