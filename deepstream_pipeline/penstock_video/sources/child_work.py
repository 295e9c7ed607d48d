"""Work of a decode process: packets to pictures, pictures into the ring, and a message for each to the parent."""

import math
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import cv2
import msgspec

from penstock.outbound import OutboundPolicy
from penstock_video.decode.codec import MakeCodec, PictureSimilarity, Pixels, SoftwareCodec, VideoPacket
from penstock_video.decode.container import DecodeOptions
from penstock_video.decode.decoder import Decoder, Picture, StreamFacts
from penstock_video.decode.recording import ClipRequest, FinishedClip, PacketRecorder, fits_mp4
from penstock_video.decode.uri import redacted
from penstock_video.errors import (
    DecodeError,
    GpuFailed,
    GpuFull,
    GpuUnavailable,
    NeedsCpu,
    PipelineError,
    SourceNotAllowed,
    SourceRefused,
    SourceUnavailable,
    StreamEnded,
)
from penstock_video.mux import MAX_PENDING
from penstock_video.sources.child_link import ParentGone, ParentLink, Slots, SlotWriter
from penstock_video.sources.protocol import (
    MESSAGE_BYTES,
    Beat,
    Ended,
    EndReason,
    FrameReady,
    Lost,
    Opened,
    Recorded,
    Start,
    decode_down,
)
from penstock_video.sources.ring import Ring, RingSize
from penstock_video.types import DecoderSharing, DevicePicture, DropPolicy, DropReason

_MAX_MOMENTS = 1024  # the last frames; no result is later


class Moments:
    """Times of one run's frames in seconds: of the recorder's clock, or of presentation until a recording begins."""

    def __init__(self) -> None:
        self._frames: deque[tuple[int, float]] = deque(maxlen=_MAX_MOMENTS)
        self._slots: dict[int, float] = {}

    def note(self, frame_num: int, slot: int, moment_s: float) -> None:
        """Notes that the frame is in this slot."""
        self._frames.append((frame_num, moment_s))
        self._slots[slot] = moment_s

    def restart(self) -> None:
        """Moves the times to the recorder's clock, which begins at 0 with the next packet."""
        last_s = self._frames[-1][1] if self._frames else 0.0
        self._frames = deque(((number, at_s - last_s) for number, at_s in self._frames), maxlen=_MAX_MOMENTS)
        self._slots = {slot: at_s - last_s for slot, at_s in self._slots.items()}

    def of(self, frame_num: int) -> float | None:
        """Time of this frame, or of the nearest known one; None if there is none, or the number is negative."""
        if frame_num < 0 or not self._frames:
            return None
        return min(self._frames, key=lambda frame: abs(frame[0] - frame_num))[1]

    def oldest(self, outside: Collection[int]) -> float | None:
        """The oldest time of the frames in these slots and of the last one; None before the first."""
        if not self._frames:
            return None
        return min([self._slots[slot] for slot in outside if slot in self._slots], default=self._frames[-1][1])


_ERRAND_S = 0.2  # interval of checks for the parent's messages while nothing is decoded
_LATE_S = 1.0  # a file in real time that is later than this does not catch up
_LOST_S = 0.2  # maximum delay of reports of lost frames

_REASONS: tuple[tuple[type[PipelineError], EndReason], ...] = (
    (SourceRefused, EndReason.AUTH_FAILED),
    (SourceUnavailable, EndReason.UNAVAILABLE),
    (SourceNotAllowed, EndReason.NOT_ALLOWED),
    (NeedsCpu, EndReason.NEEDS_CPU),
    (GpuUnavailable, EndReason.NEEDS_CPU),  # of its rows, which this process cannot compile: final
    (GpuFull, EndReason.NO_CARD),
    (DecodeError, EndReason.DECODE),
    (StreamEnded, EndReason.EOF),
)


