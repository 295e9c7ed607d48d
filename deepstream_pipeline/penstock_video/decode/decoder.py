"""Reads a source's packets and pictures in order. A decoder belongs to one thread."""

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

import av
from av.error import FFmpegError, InvalidDataError
from av.video.codeccontext import VideoCodecContext
from av.video.stream import VideoStream

from penstock_video.decode.codec import (
    Codec,
    Decoded,
    MakeCodec,
    PacketRefused,
    SoftwareCodec,
    VideoPacket,
    orientation_of,
    seconds_of,
)
from penstock_video.decode.container import (
    DecodeOptions,
    failure_of,
    open_container,
    pictures_of,
    relay_for,
    set_threads,
)
from penstock_video.decode.timeline import Damage, PtsTimeline, Verdict
from penstock_video.decode.uri import UriKind, is_live, kind_of, redacted
from penstock_video.errors import DecodeError, PipelineError, StreamEnded
from penstock_video.types import DecoderKind, DevicePicture

# Formats that seek by an index; others guess positions from times, which repeat in a joined stream.
_SEEKABLE = ("mov", "matroska", "avi")
MOST_BAD_PACKETS = 200  # consecutive, without a frame: the stream has no pictures any more
_BAD_THAT_LOOK = 3  # consecutive packets that check whether the stream has another codec now
_NEARLY_S = 2.0  # before the stated end of a stream, whose audio may be longer
_FFMPEGS_LOG = threading.Lock()  # its level is process-wide
_VIDEO_OF = r"Stream #0:{index}\D.*?Video: (\w+)"


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """Properties of a stream. width, height: upright. fps: of the stream, 0 if unknown. frames_total, duration_s: of a
    file or a file played by an RTSP server, if known. decoder: CPU or NVDEC. sample_aspect_ratio: width by height of a
    pixel of the upright picture."""

    width: int
    height: int
    fps: float
    codec: str
    is_live: bool
    frames_total: int | None = None
    duration_s: float | None = None
    decoder: DecoderKind = DecoderKind.CPU
    sample_aspect_ratio: Fraction = Fraction(1)


class Picture(NamedTuple):
    """One decoded frame, valid until the next packet. pts_s: strictly increasing. time_s: the stream's seconds.
    is_dropped: it depends on lost packets; do not show it. is_new: size, codec or rate differ from the picture before,
    or the stream was restarted."""

    frame: av.VideoFrame | DevicePicture
    pts_s: float
    time_s: float | None = None
    is_corrupt: bool = False
    is_dropped: bool = False
    is_new: bool = False


