"""NVENC or x264: who chooses, what is refused, and what happens when NVENC fails later.

No card is here: NVENC's stand-in is x264 under its name, which opens, gives up or breaks off as a test says.
"""

import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from av.container import OutputContainer
from structlog.testing import capture_logs

from penstock_video.errors import SinkFailed
from penstock_video.interfaces import Sink
from penstock_video.sinks import encoder_choice as encoders
from penstock_video.sinks import hls, rtsp_out, video_file
from penstock_video.sinks.encoder import (
    H264,
    Encoder,
    EncoderKind,
    EncoderRefused,
    NvencAnswer,
    Packets,
    Quality,
    ask_nvenc,
    lone_encoder,
    stream_encoder,
)
from penstock_video.sinks.encoder_choice import RETRY_S, Encoders
from penstock_video.sinks.hls import HlsOptions, HlsSink
from penstock_video.sinks.osd import Osd, OsdOptions
from penstock_video.sinks.rtsp_out import RtspOutOptions, RtspOutSink
from penstock_video.sinks.video_file import AnnotatedOptions, AnnotatedSink
from penstock_video.types import ByteArray, FrameResult
from tests.deepstream_pipeline.clips import number_of, numbered_picture
from tests.deepstream_pipeline.sinks.results import result
from tests.deepstream_pipeline.sinks.videos import read_video

PLAIN = OsdOptions(has_boxes=False, has_labels=False, has_trails=False, has_rules=False, has_title=False)
NONE = NvencAnswer(card="NVIDIA H200", why_not="OpenEncodeSessionEx failed: unsupported device (2)")
HERE = NvencAnswer(card="NVIDIA L4")
SWALLOWING = (sys.executable, "-c", "import sys\nwhile sys.stdin.buffer.read(65536): pass")
FRAMES = 25

Made = Callable[[Path, EncoderKind, Callable[[], float]], Sink]
SINKS: dict[str, Made] = {
    "mp4": lambda folder, kind, clock: AnnotatedSink(
        AnnotatedOptions(folder, encoder=kind), Osd(PLAIN), is_single=True, clock=clock
    ),
    "hls": lambda folder, kind, clock: HlsSink(
        HlsOptions(folder, segment_s=1.0, list_size=10, encoder=kind), Osd(PLAIN), is_single=True, clock=clock
    ),
    "rtsp": lambda folder, kind, clock: RtspOutSink(
        RtspOutOptions("rtsp://127.0.0.1:1", encoder=kind), Osd(PLAIN), is_single=True, clock=clock, command=SWALLOWING
    ),
}


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        """The time now."""
        return self.now


class Nvenc:
    """The stand-in. sessions: that open in all. frames: after which each breaks off."""

    def __init__(self) -> None:
        self.sessions = 1 << 30
        self.frames = 1 << 30
        self.opened = 0
        self.codecs: list[H264] = []  # that were opened, in order

    def stream(
        self, container: OutputContainer, size: tuple[int, int], quality: Quality, codec: H264, shape: Fraction
    ) -> Any:
        """In the place of stream_encoder."""
        live = replace(quality, is_live=True)  # NVENC holds no packet back
        return self._opened(codec, lambda: stream_encoder(container, size, live, H264.X264, shape))

    def lone(self, size: tuple[int, int], quality: Quality, codec: H264) -> Any:
        """In the place of lone_encoder."""
        return self._opened(codec, lambda: lone_encoder(size, quality, H264.X264))

    def _opened(self, codec: H264, make: Callable[[], Encoder]) -> Any:
        if codec is H264.NVENC and len(self.codecs) >= self.sessions:
            raise EncoderRefused("out of memory")
        self.codecs.append(codec)
        return Session(make(), self.frames) if codec is H264.NVENC else make()


class Session:
    """An encoder that breaks off after so many frames."""

    def __init__(self, encoder: Encoder, frames: int) -> None:
        self.pictures, self.flush = encoder.pictures, encoder.flush
        self._encoder, self._left = encoder, frames

    def encode(self, picture: ByteArray, pts_s: float) -> Packets:
        """As the encoder does it, or EncoderRefused."""
        if self._left == 0:
            raise EncoderRefused("generic error")
        self._left -= 1
        return self._encoder.encode(picture, pts_s)


