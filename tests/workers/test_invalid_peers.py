"""Peers at the core's socket that break the protocol: served no more, and no other peer is affected."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from penstock.gateway.workers import core_server
from penstock.gateway.workers.connection import (
    SOCKET_NAME,
    CallFailed,
    CallLate,
    CancelInfer,
    ClientHello,
    ClientRejected,
    CoreState,
    EngineSuspected,
    FindModel,
    Infer,
    Inferred,
    ModelsServed,
    RequestFailed,
    SlabPartGranted,
    SyncDone,
    ToClient,
    WorkerHello,
)
from penstock.gateway.workers.slab_sharing import (
    GREETING_BYTES,
    MAX_CLIENT_MESSAGE_BYTES,
    MAX_CLIENT_PROCESSES,
    ClientSlab,
)
from penstock.protocol.inference import InferRequest, SlabAddress, tensor_from_numpy
from tests.support.waiting import until
from tests.workers.test_client_processes import LARGE, PART, Core, core_in
from tests.workers.test_core_link import request

ASK = Infer(1, request(), "c", 0)
VISIT = ClientHello("odd")
DOWN_DECODER: "msgspec.msgpack.Decoder[ToClient]" = msgspec.msgpack.Decoder(ToClient)


def framed(record: object) -> bytes:
    encoded = msgspec.msgpack.encode(record)
    return len(encoded).to_bytes(4, "little") + encoded


@dataclass
class Peer:
    """A peer at the socket that sends arbitrary messages."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def say(self, *records: object) -> None:
        self.writer.write(b"".join(record if isinstance(record, bytes) else framed(record) for record in records))
        await self.writer.drain()

    async def hear(self) -> ToClient:
        size_bytes = int.from_bytes(await self.reader.readexactly(4), "little")
        return DOWN_DECODER.decode(await self.reader.readexactly(size_bytes))

    async def answer(self) -> ToClient:
        """The next that is no news of the engine."""
        while isinstance(received := await self.hear(), CoreState | SlabPartGranted):
            pass
        return received

    async def last_words(self) -> list[ToClient]:
        """All messages until the core ends the connection."""
        received: list[ToClient] = []
        while True:
            try:
                received.append(await self.hear())
            except (asyncio.IncompleteReadError, ConnectionError):
                return received


@asynccontextmanager
async def peer_at(core: Core) -> AsyncIterator[Peer]:
    await until((core.folder / SOCKET_NAME).exists)
    reader, writer = await asyncio.open_unix_connection(core.folder / SOCKET_NAME)
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()


@asynccontextmanager
async def busy_core_in(folder: Path) -> AsyncIterator[Core]:
    """With a front and a client process whose requests are answered throughout; no error reaches the loop."""
    escaped: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: escaped.append(context))
    async with core_in(folder) as core:
        links = [await core.joined(WorkerHello(1)), await core.joined(ClientHello("video"))]
        yield core
        core.engine.holds = False
        for link in links:
            assert (await link.infer(request(), client="c")).id == "id-7"
        await until(lambda: len(core.server._fronts) == 2)
        assert not core.server._unidentified
        assert not any(front.tasks for front in core.server._fronts.values())
        assert (core.server.front_count, core.server.client_process_count) == (1, 1)
        assert (core.watch.suspicions, core.watch.late, core.watch.failed, core.watch.served) == (0, [], [], [])
    assert escaped == []


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([SyncDone(7)], "the first message is no hello"),
        ([ASK], "the first message is no hello"),
        ([VISIT, VISIT], "second hello message"),
        ([VISIT, WorkerHello(1)], "second hello message"),
        ([WorkerHello(2), VISIT], "second hello message"),
        ([WorkerHello(0)], "no worker 0"),
        ([WorkerHello(-1)], "no worker -1"),
        ([WorkerHello(1 << 40)], "no worker 1099511627776"),
        ([VISIT, ASK, ASK], "two running requests have the number 1"),
        ([VISIT, ASK, FindModel(1, "new")], "two running requests have the number 1"),
        ([VISIT, ASK, CancelInfer(1), ASK], "two running requests have the number 1"),
    ],
    ids=lambda said: " ".join(type(record).__name__ for record in said) if isinstance(said, list) else said,
)
async def test_peer_that_breaks_the_protocol_gets_the_reason_and_is_served_no_more(
    tmp_path: Path, said: Sequence[object], why: str
) -> None:
    """One line in the log, nothing left of what it asked, and the others' requests are answered all the while."""
    async with busy_core_in(tmp_path) as core, peer_at(core) as peer:
        core.engine.holds = True
        with capture_logs() as logs:
            await peer.say(*said, SyncDone(1), EngineSuspected(), ASK)  # what follows is not read
            *_, last = await peer.last_words()
        assert isinstance(last, ClientRejected)
        assert why in last.reason
        (line,) = [line for line in logs if line["log_level"] in ("warning", "error")]
        assert why in str(line["reason"])


