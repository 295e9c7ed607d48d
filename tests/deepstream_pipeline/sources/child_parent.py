"""The work of a decode process, in a thread or in a real process, and its parent's side of the socket and the ring."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.vision.spec import ColorFormat, PrepareSpec
from penstock_video.sources.child_work import serve
from penstock_video.sources.protocol import DOWN, UP, Ended, FrameReady, Release, Start, decode_up, encode
from penstock_video.sources.ring import Ring, image_offset, new_ring, ring_size
from tests.deepstream_pipeline.clips import number_of

SPEC = PrepareSpec(64, 48, color=ColorFormat.BGR)
DEADLINE_S = 30.0
FRAMES = 40
PROGRAM = """import os, subprocess, sys
subprocess.run([*sys.argv[1:-3], str(os.getpid()), *sys.argv[-2:]], close_fds=False)"""


class WorkThread(threading.Thread):
    """The work of a decode process in this one, which starts at once."""

    def __init__(self, link: socket.socket, ring_descriptor: int) -> None:
        super().__init__(daemon=True)
        self._link, self._ring_descriptor, self._status = link, ring_descriptor, -1

    def run(self) -> None:
        with self._link:
            self._status = serve(self._link, self._ring_descriptor)

    def wait(self, timeout_s: float) -> int:
        """Its exit status."""
        self.join(timeout_s)
        assert not self.is_alive()
        return self._status


@dataclass
class Parent:
    """The other end: what the process said, and what its slots hold."""

    socket: socket.socket
    process: "subprocess.Popen[bytes] | WorkThread"
    ring: Ring
    event_log: list[UP] = field(default_factory=list)

    def say(self, *records: DOWN) -> None:
        """To the process."""
        for record in records:
            self.socket.send(encode(record))

    def hear(self) -> UP | None:
        """The next it says; None when it hung up."""
        message = self.socket.recv(70_000)
        if not message:
            return None
        self.event_log.append(decode_up(message))
        return self.event_log[-1]

    def until(self, is_it: Callable[[UP], bool]) -> UP:
        """Hear until that, releasing nothing."""
        while (record := self.hear()) is not None:
            if is_it(record):
                return record
        raise AssertionError(f"it hung up; the last it said: {self.event_log[-3:]}")

    def frame(self) -> FrameReady:
        """The next frame."""
        record = self.until(lambda record: isinstance(record, FrameReady | Ended))
        assert isinstance(record, FrameReady), record
        return record

    def rest(self, pause_s: float = 0.0) -> list[FrameReady]:
        """All frames to the end, each released, after a while."""
        frames = []
        while (record := self.hear()) is not None:
            if isinstance(record, FrameReady):
                frames.append(record)
                time.sleep(pause_s)
                self.release(record)
        return frames

    def release(self, frame: FrameReady) -> None:
        """Its slot may be written again."""
        with suppress(BrokenPipeError):  # it is over
            self.say(Release((frame.slot,)))

    def of(self, kind: type[UP]) -> list[Any]:
        """All of a kind so far."""
        return [record for record in self.event_log if isinstance(record, kind)]

    def image(self, frame: FrameReady) -> np.ndarray:
        """The picture in its slot."""
        row_bytes = int(np.prod(frame.row_shape)) * 4 if frame.row_shape else 0
        return self.ring.array(frame.slot, image_offset(row_bytes), (frame.height, frame.width, 3), np.uint8)

    def row_number(self, frame: FrameReady) -> int:
        """The number of the picture in its row."""
        row = self.ring.array(frame.slot, 0, frame.row_shape, np.float32)
        return number_of(row.transpose(1, 2, 0))


@contextmanager
def child(
    uri: object, *, spec: PrepareSpec | None = SPEC, frames: int = 4, is_process: bool = False, **how: Any
) -> Iterator[Parent]:
    """The work, started by a message, and ended at the end: in a real process, or in a thread, which takes less.

    has_program: the process that is returned is one that started it.
    """
    has_program = how.pop("has_program", False)
    size = ring_size(frames, spec.row_bytes if spec else 0, 320 * 192 * 3)
    descriptor = new_ring(size, "test")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(DEADLINE_S)
    process: subprocess.Popen[bytes] | WorkThread
    if is_process:
        arguments = map(str, (os.getpid(), theirs.fileno(), descriptor))
        command = [sys.executable, "-m", "penstock_video.sources.child", *arguments]
        command = [sys.executable, "-c", PROGRAM, *command] if has_program else command
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(), descriptor), stderr=subprocess.PIPE)
        theirs.close()
    else:
        process = WorkThread(theirs, os.dup(descriptor))
        process.start()
    parent = Parent(ours, process, Ring(descriptor, size))
    started: dict[str, Any] = {
        "ring_frames": frames, "slot_bytes": size.slot_bytes, "ring_bytes": size.size_bytes, "policy": "block",
    }  # fmt: skip
    parent.say(Start(uri=str(uri), spec=spec.pack() if spec else b"", **(started | how)))
    try:
        yield parent
    finally:
        if isinstance(process, WorkThread):
            ours.close()
            process.wait(DEADLINE_S)
        else:
            process.kill()
            process.communicate(timeout=DEADLINE_S)
            ours.close()
        parent.ring.close()


def ended(parent: Parent) -> Ended:
    """How it ended."""
    [last] = parent.of(Ended)
    assert parent.event_log[-1] == last
    return last
