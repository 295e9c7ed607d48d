"""Whoever comes to the core's socket and does not speak as our programs do: served no more, and nobody else notices."""

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

from server.core.infer import InferRequest
from server.core.tensor import Place, tensor_from_numpy
from server.local import core_server
from server.local.batch_line import SOCKET_NAME
from server.local.guests import GREETING_BYTES, MAX_GUEST_RECORD_BYTES, MAX_GUESTS
from server.local.lent_slab import BorrowedSlab
from server.local.messages import (
    DOWN,
    Answer,
    Ask,
    Failed,
    Find,
    GiveUp,
    Hello,
    Known,
    Late,
    Lend,
    NotServed,
    Served,
    State,
    Suspect,
    Unwelcome,
    Visit,
)
from tests.local.test_core_link import request, until
from tests.local.test_guests import LARGE, PART, Core, core_in

ASK = Ask(1, request(), "c", 0)
VISIT = Visit("odd")
DOWN_DECODER: "msgspec.msgpack.Decoder[DOWN]" = msgspec.msgpack.Decoder(DOWN)


def framed(record: object) -> bytes:
    encoded = msgspec.msgpack.encode(record)
    return len(encoded).to_bytes(4, "little") + encoded


@dataclass
class Peer:
    """Somebody at the socket who says what it likes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def say(self, *records: object) -> None:
        self.writer.write(b"".join(record if isinstance(record, bytes) else framed(record) for record in records))
        await self.writer.drain()

    async def hear(self) -> DOWN:
        size_bytes = int.from_bytes(await self.reader.readexactly(4), "little")
        return DOWN_DECODER.decode(await self.reader.readexactly(size_bytes))

    async def answer(self) -> DOWN:
        """The next that is no news of the engine."""
        while isinstance(heard := await self.hear(), State | Lend):
            pass
        return heard

    async def last_words(self) -> list[DOWN]:
        """All that is heard until the core ends the connection."""
        heard: list[DOWN] = []
        while True:
            try:
                heard.append(await self.hear())
            except (asyncio.IncompleteReadError, ConnectionError):
                return heard


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
    """With a front and a guest whose requests are answered before, beside and after; nothing reaches the loop."""
    escaped: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: escaped.append(context))
    async with core_in(folder) as core:
        links = [await core.joined(Hello(1)), await core.joined(Visit("video"))]
        yield core
        core.engine.holds = False
        for link in links:
            assert (await link.infer(request(), client="c")).id == "id-7"
        await until(lambda: len(core.server._fronts) == 2)
        assert not core.server._strangers
        assert not any(front.tasks for front in core.server._fronts.values())
        assert (core.server.front_count, core.server.guest_count) == (1, 1)
        assert (core.watch.suspicions, core.watch.late, core.watch.failed, core.watch.served) == (0, [], [], [])
    assert escaped == []


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([Known(7)], "did not say first"),
        ([ASK], "did not say first"),
        ([Find(1, "owned")], "did not say first"),
        ([GiveUp(1)], "did not say first"),
        ([Served(("owned",))], "did not say first"),
        ([Suspect()], "did not say first"),
        ([Late("owned", 1.0)], "did not say first"),
        ([NotServed("owned")], "did not say first"),
        ([VISIT, VISIT], "said twice"),
        ([VISIT, Hello(1)], "said twice"),
        ([Hello(2), VISIT], "said twice"),
        ([Hello(0)], "no front 0"),
        ([Hello(-1)], "no front -1"),
        ([Hello(1 << 40)], "no front 1099511627776"),
        ([VISIT, ASK, ASK], "asked twice under the number 1"),
        ([VISIT, ASK, Find(1, "new")], "asked twice under the number 1"),
        ([VISIT, ASK, GiveUp(1), ASK], "asked twice under the number 1"),
    ],
    ids=lambda said: " ".join(type(record).__name__ for record in said) if isinstance(said, list) else said,
)
async def test_who_speaks_out_of_order_is_told_why_and_served_no_more(
    tmp_path: Path, said: Sequence[object], why: str
) -> None:
    """One line in the log, nothing left of what it asked, and the others' requests are answered all the while."""
    async with busy_core_in(tmp_path) as core, peer_at(core) as peer:
        core.engine.holds = True
        with capture_logs() as logs:
            await peer.say(*said, Known(1), Suspect(), ASK)  # what follows is not heard
            *_, last = await peer.last_words()
        assert isinstance(last, Unwelcome)
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
        framed(VISIT) + (MAX_GUEST_RECORD_BYTES + 1).to_bytes(4, "little") + bytes(1000),
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
        assert isinstance(last, Unwelcome)


