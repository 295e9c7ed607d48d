"""Limits how many relayed inferences are at the engine at a time, and schedules clients in turn.

Triton executes calls in order of arrival, including abandoned ones, so one client's hundreds of long calls would delay
all others and the canary.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import TypeVar

from penstock.engines.model_health import EngineView
from penstock.protocol.call import A, Call, HttpCall, HttpStream, InferHead
from penstock.protocol.cancellation import (
    MAX_ABANDONED_S,
    AbandonedCall,
    CancelStage,
    abandoned_call_of,
    note_cancel_stage,
    when_engine_done,
)
from penstock.protocol.engine import ModelConfig, Relay
from penstock.protocol.errors import DeadlineExceeded, Overloaded
from penstock.vision.fair_queue import FairQueue
from penstock.vision.image_tasks import PreparationEstimator

T = TypeVar("T")

FAST_CALL_S = 0.5  # a slower response means that too many calls are at the engine
MAX_SLOTS = 64  # calls of one model, unless its instances take more
INITIAL_SLOTS = 4
SMOOTHING_WEIGHT = 0.1  # of one answer in the average
CANCELLED_CALL_S = 2.0  # minimum time that a cancelled call counts as being at the engine
LARGE_JSON_BYTES = 1 << 20
JSON_BYTES = 8 << 20  # of all large JSON bodies; Triton parses and writes 1 MiB of numbers in about 0.1 s


class SlotQueue:
    """Limits the total size at the engine. The last call may exceed the remaining room."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.call_s = 0.0  # a waiting call with less time left is not admitted while others run
        self._turns: FairQueue[tuple[int, float | None, asyncio.Future[bool]]] = FairQueue(sys.maxsize)

    def is_open(self) -> bool:
        """Whether the next call need not wait."""
        return self.held < self.limit and not self._turns

    async def enter(self, client: str, size: int, until: float | None, what: str) -> None:
        """Waits for room, in turn with other clients. Raises DeadlineExceeded. what: for the message."""
        if self.is_open():
            self.held += size
            return
        began = time.monotonic()
        let_in: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waiting = size, until, let_in
        self._turns.add(client, waiting, began)
        try:
            async with asyncio.timeout(None if until is None else until - began):
                is_admitted = await let_in
        except BaseException as error:
            if let_in.done() and not let_in.cancelled():
                if let_in.result():
                    self.leave(size)
            else:
                self._turns.remove(client, waiting)
            if isinstance(error, TimeoutError):
                waited_s = time.monotonic() - began
                raise DeadlineExceeded(
                    f"the deadline passed after {waited_s:.3f} s of waiting for {what}; allow more time or send less"
                ) from error
            note_cancel_stage(error, CancelStage.QUEUE)
            raise
        if not is_admitted:
            raise DeadlineExceeded(
                f"after {time.monotonic() - began:.3f} s of waiting for {what} less time is left than the "
                f"{self.call_s:.3f} s that a call takes; allow more time or send less"
            )

    def leave(self, size: int) -> None:
        """Releases room, and admits waiting calls."""
        self.held -= size
        self.let_in()

    def let_in(self) -> None:
        """Admits waiting calls, in turn between clients, while there is room. Rejects those that would end too late."""
        while self.held < self.limit and (turn := self._turns.take(0.0)) is not None:
            client, (size, until, let_in) = turn
            self._turns.ended(client, 0.0, None)
            if let_in.done():  # the waiting call was cancelled, and returns the room itself
                continue
            is_late = bool(self.held) and until is not None and until - time.monotonic() < self.call_s
            if not is_late:
                self.held += size
            let_in.set_result(not is_late)


class _ModelSlots(SlotQueue):
    """Slots of one model: more while responses are fast, otherwise only enough for its instances."""

    def __init__(self) -> None:
        super().__init__(INITIAL_SLOTS)
        self.took_s = FAST_CALL_S  # time of the last answer
        self.config: ModelConfig | None = None
        self._least = INITIAL_SLOTS

    def learn(self, config: ModelConfig, engines: int) -> None:
        """Sets the model's current config."""
        self.config = config
        calls = config.max_batch_size if config.has_dynamic_batching else 1
        self._least = MAX_SLOTS if config.is_ensemble else 2 * engines * config.instance_count * max(calls, 1)
        self.limit = max(self.limit, self._least)

    def answered(self, took_s: float) -> None:
        """Adjusts the limit after the engine answered a call."""
        self.took_s = took_s
        self.call_s += (took_s - self.call_s) * (SMOOTHING_WEIGHT if self.call_s else 1.0)
        if took_s > FAST_CALL_S:
            self.limit = max(self.limit - 1, self._least)
        elif self.held >= self.limit < MAX_SLOTS:
            self.limit += 1
        self.leave(1)

    def left(self) -> None:
        """Releases a cancelled call: Triton 2.51 drops it from a dynamic batcher's queue, but otherwise may run it."""
        if self.config is not None and self.config.has_dynamic_batching:
            self.leave(1)
        else:
            asyncio.get_running_loop().call_later(
                min(max(self.took_s, CANCELLED_CALL_S), MAX_ABANDONED_S), self.leave, 1
            )


