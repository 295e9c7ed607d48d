"""One end of the batch socket: records in, records out."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import msgspec

from server.local.messages import Record
from server.logs import get_logger

SOCKET_NAME = "core-batch.sock"
FAREWELL_S = 1.0  # for the other end to take what was sent last
_LENGTH_BYTES = 4
ANY_BYTES = 1 << 32
_ENCODER = msgspec.msgpack.Encoder()

log = get_logger("local")
In = TypeVar("In", bound=Record)


class BatchLine(asyncio.Protocol, Generic[In]):
    """decoder: of what comes. heard: told of each record, in order, with this end. lost: told once, at the end.

    Tensors of what comes are views into the bytes of their own record. max_record_bytes: of one; a larger one ends the
    line before it is there.

    What is sent in one turn of the loop goes in one write: each would be a system call, and wake the other end.
    """

    def __init__(
        self,
        decoder: "msgspec.msgpack.Decoder[In]",
        heard: "Callable[[BatchLine[In], In], None]",
        lost: "Callable[[BatchLine[In]], None]",
    ) -> None:
        self._decoder = decoder
        self._heard = heard
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._gathered: list[bytes] = []  # to be written at the end of this turn
        self._gathered_bytes = 0
        self._is_ended = False
        self.max_record_bytes = ANY_BYTES

    @property
    def is_open(self) -> bool:
        """Whether the other end is there, as far as is known."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def unsent_bytes(self) -> int:
        """What the other end has not taken yet; 0 where it is gone."""
        if self._transport is None:
            return 0
        return self._transport.get_write_buffer_size() + self._gathered_bytes

    def send(self, record: Record) -> None:
        """Never blocks; what is sent to an end that is gone is dropped."""
        if self._transport is None or self._transport.is_closing():
            return
        encoded = _ENCODER.encode(record)
        if not self._gathered:
            asyncio.get_running_loop().call_soon(self._write_gathered)
        self._gathered += (len(encoded).to_bytes(_LENGTH_BYTES, "little"), encoded)
        self._gathered_bytes += _LENGTH_BYTES + len(encoded)

    def close(self) -> None:
        """Drop the connection, and what was sent in this turn."""
        if self._transport is not None:
            self._transport.abort()

    def end(self) -> None:
        """Hear no more, and drop the connection when what was sent is read, or a moment later."""
        self._is_ended = True
        if self._transport is not None:
            self._write_gathered()
            self._transport.close()
            asyncio.get_running_loop().call_later(FAREWELL_S, self._transport.abort)

    def _write_gathered(self) -> None:
        gathered, self._gathered, self._gathered_bytes = self._gathered, [], 0
        if gathered and self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(gathered)

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only

    def data_received(self, data: bytes) -> None:
        received = self._received
        if received:
            received += data
            position = self._take_all(received)
            if self._is_ended:
                received.clear()
            elif position:
                del received[:position]
            return
        position = self._take_all(data)  # as most records come: whole, and nothing is gathered
        if position < len(data) and not self._is_ended:
            received += memoryview(data)[position:]

    def _take_all(self, received: bytes | bytearray) -> int:
        """Every whole record of it; where the first one begins that is not."""
        position, size = 0, len(received)
        while size - position >= _LENGTH_BYTES and not self._is_ended:
            begin = position + _LENGTH_BYTES
            end = begin + int.from_bytes(received[position:begin], "little")
            if end - begin > self.max_record_bytes:
                self._refuse(f"it has {end - begin} bytes, {self.max_record_bytes} are the most")
                break
            if size < end:
                break
            position = end
            self._take(received[begin:end] if isinstance(received, bytes) else bytes(memoryview(received)[begin:end]))
        return position

    def connection_lost(self, error: Exception | None) -> None:
        self._received.clear()
        self._gathered, self._gathered_bytes = [], 0
        self._lost(self)

    def _take(self, encoded: bytes) -> None:
        try:
            record = self._decoder.decode(encoded)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:  # ValueError: words that are no UTF-8
            self._refuse(str(error))
            return
        self._heard(self, record)

    def _refuse(self, why: str) -> None:
        log.error("a record on the batch socket cannot be read; closing it", error=why)
        self._is_ended = True
        self.close()
