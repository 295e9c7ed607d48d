"""What a camera's thread does in a process that several share: the card decodes, and makes ready."""

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from deepstream_pipeline.decode.decode_errors import DecodeErrors
from deepstream_pipeline.decode.nvcodec import NvCodec, NvdecOpener, OpenNvCodec
from deepstream_pipeline.decode.nvdec import NvdecCodecs
from deepstream_pipeline.decode.turns import MadeInTurn, Turns
from deepstream_pipeline.decode.uri import is_live
from deepstream_pipeline.errors import GpuFailed, GpuFull, GpuUnavailable, NeedsCpu, SourceNotAllowed
from deepstream_pipeline.gpu.device import Device
from deepstream_pipeline.sources.child_link import PolledLink
from deepstream_pipeline.sources.child_work import Tools, Work, read_start
from deepstream_pipeline.sources.device_slots import DeviceSlotWriter
from deepstream_pipeline.sources.messages import Ended, EndReason, Start, encode
from deepstream_pipeline.sources.own_core import OwnCore
from deepstream_pipeline.sources.ring import Ring, RingSize


@dataclass(frozen=True, slots=True)
class _OpenCard:
    """What all cameras of the process have of it together."""

    device: Device
    opener: OpenNvCodec
    turns: Turns


class Card:
    """The process's card, opened with the first camera. Where it cannot be, each is told so."""

    def __init__(self, index: int, errors: DecodeErrors, core: OwnCore | None = None) -> None:
        """errors: what the decoder's library says on the process's standard output. core: the process's own."""
        self._index, self._core = index, core
        self._lock = threading.Lock()
        self._open: _OpenCard | None = None
        self._errors = errors

    def run(self, link: socket.socket, ring_descriptor: int) -> int:
        """One camera, in a thread of its own, until it or its parent is over."""
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
            heard = PolledLink(link, start)
            codecs = NvdecCodecs(_in_turn(card, heard), stream.handle, self._errors)
            tools = Tools(codecs, lambda ring, start: DeviceSlotWriter(device, ring, start), time.thread_time)
            status = self._work(device, heard, ring, start, tools)
        finally:
            stream.close()
        return status

    def _work(self, device: Device, link: PolledLink, ring: Ring, start: Start, tools: Tools) -> int:
        work = Work(link, ring, start, tools)
        status = work.run()
        if work.gpu_fault is not None:
            _end_where_broken(device, work.gpu_fault)
        return status

    def _opened(self) -> _OpenCard:
        with self._lock:
            if self._open is None:
                device = Device.open(self._index)
                self._open = _OpenCard(device, NvdecOpener(self._index), Turns(device.bus_id))
            return self._open


def _in_turn(card: _OpenCard, link: PolledLink) -> OpenNvCodec:
    """Its opener, of decoders that are made in turn. A card that is lost is no stream's fault: a new process is wanted
    then, and no CPU."""

    def open_codec(codec: str, stream: int, size: tuple[int, int]) -> NvCodec:
        try:
            return MadeInTurn(card.opener(codec, stream, size), card.turns, link.attend)
        except NeedsCpu as refusal:
            if card.device.is_lost():
                raise GpuFailed(refusal.message) from refusal
            raise

    return open_codec


def _is_at_full_speed(start: Start) -> bool:
    """Whether it is read as fast as the process can: what is not live, and not played as if it were."""
    try:
        return not (start.is_realtime or is_live(start.uri))
    except SourceNotAllowed:  # which is told when it is opened
        return False


def _end(link: socket.socket, reason: EndReason, text: str) -> int:
    with suppress(OSError):  # nobody listens any more
        link.send(encode(Ended(reason, text)))
    return int(reason is EndReason.INTERNAL)


def _end_where_broken(device: Device, fault: GpuFailed) -> None:
    """What failed for one camera may have been its own (no memory is left), or the end of all: a context that is broken
    stays so, and its process begins anew."""
    if device.is_lost():
        sys.stderr.write(f"the card does nothing more for this process: {fault.message}\n")
        sys.stderr.flush()
        os._exit(1)
