"""Unary gRPC calls over one HTTP/2 connection without TLS. Streams, and the gateway's gRPC port, use grpc.aio.

grpc.aio needs 2.1 to 2.5 times the CPU for messages up to 150 kB, less for large ones (`python -m
loadtest.bench.gateway.engine_clients --only grpc`).
"""

import asyncio
from typing import cast

from penstock.engines.triton.http2_protocol import (
    FIRST_WINDOW,
    INTERNAL,
    MAX_BLOCK_BYTES,
    MAX_WINDOW,
    PREFIX_BYTES,
    Fields,
    Frame,
    FrameFlag,
    FrameKind,
    FrameReader,
    GrpcReply,
    HeaderDecoder,
    Http2Setting,
    Keepalive,
    KeepaliveAction,
    MalformedFrame,
    content_of,
    decode_reply,
    frame,
    is_informational,
    number_of,
    opening,
    settings_of,
    window_update,
)
from penstock.engines.triton.http_connection import detect_dead_peers
from penstock.protocol.cancellation import AbandonedCall, mark_abandoned

CODE_OF_RESET = {8: 1, 11: 8, 12: 7}  # CANCEL, ENHANCE_YOUR_CALM, INADEQUATE_SECURITY; any other is INTERNAL
GRACE_S = 0.25
MAX_GIVEN_UP = 1024
_REFUSED_STREAM, _CANCEL = 7, 8
_FRAME_BYTES = 16_384  # of the peer's frames, until its settings change it
_LAST_STREAM = 2**31 - 3
_WINDOW_UPDATE_BYTES = MAX_WINDOW // 2


class CallBroken(Exception):
    """The connection ended before the answer. The text has the reason."""


class CallNotProcessed(CallBroken):
    """The peer did not process the call, so it may be sent again."""


class TooManyAbandoned(Exception):
    """MAX_GIVEN_UP calls were abandoned in the last GRACE_S. The text has the number."""


class _OpenCall:
    """A call in flight: the received parts of its answer, and its flow-control window."""

    __slots__ = ("abandoned", "headers", "parts", "received_bytes", "reply", "send_window")

    def __init__(self, reply: "asyncio.Future[GrpcReply]", send_window: int) -> None:
        self.reply = reply
        self.send_window = send_window
        self.headers: Fields | None = None
        self.parts: list[bytes] = []
        self.received_bytes = 0
        self.abandoned: AbandonedCall | None = None

    def end(self, *, is_served: bool = False) -> None:
        """Ends the tracking of this call."""
        if self.abandoned is not None:
            self.abandoned.end(is_served=is_served)


