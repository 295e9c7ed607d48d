"""Records on the batch socket, however the socket cuts them."""

import asyncio
from collections.abc import Iterable

import msgspec
import pytest

from penstock.gateway.workers.connection import CancelInfer, MessageConnection, SyncDone, ToCore

RECORDS: tuple[ToCore, ...] = (CancelInfer(1), SyncDone(2), CancelInfer(3))
WHOLE = b"".join(
    len(encoded).to_bytes(4, "little") + encoded for encoded in map(msgspec.msgpack.Encoder().encode, RECORDS)
)
FIRST_BYTES = 4 + len(msgspec.msgpack.encode(RECORDS[0]))


class Line:
    """The messages received, in order."""

    def __init__(self) -> None:
        self.received: list[ToCore] = []
        self.line = MessageConnection(
            msgspec.msgpack.Decoder(ToCore), lambda _, record: self.received.append(record), lambda _: None
        )


@pytest.mark.parametrize("size", range(1, len(WHOLE) + 1))
def test_records_are_received_whole_and_in_order_wherever_they_are_cut(size: int) -> None:
    """In pieces of any size, several in one piece, and again behind a piece that ended inside a record."""
    line = Line()
    stream = WHOLE * 3
    for begin in range(0, len(stream), size):
        line.line.data_received(stream[begin : begin + size])
    assert line.received == list(RECORDS) * 3


@pytest.mark.parametrize("cut", [4, len(WHOLE) - 1, len(WHOLE)])
def test_record_beyond_the_limit_ends_the_line_before_it_is_there(cut: int) -> None:
    """Nothing behind it is received, in the same piece or in later ones."""
    line = Line()
    line.line.max_record_bytes = 2
    line.line.data_received(WHOLE[:cut])
    line.line.data_received(WHOLE)
    assert line.received == []


class Writes(asyncio.Transport):
    """A transport that keeps what each write was of."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_closed = False

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0

    def writelines(self, pieces: "Iterable[bytes | bytearray | memoryview]") -> None:
        self.writes.append(b"".join(pieces))

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True


async def test_what_is_sent_in_one_turn_goes_in_one_write() -> None:
    """In order; until then it counts as unsent. A line that ends writes what it has first."""
    line, socket = Line().line, Writes()
    line.connection_made(socket)
    for record in RECORDS:
        line.send(record)
    assert (socket.writes, line.unsent_bytes) == ([], len(WHOLE))
    await asyncio.sleep(0)
    assert (socket.writes, line.unsent_bytes) == ([WHOLE], 0)
    line.send(RECORDS[0])
    line.end()
    line.send(RECORDS[1])
    await asyncio.sleep(0)
    assert socket.writes == [WHOLE, WHOLE[:18]]


async def test_what_was_sent_to_an_end_that_is_lost_in_the_same_turn_is_dropped() -> None:
    """Without an error."""
    line, socket = Line().line, Writes()
    line.connection_made(socket)
    line.send(RECORDS[0])
    line.close()
    line.connection_lost(None)
    await asyncio.sleep(0)
    assert (socket.writes, line.unsent_bytes) == ([], 0)


async def test_what_a_long_turn_gathers_is_counted_as_it_comes() -> None:
    """Each refusal looks at it: adding up all of them each time stopped the loop for seconds under a flood."""
    line, socket = Line().line, Writes()
    line.connection_made(socket)
    looked = []
    for _ in range(20_000):
        line.send(RECORDS[0])
        looked.append(line.unsent_bytes)
    assert looked == [18 * count for count in range(1, 20_001)]
