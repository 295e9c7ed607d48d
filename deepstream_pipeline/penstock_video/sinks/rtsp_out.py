"""Annotated stream, pushed over TCP to an RTSP server that supports RECORD (MediaMTX, GStreamer, …)."""

import fcntl
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import urlsplit

import structlog
from pydantic import Field

from penstock_video.backoff import Backoff, Outage
from penstock_video.errors import SinkFailed
from penstock_video.interfaces import INTERNAL, SECRET
from penstock_video.sinks.broker_link import address_of
from penstock_video.sinks.encoder import H264, EncoderRefused, Quality, even, lone_encoder
from penstock_video.sinks.nvenc import EncoderChoice
from penstock_video.sinks.osd import Osd
from penstock_video.sinks.rtsp_push import CONNECTED, Begin, Coded, packed
from penstock_video.types import ByteArray, EncoderKind, FrameResult

COMMAND = (sys.executable, "-P", "-m", "penstock_video.sinks.rtsp_push")
CLOSE_S = 5.0  # for the TEARDOWN at the server
_MAX_PENDING_BYTES = 4 * 1024 * 1024
_PIPE_BYTES = 1024 * 1024
_CRF = 25  # of x264

log = structlog.get_logger(component="video")


@dataclass(frozen=True, slots=True)
class RtspOutOptions:
    """url: rtsp:// or rtsps://, may contain a user and password; with several sources each goes to url/SOURCE_ID.
    timeout_s: for the server's answer, or for it to take a packet. allowed_outbound: of OutboundPolicy."""

    url: Annotated[str, address_of("rtsp", "rtsps"), Field(json_schema_extra=SECRET)] = field(repr=False)
    timeout_s: Annotated[float, Field(json_schema_extra=INTERNAL)] = 5.0
    encoder: EncoderKind = EncoderKind.AUTO
    allowed_outbound: Annotated[tuple[str, ...], Field(json_schema_extra=INTERNAL)] = ()


