"""A live HLS playlist for each source: index.m3u8 and MPEG-TS segments as files."""

import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import av
import structlog
from av.container import OutputContainer
from pydantic import Field

from penstock_video.backoff import Backoff, Outage
from penstock_video.errors import SinkFailed
from penstock_video.sinks.encoder import H264, EncoderRefused, Quality, even, stream_encoder
from penstock_video.sinks.jsonl import Folder, SourceFolders, end_all, made_folder
from penstock_video.sinks.nvenc import EncoderChoice
from penstock_video.sinks.osd import Osd
from penstock_video.sinks.schemas import iso_time
from penstock_video.types import ByteArray, EncoderKind, Frame, FrameResult


@dataclass(frozen=True, slots=True)
class Segment:
    """number: increases by one. has_gap: times or sizes differ from the one before. time: of its first picture."""

    number: int
    duration_s: float
    time: str
    has_gap: bool = False

    @property
    def name(self) -> str:
        return f"segment-{self.number}.ts"


class Playlist:
    """The newest segments. The target duration is fixed by the first segment. A removed segment stays on disk for its
    own duration plus that of the longest list that contained it (RFC 8216, 6.2.2)."""

    def __init__(self, *, segment_s: float, list_size: int) -> None:
        self._segment_s = segment_s
        self._list_size = max(1, list_size)
        self._segments: deque[Segment] = deque()
        self._behind: deque[tuple[Segment, float]] = deque()  # with the time from which it may be deleted
        self._gaps_behind = 0
        self._published_s = self._longest_list_s = 0.0
        self.target_s = math.ceil(segment_s)

    def fit(self, step_s: float) -> None:
        """Allows for frames step_s apart, which make longer segments. No effect after the first segment."""
        if not self._published_s:
            self.target_s = max(self.target_s, round(self._segment_s + step_s))

    def has_room(self, duration_s: float) -> bool:
        """Whether a segment may have this duration."""
        return round(duration_s) <= self.target_s

    def add(self, segment: Segment) -> list[str]:
        """Adds a segment; returns names of files that may be deleted."""
        self._segments.append(segment)
        self._published_s += segment.duration_s
        gone = [self._segments.popleft() for _ in range(len(self._segments) - self._list_size)]
        self._longest_list_s = max(self._longest_list_s, sum(one.duration_s for one in self._segments))
        for one in gone:
            self._gaps_behind += one.has_gap
            self._behind.append((one, self._published_s + one.duration_s + self._longest_list_s))
        deletable = []
        while self._behind and self._behind[0][1] <= self._published_s:
            deletable.append(self._behind.popleft()[0].name)
        return deletable

    def text(self, *, is_over: bool = False) -> str:
        """The content of the playlist file."""
        first = self._segments[0].number if self._segments else 0
        lines = [
            "#EXTM3U",
            "#EXT-X-VERSION:6",
            f"#EXT-X-TARGETDURATION:{self.target_s}",
            f"#EXT-X-MEDIA-SEQUENCE:{first}",
            f"#EXT-X-DISCONTINUITY-SEQUENCE:{self._gaps_behind}",
            "#EXT-X-INDEPENDENT-SEGMENTS",
        ]
        for segment in self._segments:
            if segment.has_gap:
                lines.append("#EXT-X-DISCONTINUITY")
            lines += [f"#EXT-X-PROGRAM-DATE-TIME:{segment.time}", f"#EXTINF:{segment.duration_s:.3f},", segment.name]
        if is_over:
            lines.append("#EXT-X-ENDLIST")
        return "\n".join(lines) + "\n"


RETRY_S = 10.0
INDEX = "index.m3u8"
_OURS = (f"{INDEX}*", "segment-*.ts*")
_MUXER = {"mpegts_flags": "pat_pmt_at_frames", "flush_packets": "1"}  # a segment begins with its tables

log = structlog.get_logger(component="video")


@dataclass(frozen=True, slots=True)
class HlsOptions:
    """folder: of the playlists' folders. list_size: segments of a playlist. crf: of x264, and NVENC's quality."""

    folder: Folder
    segment_s: Annotated[float, Field(alias="segment-duration", ge=0.5, le=60)] = 2.0
    list_size: Annotated[int, Field(alias="list-size", ge=2, le=10_000)] = 6
    crf: Annotated[int, Field(ge=0, le=51)] = 25
    encoder: EncoderKind = EncoderKind.AUTO


