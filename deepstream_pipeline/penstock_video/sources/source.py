"""One source in the parent: its process, its lifecycle, and the events for its listener."""

import math
import random
from collections import deque
from collections.abc import Callable

import msgspec
import structlog

from penstock_video.decode.uri import Secrets, policy_of
from penstock_video.errors import GpuFailed, PipelineError
from penstock_video.sources.admission import Verdict, cost_of
from penstock_video.sources.decode_host import DecodeHosts, DecoderChoice
from penstock_video.sources.feed import Feed, FrameNumbers, RowRings, SourceCounts
from penstock_video.sources.lifecycle import Action, LifecycleOptions, SourceLifecycle
from penstock_video.sources.options import DeviceRing, SourceListener, SourceNeeds, SourceSnapshot, start_of
from penstock_video.sources.process import BrokenPromise, Pictures, ProcessLink
from penstock_video.sources.protocol import (
    DOWN,
    UP,
    Beat,
    Cut,
    Ended,
    EndReason,
    FrameReady,
    Hold,
    Lost,
    Opened,
    Recorded,
    Start,
    Want,
)
from penstock_video.types import DecoderKind, DropPolicy, DropReason, SourceConfig, SourceState

log = structlog.get_logger(component="video")

GiveBack = Callable[["Source", ProcessLink, int], None]
_LAST_READS = 64  # from an ended process: more than its socket can hold
_READ_MARGIN_S = 2.0  # so that the lifecycle reports silence first


