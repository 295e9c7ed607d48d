"""Work of a shared decode process: one thread per camera; GPU decoders are created one at a time."""

import fcntl
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import cv2

from penstock.vision.spec import PrepareSpec
from penstock_video.decode.nvcodec import NvCodec, NvdecOpener, OpenNvCodec, Surface
from penstock_video.decode.nvdec import NvdecCodecs
from penstock_video.decode.uri import is_live
from penstock_video.errors import GpuFailed, GpuFull, GpuUnavailable, NeedsCpu, SourceNotAllowed
from penstock_video.gpu.device import Device
from penstock_video.preprocess.device_rows import output_size
from penstock_video.sources.child_link import ParentLink
from penstock_video.sources.child_work import Tools, Work, read_start
from penstock_video.sources.core_pinning import OwnCore, open_lock
from penstock_video.sources.device_slots import DeviceSlotWriter
from penstock_video.sources.protocol import Ended, EndReason, Start, encode
from penstock_video.sources.ring import Ring, RingSize

STUCK_S = 3.0  # for one turn
TURN_TIMEOUT_S = 60.0  # time for a thousand decoders
_LOOK_S, _ATTEND_S = 0.02, 0.2
_TOKEN_BYTES = 8


class DecoderTurns:
    """Turns to create decoders on one GPU, by lock files. One object per process, for all threads."""

    def __init__(self, card: str, stuck_s: float = STUCK_S, max_wait_s: float = TURN_TIMEOUT_S) -> None:
        """card: its `Device.bus_id`, for the lock files' names. Without files, processes do not wait for each other."""
        self._names = [f"decoders-{card}{number}.lock" for number in ("", ".1", ".2")]
        self._stuck_s, self._max_wait_s = stuck_s, max_wait_s
        self._foremost = threading.Lock()  # held by the thread of this process that checks the files
        self._passed: dict[str, bytes] = {}  # token of each file's turn that proved stuck

    @contextmanager
    def taken(self, meanwhile: Callable[[], None]) -> Iterator[None]:
        """Holds a turn in the context. meanwhile: called several times a second; its exception ends the wait."""
        wait = _Wait(self._max_wait_s, meanwhile)
        with ExitStack() as held:
            if self._is_foremost(wait):
                held.callback(self._foremost.release)
                self._take(held, wait)
            yield

    def _is_foremost(self, wait: "_Wait") -> bool:
        """Whether this thread may check the files. False on timeout."""
        while not self._foremost.acquire(timeout=_ATTEND_S):
            wait.attend()
            if wait.is_over:
                return False
        return True

    def _take(self, held: ExitStack, wait: "_Wait") -> None:
        """Returns with a turn, or without one if none is available."""
        for name in self._names:
            descriptor = open_lock(name)
            if descriptor is None:
                return
            held.callback(os.close, descriptor)
            if not self._is_passing_by(name, descriptor, wait):
                return

    def _is_passing_by(self, name: str, descriptor: int, wait: "_Wait") -> bool:
        """Whether the holder of the turn is stuck. False: the turn is ours, or none is needed."""
        turn, since = None, wait.attend()
        while not _is_ours(descriptor):
            newest = _turn_of(descriptor)
            if newest is None or wait.is_over:
                return False
            if newest != turn:
                turn, since = newest, wait.now
            if newest == self._passed.get(name) or wait.now - since >= self._stuck_s:
                self._passed[name] = newest
                return True
            time.sleep(_LOOK_S)
            wait.attend()
        return False


class _Wait:
    """A camera's wait. now: when it last read the clock."""

    def __init__(self, max_wait_s: float, meanwhile: Callable[[], None]) -> None:
        self.now = self._attended = time.monotonic()
        self._until, self._meanwhile = self.now + max_wait_s, meanwhile

    @property
    def is_over(self) -> bool:
        return self.now >= self._until

    def attend(self) -> float:
        """Reads the clock; calls meanwhile if the last call was a while ago."""
        self.now = time.monotonic()
        if self.now - self._attended >= _ATTEND_S:
            self._attended = self.now
            self._meanwhile()
        return self.now


