"""Records a source without re-encoding: its packets of the last seconds and later ones, as MP4."""

import math
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from io import BytesIO

import av
from av.container import OutputContainer
from av.error import FFmpegError
from av.video.stream import VideoStream

from penstock_video.decode.codec import VideoPacket, seconds_of

MOST_CACHED_BYTES = 64 * 2**20
MOST_RECORDINGS = 8  # at the same time
_MOST_LIVE_STEP_S = 10.0  # between two packets of a live stream; a larger step is a clock jump and counts as one frame
_REACH_S, _REACH_FRAMES = 10.0, 16  # maximum distance of a decoded picture's time from the newest packet
_ONE_FRAME_S = 0.04
_TIME_BASE = Fraction(1, 90_000)
_SILENCE_TIMEOUT_S = 10.0  # after a silent source's clip should have ended, it is finished without more packets
_LATE_S = 2.0  # beyond the cache, since an event follows its frame
_NEARLY_S = 0.2  # a clip that lacks less is complete
_CHANGED = "the pictures changed their size or codec"


@dataclass(frozen=True, slots=True, eq=False)
class _CachedPacket:
    """A packet with its time on the cache's clock, which never goes back. All times in seconds."""

    content: bytes
    dts_s: float
    pts_s: float
    duration_s: float
    is_key: bool


@dataclass(frozen=True, slots=True)
class FinishedClip:
    """A finished clip. error: empty, or why it is missing or short. before_s, after_s: recorded around its moment;
    before_s is negative if it begins later, both are 0 without a file. is_unwritable: packets or folder could not be
    written."""

    path: str
    error: str = ""
    before_s: float = 0.0
    after_s: float = 0.0
    is_unwritable: bool = False


@dataclass(frozen=True, slots=True)
class ClipRequest:
    """A clip to record around its moment. moment_s: see `PacketRecorder.moment_of`; None for the newest packet's."""

    path: str
    before_s: float
    after_s: float
    moment_s: float | None = None


def fits_mp4(stream: VideoStream) -> bool:
    """Whether packets of this stream fit into MP4 unchanged."""
    with av.open(BytesIO(), "w", format="mp4") as container:
        try:
            container.add_stream_from_template(stream)
        except ValueError:
            return False
    return True


