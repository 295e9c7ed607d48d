"""A source's packets and pictures, in their order. One thread uses a decoder; its process is killed where it hangs."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import av
from av.error import EOFError, FFmpegError, InvalidDataError
from av.video.codeccontext import VideoCodecContext
from av.video.stream import VideoStream

from deepstream_pipeline.decode.damage import Damage, Verdict
from deepstream_pipeline.decode.failures import failure_of
from deepstream_pipeline.decode.opening import DecodeOptions, open_container, pictures_of, set_threads
from deepstream_pipeline.decode.pictures import upright_size
from deepstream_pipeline.decode.recording import VideoPacket
from deepstream_pipeline.decode.timeline import Timeline
from deepstream_pipeline.decode.uri import UriKind, is_live, kind_of, redacted
from deepstream_pipeline.errors import DecodeError, PipelineError, StreamEnded

# Where seeking is by an index; elsewhere it guesses places by times, which a joined stream tells twice.
_SEEKABLE = ("mov", "matroska", "avi")
MOST_BAD_PACKETS = 200  # in a row, without a frame: it is no stream of pictures any more
_BAD_THAT_LOOK = 3  # in a row, at most, whether the stream has another codec now
_NEARLY_S = 2.0  # before the end that a stream gave: its sound may be longer than its pictures
_VIDEO_OF = r"Stream #0:{index}\D.*?Video: (\w+)"


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """What a stream is. width, height: upright. fps: as it says of itself, 0 where it does not. frames_total,
    duration_s: of what has an end, where they are known: a file, or what an RTSP server plays of one."""

    width: int
    height: int
    fps: float
    codec: str
    is_live: bool
    frames_total: int | None = None
    duration_s: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """One decoded frame. pts_s: rises strictly. is_dropped: it builds on packets that were lost; not to be shown.

    is_new: it is the first of other facts (size, codec, rate) than the picture before, or of a stream that began anew.
    """

    frame: av.VideoFrame
    pts_s: float
    is_corrupt: bool = False
    is_dropped: bool = False
    is_new: bool = False


class Decoder:
    """An opened source. Packets come by `packets`, and `decode` makes pictures of each, so that both can be kept."""

    def __init__(self, uri: str, options: DecodeOptions, first_pts_s: float = 0.0) -> None:
        """Opens it. Raises SourceNotAllowed, SourceRefused, SourceUnavailable, DecodeError."""
        self._uri, self._options = uri, options
        self._kind = kind_of(uri)
        self._damage = Damage()
        self._failed = 0  # packets in a row
        self._open()
        self._timeline = Timeline(first_pts_s, 1.0 / self.facts.fps if self.facts.fps else 0.04)

    @property
    def bad_packets(self) -> int:
        """How many were damaged, or could not be decoded."""
        return self._damage.bad_packets

    @property
    def is_played_out(self) -> bool:
        """Whether it said how long it is, and its pictures came to there."""
        if self.facts.duration_s is None or self._span_s is None:
            return False
        return self._span_s[1] - self._span_s[0] >= self.facts.duration_s - _NEARLY_S

    @property
    def stream(self) -> VideoStream:
        """Of whose packets a copy can be written (a recording's template)."""
        return self._stream

    def packets(self) -> Iterator[VideoPacket]:
        """Each of the stream, until its end, the last ones empty. May be called again after an error.

        Raises SourceUnavailable when nothing comes in time, DecodeError when nothing can be read any more.
        """
        while True:
            try:
                yield from self._container.demux(self._stream)
            except InvalidDataError:  # a damaged container: the next packet may be whole
                self._count_failure()
                continue
            except FFmpegError as error:
                raise failure_of(error, self._uri, self._kind, is_opening=False) from None
            return

    def decode(self, packet: VideoPacket) -> list[Picture]:
        """The pictures that came out with this packet, often none, or one. Raises DecodeError where none ever will."""
        if packet.is_corrupt:  # its frame, where one comes of it, is marked, too
            self._damage.bad_packets += 1
        try:
            frames = self._context.decode(packet if packet.size else None)
        except EOFError:
            return []
        except InvalidDataError:
            before = self._change_codec()
            if before is not None:
                return before + self.decode(packet)
            self._count_failure()
            return []
        except FFmpegError as error:
            self._count_failure()
            if self._failed == 1:
                return []
            raise self._hopeless(error.strerror or type(error).__name__) from None
        return self._pictures(frames)

    def rewind(self) -> None:
        """To its beginning, without opening it again where that is sure to work. The next picture is_new.

        Raises as the constructor does.
        """
        try:
            if not self._container.format.name.startswith(_SEEKABLE):
                raise StreamEnded("it cannot seek")
            self._container.seek(self._container.start_time or 0)
            self._context.flush_buffers()
        except (FFmpegError, StreamEnded):
            self.close()
            self._open()
        self._timeline.begin()
        self._damage.begin()
        self._is_new, self._failed = True, 0

    def close(self) -> None:
        """Let go of the source."""
        self._container.close()

    def _open(self) -> None:
        self._container = open_container(self._uri, self._options)
        try:
            self._stream = pictures_of(self._container, self._uri)
            self._context: VideoCodecContext = self._stream.codec_context
            has_end = self._kind is not UriKind.RTSP and bool(self._container.duration)
            self._is_live = is_live(self._uri) and not has_end
            self._span_s: tuple[float, float] | None = None  # of its pictures, as they are timed
            set_threads(self._context, self._options.threads, is_live=self._is_live)
            self.facts = self._facts(self._context.width, self._context.height)
            self._refuse_large()
        except PipelineError:
            self.close()
            raise
        self._shape = (self._context.width, self._context.height, "")
        self._is_new = False

    def _pictures(self, frames: list[av.VideoFrame]) -> list[Picture]:
        if frames:
            self._failed = 0
        return [self._picture(frame) for frame in frames]

    def _picture(self, frame: av.VideoFrame) -> Picture:
        verdict = self._damage.judge(is_key=frame.key_frame, is_corrupt=frame.is_corrupt)
        is_new, self._is_new = self._is_changed(frame) or self._is_new, False
        raw_s = _seconds(frame)
        if raw_s is not None:
            self._span_s = (raw_s if self._span_s is None else self._span_s[0], raw_s)
        return Picture(
            frame,
            self._timeline.stamp(raw_s),
            is_corrupt=verdict is Verdict.CORRUPT,
            is_dropped=verdict is Verdict.DROPPED,
            is_new=is_new,
        )

    def _is_changed(self, frame: av.VideoFrame) -> bool:
        """Whether it is of another size or colour format than the one before, told in facts then."""
        shape = (frame.width, frame.height, frame.format.name)
        if shape == self._shape:
            return False
        is_first = not self._shape[2]
        before, self._shape = self._shape, shape
        width, height = upright_size(frame)
        if (width, height) == (self.facts.width, self.facts.height) and (is_first or before[:2] == shape[:2]):
            return False
        self.facts = self._facts(width, height)
        self._refuse_large()
        return not is_first

    def _facts(self, width: int, height: int) -> StreamFacts:
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
        )

    def _refuse_large(self) -> None:
        pixels, most = self.facts.width * self.facts.height, self._options.max_pixels
        if most and pixels > most:
            size = f"{self.facts.width}x{self.facts.height}"
            raise DecodeError(f"{redacted(self._uri)} has pictures of {size} (at most {most} pixels are taken)")

    def _count_failure(self) -> None:
        self._damage.packet_failed()
        self._failed += 1
        if self._failed > MOST_BAD_PACKETS:
            raise self._hopeless(f"{self._failed} packets in a row")

    def _hopeless(self, reason: str) -> DecodeError:
        return DecodeError(f"{redacted(self._uri)} cannot be decoded any more ({reason})")

    def _change_codec(self) -> list[Picture] | None:
        """Decode from now on as the stream says it is coded now; what was left in the decoder. None: nothing is new."""
        name = self._codec_now() if self._failed < _BAD_THAT_LOOK else ""
        if not name or name == self._context.codec.canonical_name:
            return None
        context = av.CodecContext.create(name, "r")
        if not isinstance(context, VideoCodecContext):
            return None
        set_threads(context, self._options.threads, is_live=self._is_live)
        before = self._flushed()
        self._context = context
        self.facts = self._facts(self.facts.width, self.facts.height)
        self._damage.begin()
        self._is_new = True
        return before

    def _flushed(self) -> list[Picture]:
        try:
            return self._pictures(self._context.decode(None))
        except FFmpegError:
            return []

    def _codec_now(self) -> str:
        """What FFmpeg prints of the stream: PyAV tells its codec as it was when it was opened."""
        level = av.logging.get_level()
        av.logging.set_level(av.logging.INFO)
        try:
            printed: str = self._container.dumps_format()  # type: ignore[attr-defined]  # not in its stubs
        finally:
            av.logging.set_level(level)
        found = re.search(_VIDEO_OF.format(index=self._stream.index), printed)
        return found[1] if found else ""


def _seconds(frame: av.VideoFrame) -> float | None:
    if frame.pts is None or not frame.time_base:
        return None
    return float(frame.pts * frame.time_base)