@dataclass(frozen=True, slots=True)
class Tools:
    """Decoding and preparing functions. cpu_s: CPU time of the run so far. sharing: of the NVDEC decoder."""

    codecs: MakeCodec
    make_slots: Callable[[Ring, Start], Slots]
    cpu_s: Callable[[], float]
    sharing: Callable[[], DecoderSharing | None] = lambda: None


ON_CPU = Tools(SoftwareCodec, SlotWriter, time.process_time)


def serve(link: socket.socket, ring_descriptor: int) -> int:
    """Runs the first message's source until it or the parent ends. Returns the exit status."""
    cv2.setNumThreads(1)
    start = read_start(link)
    if start is None:
        return 2
    ring = Ring(ring_descriptor, RingSize(start.ring_frames, start.slot_bytes))
    ring.close()  # it is mapped
    return Work(ParentLink(link, start), ring, start, ON_CPU).run()


def read_start(link: socket.socket) -> Start | None:
    """The first message; None if it is not Start."""
    message = link.recv(MESSAGE_BYTES + 1)
    try:
        start = decode_down(message) if message else None
    except msgspec.MsgspecError:
        return None
    return start if isinstance(start, Start) else None


class Work:
    """One run of one source. gpu_fault: the driver error that ended it."""

    def __init__(self, link: ParentLink, ring: Ring, start: Start, tools: Tools) -> None:
        self.gpu_fault: GpuFailed | None = None
        self._start, self._ring, self._tools = start, ring, tools
        self._link = link
        self._slots: Slots | None = None
        self._policy = DropPolicy(start.policy)
        self._recorder, self._moments = PacketRecorder(start.record_cache_s, self._tell_recorded), Moments()
        self._is_recording = start.record_cache_s > 0  # from the first packet, or else from the first request on
        self._likeness = PictureSimilarity(start.cut)
        self._decoder: Decoder | None = None
        self._sent_facts: StreamFacts | None = None
        self._frame_num, self._segment = start.first_frame_num, start.first_segment
        self._decoded = 0
        self._since_row = start.interval
        self._lost: dict[str, int] = {}
        self._lost_at = 0.0
        self._plays_from: float | None = None
        self._is_pacing = False
        self._arrived_at = 0.0  # the current packet
        self._image_at = -math.inf  # arrival of the last frame whose picture was sent
        self._began_s = tools.cpu_s()
        self._prepare_s = 0.0

    def run(self) -> int:
        """Runs until the source's end, and sends that to the parent if it still reads."""
        self._link.begin(self._beat)
        try:
            ended = self._run()
        except ParentGone:
            ended = None
        except PipelineError as error:
            self.gpu_fault = error if isinstance(error, GpuFailed) else None
            ended = Ended(_reason_of(error), redacted(error.message))
        except Exception as error:  # noqa: BLE001 - the process's root: any error ends this source and is sent
            ended = Ended(EndReason.INTERNAL, _where(error))
        return self._finish(ended)

    def _finish(self, ended: Ended | None) -> int:
        with suppress(ParentGone):
            self._recorder.close(_why_over(ended))
        with suppress(ParentGone):
            if ended is not None:
                self._tell_lost()
                self._link.send(self._beat())
                self._link.send(ended)
        if self._decoder is not None:
            self._decoder.close()
        if self._slots is not None:
            with suppress(GpuFailed):  # a broken driver cannot free anything
                self._slots.close()
        self._link.end()
        return 1 if ended is not None and ended.reason is EndReason.INTERNAL else 0

    def _run(self) -> Ended:
        start = self._start
        options = DecodeOptions(
            open_timeout_s=start.open_timeout_s,
            read_timeout_s=start.read_timeout_s,
            is_udp=start.is_udp,
            threads=int(start.is_realtime),  # as a camera: no frame is delayed by others
            max_pixels=start.max_pixels,
            outbound=OutboundPolicy(start.allowed_outbound, start.is_from_api),
        )
        slots = self._slots = self._tools.make_slots(self._ring, start)
        decoder = self._decoder = Decoder(start.uri, options, start.first_pts_s, self._tools.codecs)
        self._tell_opened(decoder)
        while True:
            decoded = self._decoded
            self._read(decoder, slots)
            if self._decoded == decoded:
                raise DecodeError(f"{redacted(start.uri)} has no picture in it that can be decoded")
            if not start.is_loop:
                self._await_events()
                is_whole = decoder.facts.is_live and decoder.is_played_out
                return Ended(EndReason.PLAYED_OUT if is_whole else EndReason.EOF, f"{redacted(start.uri)} is over")
            decoder.rewind()

    def _read(self, decoder: Decoder, slots: Slots) -> None:
        for packet in decoder.packets():
            self._errands()
            self._arrived_at = self._arrival(decoder, packet)
            if self._is_recording:
                self._recorder.push(packet, self._moments.oldest(self._link.outside()))
            for picture in decoder.decode(packet):
                self._take(decoder, slots, picture)

    def _take(self, decoder: Decoder, slots: Slots, picture: Picture) -> None:
        captured_at = self._arrived_at
        captured_unix_s = time.time() - (time.monotonic() - captured_at)
        frame_num = self._frame_num
        self._frame_num, self._decoded = frame_num + 1, self._decoded + 1
        if picture.is_new:
            self._segment += 1
            self._likeness.begin()
        if decoder.facts is not self._sent_facts and decoder.facts != self._sent_facts:
            self._tell_opened(decoder)
        self._since_row += 1
        if picture.is_dropped:
            return self._lose(DropReason.CORRUPT)
        is_whole = not isinstance(picture.frame, DevicePicture) or picture.frame.source_size is None
        has_row, has_image = self._since_row > self._start.interval, is_whole and self._wants_image(captured_at)
        slot = self._slot(slots, decoder.facts, has_row=has_row, has_image=has_image)
        if slot is None:
            return self._lose(DropReason.RING_FULL)
        moment_s = self._recorder.moment_of(picture.time_s) if self._is_recording else picture.pts_s
        self._moments.note(frame_num, slot, moment_s)
        began_s = time.thread_time()
        self._image_at = captured_at if has_image else self._image_at
        written = slots.write(slot, picture.frame, has_row=has_row, has_image=has_image)
        digest = self._look(decoder, picture, written.thumbnail)
        if has_row:
            self._since_row = 0
        self._prepare_s += time.thread_time() - began_s
        self._tell_lost()
        return self._link.send(
            FrameReady(
                slot=slot,
                frame_num=frame_num,
                pts_s=picture.pts_s,
                captured_at=captured_at,
                captured_unix_s=captured_unix_s,
                width=decoder.facts.width,
                height=decoder.facts.height,
                row_shape=written.row_shape,
                has_image=has_image,
                segment=self._segment,
                is_corrupt=picture.is_corrupt,
                digest=digest,
                sample_aspect=decoder.facts.sample_aspect_ratio.as_integer_ratio(),
                is_on_device=slots.is_on_device and bool(written.row_shape),
            )
        )

    def _await_events(self) -> None:
        """Waits until the parent has handled a file's last events, which may need its last packets for recordings."""
        is_waiting = self._policy is DropPolicy.BLOCK and self._is_recording
        while is_waiting:
            is_waiting = not self._link.wait_for_all_slots(_ERRAND_S)
            self._errands()

    def _arrival(self, decoder: Decoder, packet: VideoPacket) -> float:
        """Arrival time of the packet; in a file played in real time its due time, for which this waits."""
        at_s = decoder.arrival_s(packet) if self._start.is_realtime else None
        if at_s is None:
            return time.monotonic()
        if self._plays_from is None:
            self._plays_from = time.monotonic() - at_s + self._start.begin_after_s
        while (late_s := time.monotonic() - self._plays_from - at_s) < 0:
            self._is_pacing = True
            time.sleep(min(-late_s, _ERRAND_S))
            if -late_s > _ERRAND_S:  # otherwise with the next packet
                self._errands()
        self._is_pacing = False
        if late_s > _LATE_S:  # the machine was busy, or the file paused
            self._plays_from += late_s
        return self._plays_from + at_s

    def _look(self, decoder: Decoder, picture: Picture, thumbnail: Pixels) -> int:
        """The picture's digest. A cut begins a new segment in a file; in a camera's stream it is a change of light."""
        digest, is_cut = self._likeness.look(thumbnail)
        if is_cut and not decoder.facts.is_live and not picture.is_corrupt:
            self._segment += 1
        return digest

    def _wants_image(self, now: float) -> bool:
        return self._link.wants_images and now - self._image_at >= self._link.image_interval_s

    def _slot(self, slots: Slots, facts: StreamFacts, *, has_row: bool, has_image: bool) -> int | None:
        """A slot to write into; None if there is none and the policy is not to wait. A camera's rows beyond MAX_PENDING
        are dropped here, before they are prepared, since the parent owns slots until the engine has read them."""
        most = slots.most(facts.width, facts.height, has_image)
        if self._policy is not DropPolicy.BLOCK:
            return self._link.take_slot(most, MAX_PENDING if has_row and not has_image else None)
        while True:
            slot = self._link.wait_for_slot(most, _ERRAND_S)
            if slot is not None:
                return slot
            self._errands()

    def _errands(self) -> None:
        """Starts requested recordings, and waits while paused. Raises ParentGone."""
        while True:
            for cut in self._link.cuts():
                if not self._is_recording:
                    self._is_recording = True
                    self._moments.restart()
                moment_s = self._moments.of(cut.frame_num)
                self._recorder.cut(ClipRequest(cut.path, cut.before_s, cut.after_s, moment_s), time.monotonic())
            if self._is_recording and self._policy is not DropPolicy.BLOCK:  # waiting for the engine is no silence
                self._recorder.look(time.monotonic())
            if not self._link.wait_while_paused(_ERRAND_S):
                return

    def _lose(self, reason: DropReason) -> None:
        self._lost[reason] = self._lost.get(reason, 0) + 1
        if time.monotonic() - self._lost_at >= _LOST_S:
            self._tell_lost()

    def _tell_lost(self) -> None:
        if not self._lost:
            return
        lost, self._lost, self._lost_at = self._lost, {}, time.monotonic()
        for reason, count in lost.items():
            self._link.send(Lost(reason, count))

    def _tell_opened(self, decoder: Decoder) -> None:
        facts = self._sent_facts = decoder.facts
        self._recorder.begin(decoder.stream, is_live=facts.is_live)
        self._link.send(
            Opened(
                width=facts.width,
                height=facts.height,
                fps=facts.fps,
                codec=facts.codec,
                is_live=facts.is_live,
                frames_total=facts.frames_total,
                duration_s=facts.duration_s,
                is_recordable=fits_mp4(decoder.stream),
                decoder=facts.decoder.value,
            )
        )

    def _tell_recorded(self, over: FinishedClip) -> None:
        self._link.send(Recorded(over.path, over.error, over.before_s, over.after_s, over.is_unwritable))

    def _beat(self) -> Beat:
        decode_s = max(self._tools.cpu_s() - self._began_s - self._prepare_s, 0.0)
        bad_packets = self._decoder.bad_packets if self._decoder is not None else 0
        sums = self._decoded, bad_packets, decode_s, self._prepare_s
        return Beat(*sums, is_pacing=self._is_pacing, sharing=self._tools.sharing())


def _why_over(ended: Ended | None) -> str:
    if ended is None:
        return "the source was stopped"
    return "the source is over" if ended.reason in (EndReason.EOF, EndReason.PLAYED_OUT) else "the source failed"


def _reason_of(error: PipelineError) -> EndReason:
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), EndReason.INTERNAL)


def _where(error: Exception) -> str:
    """The exception's type and location, since its text may contain a password."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno}"