class PacketRecorder:
    """The packet cache of one source, and its open clips. Used by the decoding thread."""

    def __init__(
        self, cache_s: float, finished: Callable[[FinishedClip], None], *, most_bytes: int = MOST_CACHED_BYTES
    ) -> None:
        """cache_s: seconds of packets to cache; 0 for none. finished is called once for each clip. cached_bytes: size
        of the cached packets."""
        self._cache_s, self._most_bytes, self._finished = cache_s, most_bytes, finished
        self._kept: deque[_CachedPacket] = deque()
        self.cached_bytes = 0
        self._stream: VideoStream | None = None
        self._clips: list[_Clip] = []
        self._shift_s = 0.0
        self._last_s: float | None = None
        self._step_s, self._most_step_s = _ONE_FRAME_S, math.inf
        self._lacks = ""  # why the cache has no earlier packets

    def begin(self, stream: VideoStream, *, is_live: bool) -> None:
        """Starts another stream, whose packets do not fit into open clips: these end here."""
        self._most_step_s = _MOST_LIVE_STEP_S if is_live else math.inf
        self._end(self._clips, _CHANGED)
        self._kept.clear()
        self.cached_bytes = 0
        self._lacks = _CHANGED if self._stream is not None else "the source was opened only then"
        self._stream = stream

    def push(self, packet: VideoPacket, since_s: float | None = None) -> None:
        """Adds the next packet. since_s: the earliest moment that a clip may request; None for this packet's."""
        if not packet.size:
            return
        dts_s = self._next_s(seconds_of(packet.dts, packet.time_base))
        if not (self._cache_s or self._clips):
            return
        late = packet.pts - packet.dts if packet.pts is not None and packet.dts is not None else 0
        late_s = seconds_of(max(late, 0), packet.time_base) or 0.0
        kept = _CachedPacket(bytes(packet), dts_s, dts_s + late_s, self._step_s, packet.is_keyframe)
        if self._cache_s:
            self._keep(kept, dts_s if since_s is None else min(since_s, dts_s))
        self._end([clip for clip in self._clips if not clip.take(kept)])

    def moment_of(self, pts_s: float | None) -> float:
        """Time of a decoded picture on the packets' clock; never goes back far."""
        last_s = self._last_s or 0.0
        moment_s = last_s if pts_s is None else pts_s + self._shift_s
        reach_s = max(_REACH_S, _REACH_FRAMES * self._step_s)
        return moment_s if last_s - reach_s <= moment_s <= last_s + reach_s else last_s

    def look(self, now: float) -> None:
        """Finishes clips whose packets are overdue."""
        self._end([clip for clip in self._clips if now >= clip.until], "no packets came any more")

    def cut(self, asked: ClipRequest, now: float) -> None:
        """Starts a clip at `now` (monotonic seconds). `finished` gets errors."""
        if self._stream is None or len(self._clips) >= MOST_RECORDINGS:
            why = "not open yet" if self._stream is None else f"{MOST_RECORDINGS} are made already"
            self._finished(FinishedClip(asked.path, why))
            return
        moment_s = (self._last_s or 0.0) if asked.moment_s is None else asked.moment_s
        lacks = self._lacks
        if asked.before_s > self._cache_s:
            lacks = f"smart-rec-cache is {self._cache_s:g} s"
        clip = _Clip(replace(asked, moment_s=moment_s), self._stream, now + asked.after_s + _SILENCE_TIMEOUT_S, lacks)
        self._clips.append(clip)
        first_s = moment_s - min(asked.before_s, self._cache_s)
        begin = max((i for i, kept in enumerate(self._kept) if kept.is_key and kept.dts_s <= first_s), default=0)
        for kept in list(self._kept)[begin:]:
            if not clip.take(kept):
                self._end([clip])
                return

    def close(self, why: str) -> None:
        """Finishes every clip; incomplete ones have the reason."""
        self._end(self._clips, why)

    def _end(self, clips: "list[_Clip]", why: str = "") -> None:
        for clip in list(clips):
            self._clips.remove(clip)
            self._finished(clip.close(why))

    def _next_s(self, raw_s: float | None) -> float:
        last_s = self._last_s
        if last_s is None:
            self._shift_s = -(raw_s or 0.0)
            dts_s = 0.0
        elif raw_s is None:
            dts_s = last_s + self._step_s
        else:
            if not 0.0 < raw_s + self._shift_s - last_s <= self._most_step_s:
                self._shift_s = last_s + self._step_s - raw_s
            dts_s = raw_s + self._shift_s
            self._step_s = dts_s - last_s
        self._last_s = dts_s
        return dts_s

    def _keep(self, kept: _CachedPacket, since_s: float) -> None:
        self._kept.append(kept)
        self.cached_bytes += len(kept.content)
        while self.cached_bytes > self._most_bytes:
            self._lacks = f"more than {self._most_bytes >> 20} MiB are not kept"
            self._drop_first_group()
        while self._is_first_group_old(since_s):
            self._lacks = f"smart-rec-cache is {self._cache_s:g} s"
            self._drop_first_group()

    def _is_first_group_old(self, since_s: float) -> bool:
        """Whether the cache is long enough without its first keyframe and the packets that depend on it."""
        second = next((kept for i, kept in enumerate(self._kept) if i and kept.is_key), None)
        return second is not None and second.dts_s <= since_s - self._cache_s - _LATE_S

    def _drop_first_group(self) -> None:
        while self._kept:
            self.cached_bytes -= len(self._kept.popleft().content)
            if self._kept and self._kept[0].is_key:
                return


