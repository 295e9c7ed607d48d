"""Streams that a front passes on to its core: how they end when the gateway stops, and when their time is over."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import grpc
import pytest

from penstock.gateway.grpc.forwarding import StreamForwarder
from penstock.gateway.grpc.relay import Context
from penstock.gateway.workers.core_relay import CoreRelay
from penstock.protocol.call import GrpcMetadata
from penstock.protocol.identity import Identity
from tests.grpc.harness import infer_message
from tests.grpc.scripted import STREAM, WAIT_S, ScriptedStream

DRAINED = (grpc.StatusCode.UNAVAILABLE, "this gateway stops and takes no more requests; open the stream to another one")
CUT = (grpc.StatusCode.UNAVAILABLE, "this gateway stopped before all answers came; send to another one")


@dataclass
class Core:
    """The core, as far as streams go there. opened: the streams, in order. on_cancel: called as one is let go."""

    opened: list[ScriptedStream] = field(default_factory=list)
    on_cancel: Callable[[], None] = lambda: None

    def open_stream(self, _: str, __: GrpcMetadata, ___: Identity) -> ScriptedStream:
        stream = ScriptedStream()
        let_go, stream.cancel = stream.cancel, lambda: (let_go(), self.on_cancel())[0]  # type: ignore[method-assign]
        self.opened.append(stream)
        return stream


class Ended(Exception):
    """What gRPC raises through a handler that aborts."""


@dataclass
class Client:
    """A client that opened a stream. says: its messages; then it keeps still. ended: with what, None while open."""

    remaining_s: float | None = None
    says: list[bytes] = field(default_factory=list)
    ended: tuple[grpc.StatusCode, str] | None = None

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> None:
        return None

    def time_remaining(self) -> float | None:
        return self.remaining_s

    async def read(self) -> bytes:
        if self.says:
            return self.says.pop()
        return await asyncio.get_running_loop().create_future()

    async def send_initial_metadata(self, _: object) -> None:
        return

    async def abort(self, code: grpc.StatusCode, details: str, _: object) -> None:
        self.ended = code, details
        raise Ended

    def set_trailing_metadata(self, _: object) -> None:
        self.ended = grpc.StatusCode.OK, ""


def passed(streams: StreamForwarder, client: Client) -> "asyncio.Task[None]":
    return asyncio.create_task(streams.serve(STREAM, None, cast(Context, client)))


async def ends(*streams: "asyncio.Task[None]") -> None:
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*streams, return_exceptions=True)


async def test_stream_that_begins_in_a_drain_is_half_closed_at_once() -> None:
    """The core ends it then, before the grace is over; UNAVAILABLE says that requests may have been left unread."""
    core, client = Core(), Client()
    streams = StreamForwarder(cast(CoreRelay, core))
    streams.drain()
    serving = passed(streams, client)
    await asyncio.sleep(0)
    async with asyncio.timeout(WAIT_S):
        await core.opened[0].is_half_closed.wait()
    core.opened[0].finish()
    await ends(serving)
    assert client.ended == DRAINED


class FullStream(ScriptedStream):
    """Its engine has no room yet. room: until when a message waits."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.room = asyncio.Event(), asyncio.Event()

    async def send(self, message: bytes) -> None:
        self.begun.set()
        await self.room.wait()
        await super().send(message)


async def test_message_that_waits_for_room_is_sent_in_spite_of_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was read before: it is one of those that are answered. Who cancels gRPC's write ends the whole call."""
    core, client = Core(), Client(says=[infer_message()])
    full = FullStream()
    monkeypatch.setattr(core, "open_stream", lambda *_: full)
    streams = StreamForwarder(cast(CoreRelay, core))
    serving = passed(streams, client)
    async with asyncio.timeout(WAIT_S):
        await full.begun.wait()
        streams.drain()
        await asyncio.sleep(0.01)
        assert not full.is_half_closed.is_set()
        full.room.set()
        await full.is_half_closed.wait()
    assert len(full.sent) == 1
    full.finish()
    await ends(serving)
    assert client.ended == DRAINED


async def test_cut_in_the_moment_in_which_a_stream_ends_cuts_the_others() -> None:
    """The one that ends keeps its own end."""
    core, clients = Core(), [Client(), Client()]
    streams = StreamForwarder(cast(CoreRelay, core))
    serving = [passed(streams, client) for client in clients]
    await asyncio.sleep(0.01)
    core.on_cancel = streams.cut
    core.opened[0].finish()
    await ends(*serving)
    assert [client.ended for client in clients] == [(grpc.StatusCode.OK, ""), CUT]


async def test_stream_whose_deadline_has_passed_on_arrival_is_refused() -> None:
    """As every other call: DEADLINE_EXCEEDED with our sentence, and the core is not asked."""
    core, client = Core(), Client(remaining_s=0.0)
    await ends(passed(StreamForwarder(cast(CoreRelay, core)), client))
    assert client.ended == (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "the deadline had passed when the request arrived; allow more time",
    )
    assert not core.opened