class _StreamSlot:
    """Slot of one call on a stream, until it is answered."""

    __slots__ = ("_began", "_room")

    def __init__(self, room: _ModelSlots) -> None:
        self._room = room
        self._began = time.monotonic()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._room.answered(time.monotonic() - self._began)
        else:
            self._room.left()


class EngineSlots:
    """engines: number of engines that serve the relay's models."""

    def __init__(self, relay: Relay, watch: EngineView, engines: int = 1) -> None:
        self._relay = relay
        self._watch = watch
        self.engines = engines
        self._json = SlotQueue(JSON_BYTES)
        self._rooms: dict[str, _ModelSlots] = {}
        self._pictures = PreparationEstimator()

    @contextmanager
    def pictures(self, model_name: str, client: str, count: int, until: float | None) -> Iterator[None]:
        """Counts pictures from before they are decoded until they are answered, one call each.

        Raises Overloaded if they would be answered after `until`, so that no decoder works for them.
        """
        room = self._rooms.get(model_name)
        if room is not None and until is not None:
            calls = self._pictures.rows_with(model_name, client, count)
            needs_s, left_s = room.call_s * calls / room.limit, until - time.monotonic()
            if calls > room.limit and needs_s > left_s:
                raise Overloaded(
                    f"{calls} pictures of model {model_name!r} need {needs_s:.3f} s, and {max(left_s, 0.0):.3f} s are "
                    "left; send fewer or allow more time",
                    reason="cannot_meet",
                    retry_after_s=needs_s - left_s,
                )
        began = time.monotonic()
        for _ in range(count):
            self._pictures.began(model_name, client)
        try:
            yield
        finally:
            for _ in range(count):
                self._pictures.ended(model_name, client, time.monotonic() - began)

    async def send(self, call: Call[A], head: InferHead, client: str, until: float | None) -> A:
        """See Relay.send. client: for turns."""
        ask: Callable[[], Awaitable[A]] = partial(self._relay.send, call, deadline=until)
        if head.json_bytes >= LARGE_JSON_BYTES:
            ask = partial(self._with_json, ask, head.json_bytes, client, until)
        return await self.ask(ask, head.model_name, client, until)

    async def ask(self, ask: Callable[[], Awaitable[T]], model_name: str, client: str, until: float | None) -> T:
        """Calls `ask` when it is the client's turn, and returns its result. May also raise DeadlineExceeded."""
        room = self._room_of(model_name)
        if room is None:
            return await ask()
        if room.is_open():
            room.held += 1
        else:
            await room.enter(client, 1, until, _earlier_calls(model_name))
        began = time.monotonic()
        try:
            answer = await ask()
        except BaseException as error:
            self._left(error, room, model_name)
            raise
        room.answered(time.monotonic() - began)
        return answer

    async def place(self, model_name: str, client: str, until: float | None) -> AbstractContextManager[None]:
        """Waits for the client's turn. Returns the slot of a call over a stream, until it is answered or abandoned."""
        room = self._room_of(model_name)
        if room is None:
            return nullcontext()
        await room.enter(client, 1, until, _earlier_calls(model_name))
        return _StreamSlot(room)

    @asynccontextmanager
    async def stream(
        self, call: HttpCall, head: InferHead, client: str, until: float | None
    ) -> AsyncIterator[HttpStream]:
        """See Relay.stream; the stream is closed at the end of the block. client: for turns."""
        with await self.place(head.model_name, client, until):
            stream = await self._relay.stream(call, deadline=until)
            try:
                yield stream
            finally:
                await stream.chunks.aclose()

    async def _with_json(self, ask: Callable[[], Awaitable[T]], size: int, client: str, until: float | None) -> T:
        await self._json.enter(client, size, until, "the large JSON bodies before it")
        try:
            answer = await ask()
        except BaseException as error:
            when_engine_done(error, partial(self._json.leave, size))
            raise
        self._json.leave(size)
        return answer

    def _left(self, error: BaseException, room: _ModelSlots, model_name: str) -> None:
        """Releases a call without a response. An abandoned call uses its slot until the engine has finished it."""
        call = abandoned_call_of(error)
        if call is None:
            room.leave(1)
            return
        call.when_ended(partial(self._ended, call, room, model_name))

    def _ended(self, call: AbandonedCall, room: _ModelSlots, model_name: str) -> None:
        if call.is_served:
            room.leave(1)
            self._watch.note_served(model_name)  # without this, its canary, which waits behind such calls, would fail
        else:
            room.left()

    def _room_of(self, model_name: str) -> _ModelSlots | None:
        """None for an unknown model, and for models whose calls may overtake others: sequences and priorities."""
        known = self._watch.models.get(model_name)
        if known is None or (config := known.config) is None or config.is_decoupled:
            return None
        if config.has_sequence_batching or config.has_priorities:
            return None
        room = self._rooms.get(model_name)
        if room is None:
            room = self._rooms[model_name] = _ModelSlots()
        if room.config is not config:
            room.learn(config, self.engines)
        return room


def _earlier_calls(model_name: str) -> str:
    return f"the calls of model {model_name!r} before it"