class _Clip:
    """One file. until: monotonic seconds, when it is finished even without packets."""

    def __init__(self, asked: ClipRequest, stream: VideoStream, until: float, lacks: str) -> None:
        """lacks: why earlier packets are missing."""
        self.until = until
        self._asked, self._lacks = asked, lacks
        self._moment_s = asked.moment_s or 0.0
        self._first_s: float | None = None
        self._span_s = (0.0, 0.0)  # of the shown pictures
        self._is_complete = False
        self._stream: VideoStream | None = None
        self._error = ""
        self._is_unwritable = False
        self._container: OutputContainer | None = None
        try:
            options = {"movflags": "hybrid_fragmented+delay_moov"}
            self._container = av.open(f"{asked.path}.part", "w", format="mp4", container_options=options)
            self._stream = self._container.add_stream_from_template(stream)
        except ValueError:
            self._fail(f"packets of {stream.codec_context.name} do not fit into MP4")
        except (FFmpegError, OSError) as error:
            self._fail(_reason(error))

    def take(self, kept: _CachedPacket) -> bool:
        """Writes a packet; returns whether the clip wants more."""
        if self._error or self._container is None or self._stream is None:
            return False
        self._is_complete = kept.dts_s > self._moment_s + self._asked.after_s
        if self._is_complete:
            return False
        if self._first_s is None:
            if not kept.is_key:
                return True
            self._first_s, self._span_s = kept.dts_s, (kept.pts_s, kept.pts_s)
        try:
            self._container.mux_one(self._packet(kept, self._stream, self._first_s))
        except (FFmpegError, OSError, ValueError) as error:
            self._fail(_reason(error))
            return False
        self._span_s = (self._span_s[0], max(self._span_s[1], kept.pts_s + kept.duration_s))
        return True

    def close(self, why: str) -> FinishedClip:
        """Finishes the file under its final name. why: why an incomplete clip ends."""
        try:
            if self._container is not None:
                self._container.close()
            if not self._error and self._first_s is None:
                self._error = "no keyframe came in its time"
            if not self._error:
                os.replace(f"{self._asked.path}.part", self._asked.path)
        except (FFmpegError, OSError, ValueError) as error:
            if not self._error:
                self._fail(_reason(error))
        if not self._error:
            return self._whole(why)
        with suppress(OSError):
            os.unlink(f"{self._asked.path}.part")
        return FinishedClip(self._asked.path, self._error, is_unwritable=self._is_unwritable)

    def _whole(self, why: str) -> FinishedClip:
        asked = self._asked
        before_s, after_s = self._moment_s - self._span_s[0], self._span_s[1] - self._moment_s
        short = []
        if before_s < asked.before_s - _NEARLY_S:
            short.append(f"{before_s:.1f} s before its moment, not {asked.before_s:g}: {self._lacks}")
        if not self._is_complete and after_s < asked.after_s - _NEARLY_S:
            short.append(f"{after_s:.1f} s after its moment, not {asked.after_s:g}: {why}")
        return FinishedClip(asked.path, "; ".join(short), before_s, after_s)

    def _fail(self, reason: str) -> None:
        self._error, self._is_unwritable = f"the recording cannot be written: {reason}", True

    def _packet(self, kept: _CachedPacket, stream: VideoStream, first_s: float) -> "av.Packet[av.stream.Stream]":
        packet = av.Packet(kept.content)
        packet.stream, packet.time_base = stream, _TIME_BASE
        packet.dts, packet.pts = _ticks(kept.dts_s - first_s), _ticks(kept.pts_s - first_s)
        packet.duration = _ticks(kept.duration_s)
        packet.is_keyframe = kept.is_key
        return packet


def _ticks(seconds: float) -> int:
    return round(seconds * _TIME_BASE.denominator)


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or type(error).__name__
