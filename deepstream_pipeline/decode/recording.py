"""Clips of a source without encoding anything: its packets of the last seconds, and those to come, as an MP4.

A clip begins at the keyframe before the moment that was asked for. Its packets are copied as they are, so a damaged
one stays damaged. The file is PATH.part until it is whole; FFmpeg writes it in fragments, so that what a killed process
leaves behind still plays, and makes a plain MP4 of it at the end.
"""

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import av
from av.container import OutputContainer
from av.error import FFmpegError
from av.video.stream import VideoStream

VideoPacket: TypeAlias = "av.Packet[VideoStream]"
Finished = Callable[[str, str], None]

MOST_CACHED_BYTES = 64 * 2**20
MOST_RECORDINGS = 8  # at once
_MOST_STEP_S = 10.0  # between two packets; more is a jump, and counts as one frame
_ONE_FRAME_S = 0.04
_TIME_BASE = Fraction(1, 90_000)
_PATIENCE_S = 10.0  # a source that went silent: so long after its end a recording is finished without more


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A packet at its time of the cache's clock, which never goes back. All times in seconds."""

    content: bytes
    dts_s: float
    pts_s: float
    duration_s: float
    is_key: bool


class Recorder:
    """The cache of one source's packets, and the clips that are being made of them. Used by the decoding thread."""

    def __init__(self, cache_s: float, finished: Finished, *, most_bytes: int = MOST_CACHED_BYTES) -> None:
        """cache_s: of packets that are kept; 0 for none. finished(path, error) is called once for each clip."""
        self._cache_s, self._most_bytes, self._finished = cache_s, most_bytes, finished
        self._kept: deque[_Kept] = deque()
        self._kept_bytes = 0
        self._stream: VideoStream | None = None
        self._clips: list[_Clip] = []
        self._shift_s = 0.0
        self._last_s: float | None = None
        self._step_s = _ONE_FRAME_S

    @property
    def cached_bytes(self) -> int:
        """Of packets, now."""
        return self._kept_bytes

    def begin(self, stream: VideoStream) -> None:
        """The packets from now on are of that stream, which cannot be put behind those of another: clips end here."""
        self._end(self._clips)
        self._kept.clear()
        self._kept_bytes = 0
        self._stream = stream

    def push(self, packet: VideoPacket, now: float) -> None:
        """The next packet that was read, at that time (monotonic seconds)."""
        if not packet.size or not (self._cache_s or self._clips):
            return
        kept = self._timed(packet)
        if self._cache_s:
            self._keep(kept)
        self._end([clip for clip in self._clips if not clip.take(kept) or now >= clip.until])

    def look(self, now: float) -> None:
        """Finish what waits for packets that do not come."""
        self._end([clip for clip in self._clips if now >= clip.until])

    def cut(self, path: str, before_s: float, after_s: float, now: float) -> None:
        """Begin a clip from so long ago to so long from now. What goes wrong is told to `finished`."""
        if self._stream is None or len(self._clips) >= MOST_RECORDINGS:
            self._finished(path, "not open yet" if self._stream is None else f"{MOST_RECORDINGS} are made already")
            return
        last_s = self._last_s or 0.0
        clip = _Clip(path, self._stream, last_s + after_s, now + after_s + _PATIENCE_S)
        self._clips.append(clip)
        first_s = last_s - before_s
        begin = max((i for i, kept in enumerate(self._kept) if kept.is_key and kept.dts_s <= first_s), default=0)
        for kept in list(self._kept)[begin:]:
            if not clip.take(kept):
                self._end([clip])
                return

    def close(self) -> None:
        """Finish every clip with what it has."""
        self._end(self._clips)

    def _end(self, clips: "list[_Clip]") -> None:
        for clip in list(clips):
            self._clips.remove(clip)
            self._finished(clip.path, clip.close())

    def _timed(self, packet: VideoPacket) -> _Kept:
        base = float(packet.time_base)
        raw_s = None if packet.dts is None else packet.dts * base
        dts_s = self._next_s(raw_s)
        late_s = (packet.pts - packet.dts) * base if packet.pts is not None and packet.dts is not None else 0.0
        return _Kept(bytes(packet), dts_s, dts_s + max(late_s, 0.0), self._step_s, packet.is_keyframe)

    def _next_s(self, raw_s: float | None) -> float:
        last_s = self._last_s
        if last_s is None:
            self._shift_s = -(raw_s or 0.0)
            dts_s = 0.0
        elif raw_s is None:
            dts_s = last_s + self._step_s
        else:
            if not 0.0 < raw_s + self._shift_s - last_s <= _MOST_STEP_S:
                self._shift_s = last_s + self._step_s - raw_s
            dts_s = raw_s + self._shift_s
            self._step_s = dts_s - last_s
        self._last_s = dts_s
        return dts_s

    def _keep(self, kept: _Kept) -> None:
        self._kept.append(kept)
        self._kept_bytes += len(kept.content)
        while self._kept_bytes > self._most_bytes or self._is_first_group_old(kept.dts_s):
            self._drop_first_group()

    def _is_first_group_old(self, now_s: float) -> bool:
        """Whether the cache reaches back far enough without its first keyframe and what builds on it."""
        second = next((kept for i, kept in enumerate(self._kept) if i and kept.is_key), None)
        return second is not None and second.dts_s <= now_s - self._cache_s

    def _drop_first_group(self) -> None:
        while self._kept:
            self._kept_bytes -= len(self._kept.popleft().content)
            if self._kept and self._kept[0].is_key:
                return