class Source:
    """One source. give_back: called from any thread with a slot that is no longer read, and its process. is_unwanted:
    its removal was requested; is_leaving: has begun. deferred: requests for its ID after that. process: the one that
    runs, is ending, or is not reaped yet."""

    def __init__(
        self,
        config: SourceConfig,
        needs: SourceNeeds,
        hosts: DecodeHosts,
        *,
        listener: SourceListener,
        give_back: GiveBack,
        now: float,
    ) -> None:
        self.config, self.source_id = config, config.source_id
        self.process: ProcessLink | None = None
        self.deferred: deque[Callable[[float], None]] = deque()
        self.is_leaving = self.is_unwanted = False
        self._needs, self._options, self._listener, self._give_back = needs, hosts.options, listener, give_back
        self._hosts = hosts
        gpu, absence = hosts.options.gpu, hosts.options.gpu_absence
        self._choice = DecoderChoice(config.decoder, absence if gpu is None else None)
        self._decoder, self._decoder_reason = DecoderKind.CPU, ""
        self._rings = RowRings(self._new_device_ring)
        options = LifecycleOptions.of(config, may_use_cpu=self._choice.may_use_cpu)
        self.watch = SourceLifecycle(options, now, random.random)
        self._want = Want(needs.wants_images, needs.image_interval_s)
        self._policy = policy_of(config)
        self._is_waiting_for_room = self._policy is DropPolicy.BLOCK
        self._secrets = Secrets(config.uri)
        self._timeline, self._tally = FrameNumbers(), SourceCounts()
        self._feed: Feed | None = None
        self._opened: Opened | None = None
        self._recordings: set[str] = set()
        self._started_at = 0.0
        self._start_s: float | None = None
        self._reported: tuple[SourceState, str] | None = None
        self._has_reported_end = False
        if self._choice.refusal:
            self.watch.finish(SourceState.FAILED, self._choice.refusal)

    # what time and people ask

    @property
    def is_over(self) -> bool:
        """Whether it ended by itself. Thread-safe."""
        return self.watch.is_over and not self.is_unwanted

    def tick(self, now: float) -> bool:
        """Runs due actions. Returns whether it waits to be started."""
        gpu, feed = self._options.gpu, self._feed
        if gpu is not None and feed is not None and feed.device_ring is not None and gpu.is_card_lost():
            self._do(self.watch.kill("the GPU was lost; restarting with rows in host memory"))
        is_ours = self._is_waiting_for_room and bool(self._feed and self._feed.outside)
        action = self.watch.tick(now, is_ours=is_ours)
        self._do(action)
        return action is Action.START

    def start(self, now: float) -> None:
        """Starts its process. A failure is retried like a process that dies."""
        if not self._choose_decoder(now):
            return
        self._started_at, self._start_s = now, None
        try:
            process, device_ring = self._begin(now)
        except (OSError, PipelineError) as error:
            why = error.message if isinstance(error, PipelineError) else error.strerror
            self.watch.process_ended(now, f"could not be started ({why})")
            self.tell()
            return
        self.process = process
        self._tally.begin()
        self._feed = Feed(
            self.source_id, process.ring, self._needs, lambda slot: self._give_back(self, process, slot), device_ring
        )
        self.tell()

    def pause(self, now: float) -> None:
        self._do(self.watch.pause(now))

    def resume(self, now: float) -> None:
        self._do(self.watch.resume(now))

    def remove(self, now: float) -> None:
        self.is_leaving = True
        self._do(self.watch.remove(now))

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def let_go(self, now: float) -> None:
        """Stops waiting for its process."""
        self.remove(now)
        if self.process is not None:
            self.process_ended(now, "was killed")

    def want_images(self, want: Want) -> None:
        self._want = want
        self._send(want)

    def record(self, cut: Cut) -> None:
        if not self.watch.is_taken:
            self._listener.on_recorded(self.source_id, Recorded(cut.path, f"the source is {self.watch.state.value}"))
            return
        self._recordings.add(cut.path)
        self._send(cut)

    def released(self, process: ProcessLink, slots: list[int], now: float) -> None:
        """Frees slots of one of its processes. A former one's slots are gone with it, except GPU memory."""
        self._rings.released(process, slots)
        if process is self.process and self._feed is not None:
            self._feed.outside.difference_update(slots)
            process.release(slots)
            if self._is_waiting_for_room:
                self.watch.progress(now)

    # what its process says

    def receive(self, now: float) -> bool:
        """Reads messages, a bounded number. False once the process hung up."""
        if self.process is None:
            return False
        try:
            for message in self.process.receive():
                if message is None:
                    self.watch.await_exit(now)
                    return False
                self._start_s = now - self._started_at if self._start_s is None else self._start_s
                if not isinstance(message, FrameReady):
                    self._tally.talk(now)
                self._hear(message, now)
        except BrokenPromise as error:
            self._choice.broke_promise(now)
            self.process.kill_untrusted()
            self._do(self.watch.kill(self._secrets.hidden_in(str(error))))
        return self.watch.is_receiving

    def process_ended(self, now: float, how: str) -> None:
        """Records that the process was reaped and closed. how: its exit text."""
        process, feed, self.process, self._feed = self.process, self._feed, None, None
        if process is not None and process.is_lost:
            self._choice.lost_process(now, f"after {process.pid}")
        if feed is not None and feed.device_ring is not None:
            self._rings.leave(process, feed)
        for path in sorted(self._recordings):
            self._listener.on_recorded(self.source_id, Recorded(path, "its decode process ended"))
        self._recordings.clear()
        self._hosts.cards.leave(self.source_id)
        self.watch.process_ended(now, self._secrets.hidden_in(how))
        self.tell()

    def hear_out(self, now: float) -> None:
        """Reads the last messages of an ended process."""
        for _ in range(_LAST_READS):
            if not self.watch.is_receiving or not self.receive(now):
                return

    def tell(self) -> None:
        """Reports changes to the listener."""
        now_so = (self.watch.state, self.watch.reason)
        if now_so != self._reported:
            self._reported = now_so
            self._listener.on_state(self.source_id, *now_so)
        if self.watch.is_over and not self._has_reported_end:
            self._has_reported_end = True
            self._rings.close()
            self._hosts.cards.forget(self.source_id)
            self._listener.on_ended(self.source_id)

    def snapshot(self) -> SourceSnapshot:
        """A snapshot. Thread-safe: its numbers are of about the same moment."""
        watch, beat, process, feed = self.watch, self._tally.beat, self.process, self._feed
        return SourceSnapshot(
            config=self.config,
            state=watch.state,
            reason=watch.reason,
            fps=watch.fps,
            frames=watch.decoded,
            drops=dict(self._tally.drops),
            restarts=watch.restarts,
            is_frozen=watch.is_frozen,
            opened=self._opened,
            pts_s=self._timeline.pts_s or 0.0,
            bad_packets=beat.bad_packets,
            decode_s=beat.decode_s,
            prepare_s=beat.prepare_s,
            start_s=self._start_s,
            waiting_frames=len(feed.outside) if feed is not None else 0,
            pid=process.pid if process is not None else None,
            is_open=watch.is_taken,
            decoder_reason=self._decoder_reason,
        )

    # inside

    def _hear(self, message: UP, now: float) -> None:
        match message:
            case FrameReady():
                self._frame(message, now)
            case Lost():
                self._lost(self._tally.lost(message), message.count)
                self._do(self.watch.lost(now, message.count))
            case Beat():
                beat = self._tally.beats(message)
                self.watch.beat(now, message.decoded, is_waiting=message.is_waiting, is_pacing=message.is_pacing)
                self._listener.on_beat(self.source_id, beat)
            case Opened():
                self._open(message, now)
            case Recorded():
                self._recordings.discard(message.path)
                error = self._secrets.hidden_in(message.error)
                self._listener.on_recorded(self.source_id, msgspec.structs.replace(message, error=error))
            case Ended():
                self._ended(message.reason, self._secrets.hidden_in(message.text), now)

    def _frame(self, ready: FrameReady, now: float) -> None:
        if self._feed is None or not self.watch.is_taken:
            self._lost(self._tally.lost(Lost(DropReason.STOPPED.value, 1)), 1)
            self._do(self.watch.lost(now, 1))
            return
        prepared = self._feed.prepared(
            ready, self._timeline, now, max_pixels=self._options.max_pixels, is_live=self.watch.is_live
        )
        action = self.watch.frame(now, ready.digest, prepared.frame.pts_s)
        self.tell()
        self._listener.on_frame(prepared)
        self._do(action)

    def _ended(self, reason: EndReason, text: str, now: float) -> None:
        if reason in (EndReason.NEEDS_CPU, EndReason.NO_CARD):
            if self._decoder is DecoderKind.CPU:
                raise BrokenPromise("its process needs the CPU, and has it")
            has_other_card = reason is EndReason.NO_CARD and self._hosts.cards.avoid(self.source_id, now)
            if not has_other_card:
                (self._choice.needs_cpu if reason is EndReason.NEEDS_CPU else self._choice.has_no_card)(now)
            if self._choice.may_use_cpu and not has_other_card:
                self._leave_card(text)
        self.watch.end_reported(now, reason, text)

    def _lost(self, reason: DropReason, count: int) -> None:
        self._listener.on_lost(self.source_id, reason.value, count)

    def _open(self, opened: Opened, now: float) -> None:
        if opened.width < 1 or opened.height < 1 or not math.isfinite(opened.fps) or opened.fps < 0:
            raise BrokenPromise(f"its process opened {opened.width}x{opened.height} at {opened.fps} frames/s")
        if opened.decoder != self._decoder:
            raise BrokenPromise(f"its process decodes by {opened.decoder[:16]!r}, not by {self._decoder}")
        self._opened = opened
        if self.process is not None:
            self.process.pictures = self._pictures
        cost = cost_of(opened.width, opened.height, opened.fps, opened.codec)
        self._hosts.cards.opened(self.source_id, cost, now)
        self.watch.opened(now, opened.fps, is_live=opened.is_live)
        self._listener.on_opened(self.source_id, opened)
        self.tell()

    def _do(self, action: Action) -> None:
        process = self.process
        if process is not None and action is Action.KILL:
            process.kill()
        elif process is not None and action is Action.STOP:
            process.ask_to_end()
        elif action in (Action.HOLD, Action.GO_ON):
            self._send(Hold(action is Action.HOLD))
        self.tell()

    def _send(self, record: DOWN) -> None:
        if self.process is None or not self.watch.is_receiving:
            return
        try:
            self.process.send(record)
        except BrokenPromise as error:
            self._do(self.watch.kill(str(error)))

    def _choose_decoder(self, now: float) -> bool:
        """Chooses the decoder. False if no process is to be started now: it is decided later, or no card has room."""
        self._decoder = self._choice.kind(now)
        if self._decoder is DecoderKind.NVDEC:
            admission = self._hosts.cards.choose(self.source_id, now)
            if admission.verdict is Verdict.WAIT:
                self.watch.postpone(now)
                self.tell()
                return False
            self._decoder_reason = ""
            if admission.verdict is Verdict.REFUSE:
                self._choice.has_no_card(now)
                self._decoder = self._choice.kind(now)
                if self._decoder is DecoderKind.NVDEC:
                    self.watch.started(now)
                    self.watch.refused(now, admission.reason)
                    self.tell()
                    return False
                self._leave_card(admission.reason)
        self.watch.started(now)
        return True

    def _leave_card(self, reason: str) -> None:
        self._decoder_reason = reason
        log.info("the CPU decodes a source that the GPU cannot decode", source=self.source_id, reason=reason)

    @property
    def _pictures(self) -> Pictures | None:
        """Of its last process."""
        opened = self._opened
        return None if opened is None else (opened.codec, opened.width, opened.height)

    def _begin(self, now: float) -> tuple[ProcessLink, DeviceRing | None]:
        """Starts a run with the current decoder. Raises OSError and PipelineError."""
        device_ring = self._device_ring()
        try:
            start = self._start_record(now, device_ring)
            company = self._choice.company(now)
            return self._hosts.line(start, self.source_id, company=company, pictures=self._pictures), device_ring
        except BaseException:
            if device_ring is not None:
                self._rings.put_back(device_ring)
            raise

    def _begin_after_s(self) -> float:
        """Of a file that a GPU plays in real time, the first time: keyframes of many are then spread in time."""
        if self._decoder is DecoderKind.NVDEC and self.config.is_realtime and self._timeline.pts_s is None:
            return self._hosts.next_offset_s()
        return 0.0

    def _device_ring(self) -> DeviceRing | None:
        """For the rows of a new run; None if they use host memory."""
        gpu = self._options.gpu
        if self._decoder is not DecoderKind.NVDEC or gpu is None or gpu.new_device_ring is None:
            return None
        if not self._needs.row_bytes or gpu.is_card_lost():
            return None
        if self._hosts.cards.position(self.source_id) not in (None, gpu.device):
            return None  # the rows' memory is on another card
        try:
            return self._rings.take()
        except GpuFailed as error:
            log.warning("rows go through the host", source=self.source_id, reason=error.message)
            return None

    def _new_device_ring(self) -> DeviceRing:
        gpu = self._options.gpu
        if gpu is None or gpu.new_device_ring is None:
            raise RuntimeError("there is no GPU for a ring of rows")
        return gpu.new_device_ring(self._options.ring_frames, self._needs.row_bytes)

    def _start_record(self, now: float, device_ring: DeviceRing | None) -> Start:
        frame_num, pts_s, segment = self._timeline.begin(now, is_live=self.watch.is_live)
        return msgspec.structs.replace(
            start_of(self.config, self._needs, self._options),
            policy=self._policy.value,
            wants_images=self._want.images,
            image_interval_s=self._want.interval_s,
            read_timeout_s=self.config.reconnect_interval_s + _READ_MARGIN_S,
            first_frame_num=frame_num,
            first_pts_s=pts_s,
            first_segment=segment,
            decoder=self._decoder.value,
            begin_after_s=self._begin_after_s(),
            device_ring=b"" if device_ring is None else device_ring.handle,
        )