class RtspOutSink:
    """Pushes each source's stream; waits for the server only at a stream's end, CLOSE_S at most.

    If a server refuses, hangs or disconnects, write raises SinkFailed once and retries with pauses from 1 to 30 s.
    `lost` counts the pictures that were not sent. Another resolution is scaled into the first, with bars.
    """

    def __init__(
        self,
        options: RtspOutOptions,
        osd: Osd,
        *,
        is_single: bool = False,
        clock: Callable[[], float] = time.monotonic,
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        self._options = options
        self._osd = osd
        self._encoders = EncoderChoice(options.encoder, "rtsp")
        self._has_room_for_one, self._single = is_single, ""
        self._clock = clock
        self._command = command
        self._ways: dict[str, _PushPath] = {}
        self._lost_of_ended = 0

    @property
    def lost(self) -> int:
        """Pictures that were not sent."""
        return self._lost_of_ended + sum(way.outage.lost for way in self._ways.values())

    def write(self, result: FrameResult) -> None:
        """Encodes the frame's picture and sends it to its source's process."""
        picture = self._osd.draw(result)
        if picture is None:
            return
        now, source_id = self._clock(), result.frame.source_id
        way = self._ways.get(source_id)
        if way is None:
            way = self._ways[source_id] = _PushPath(self._url(source_id))
        try:
            if way.push is None and way.outage.may_try(now):
                way.push = self._new_push(way.url, result)
            if way.push is None or not self._write(way.push, picture, result, now):
                way.outage.lost += 1
            if way.push is not None and way.push.is_connected:
                way.tell_that_it_works()
        except (OSError, _PushFailed) as error:
            way.fail(error, now)

    def _new_push(self, url: str, result: FrameResult) -> "_Push":
        size = even(result.frame.width, result.frame.height)
        return self._encoders.open(lambda codec: _Push(self._command, url, size, self._options, codec))

    def _write(self, push: "_Push", picture: ByteArray, result: FrameResult, now: float) -> bool:
        """Whether the picture was sent. If NVENC fails, x264 goes on in the same stream."""
        try:
            return push.write(picture, result.frame.pts_s, now)
        except EncoderRefused as refused:
            self._encoders.failed(refused)
            push.use_cpu()
            return push.write(picture, result.frame.pts_s, now)

    def end_source(self, source_id: str) -> None:
        """Ends the stream at the server."""
        self._osd.drop_pictures(source_id)
        way = self._ways.pop(source_id, None)
        if way is not None:
            self._lost_of_ended += way.outage.lost
            way.close(time.monotonic() + CLOSE_S)

    def close(self) -> None:
        """Ends every stream at the server. A second call does nothing."""
        ways, self._ways = list(self._ways.values()), {}
        until = time.monotonic() + CLOSE_S
        for way in ways:
            self._lost_of_ended += way.outage.lost
            if way.push is not None:
                way.push.end_input(until)
        for way in ways:
            way.close(until)

    def _url(self, source_id: str) -> str:
        if self._has_room_for_one:
            self._has_room_for_one, self._single = False, source_id
        return self._options.url if source_id == self._single else f"{self._options.url.rstrip('/')}/{source_id}"


class _PushFailed(Exception):
    """The process ended or is stuck. The text is for display."""


class _PushPath:
    """One source's connection: a process, or none until the next attempt."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.push: _Push | None = None
        self.outage = Outage(Backoff(1.0, 30.0))

    def fail(self, error: Exception, now: float) -> None:
        """Raises SinkFailed if the failure is new."""
        if self.push is not None:
            self.push.kill()
            self.push = None
        self.outage.lost += 1
        if self.outage.failed(now, jitter=random.random()):
            raise SinkFailed(f"{shown(self.url)}: {error}; tried again with growing pauses") from error

    def tell_that_it_works(self) -> None:
        lost = self.outage.worked()
        if lost is not None:
            log.warning("stream is pushed again", server=shown(self.url), lost_frames=lost)

    def close(self, until: float) -> None:
        if self.push is not None:
            self.push.end_input(until)
            self.push.wait(until)
            self.push = None


class _Push:
    """A push process with its encoder. Raises OSError if it cannot be started, EncoderRefused before that."""

    def __init__(
        self, command: tuple[str, ...], url: str, size: tuple[int, int], options: RtspOutOptions, codec: H264
    ) -> None:
        self.is_connected = False
        self._timeout_s = options.timeout_s
        self._size = size
        self._encoder = lone_encoder(size, Quality(_CRF, is_live=True), codec)
        self._pending = bytearray(packed(Begin(url, *size, options.timeout_s, options.allowed_outbound)))
        self._moved_at: float | None = None
        self._skips_to_key = False
        self._said = b""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._input.fileno(), False)
        os.set_blocking(self._output.fileno(), False)
        with suppress(OSError):  # a smaller buffer also works
            fcntl.fcntl(self._input.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def write(self, picture: ByteArray, pts_s: float, now: float) -> bool:
        """Returns whether the picture was sent. Raises _PushFailed, EncoderRefused."""
        is_taken = True
        for packet in self._encoder.encode(picture, pts_s):
            is_key = packet.is_keyframe
            if len(self._pending) > _MAX_PENDING_BYTES or (self._skips_to_key and not is_key):
                self._skips_to_key, is_taken = True, False
                continue
            self._skips_to_key = False
            self._pending += packed(Coded(packet.pts or 0, packet.duration or 0, is_key, bytes(packet)))
        self._flush(now)
        self._listen()
        return is_taken

    def use_cpu(self) -> None:
        """x264 continues the stream, with a keyframe."""
        self._encoder = lone_encoder(self._size, Quality(_CRF, is_live=True)).after(self._encoder)

    def end_input(self, until: float) -> None:
        """Closes the process's input after the waiting data. A second call does nothing."""
        if self._input.closed:
            return
        with suppress(OSError, _PushFailed):
            while self._pending and (left_s := until - time.monotonic()) > 0:
                select.select([], [self._input], [], left_s)
                self._flush(time.monotonic())
        self._input.close()

    def wait(self, until: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, until - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kills and reaps the process."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        self._input.close()
        self._output.close()

    def _flush(self, now: float) -> None:
        if self._moved_at is None:
            self._moved_at = now
        try:
            while self._pending:
                del self._pending[: os.write(self._input.fileno(), self._pending)]
                self._moved_at = now
        except BlockingIOError:
            if now - self._moved_at > self._timeout_s * 2:
                raise _PushFailed("its process takes nothing") from None
            return
        except BrokenPipeError:
            raise _PushFailed(self._why()) from None
        self._moved_at = now

    def _listen(self) -> None:
        with suppress(BlockingIOError):
            said = os.read(self._output.fileno(), 4096)
            if not said:
                raise _PushFailed(self._why())
            self._said = (self._said + said)[-4096:]
            if CONNECTED.encode() in self._said:
                self.is_connected = True

    def _why(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        with suppress(OSError):
            self._said += os.read(self._output.fileno(), 4096)
        if self._process.returncode == -signal.SIGALRM:
            return f"the server takes longer than {self._timeout_s:g} s"
        lines = [line for line in self._said.decode(errors="replace").splitlines() if line != CONNECTED]
        return lines[-1] if lines else f"its process ended with {self._process.returncode}"


def shown(url: str) -> str:
    """The URL for display, without user, password and query."""
    parts = urlsplit(url)
    try:
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        port = ""
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"