class Http2Connection(asyncio.Protocol):
    """One connection. Create it inside the running loop; use it after `greeted`. is_open: it takes new calls."""

    def __init__(self, keepalive: Keepalive) -> None:
        self.is_open = False
        self._loop = asyncio.get_running_loop()
        self._keepalive = keepalive
        self._look: asyncio.TimerHandle | None = None
        self._greeting: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader()
        self._decoder = HeaderDecoder()
        self._calls: dict[int, _OpenCall] = {}
        self._next_id = 1
        self._max_calls = MAX_WINDOW
        self._frame_bytes = _FRAME_BYTES
        self._first_window = self._send_window = FIRST_WINDOW
        self._received_bytes = 0
        self._given_up = 0
        self._is_paused = False
        self._room: asyncio.Future[None] | None = None
        self._block: tuple[int, int, bytearray] | None = None

    async def greeted(self) -> None:
        """Waits for the peer's SETTINGS frame, which limits concurrent calls. Raises CallBroken."""
        await asyncio.shield(self._greeting)

    async def unary(self, head: bytes, message: bytes) -> GrpcReply:
        """The peer's answer, also an error. head: of encode_head. Raises CallBroken, TooManyAbandoned.

        If cancelled, resets the call after GRACE_S: Triton 2.51 crashes if a call is reset at its start or end. The
        error then has the abandoned call (see penstock.protocol.cancellation).
        """
        if self._given_up >= MAX_GIVEN_UP:
            raise TooManyAbandoned(f"{self._given_up} abandoned calls are still in the engine (limit {MAX_GIVEN_UP})")
        while self.is_open and len(self._calls) >= self._max_calls:
            await self._wait_for_room()
        if not self.is_open or self._transport is None:
            raise CallBroken("the connection was closed")
        stream_id = self._next_id
        self._next_id += 2
        if self._next_id > _LAST_STREAM:
            self.is_open = False
        self._keepalive.sent(self._loop.time(), is_first=not self._calls)
        call = self._calls[stream_id] = _OpenCall(self._loop.create_future(), self._first_window)
        try:
            if not self._send_at_once(self._transport, stream_id, head, message):
                await self._send_as_room_comes(self._transport, stream_id, call, head, message)
            return await call.reply
        except BaseException as error:
            if stream_id in self._calls:
                call.abandoned = mark_abandoned(error)
                self._given_up += 1
                self._loop.call_later(GRACE_S, self._take_back, stream_id)
            raise
        finally:
            self._room_came()

    def close(self) -> None:
        """Closes the connection; its calls fail."""
        self.is_open = False
        if self._look is not None:
            self._look.cancel()
        if self._transport is not None:
            self._transport.abort()

    # Sending

    def _take_back(self, stream_id: int) -> None:
        self._given_up -= 1
        if (call := self._calls.pop(stream_id, None)) is not None:
            call.end()
            self._write(frame(FrameKind.RST_STREAM, 0, stream_id, _CANCEL.to_bytes(4, "big")))
            self._room_came()

    def _send_at_once(self, transport: asyncio.Transport, stream_id: int, head: bytes, message: bytes) -> bool:
        """Sends the call in one HEADERS and one DATA frame. Returns False, and sends nothing, if it does not fit."""
        size = len(message) + PREFIX_BYTES
        if size > min(self._send_window, self._first_window, self._frame_bytes) or len(head) > self._frame_bytes:
            return False
        self._send_window -= size
        body = b"\x00" + len(message).to_bytes(4, "big") + message
        ends = FrameFlag.END_STREAM
        transport.write(
            frame(FrameKind.HEADERS, FrameFlag.END_HEADERS, stream_id, head)
            + frame(FrameKind.DATA, ends, stream_id, body)
        )
        return True

    async def _send_as_room_comes(
        self, transport: asyncio.Transport, stream_id: int, call: _OpenCall, head: bytes, message: bytes
    ) -> None:
        """Sends the call in pieces, as flow control allows; stops early if the peer answers."""
        self._send_head(transport, stream_id, head)
        prefix = b"\x00" + len(message).to_bytes(4, "big")
        view, position = memoryview(message), 0
        while position < len(message) or prefix:
            room = min(self._frame_bytes, self._send_window, call.send_window) - len(prefix)
            if room <= 0 or self._is_paused:
                await self._wait_for_room()
                if call.reply.done():
                    return
                continue
            piece = prefix + view[position : position + room]
            position, prefix = position + len(piece) - len(prefix), b""
            self._send_window -= len(piece)
            call.send_window -= len(piece)
            flags = FrameFlag.END_STREAM if position == len(message) else 0
            transport.write(frame(FrameKind.DATA, flags, stream_id, piece))

    def _send_head(self, transport: asyncio.Transport, stream_id: int, head: bytes) -> None:
        size = self._frame_bytes
        pieces = [head[start : start + size] for start in range(0, len(head), size)]
        for index, piece in enumerate(pieces):
            flags = FrameFlag.END_HEADERS if index == len(pieces) - 1 else 0
            transport.write(frame(FrameKind.CONTINUATION if index else FrameKind.HEADERS, flags, stream_id, piece))

    async def _wait_for_room(self) -> None:
        if self._room is None:
            self._room = self._loop.create_future()
        await asyncio.shield(self._room)

    def _room_came(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._room = None

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport only has the same methods
        detect_dead_peers(self._transport)
        self._transport.write(opening())
        self._look_later()

    def data_received(self, data: bytes) -> None:
        self._keepalive.received(self._loop.time())
        try:
            for arrived in self._reader.frames(data):
                self._take(arrived)
        except MalformedFrame as error:
            self._fail(f"the engine's HTTP/2 cannot be read: {error}")

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._room_came()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(str(error or "closed by the engine"))

    def _look_later(self) -> None:
        self._look = self._loop.call_later(self._keepalive.interval_s, self._look_now)

    def _look_now(self) -> None:
        due = self._keepalive.due(self._loop.time()) if self._calls else KeepaliveAction.NOTHING
        if due is KeepaliveAction.GIVE_UP:
            self._fail("the engine does not answer pings")
            return
        if due is KeepaliveAction.PING:
            self._write(frame(FrameKind.PING, 0, 0, bytes(8)))
        self._look_later()

    # Receiving

    def _take(self, arrived: Frame) -> None:
        kind = arrived.kind
        if self._block is not None and kind != FrameKind.CONTINUATION:
            raise MalformedFrame("a header block is broken off")
        if kind == FrameKind.DATA:
            self._take_data(arrived)
        elif kind in (FrameKind.HEADERS, FrameKind.CONTINUATION):
            self._take_headers(arrived)
        elif kind == FrameKind.WINDOW_UPDATE:
            self._take_window(arrived)
        elif kind == FrameKind.SETTINGS:
            self._take_settings(arrived)
        elif kind == FrameKind.PING:
            if not arrived.flags & FrameFlag.ACK:
                self._write(frame(FrameKind.PING, FrameFlag.ACK, 0, arrived.payload))
        elif kind == FrameKind.RST_STREAM:
            self._take_reset(arrived.stream_id, number_of(arrived.payload))
        elif kind == FrameKind.GOAWAY:
            self._take_goodbye(number_of(arrived.payload))

    def _take_data(self, arrived: Frame) -> None:
        self._received_bytes += len(arrived.payload)
        if self._received_bytes >= _WINDOW_UPDATE_BYTES:
            self._write(window_update(0, self._received_bytes))
            self._received_bytes = 0
        call = self._calls.get(arrived.stream_id)
        if call is None:
            return
        call.parts.append(content_of(arrived))
        if arrived.flags & FrameFlag.END_STREAM:
            self._finish(arrived.stream_id, call, call.headers or ())
            return
        call.received_bytes += len(arrived.payload)
        if call.received_bytes >= _WINDOW_UPDATE_BYTES:
            self._write(window_update(arrived.stream_id, call.received_bytes))
            call.received_bytes = 0

    def _take_headers(self, arrived: Frame) -> None:
        """A block, or a part of one. The last block of a call contains its status."""
        if arrived.kind == FrameKind.HEADERS:
            stream_id, flags, block = arrived.stream_id, arrived.flags, content_of(arrived)
        elif self._block is not None and self._block[0] == arrived.stream_id:
            stream_id, flags, gathered = self._block
            block = bytes(gathered + arrived.payload)
            flags |= arrived.flags & FrameFlag.END_HEADERS
        else:
            raise MalformedFrame("a header block without its beginning")
        if len(block) > MAX_BLOCK_BYTES:
            raise MalformedFrame(f"a header block of more than {MAX_BLOCK_BYTES} bytes")
        if not flags & FrameFlag.END_HEADERS:
            self._block = (stream_id, flags, bytearray(block))
            return
        self._block = None
        fields, call = self._decoder.fields(block), self._calls.get(stream_id)
        if call is None:
            return
        if flags & FrameFlag.END_STREAM:
            self._finish(stream_id, call, fields)
        elif call.headers is None and not is_informational(fields):
            call.headers = fields

    def _take_window(self, arrived: Frame) -> None:
        more = number_of(arrived.payload)
        if arrived.stream_id == 0:
            self._send_window += more
        elif arrived.stream_id in self._calls:
            self._calls[arrived.stream_id].send_window += more
        self._room_came()

    def _take_settings(self, arrived: Frame) -> None:
        if arrived.flags & FrameFlag.ACK:
            return
        for name, value in settings_of(arrived.payload):
            if name == Http2Setting.MAX_CONCURRENT_STREAMS:
                self._max_calls = value
            elif name == Http2Setting.MAX_FRAME_SIZE:
                self._frame_bytes = value
            elif name == Http2Setting.INITIAL_WINDOW_SIZE:
                for call in self._calls.values():
                    call.send_window += value - self._first_window
                self._first_window = value
        self._write(frame(FrameKind.SETTINGS, FrameFlag.ACK, 0, b""))
        if not self._greeting.done():
            self.is_open = True
            self._greeting.set_result(None)
        self._room_came()

    def _take_reset(self, stream_id: int, why: int) -> None:
        call = self._calls.pop(stream_id, None)
        if call is None:
            return
        call.end()
        if call.reply.done():
            return
        if why == _REFUSED_STREAM:
            call.reply.set_exception(CallNotProcessed("the engine refused the call unread"))
        else:
            details = f"Received RST_STREAM with error code {why}"
            call.reply.set_result(GrpcReply(CODE_OF_RESET.get(why, INTERNAL), b"", details, ()))
        self._room_came()

    def _take_goodbye(self, last_id: int) -> None:
        """The peer takes no new calls, and did not process those after last_id."""
        self.is_open = False
        for stream_id in [number for number in self._calls if number > last_id]:
            call = self._calls.pop(stream_id)
            call.end()
            if not call.reply.done():
                call.reply.set_exception(CallNotProcessed("the engine ends the connection"))
        if not self._calls:
            self.close()
        self._room_came()

    def _finish(self, stream_id: int, call: _OpenCall, trailers: Fields) -> None:
        reply = decode_reply(call.headers or (), call.parts, trailers)  # may raise: then _fail ends the call
        del self._calls[stream_id]
        call.end(is_served=reply.code == 0)
        if not call.reply.done():
            call.reply.set_result(reply)
        self._room_came()
        if not self.is_open and not self._calls:
            self.close()

    def _fail(self, why: str) -> None:
        calls, self._calls = self._calls, {}
        if not self._greeting.done():
            self._greeting.set_exception(CallBroken(why))
        for call in calls.values():
            call.end()
            if not call.reply.done():
                call.reply.set_exception(CallBroken(why))
        self._greeting.exception()  # retrieved, or asyncio logs that it never was
        self.close()
        self._room_came()