@pytest.mark.parametrize(
    "said",
    [
        b"\x05\0\0\0rubbi\x05\0\0\0rubbi",
        framed(VISIT) + b"\x05\0\0\0rubbi" + framed(ASK),
        framed(VISIT) + framed(["Nonsense", 1]) + framed(ASK),
        framed(VISIT) + framed(["Ask", 1, ["owned", "no tensors"], "c", 0]),
        framed(VISIT) + framed(["Known", -1.5]),
        framed(VISIT) + framed(VISIT).replace(b"odd", b"o\xffd"),
        framed(VISIT) + b"\x91\x13\0\0\x93\xa5Known\x01" + b"\x91" * 5000 + b"\xc0",
        (GREETING_BYTES + 1).to_bytes(4, "little"),
        framed(VISIT) + (MAX_CLIENT_MESSAGE_BYTES + 1).to_bytes(4, "little") + bytes(1000),
    ],
    ids=lambda said: f"{len(said)} bytes",
)
async def test_who_sends_what_is_no_record_is_dropped_with_one_line_of_the_log(tmp_path: Path, said: bytes) -> None:
    """Long before so many bytes are there as it said that would come."""
    async with busy_core_in(tmp_path) as core, peer_at(core) as peer:
        asked = len(core.engine.asked)
        with capture_logs() as logs:
            await peer.say(said)
            await peer.last_words()
        assert len([line for line in logs if line["log_level"] in ("warning", "error")]) == 1
        assert len(core.engine.asked) == asked


async def test_who_goes_in_the_middle_of_a_record_leaves_nothing(tmp_path: Path) -> None:
    """The half of it is thrown away."""
    whole = framed(VISIT) + framed(ASK)
    async with busy_core_in(tmp_path) as core:
        for end in range(0, len(whole), 7):
            async with peer_at(core) as peer:
                await peer.say(whole[:end])


async def test_who_says_nothing_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold a descriptor of the core's for ever."""
    monkeypatch.setattr(core_server, "GREETING_S", 0.1)
    async with busy_core_in(tmp_path) as core, peer_at(core) as peer:
        (last,) = await peer.last_words()
        assert isinstance(last, ClientRejected)


async def test_client_process_beyond_the_limit_may_send_anything(tmp_path: Path) -> None:
    """It is rejected once; what it sent behind its greeting has no effect."""
    async with busy_core_in(tmp_path) as core:
        links = [await core.joined(ClientHello(f"client {number}")) for number in range(MAX_CLIENT_PROCESSES - 1)]
        with capture_logs() as logs:
            for _ in range(3):
                async with peer_at(core) as peer:
                    await peer.say(VISIT, SyncDone(3), EngineSuspected(), ASK)
                    (last,) = await peer.last_words()
                    assert isinstance(last, ClientRejected)
                    assert "already" in last.reason
        assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["client process rejected"]
        for _ in links:
            await core.leave()


