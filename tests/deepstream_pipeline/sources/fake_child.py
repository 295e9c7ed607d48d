"""A decode process without a decoder: what it does wrong is in its address, as rtsp://fake/MODE?frames=5&fps=100.

live:    frames until its parent goes, or so many, then the end of its stream; a file: address gives a file.
"""

import mmap
import os
import signal
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from urllib.parse import parse_qs, urlsplit

from penstock_video.sources.protocol import (
    Beat,
    Cut,
    Ended,
    EndReason,
    FrameReady,
    Hold,
    Lost,
    Opened,
    Recorded,
    Release,
    Start,
    Want,
    decode_down,
    encode,
)

WIDTH, HEIGHT, ROW_BYTES, IMAGE_OFFSET = 32, 16, 16, 64
FULL = "the GPU makes no more decoders"


class FakeChild:
    """One process' life."""

    def __init__(self, socket_fd: int, ring_fd: int, *, is_shared: bool = False) -> None:
        self.is_shared = is_shared
        self.socket = socket.socket(fileno=socket_fd)
        start = decode_down(self.socket.recv(65536))
        assert isinstance(start, Start)
        self.start = start
        address = urlsplit(start.uri)
        self.mode = address.path.strip("/").partition("/")[0]
        self.wishes = {key: values[0] for key, values in parse_qs(address.query).items()}
        self.is_live = address.scheme == "rtsp"
        self.ring = mmap.mmap(ring_fd, start.ring_frames * start.slot_bytes)  # numpy takes most of a process's start
        self.free = deque(range(start.ring_frames))
        self.frame_num, self.images = start.first_frame_num, start.wants_images
        self.is_held = self.is_over = False
        self.sent = 0

    def wish(self, name: str, default: float) -> float:
        return float(self.wishes.get(name, default))

    def say(self, *records: object) -> None:
        for record in records:
            self.socket.send(encode(record))

    def open(self) -> None:
        fps = self.wish("says", self.wish("fps", 50))
        self.say(
            Opened(width=WIDTH, height=HEIGHT, fps=fps, codec="fake", is_live=self.is_live, decoder=self.start.decoder)
        )

    def hear(self, timeout_s: float) -> None:
        """What the parent says within the time."""
        self.socket.settimeout(max(timeout_s, 0.0005))
        try:
            message = self.socket.recv(65536)
        except TimeoutError:
            return
        finally:
            self.socket.settimeout(None)  # sending waits for a parent that is behind, as the real child's does
        if not message:
            self.is_over = True
            return
        match decode_down(message):
            case Release(slots):
                self.free.extend(slots)
            case Want(images):
                self.images = images
            case Hold(is_held):
                self.is_held = is_held
            case Cut(path):
                self.say(Recorded(path, ""))

    def ready(self, slot: int, **changes: object) -> FrameReady:
        fields: dict[str, object] = {
            "slot": slot,
            "frame_num": self.frame_num,
            "pts_s": self.start.first_pts_s + self.sent / self.wish("fps", 50),
            "captured_at": time.monotonic(),
            "captured_unix_s": time.time(),
            "width": WIDTH,
            "height": HEIGHT,
            "row_shape": (ROW_BYTES,),
            "has_image": self.images,
            "segment": self.start.first_segment,
            "is_corrupt": False,
            "digest": self.frame_num,
        }
        return FrameReady(**(fields | changes))  # type: ignore[arg-type]

    def frame(self, **changes: object) -> None:
        if not self.free:
            self.say(Lost("ring_full", 1))
            self.frame_num += 1
            return
        slot = self.free.popleft()
        begin, value = slot * self.start.slot_bytes, bytes([self.frame_num % 251])
        self.ring[begin : begin + ROW_BYTES] = value * ROW_BYTES
        if self.images:
            begin += IMAGE_OFFSET
            self.ring[begin : begin + HEIGHT * WIDTH * 3] = value * HEIGHT * WIDTH * 3
        self.say(self.ready(slot, **changes))
        self.frame_num += 1
        self.sent += 1

    def play(self, frames: float) -> None:
        """So many frames, at its rate; a file waits for room."""
        at = time.monotonic()
        while not self.is_over and self.sent < frames:
            at += 1 / self.wish("fps", 50)
            while not self.is_over and (self.is_held or time.monotonic() < at or not (self.is_live or self.free)):
                self.hear(at - time.monotonic())
            if not self.is_over:
                self.frame()

    def wait_for_ever(self) -> None:
        """For a signal; a thread among others waits for its socket's end."""
        while self.is_shared and not self.is_over:
            self.hear(1.0)
        while not self.is_shared:
            time.sleep(3600)

    def run(self) -> None:
        frames = self.wish("frames", 1e9)
        if self.mode == "never_opens":
            self.wait_for_ever()
        if self.mode in ("unavailable", "auth_failed", "not_allowed"):
            self.say(Ended(EndReason(self.mode), f"{self.start.uri} said no"))
            return
        if self.mode == "needs_cpu" and self.start.decoder == "nvdec":
            self.say(Ended(EndReason.NEEDS_CPU, "10 bit"))
            return
        if self.mode == "no_card" and self.start.decoder == "nvdec":
            self.say(Ended(EndReason.NO_CARD, FULL))
            return
        if self.mode == "dies_early":
            sys.stderr.write("Traceback\nModuleNotFoundError: av\n")
            sys.exit(3)
        self.open()
        getattr(self, f"do_{self.mode}", self.do_live)(frames)

    def do_live(self, frames: float) -> None:
        self.play(frames)
        self.say(Beat(self.sent, 0, 0.5, 0.25))
        if not self.is_over:
            self.say(Ended(EndReason.EOF, ""))

    def do_card_fills(self, frames: float) -> None:
        """Its size changes after so many frames, and the card has no room any more for another decoder."""
        if self.start.decoder != "nvdec":
            return self.do_live(1e9)
        self.play(frames)
        return self.say(Ended(EndReason.NO_CARD, FULL))

    def do_hangs(self, frames: float) -> None:
        self.play(frames)
        while True:
            time.sleep(3600)

    def do_on_device(self, frames: float) -> None:
        self.frame(is_on_device=bool(self.start.device_ring), row_shape=(int(self.wish("row", ROW_BYTES)),))
        self.wait_for_ever()

    def do_on_no_card(self, frames: float) -> None:
        self.frame(is_on_device=True)
        self.wait_for_ever()

    def do_silent(self, frames: float) -> None:
        self.play(frames)
        self.wait_for_ever()

    def do_segv(self, frames: float) -> None:
        self.play(frames)
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(3600)  # of several threads another one may take it

    def do_rubbish(self, frames: float) -> None:
        self.play(2)
        self.socket.send(os.urandom(64))
        self.wait_for_ever()

    def do_deep(self, frames: float) -> None:
        self.socket.send(b"\x91" * 50_000)
        self.wait_for_ever()

    def do_bad_slot(self, frames: float) -> None:
        self.say(self.ready(10_000))
        self.wait_for_ever()

    def do_same_slot(self, frames: float) -> None:
        for _ in range(2):
            self.say(self.ready(0))
            self.frame_num, self.sent = self.frame_num + 1, self.sent + 1
        self.wait_for_ever()

    def do_big_row(self, frames: float) -> None:
        self.say(self.ready(0, row_shape=(1 << 40, 1 << 40)))
        self.wait_for_ever()

    def do_long_row(self, frames: float) -> None:
        self.say(self.ready(0, row_shape=(ROW_BYTES + 1,)))
        self.wait_for_ever()

    def do_huge(self, frames: float) -> None:
        self.say(self.ready(0, width=100_000, height=100_000, has_image=True))
        self.wait_for_ever()

    def do_backwards(self, frames: float) -> None:
        self.play(2)
        self.say(self.ready(self.free.popleft(), pts_s=-1.0))
        self.wait_for_ever()

    def do_flood(self, frames: float) -> None:
        while True:
            self.say(Beat(1, 0, 0.0, 0.0))

    def do_cuts_ring(self, frames: float) -> None:
        try:
            os.ftruncate(int(sys.argv[-1]), 0)
        except PermissionError:
            self.play(frames)

    def do_deaf(self, frames: float) -> None:
        while True:
            self.say(Lost("corrupt", 1))
            time.sleep(0.05)

    def do_stubborn(self, frames: float) -> None:
        self.play(1)
        self.say(Ended(EndReason.EOF, "bye"))
        self.wait_for_ever()


if __name__ == "__main__":
    with suppress(BrokenPipeError, ConnectionResetError):
        FakeChild(int(sys.argv[-2]), int(sys.argv[-1])).run()
