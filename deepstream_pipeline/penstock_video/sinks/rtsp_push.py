"""The process that pushes one H.264 stream to an RTSP server: python -m penstock_video.sinks.rtsp_push

FFmpeg connects and disconnects with the GIL held, so that a server that hangs would block the whole program; here it
blocks only this process. It reads Begin and then Coded, length-prefixed, from standard input, and writes "connected" or
why it ends to standard output. SIGALRM ends it if the server takes too long.
"""

import signal
import struct
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import BinaryIO
from urllib.parse import urlsplit

import av
import msgspec
from av.container import OutputContainer
from av.error import FFmpegError
from av.stream import Stream

from penstock.outbound import OutboundPolicy
from penstock_video.sinks.broker_link import LinkDown, require_allowed_host

LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
CONNECTED = "connected"
TIME_BASE = Fraction(1, 90_000)


class Begin(msgspec.Struct, frozen=True, array_like=True):
    """The stream to push. url: with user and password, which is why it is not in the command line."""

    url: str
    width: int
    height: int
    timeout_s: float
    allowed_outbound: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Begin({self.width}x{self.height})"


class Coded(msgspec.Struct, frozen=True, array_like=True):
    """One packet, with its parameter sets if it is a keyframe. Times in 1/90000 s."""

    pts: int
    duration: int
    is_key: bool
    content: bytes


_encode = msgspec.msgpack.Encoder().encode
_begin = msgspec.msgpack.Decoder(Begin).decode
_coded = msgspec.msgpack.Decoder(Coded).decode


def packed(message: Begin | Coded) -> bytes:
    """The message with its length before it."""
    content = _encode(message)
    return LENGTH.pack(len(content)) + content


def push(source: BinaryIO, tell: Callable[[str], None], alarm: Callable[[float], object]) -> None:
    """Pushes until the source ends. alarm(seconds) is called before each wait for the server, alarm(0) after it.

    Raises FFmpegError, OSError, and LinkDown for an address that is not allowed.
    """
    first = _read(source)
    if first is None:
        return
    begin = _begin(first)
    options = {"rtsp_transport": "tcp", "timeout": str(round(begin.timeout_s * 1_000_000))}
    container: OutputContainer = av.open(begin.url, "w", format="rtsp", container_options=options)
    stream = container.add_mux_stream("h264", width=begin.width, height=begin.height, time_base=TIME_BASE)
    is_connected = False
    while (message := _read(source)) is not None:
        coded = _coded(message)
        packet: av.Packet[Stream] = av.Packet(coded.content)
        packet.stream, packet.time_base = stream, TIME_BASE
        packet.pts = packet.dts = coded.pts
        packet.duration, packet.is_keyframe = coded.duration, coded.is_key
        alarm(begin.timeout_s)
        if not is_connected:
            require_allowed_host(urlsplit(begin.url).hostname or "", OutboundPolicy(begin.allowed_outbound))
        container.mux_one(packet)
        alarm(0)
        if not is_connected:
            is_connected = True
            tell(CONNECTED)
    alarm(begin.timeout_s)
    container.close()


def _read(source: BinaryIO) -> bytes | None:
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    if length > MAX_MESSAGE_BYTES:
        return None
    content = source.read(length)
    return content if len(content) == length else None


def _tell(text: str) -> None:
    sys.stdout.write(text.replace("\n", " ") + "\n")
    sys.stdout.flush()


def main() -> int:
    """Exit status 1 if the server refuses, disconnects or sends something else."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends it
    av.logging.set_level(av.logging.PANIC)
    try:
        push(sys.stdin.buffer, _tell, lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds))
    except LinkDown as refused:
        _tell(refused.message)
        return 1
    except (FFmpegError, OSError) as error:
        _tell(getattr(error, "strerror", None) or type(error).__name__)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