class HlsSink:
    """A playlist in folder/hls for one source, in folder/SOURCE_ID/hls for each of several.

    Raises SinkFailed at once if the folder is not writable, or NVENC is asked for and absent. On a full disk, write
    raises SinkFailed once, counts lost segments in `lost` and retries after RETRY_S. If NVENC fails, x264 continues
    with the same frame after a discontinuity. Frames without a picture are skipped.
    """

    def __init__(
        self, options: HlsOptions, osd: Osd, *, is_single: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._osd = osd
        self._clock = clock
        self._folders = SourceFolders(made_folder(options.folder), is_single=is_single)
        self._encoders = EncoderChoice(options.encoder, "hls")
        self._streams: dict[str, LiveStream] = {}
        self._lost_of_ended = 0

    @property
    def lost(self) -> int:
        """Segments in no playlist."""
        return self._lost_of_ended + sum(stream.lost for stream in self._streams.values())

    def write(self, result: FrameResult) -> None:
        """Adds the frame's picture to its source's stream."""
        picture = self._osd.draw(result)
        if picture is None:
            return
        source_id = result.frame.source_id
        stream = self._streams.get(source_id)
        if stream is None:
            stream = LiveStream(self._folders.of(source_id) / "hls", self._options, self._encoders)
            self._streams[source_id] = stream
        stream.write(picture, result.frame, self._clock())

    def end_source(self, source_id: str) -> None:
        self._osd.drop_pictures(source_id)
        stream = self._streams.pop(source_id, None)
        if stream is None:
            return
        try:
            stream.close(self._clock())
        finally:
            self._lost_of_ended += stream.lost

    def close(self) -> None:
        """Ends every playlist. A second call does nothing."""
        end_all(self._streams, self.end_source)


class LiveStream:
    """One source's stream. Deletes an earlier one in the folder. Raises SinkFailed on a new failure."""

    def __init__(self, folder: Path, options: HlsOptions, encoders: EncoderChoice) -> None:
        self.folder = folder
        self._options = options
        self._encoders = encoders
        self._playlist = Playlist(segment_s=options.segment_s, list_size=options.list_size)
        self._outage = Outage(Backoff(RETRY_S, RETRY_S))
        self._is_clean = False
        self._number = int(time.time())  # segments after a restart get new names
        self._has_gap = False
        self._coder: _Coder | None = None

    @property
    def lost(self) -> int:
        """Segments in no playlist."""
        return self._outage.lost

    def write(self, picture: ByteArray, frame: Frame, now: float) -> None:
        """Encodes a picture; if it begins a segment, writes the one before."""
        coder = self._coder
        if coder is not None:
            is_next = coder.takes(frame, self._options.segment_s)
            if is_next:
                self._playlist.fit(frame.pts_s - coder.last.pts_s)
            if not (is_next and self._playlist.has_room(coder.duration_s(frame))):
                self._end_coder(now)
                self._has_gap = True
        try:
            segment = self._coder_for(frame).write(picture, frame)
        except EncoderRefused as refused:
            self._encoders.failed(refused)
            self._end_coder(now)
            self._has_gap = True
            segment = self._coder_for(frame).write(picture, frame)
        if segment is not None:
            self._store(segment, now)

    def close(self, now: float) -> None:
        """Writes the last segment and the end of the playlist."""
        self._end_coder(now)
        self._keep(now, lambda: self._put(INDEX, self._playlist.text(is_over=True).encode()))

    def _coder_for(self, frame: Frame) -> "_Coder":
        if self._coder is None:
            self._coder = self._encoders.open(lambda codec: _Coder(frame, self._options, codec))
        return self._coder

    def _end_coder(self, now: float) -> None:
        coder, self._coder = self._coder, None
        made = coder.close() if coder is not None else None
        if made is not None and made.content:
            self._store(made, now)

    def _store(self, made: "_Made", now: float) -> None:
        duration_s = min(made.duration_s, float(self._playlist.target_s))
        segment = Segment(self._number, duration_s, made.time, self._has_gap)
        self._number += 1
        self._has_gap = not self._keep(now, lambda: self._publish(segment, made.content))

    def _keep(self, now: float, write: Callable[[], None]) -> bool:
        if not self._outage.may_try(now):
            self._outage.lost += 1
            return False
        try:
            write()
        except OSError as error:
            self._outage.lost += 1
            if self._outage.failed(now):
                why = error.strerror or str(error)
                text = f"{self.folder}: {why}; HLS is off, tried again every {RETRY_S:g} s"
                self._has_gap = True
                raise SinkFailed(text) from error
            return False
        lost = self._outage.worked()
        if lost is not None:
            log.warning("hls is written again", folder=str(self.folder), lost_segments=lost)
        return True

    def _publish(self, segment: Segment, content: bytes) -> None:
        if not self._is_clean:
            self.folder.mkdir(parents=True, exist_ok=True)
            for pattern in _OURS:
                for path in self.folder.glob(pattern):
                    path.unlink(missing_ok=True)
            self._is_clean = True
        self._put(segment.name, content)
        for name in self._playlist.add(segment):
            (self.folder / name).unlink(missing_ok=True)
        self._put(INDEX, self._playlist.text().encode())

    def _put(self, name: str, content: bytes) -> None:
        path, beside = self.folder / name, self.folder / f"{name}.tmp"
        try:
            beside.write_bytes(content)
            os.replace(beside, path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise


@dataclass(frozen=True, slots=True)
class _Made:
    content: bytes
    duration_s: float
    time: str


class _Coder:
    """Encodes pictures of one size to whole segments. Raises EncoderRefused."""

    def __init__(self, frame: Frame, options: HlsOptions, codec: H264) -> None:
        self._shape = (frame.width, frame.height, frame.sample_aspect_ratio)
        self._block = _Block()
        self._container: OutputContainer = av.open(self._block, "w", format="mpegts", container_options=_MUXER)
        self._encoder = stream_encoder(
            self._container,
            even(frame.width, frame.height),
            Quality(options.crf, is_live=True),
            codec,
            key_every_s=options.segment_s,
            sample_aspect_ratio=frame.sample_aspect_ratio,
        )
        self._first, self.last = frame, frame

    def takes(self, frame: Frame, segment_s: float) -> bool:
        """Whether the frame continues the last one."""
        gap_s = frame.pts_s - self.last.pts_s
        shape = (frame.width, frame.height, frame.sample_aspect_ratio)
        return shape == self._shape and 0 < gap_s <= _longest_gap_s(segment_s)

    def duration_s(self, frame: Frame) -> float:
        """Duration of the segment that this frame ends or continues, in seconds."""
        return frame.pts_s - self._first.pts_s

    def write(self, picture: ByteArray, frame: Frame) -> _Made | None:
        """Encodes the picture. Returns the segment before it, if it begins one."""
        packets = self._encoder.encode(picture, frame.pts_s)
        made = None
        if any(packet.is_keyframe for packet in packets) and self._block.has_content:
            made = _Made(self._block.take(), frame.pts_s - self._first.pts_s, iso_time(self._first.captured_unix_s))
            self._first = frame
        self._container.mux(packets)
        self.last = frame
        return made

    def close(self) -> _Made:
        """Returns the last segment; empty if nothing was encoded."""
        self._container.mux(self._encoder.flush())
        self._container.close()
        duration_s = self.last.pts_s - self._first.pts_s + self._encoder.step_s
        return _Made(self._block.take(), duration_s, iso_time(self._first.captured_unix_s))


def _longest_gap_s(segment_s: float) -> float:
    """Longest gap between two frames of a segment; after a longer one the stream continues with a discontinuity."""
    return max(5.0, 3 * segment_s)


class _Block:
    """Output of the muxer since it was last taken."""

    def __init__(self) -> None:
        self._content = bytearray()

    @property
    def has_content(self) -> bool:
        return bool(self._content)

    def write(self, block: bytes) -> int:
        self._content += block
        return len(block)

    def take(self) -> bytes:
        content = bytes(self._content)
        self._content.clear()
        return content