async def test_tensor_outside_of_its_client_process_part_is_not_read(tmp_path: Path) -> None:
    """Nor is it where it has bytes of its own: the engine would read the others in their place."""
    async with busy_core_in(tmp_path) as core:
        slab = ClientSlab(asyncio.get_running_loop().call_later)
        victim = await core.joined(WorkerHello(2), slab)
        await until(lambda: slab.generation)
        lease, own = slab.lease(LARGE.data.nbytes), core.slab.lease(LARGE.data.nbytes)
        assert lease is not None
        assert own is not None
        async with peer_at(core) as peer:
            await peer.say(VISIT)
            while not isinstance(lent := await peer.hear(), SlabPartGranted):
                pass
            place = SlabAddress(lent.lent.region, lent.lent.generation, lent.lent.offset)
            at_the_end = replace(place, offset=place.offset + PART - 64)
            others = [lease.place, own.place, at_the_end, replace(place, offset=-64), replace(place, offset=1 << 60)]
            for number, elsewhere in enumerate([*others, replace(place, region="other")]):
                asked = replace(LARGE, data=memoryview(b""), place=elsewhere)
                await peer.say(Infer(number, InferRequest("owned", (asked,)), "c", 0))
                refused = await peer.answer()
                assert isinstance(refused, RequestFailed)
                assert refused.kind in ("InvalidRequest", "EngineUnavailable")
            for number, shape in enumerate([(1 << 40,), (-1, 4), (2, -(1 << 62))], 10):
                asked = replace(LARGE, shape=shape, data=memoryview(b""), place=place)
                await peer.say(Infer(number, InferRequest("owned", (asked,)), "c", 0))
                assert isinstance(await peer.answer(), RequestFailed)
            assert core.engine.asked == []
            await peer.say(Infer(20, InferRequest("owned", (replace(LARGE, place=lease.place),)), "c", 0))
            assert isinstance(await peer.answer(), Inferred)
            assert core.engine.asked[-1][0].inputs[0].place is None
            lease.release()
            own.release()
        assert (await victim.infer(InferRequest("owned", (LARGE,)), client="c")).outputs[0].data == LARGE.data
        await core.leave()


async def test_client_process_that_sends_and_reads_no_answer_fills_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond a bound it is refused, and where it does not read that either it is served no more."""
    monkeypatch.setattr(core_server, "CLIENT_UNREAD_BYTES", 1 << 20)
    monkeypatch.setattr(core_server, "CLIENT_STALLED_BYTES", (1 << 20) + (48 << 10))
    monkeypatch.setattr(core_server, "UNREAD_BYTES", 0)
    large = tensor_from_numpy("x", np.zeros((1, 10_000), np.float32))
    async with busy_core_in(tmp_path) as core, peer_at(core) as peer:
        await peer.say(VISIT)
        await until(lambda: core.server.client_process_count == 2)
        line = list(core.server._fronts)[-1]
        most = 0
        for number in range(2000):
            if core.server.client_process_count < 2:
                break
            await peer.say(Infer(number, InferRequest("owned", (large,)), "c", 0))
            await until(lambda: not core.server._fronts.get(line) or not core.server._fronts[line].tasks)
            await asyncio.sleep(0)
            most = max(most, line.unsent_bytes)
        assert core.server.client_process_count == 1
        assert 1 << 20 < most < (1 << 20) + (50 << 10)
        assert 'code="full"' in core.metrics.text().decode()


async def test_core_survives_any_messages_of_client_processes(tmp_path: Path) -> None:
    """Messages in any order, whole and damaged, with reused numbers, from many client processes beside each other."""
    async with busy_core_in(tmp_path) as core:
        for seed in range(15):
            await fuzz(core, random.Random(seed))


async def fuzz(core: Core, dice: random.Random) -> None:
    """One client process's life."""
    place = SlabAddress("nowhere", dice.randrange(3), dice.randrange(1 << 20))
    asks = [
        request(),
        request("other"),
        InferRequest("owned", ()),
        InferRequest("owned", (replace(LARGE, data=memoryview(b""), place=place),)),
        request(deadline=dice.choice([float("nan"), float("inf"), -1.0, 1e18])),
    ]
    core.engine.holds = dice.random() < 0.5
    async with peer_at(core) as peer:
        said = [framed(VISIT)] if dice.random() < 0.9 else []
        for _ in range(dice.randrange(12)):
            number = dice.randrange(4)
            records = [
                Infer(number, dice.choice(asks), "c", dice.randrange(-2, 300)),
                CancelInfer(number),
                FindModel(number, dice.choice(["owned", "new", ""])),
                SyncDone(number),
                dice.choice(
                    [CallLate("owned", 1.0), CallFailed("owned"), EngineSuspected(), ModelsServed(("owned", "missing"))]
                ),
            ]
            said.append(framed(dice.choice(records)))
        sent = bytearray(b"".join(said))
        if sent and dice.random() < 0.3:
            sent[dice.randrange(len(sent))] = dice.randrange(256)
        if dice.random() < 0.3:
            del sent[dice.randrange(len(sent) + 1) :]
        with capture_logs():
            await peer.say(bytes(sent))
            for _ in range(dice.randrange(20)):
                await asyncio.sleep(0)