@pytest.fixture
def nvenc(monkeypatch: pytest.MonkeyPatch) -> Nvenc:
    """A card with NVENC, as the sinks see it."""
    stand_in = Nvenc()
    monkeypatch.setattr(encoders, "nvenc_here", lambda: NvencAnswer(card="NVIDIA L4"))
    for module, name, made in (
        (video_file, "stream_encoder", stand_in.stream),
        (hls, "stream_encoder", stand_in.stream),
        (rtsp_out, "lone_encoder", stand_in.lone),
    ):
        monkeypatch.setattr(module, name, made)
    return stand_in


def numbered(number: int, source_id: str = "cam") -> FrameResult:
    """A result whose picture tells its number."""
    frame_result = result(number, size=(160, 96), source_id=source_id)
    return replace(frame_result, frame=replace(frame_result.frame, image=numbered_picture(number, 160, 96)))


def pictures_of(folder: Path) -> list[list[int]]:
    """The numbers in each video file, oldest first, or in the playlist."""
    index = folder / "hls" / "index.m3u8"
    names = [index] if index.exists() else sorted(folder.glob("annotated*.mp4"), key=lambda path: path.stat().st_mtime)
    return [[number_of(picture) for picture in read_video(path).pictures] for path in names]


CHOICES = {
    "auto, NVENC": (EncoderKind.AUTO, HERE, H264.NVENC),
    "auto, none": (EncoderKind.AUTO, NONE, H264.X264),
    "cpu, NVENC": (EncoderKind.CPU, HERE, H264.X264),
    "nvenc, NVENC": (EncoderKind.NVENC, HERE, H264.NVENC),
}