class _Clip:
    """One file. until: monotonic seconds, when it is finished whether packets come or not."""

    def __init__(self, path: str, stream: VideoStream, end_s: float, until: float) -> None:
        self.path, self.until = path, until
        self._end_s = end_s
        self._first_s: float | None = None
        self._stream: VideoStream | None = None
        self._error = ""
        self._packets = 0
        self._container: OutputContainer | None = None
        try:
            options = {"movflags": "hybrid_fragmented+delay_moov"}
            self._container = av.open(f"{path}.part", "w", format="mp4", container_options=options)
            self._stream = self._container.add_stream_from_template(stream)
        except ValueError:
            self._error = f"the recording cannot be written: packets of {stream.codec_context.name} do not fit into MP4"
        except (FFmpegError, OSError) as error:
            self._error = _reason(error)

    def take(self, kept: _Kept) -> bool:
        """Whether it wants more after this one."""
        if self._error or self._container is None or self._stream is None:
            return False
        if self._first_s is None:
            if not kept.is_key:
                return kept.dts_s < self._end_s
            self._first_s = kept.dts_s
        if kept.dts_s > self._end_s:
            return False
        try:
            self._container.mux_one(self._packet(kept, self._stream, self._first_s))
        except (FFmpegError, OSError, ValueError) as error:
            self._error = _reason(error)
            return False
        self._packets += 1
        return True

    def close(self) -> str:
        """Finish the file under its own name; the error, or nothing."""
        try:
            if self._container is not None:
                self._container.close()
            if not self._error and not self._packets:
                self._error = "no keyframe came in its time"
            if not self._error:
                os.replace(f"{self.path}.part", self.path)
        except (FFmpegError, OSError, ValueError) as error:
            self._error = self._error or _reason(error)
        if self._error:
            with suppress(OSError):
                os.unlink(f"{self.path}.part")
        return self._error

    def _packet(self, kept: _Kept, stream: VideoStream, first_s: float) -> "av.Packet[av.stream.Stream]":
        packet = av.Packet(kept.content)
        packet.stream, packet.time_base = stream, _TIME_BASE
        packet.dts, packet.pts = _ticks(kept.dts_s - first_s), _ticks(kept.pts_s - first_s)
        packet.duration = _ticks(kept.duration_s)
        packet.is_keyframe = kept.is_key
        return packet


def _ticks(seconds: float) -> int:
    return round(seconds * _TIME_BASE.denominator)


def _reason(error: BaseException) -> str:
    words = getattr(error, "strerror", None) or type(error).__name__
    return f"the recording cannot be written: {words}"