def _is_ours(descriptor: int) -> bool:
    """Whether the turn is ours, or the system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    with suppress(OSError):  # also ours if the disk is full
        os.pwrite(descriptor, os.urandom(_TOKEN_BYTES), 0)  # marks a new turn
    return True


def _turn_of(descriptor: int) -> bytes | None:
    """The token of the current turn; None if it cannot be read."""
    try:
        return os.pread(descriptor, _TOKEN_BYTES, 0)
    except OSError:
        return None


class MadeInTurn:
    """An NvCodec whose first packet, which creates it on the GPU, waits for a turn."""

    def __init__(self, codec: NvCodec, turns: DecoderTurns, meanwhile: Callable[[], None]) -> None:
        self._codec, self._turns, self._meanwhile = codec, turns, meanwhile
        self._is_made = False

    def decode(self, data: bytes, stamp: int) -> list[Surface]:
        """See NvCodec."""
        if self._is_made:
            return self._codec.decode(data, stamp)
        with self._turns.taken(self._meanwhile):
            surfaces = self._codec.decode(data, stamp)
        self._is_made = True
        return surfaces

    def flush(self) -> list[Surface]:
        """See NvCodec."""
        return self._codec.flush()

    def close(self) -> None:
        """See NvCodec."""
        self._codec.close()


class OutputSize:
    """Size of a camera's decoded pictures, called at each keyframe: full size from the moment on at which the parent
    wants pictures, so that a viewer costs one new decoder at most."""

    def __init__(self, start: Start, link: ParentLink) -> None:
        self._spec = PrepareSpec.unpack(start.spec) if start.spec else None
        self._link, self._is_full = link, False

    def __call__(self, size: tuple[int, int]) -> tuple[int, int] | None:
        """None for the full size."""
        self._is_full = self._is_full or self._link.wants_images
        return None if self._is_full else output_size(size, self._spec)


@dataclass(frozen=True, slots=True)
class _OpenGpu:
    """State of the GPU that all cameras of the process share."""

    device: Device
    opener: NvdecOpener
    turns: DecoderTurns


class SharedGpu:
    """The process's GPU, opened with the first camera. If that fails, each camera ends with the reason."""

    def __init__(self, index: int, core: OwnCore | None = None) -> None:
        """core: of the process."""
        cv2.setNumThreads(1)
        self._index, self._core = index, core
        self._lock = threading.Lock()
        self._open: _OpenGpu | None = None

    def run(self, link: socket.socket, ring_descriptor: int) -> int:
        """Runs one camera in its thread, until it or its parent ends."""
        start = read_start(link)
        if start is None:
            os.close(ring_descriptor)
            return 2
        if self._core is not None and _is_at_full_speed(start):
            self._core.leave()
        ring = Ring(ring_descriptor, RingSize(start.ring_frames, start.slot_bytes))
        ring.close()  # it is mapped
        try:
            card = self._opened()
        except GpuUnavailable as error:
            return _end(link, EndReason.NO_CARD, error.message)
        except NeedsCpu as error:
            return _end(link, EndReason.NEEDS_CPU, error.message)
        device = card.device
        try:
            device.bind()
            stream = device.new_stream()
        except GpuFailed as fault:
            _end_where_broken(device, fault)
            is_full = isinstance(fault, GpuFull)
            return _end(link, EndReason.NO_CARD if is_full else EndReason.INTERNAL, fault.message)
        try:
            parent_link = ParentLink(link, start)
            opener = card.opener.for_camera()
            opener.is_alone = _is_at_full_speed(start)  # two would take turns
            codecs = NvdecCodecs(_in_turn(card, opener, parent_link), stream.handle, OutputSize(start, parent_link))
            slots = lambda ring, start: DeviceSlotWriter(device, ring, start)  # noqa: E731
            tools = Tools(codecs, slots, time.thread_time, lambda: opener.sharing)
            status = self._work(device, parent_link, ring, start, tools)
        finally:
            stream.close()
        return status

    def _work(self, device: Device, link: ParentLink, ring: Ring, start: Start, tools: Tools) -> int:
        work = Work(link, ring, start, tools)
        status = work.run()
        if work.gpu_fault is not None:
            _end_where_broken(device, work.gpu_fault)
        return status

    def _opened(self) -> _OpenGpu:
        with self._lock:
            if self._open is None:
                device = Device.open(self._index)
                self._open = _OpenGpu(device, NvdecOpener(device), DecoderTurns(device.bus_id))
            return self._open


def _in_turn(card: _OpenGpu, opener: NvdecOpener, link: ParentLink) -> OpenNvCodec:
    """Opens decoders in turns. A lost GPU is no fault of the stream, which then needs a new process, not the CPU."""

    def open_codec(codec: str, stream: int, size: tuple[int, int], scaled: tuple[int, int] | None = None) -> NvCodec:
        try:
            decoder = opener(codec, stream, size, scaled)
        except NeedsCpu as refusal:
            if card.device.is_lost():
                raise GpuFailed(refusal.message) from refusal
            raise
        return (
            decoder if scaled is None and opener.may_join(codec, size) else MadeInTurn(decoder, card.turns, link.attend)
        )

    return open_codec


def _is_at_full_speed(start: Start) -> bool:
    """Whether it is read at full speed: not live, and not in real time."""
    try:
        return not (start.is_realtime or is_live(start.uri))
    except SourceNotAllowed:  # reported when it is opened
        return False


def _end(link: socket.socket, reason: EndReason, text: str) -> int:
    with suppress(OSError):  # the parent has closed it
        link.send(encode(Ended(reason, text)))
    return int(reason is EndReason.INTERNAL)


def _end_where_broken(device: Device, fault: GpuFailed) -> None:
    """Ends the process if the GPU context is broken, rather than one camera's call (such as no memory)."""
    if device.is_lost():
        sys.stderr.write(f"this process can no longer use the GPU: {fault.message}\n")
        sys.stderr.flush()
        os._exit(1)