@pytest.mark.parametrize("case", CHOICES)
def test_encoders_choose_by_kind_and_card(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """auto is NVENC where there is one, cpu never, nvenc always."""
    kind, answer, codec = CHOICES[case]
    monkeypatch.setattr(encoders, "nvenc_here", lambda: answer)
    assert Encoders(kind, "mp4", clock=Clock()).codec is codec


def test_encoders_of_the_cpu_ask_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says cpu waits for no driver."""
    monkeypatch.setattr(encoders, "nvenc_here", lambda: pytest.fail("asked"))
    Encoders(EncoderKind.CPU, "mp4", clock=Clock())


def test_encoders_say_at_start_who_encodes_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line of the log a sink: the encoder, the card, or why it is not NVENC."""
    with capture_logs() as logs:
        for answer in (HERE, NONE):
            monkeypatch.setattr(encoders, "nvenc_here", lambda answer=answer: answer)
            Encoders(EncoderKind.AUTO, "mp4", clock=Clock())
    first, second = logs
    assert (first["sink"], first["encoder"], first["card"]) == ("mp4", "h264_nvenc", "NVIDIA L4")
    assert (second["sink"], second["encoder"], second["why_not_nvenc"]) == ("mp4", "libx264", NONE.why_not)


@pytest.mark.parametrize("name", SINKS)
def test_sink_set_to_use_nvenc_without_one_is_refused_at_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence has the sink, the card, FFmpeg's reason, which cards have none, and what to say instead."""
    monkeypatch.setattr(encoders, "nvenc_here", lambda: NONE)
    with pytest.raises(SinkFailed) as failed:
        SINKS[name](tmp_path, EncoderKind.NVENC, Clock())
    assert failed.value.message == (
        f"the {name} sink's encoder is nvenc, and NVENC does not open on NVIDIA H200: OpenEncodeSessionEx failed: "
        "unsupported device (2); A100, H100, H200 and B200 have none; say encoder: auto, or cpu"
    )


@pytest.mark.parametrize("name", SINKS)
def test_sink_with_nvenc_uses_it(name: str, tmp_path: Path, nvenc: Nvenc) -> None:
    """Each stream is opened with it."""
    sink = SINKS[name](tmp_path, EncoderKind.AUTO, Clock())
    for number in range(FRAMES):
        sink.write(numbered(number))
    sink.close()
    assert nvenc.codecs == [H264.NVENC]


@pytest.mark.parametrize("name", SINKS)
def test_sink_without_a_free_session_uses_the_cpu_with_one_warning(name: str, tmp_path: Path, nvenc: Nvenc) -> None:
    """Consumer cards limit sessions: the streams beyond them are encoded by x264, and it is reported once."""
    nvenc.sessions = 1
    sink = SINKS[name](tmp_path, EncoderKind.AUTO, Clock())
    with capture_logs() as logs:
        for number, source_id in itertools.product(range(FRAMES), ("a", "b", "c")):
            sink.write(numbered(number, source_id))
    sink.close()
    assert nvenc.codecs == [H264.NVENC, H264.X264, H264.X264]
    warnings = [log for log in logs if log["log_level"] == "warning"]
    assert [log["why"] for log in warnings] == ["NVENC opens for no further stream (out of memory)"]


BROKEN = {
    "mp4": [list(range(10)), list(range(10, FRAMES))],  # annotated.mp4 and annotated-2.mp4
    "hls": [list(range(FRAMES))],  # one playlist
}


@pytest.mark.parametrize("name", BROKEN)
def test_sink_whose_nvenc_breaks_off_goes_on_with_the_cpu(name: str, tmp_path: Path, nvenc: Nvenc) -> None:
    """No picture is lost: a file is followed by another, a playlist has a discontinuity."""
    nvenc.frames = 10
    sink = SINKS[name](tmp_path, EncoderKind.AUTO, Clock())
    for number in range(FRAMES):
        sink.write(numbered(number))
    sink.close()
    assert pictures_of(tmp_path) == BROKEN[name]
    assert nvenc.codecs == [H264.NVENC, H264.X264]
    if name == "hls":
        assert (tmp_path / "hls" / "index.m3u8").read_text().count("#EXT-X-DISCONTINUITY\n") == 1


def test_rtsp_sink_whose_nvenc_breaks_off_begins_again(tmp_path: Path, nvenc: Nvenc) -> None:
    """The stream is pushed anew, by x264; the picture between is lost and counted."""
    nvenc.frames = 10
    clock = Clock()
    sink = RtspOutSink(RtspOutOptions("rtsp://127.0.0.1:1"), Osd(PLAIN), clock=clock, command=SWALLOWING)
    for number in range(FRAMES):
        sink.write(numbered(number))
    assert (nvenc.codecs, sink.lost) == ([H264.NVENC, H264.X264], 1)
    sink.close()


@pytest.mark.parametrize("name", SINKS)
@pytest.mark.parametrize("failing", ["sessions", "frames"])
def test_sink_that_must_use_nvenc_fails_and_tries_again(name: str, failing: str, tmp_path: Path, nvenc: Nvenc) -> None:
    """Without a session, or with one that broke off, pictures are lost, counted and reported; it is retried later."""
    setattr(nvenc, failing, 0)
    clock = Clock()
    sink = SINKS[name](tmp_path, EncoderKind.NVENC, clock)
    for number in range(3):
        with pytest.raises(SinkFailed, match=r"tried again every 10 s; encoder: auto would go on with the CPU"):
            sink.write(numbered(number))
    assert getattr(sink, "lost") == 3  # noqa: B009  no part of the protocol
    setattr(nvenc, failing, 1 << 30)
    clock.now += RETRY_S
    for number in range(3, FRAMES):
        sink.write(numbered(number))
    sink.close()
    assert set(nvenc.codecs) == {H264.NVENC}
    assert name == "rtsp" or pictures_of(tmp_path)[-1] == list(range(3, FRAMES))


@pytest.mark.parametrize("name", SINKS)
def test_sink_whose_card_lied_uses_the_cpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FFmpeg's own h264_nvenc, which does not open here: nothing is lost, open or on the terminal."""
    if not ask_nvenc().why_not:
        pytest.skip("there is an NVENC here")
    monkeypatch.setattr(encoders, "nvenc_here", lambda: NvencAnswer(card="a card that lies"))
    before = len(os.listdir("/proc/self/fd"))
    sink = SINKS[name](tmp_path, EncoderKind.AUTO, Clock())
    for number in range(FRAMES):
        sink.write(numbered(number))
    sink.close()
    assert getattr(sink, "lost") == 0  # noqa: B009  no part of the protocol
    assert len(os.listdir("/proc/self/fd")) == before
    assert name == "rtsp" or pictures_of(tmp_path) == [list(range(FRAMES))]


def test_quality_of_nvenc_holds_what_the_sinks_need() -> None:
    """No B-frames, no packet held back, key frames that players can begin with, a quality that is never automatic."""
    for is_live in (True, False):
        options = Quality(0, is_live=is_live).options(H264.NVENC)
        needed = {"bf": "0", "delay": "0", "zerolatency": "1", "forced-idr": "1", "rc": "vbr", "cq": "1"}
        assert needed.items() <= options.items()