class Decoder:
    """An opened source. `packets` reads packets, and `decode` makes pictures of each."""

    def __init__(
        self, uri: str, options: DecodeOptions, first_pts_s: float = 0.0, codecs: MakeCodec = SoftwareCodec
    ) -> None:
        """Raises SourceNotAllowed, SourceRefused, SourceUnavailable, DecodeError, and what `codecs` raises."""
        self._uri, self._options, self._codecs = uri, options, codecs
        self._kind = kind_of(uri)
        self._damage = Damage()
        self._failed = 0  # consecutive packets
        self._retired: Codec | None = None  # its last pictures may still be in use
        self._open()
        interval_s = 1.0 / self.facts.fps if self.facts.fps else 0.04
        self._timeline, self._arrivals = PtsTimeline(first_pts_s, interval_s), PtsTimeline(first_pts_s, interval_s)

    @property
    def bad_packets(self) -> int:
        """Number of packets that were damaged or could not be decoded."""
        return self._damage.bad_packets

    @property
    def is_played_out(self) -> bool:
        """Whether it has a duration, and was played to its end."""
        if self.facts.duration_s is None or self._span_s is None:
            return False
        return self._span_s[1] - self._span_s[0] >= self.facts.duration_s - _NEARLY_S

    @property
    def stream(self) -> VideoStream:
        """The stream, as a template for recordings of its packets."""
        return self._stream

    def packets(self) -> Iterator[VideoPacket]:
        """Packets until the end; the last are empty. Resumable after errors. Raises SourceUnavailable, DecodeError."""
        while True:
            try:
                yield from self._container.demux(self._stream)
            except InvalidDataError:  # a damaged container: the next packet may be valid
                self._count_failure()
                continue
            except IndexError:  # PyAV's, at the end, if streams were added meanwhile; this one's last packet was before
                return
            except FFmpegError as error:
                if self._relay is not None and self._relay.fault is not None:
                    raise self._relay.fault from None
                raise failure_of(error, self._uri, self._kind, is_opening=False) from None
            return

    def arrival_s(self, packet: VideoPacket) -> float | None:
        """When a camera would send the packet (increasing seconds), or None if empty. Call it once per packet."""
        if not packet.size:
            return None
        ticks = packet.pts if packet.dts is None else packet.dts
        return self._arrivals.stamp(seconds_of(ticks, packet.time_base))

    def decode(self, packet: VideoPacket) -> list[Picture]:
        """Pictures that this packet completed, often none or one. Raises DecodeError, NeedsCpu, GpuFull."""
        self._let_retired_go()
        if packet.is_corrupt:  # its frame, if any, is marked, too
            self._damage.bad_packets += 1
        return self._decode(packet)

    def rewind(self) -> None:
        """Seeks to the beginning, or reopens. The next picture is_new. Raises as the constructor does."""
        try:
            if not self._container.format.name.startswith(_SEEKABLE):
                raise StreamEnded("it cannot seek")
            self._container.seek(self._container.start_time or 0)
            self._codec.reset()
        except (FFmpegError, StreamEnded):
            self.close()
            self._open()
        self._timeline.begin()
        self._arrivals.begin()
        self._damage.begin()
        self._is_new, self._failed = True, 0

    def close(self) -> None:
        self._let_retired_go()
        self._codec.close()
        self._let_container_go()

    def _open(self) -> None:
        self._relay = relay_for(self._uri, self._options)
        try:
            self._container = open_container(self._uri, self._options, self._relay)
        except PipelineError:
            if self._relay is not None:
                self._relay.close()
            raise
        try:
            self._stream = pictures_of(self._container, self._uri)
            self._context: VideoCodecContext = self._stream.codec_context
            has_end = self._kind is not UriKind.RTSP and bool(self._container.duration)
            self._is_live = is_live(self._uri) and not has_end
            self._span_s: tuple[float, float] | None = None  # times of its pictures
            set_threads(self._context, self._options.threads, is_live=self._is_live)
            self._codec = self._codecs(self._stream, self._context)
        except PipelineError:
            self._let_container_go()
            raise
        try:
            self.facts = self._facts(self._context.width, self._context.height)
            self._refuse_large()
        except PipelineError:
            self.close()
            raise
        self._is_new, self._is_first = False, True

    def _decode(self, packet: VideoPacket) -> list[Picture]:
        try:
            decoded = self._codec.decode(packet if packet.size else None)
        except PacketRefused as refused:
            before = None if refused.is_fatal else self._change_codec()
            if before is not None:
                return before + self._decode(packet)
            self._count_failure()
            if refused.is_fatal and self._failed > 1:
                raise self._hopeless(refused.message) from None
            return []
        return self._pictures(decoded)

    def _pictures(self, decoded: list[Decoded]) -> list[Picture]:
        if decoded:
            self._failed = 0
        return [self._picture(one) for one in decoded]

    def _picture(self, decoded: Decoded) -> Picture:
        for _ in range(decoded.lost):
            self._damage.packet_failed()
        verdict = self._damage.judge(is_key=decoded.is_key, is_corrupt=decoded.is_corrupt)
        is_new, self._is_new = self._is_changed(decoded) or self._is_new, False
        raw_s = decoded.raw_s
        if raw_s is not None:
            self._span_s = (raw_s if self._span_s is None else self._span_s[0], raw_s)
        return Picture(
            decoded.frame,
            self._timeline.stamp(raw_s, time.monotonic() if self._is_live else None),
            raw_s,
            is_corrupt=verdict is Verdict.CORRUPT,
            is_dropped=verdict is Verdict.DROPPED,
            is_new=is_new,
        )

    def _is_changed(self, decoded: Decoded) -> bool:
        """Whether its size differs from the one before; if so, updates facts."""
        is_first, self._is_first = self._is_first, False
        if not is_first and (decoded.width, decoded.height) == (self.facts.width, self.facts.height):
            return False
        frame = decoded.frame
        orientation = frame.orientation if isinstance(frame, DevicePicture) else orientation_of(frame)
        self.facts = self._facts(decoded.width, decoded.height, is_transposed=orientation.is_transposed)
        self._refuse_large()
        return not is_first

    def _facts(self, width: int, height: int, *, is_transposed: bool = False) -> StreamFacts:
        shape = self._stream.sample_aspect_ratio or Fraction(1)
        rate: Fraction | None = self._stream.average_rate or self._stream.guessed_rate
        duration = self._container.duration
        return StreamFacts(
            width=width,
            height=height,
            fps=float(rate) if rate else 0.0,
            codec=self._context.name,
            is_live=self._is_live,
            frames_total=(self._stream.frames or None) if self._kind is UriKind.FILE else None,
            duration_s=duration / av.time_base if duration and duration > 0 else None,
            decoder=self._codec.kind,
            sample_aspect_ratio=1 / shape if is_transposed else shape,
        )

    def _refuse_large(self) -> None:
        pixels, most = self.facts.width * self.facts.height, self._options.max_pixels
        if most and pixels > most:
            size = f"{self.facts.width}x{self.facts.height}"
            raise DecodeError(f"{redacted(self._uri)} has pictures of {size} (at most {most} pixels are taken)")

    def _let_container_go(self) -> None:
        self._container.close()
        if self._relay is not None:
            self._relay.close()

    def _let_retired_go(self) -> None:
        if self._retired is not None:
            self._retired.close()
            self._retired = None

    def _count_failure(self) -> None:
        self._damage.packet_failed()
        self._failed += 1
        if self._failed > MOST_BAD_PACKETS:
            raise self._hopeless(f"{self._failed} packets in a row")

    def _hopeless(self, reason: str) -> DecodeError:
        return DecodeError(f"{redacted(self._uri)} cannot be decoded any more ({reason})")

    def _change_codec(self) -> list[Picture] | None:
        """Switches to the stream's new codec; returns pictures left in the decoder. None: no change."""
        name = self._codec_now() if self._failed < _BAD_THAT_LOOK else ""
        if not name or name == self._context.codec.canonical_name:
            return None
        context = av.CodecContext.create(name, "r")
        if not isinstance(context, VideoCodecContext):
            return None
        set_threads(context, self._options.threads, is_live=self._is_live)
        before = self._flushed()
        self._retired, self._context, self._codec = self._codec, context, self._codecs(self._stream, context)
        self.facts = replace(self.facts, codec=context.name, decoder=self._codec.kind)
        self._damage.begin()
        self._is_new = True
        if not before:  # a full GPU may need its decoder's memory for the next
            self._let_retired_go()
        return before

    def _flushed(self) -> list[Picture]:
        try:
            return self._pictures(self._codec.decode(None))
        except PacketRefused:
            return []

    def _codec_now(self) -> str:
        """The codec that FFmpeg prints, since PyAV keeps the first one."""
        with _FFMPEGS_LOG:
            level = av.logging.get_level()
            av.logging.set_level(av.logging.INFO)
            try:
                printed: str = self._container.dumps_format()  # type: ignore[attr-defined]  # not in its stubs
            finally:
                av.logging.set_level(level)
        found = re.search(_VIDEO_OF.format(index=self._stream.index), printed)
        return found[1] if found else ""