async def test_guest_that_is_one_too_many_may_say_what_it_likes(tmp_path: Path) -> None:
    """It is told once that it is not served; what it sent behind its greeting is nobody's trouble."""
    async with busy_core_in(tmp_path) as core:
        links = [await core.joined(Visit(f"guest {number}")) for number in range(MAX_GUESTS - 1)]
        with capture_logs() as logs:
            for _ in range(3):
                async with peer_at(core) as peer:
                    await peer.say(VISIT, Known(3), Suspect(), ASK)
                    (last,) = await peer.last_words()
                    assert isinstance(last, Unwelcome)
                    assert "already" in last.reason
        assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["a guest is not served"]
        for _ in links:
            await core.leave()


async def test_tensor_outside_of_what_its_guest_was_lent_is_not_read(tmp_path: Path) -> None:
    """Nor is it where it has bytes of its own: the engine would read the others in their place."""
    async with busy_core_in(tmp_path) as core:
        slab = BorrowedSlab(asyncio.get_running_loop().call_later)
        victim = await core.joined(Hello(2), slab)
        await until(lambda: slab.generation)
        lease, own = slab.lease(LARGE.data.nbytes), core.slab.lease(LARGE.data.nbytes)
        assert lease is not None
        assert own is not None
        async with peer_at(core) as peer:
            await peer.say(VISIT)
            while not isinstance(lent := await peer.hear(), Lend):
                pass
            place = Place(lent.lent.region, lent.lent.generation, lent.lent.offset)
            at_the_end = replace(place, offset=place.offset + PART - 64)
            others = [lease.place, own.place, at_the_end, replace(place, offset=-64), replace(place, offset=1 << 60)]
            for number, elsewhere in enumerate([*others, replace(place, region="other")]):
                asked = replace(LARGE, data=memoryview(b""), place=elsewhere)
                await peer.say(Ask(number, InferRequest("owned", (asked,)), "c", 0))
                refused = await peer.answer()
                assert isinstance(refused, Failed)
                assert refused.kind in ("InvalidRequest", "BackendUnavailable")
            for number, shape in enumerate([(1 << 40,), (-1, 4), (2, -(1 << 62))], 10):
                asked = replace(LARGE, shape=shape, data=memoryview(b""), place=place)
                await peer.say(Ask(number, InferRequest("owned", (asked,)), "c", 0))
                assert isinstance(await peer.answer(), Failed)
            assert core.engine.asked == []
            await peer.say(Ask(20, InferRequest("owned", (replace(LARGE, place=lease.place),)), "c", 0))
            assert isinstance(await peer.answer(), Answer)
            assert core.engine.asked[-1][0].inputs[0].place is None
            lease.release()
            own.release()
        assert (await victim.infer(InferRequest("owned", (LARGE,)), client="c")).outputs[0].data == LARGE.data
        await core.leave()


async def test_guest_that_asks_and_reads_no_answer_fills_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond a bound it is refused, and where it does not read that either it is served no more."""
    monkeypatch.setattr(core_server, "GUEST_UNREAD_BYTES", 1 << 20)
    monkeypatch.setattr(core_server, "GUEST_DEAF_BYTES", (1 << 20) + (48 << 10))
    monkeypatch.setattr(core_server, "UNREAD_BYTES", 0)
    large = tensor_from_numpy("x", np.zeros((1, 10_000), np.float32))
    async with busy_core_in(tmp_path) as core, peer_at(core) as peer:
        await peer.say(VISIT)
        await until(lambda: core.server.guest_count == 2)
        line = list(core.server._fronts)[-1]
        most = 0
        for number in range(2000):
            if core.server.guest_count < 2:
                break
            await peer.say(Ask(number, InferRequest("owned", (large,)), "c", 0))
            await until(lambda: not core.server._fronts.get(line) or not core.server._fronts[line].tasks)
            await asyncio.sleep(0)
            most = max(most, line.unsent_bytes)
        assert core.server.guest_count == 1
        assert 1 << 20 < most < (1 << 20) + (50 << 10)
        assert 'code="full"' in core.metrics.text().decode()


async def test_core_lives_through_whatever_guests_say(tmp_path: Path) -> None:
    """Records in any order, whole and damaged, with numbers that are used again, from many guests beside each other."""
    async with busy_core_in(tmp_path) as core:
        for seed in range(40):
            await fuzz(core, random.Random(seed))


async def fuzz(core: Core, dice: random.Random) -> None:
    """One guest's life."""
    place = Place("nowhere", dice.randrange(3), dice.randrange(1 << 20))
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
                Ask(number, dice.choice(asks), "c", dice.randrange(-2, 300)),
                GiveUp(number),
                Find(number, dice.choice(["owned", "new", ""])),
                Known(number),
                dice.choice([Late("owned", 1.0), NotServed("owned"), Suspect(), Served(("owned", "nobody"))]),
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
