"""NVENC or x264: what is chosen, what is refused, and what happens when NVENC fails in the middle of a film.

No card with NVENC is here. Its stand-in is x264 under its name, which opens, is refused or fails as a test says.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from av.container import OutputContainer
from structlog.testing import capture_logs

from penstock_video.errors import SinkFailed
from penstock_video.interfaces import Sink
from penstock_video.settings.loader import Flags, read_settings
from penstock_video.sinks import hls, nvenc, rtsp_out, video_file
from penstock_video.sinks.encoder import H264, EncoderRefused, Packets, Quality, lone_encoder, stream_encoder
from penstock_video.sinks.hls import HlsOptions, HlsSink
from penstock_video.sinks.nvenc import TRIAL_SIZE, EncoderChoice, NvencTrial, ask_nvenc, fault_of
from penstock_video.sinks.osd import Osd
from penstock_video.sinks.rtsp_out import RtspOutOptions, RtspOutSink
from penstock_video.sinks.video_file import AnnotatedOptions, AnnotatedSink
from penstock_video.types import ByteArray, EncoderKind
from tests.deepstream_pipeline.clips import number_of, numbered_picture
from tests.deepstream_pipeline.sinks.results import PLAIN, numbered
from tests.deepstream_pipeline.sinks.videos import read_video

NONE = NvencTrial("NVIDIA H200", "OpenEncodeSessionEx failed: unsupported device (2)")
HERE = NvencTrial("NVIDIA L4")
SWALLOWING = (sys.executable, "-c", "import sys\nwhile sys.stdin.buffer.read(65536): pass")
DEVICE = (Path(__file__),)  # in the place of the driver's
FRAMES = 25

SINKS: dict[str, Callable[[Path, EncoderKind], Sink]] = {
    "mp4": lambda folder, kind: AnnotatedSink(AnnotatedOptions(folder, encoder=kind), Osd(PLAIN), is_single=True),
    "hls": lambda folder, kind: HlsSink(HlsOptions(folder, 1.0, 10, encoder=kind), Osd(PLAIN), is_single=True),
    "rtsp": lambda _, kind: RtspOutSink(
        RtspOutOptions("rtsp://127.0.0.1:1", encoder=kind), Osd(PLAIN), is_single=True, command=SWALLOWING
    ),
}


class FakeNvenc:
    """The stand-in. sessions: that open in all. frames: after which each fails. opened: the codecs, in order."""

    def __init__(self) -> None:
        self.sessions = self.frames = 1 << 30
        self.opened: list[H264] = []

    def stream(
        self, container: OutputContainer, size: tuple[int, int], quality: Quality, codec: H264 = H264.X264, **more: Any
    ) -> Any:
        """In the place of stream_encoder."""
        return self._opened(codec, quality, lambda asked: stream_encoder(container, size, asked, **more))

    def lone(self, size: tuple[int, int], quality: Quality, codec: H264 = H264.X264) -> Any:
        """In the place of lone_encoder."""
        return self._opened(codec, quality, lambda asked: lone_encoder(size, asked))

    def _opened(self, codec: H264, quality: Quality, make: Callable[[Quality], Any]) -> Any:
        if codec is H264.NVENC and self.opened.count(H264.NVENC) >= self.sessions:
            raise EncoderRefused("out of memory")
        self.opened.append(codec)
        if codec is H264.X264:
            return make(quality)
        return FailingEncoder(make(Quality(quality.crf, is_live=True)), self.frames)  # it holds no packet back


class FailingEncoder:
    """An encoder that fails after so many frames."""

    def __init__(self, encoder: Any, frames: int) -> None:
        self._encoder, self._left = encoder, frames

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def encode(self, picture: ByteArray, pts_s: float) -> Packets:
        """The encoder's packets, or EncoderRefused."""
        if self._left == 0:
            raise EncoderRefused("generic error")
        self._left -= 1
        packets: Packets = self._encoder.encode(picture, pts_s)
        return packets


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvenc:
    """A card with NVENC, as the sinks see it."""
    stand_in = FakeNvenc()
    monkeypatch.setattr(nvenc, "nvenc_here", lambda: HERE)
    for module, name, made in (
        (video_file, "stream_encoder", stand_in.stream),
        (hls, "stream_encoder", stand_in.stream),
        (rtsp_out, "lone_encoder", stand_in.lone),
    ):
        monkeypatch.setattr(module, name, made)
    return stand_in


def written(sink: Sink, *source_ids: str) -> None:
    """A film of numbered pictures of each source."""
    for number in range(FRAMES):
        for source_id in source_ids:
            sink.write(numbered(number, source_id=source_id))
    sink.close()


def pictures_of(path: Path) -> list[int]:
    return [number_of(picture) for picture in read_video(path).pictures]


@pytest.mark.parametrize(
    ("kind", "trial", "codec"),
    [
        (EncoderKind.AUTO, HERE, H264.NVENC),
        (EncoderKind.AUTO, NONE, H264.X264),
        (EncoderKind.CPU, HERE, H264.X264),
        (EncoderKind.NVENC, HERE, H264.NVENC),
    ],
)
def test_encoder_is_chosen_by_kind_and_card(
    kind: EncoderKind, trial: NvencTrial, codec: H264, monkeypatch: pytest.MonkeyPatch
) -> None:
    """auto is NVENC where it encodes, cpu never asks for it."""
    asked: list[NvencTrial] = []
    monkeypatch.setattr(nvenc, "nvenc_here", lambda: (asked.append(trial), trial)[1])
    assert EncoderChoice(kind, "mp4").open(lambda chosen: chosen) is codec
    assert bool(asked) == (kind is not EncoderKind.CPU)


@pytest.mark.parametrize("name", SINKS)
def test_sink_that_must_use_nvenc_is_refused_on_a_card_without_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At start, with the card, FFmpeg's reason, which cards have none, and what to use."""
    monkeypatch.setattr(nvenc, "nvenc_here", lambda: NONE)
    with pytest.raises(SinkFailed) as refused:
        SINKS[name](tmp_path, EncoderKind.NVENC)
    assert refused.value.message == (
        f"the {name} sink's encoder is nvenc, and NVENC does not open on NVIDIA H200: OpenEncodeSessionEx failed: "
        "unsupported device (2); A100, H100, H200 and B200 have no video encoder; use encoder auto or cpu"
    )


def test_film_goes_on_in_a_second_file_when_nvenc_fails(tmp_path: Path, fake: FakeNvenc) -> None:
    """Both files play; together they have every frame once, also that at which it failed; the log says it once."""
    fake.frames = 7
    sink = SINKS["mp4"](tmp_path, EncoderKind.AUTO)
    with capture_logs() as logs:
        written(sink, "cam")
    assert pictures_of(tmp_path / "annotated.mp4") == list(range(7))
    assert pictures_of(tmp_path / "annotated-2.mp4") == list(range(7, FRAMES))
    assert fake.opened == [H264.NVENC, H264.X264]
    assert [line["reason"] for line in logs if line["log_level"] == "warning"] == ["NVENC failed: generic error"]
    assert sink.lost == 0  # type: ignore[attr-defined]  # of the sinks that can lose


def test_playlist_goes_on_after_a_discontinuity_when_nvenc_fails(tmp_path: Path, fake: FakeNvenc) -> None:
    """It has every frame once."""
    fake.frames = 7
    written(SINKS["hls"](tmp_path, EncoderKind.AUTO), "cam")
    assert pictures_of(tmp_path / "hls" / "index.m3u8") == list(range(FRAMES))
    assert (tmp_path / "hls" / "index.m3u8").read_text().count("#EXT-X-DISCONTINUITY\n") == 1


def test_stream_goes_on_when_nvenc_fails(tmp_path: Path, fake: FakeNvenc) -> None:
    """In the same push: no picture is lost, and x264 begins with a keyframe at the time of the frame that failed."""
    fake.frames = 7
    sink = SINKS["rtsp"](tmp_path, EncoderKind.AUTO)
    written(sink, "cam")
    assert fake.opened == [H264.NVENC, H264.X264]
    assert sink.lost == 0  # type: ignore[attr-defined]
    live = Quality(25, is_live=True)
    first = lone_encoder((64, 64), live)
    pictures = [numbered_picture(number, 64, 64) for number in range(4)]
    packets = [packet for number in range(3) for packet in first.encode(pictures[number], 5 + number / 10)]
    (packet,) = lone_encoder((64, 64), live).after(first).encode(pictures[3], 5.3)
    assert packet.is_keyframe
    assert [one.pts for one in (*packets, packet)] == [0, 9000, 18000, 27000]


def test_stream_for_which_the_card_has_no_session_is_encoded_by_the_cpu(tmp_path: Path, fake: FakeNvenc) -> None:
    """The others stay on the card."""
    fake.sessions = 1
    written(AnnotatedSink(AnnotatedOptions(tmp_path), Osd(PLAIN)), "a", "b")
    assert fake.opened == [H264.NVENC, H264.X264]
    assert [pictures_of(tmp_path / name / "annotated.mp4") for name in "ab"] == [list(range(FRAMES))] * 2


def test_trial_fails_here_with_ffmpegs_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without the driver's device no process is started; with one, FFmpeg's own log stays in the process."""
    assert ask_nvenc(program=("/nowhere",), devices=(tmp_path / "nvidiactl",)).why_not == "no NVIDIA GPU is here"
    trial = ask_nvenc(devices=DEVICE)
    if not trial.why_not:
        pytest.skip(f"{trial.card} has NVENC")
    assert "libcuda" in trial.why_not or "OpenEncodeSessionEx" in trial.why_not, trial
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import signal; signal.pause()", "the driver took longer than 0.5 s"),
        ("import os; os.abort()", "its trial failed: the process ended with -6"),
    ],
)
def test_trial_that_hangs_or_crashes_is_a_no(program: str, reason: str) -> None:
    """A broken driver costs the deadline at most."""
    asked = ask_nvenc(0.5, program=(sys.executable, "-I", "-S", "-c", program), devices=DEVICE)
    assert asked == NvencTrial(why_not=reason)


def test_trial_refuses_an_encoder_that_the_sinks_could_not_use() -> None:
    """Packets must come at once, and keyframes where they are requested: x264 does both when it is live."""
    assert fault_of(lone_encoder(TRIAL_SIZE, Quality(25, is_live=True))) == ""
    assert fault_of(lone_encoder(TRIAL_SIZE, Quality(25))) == "NVENC returned 0 packets for picture 0 instead of one"


def test_flag_chooses_the_encoder_of_every_sink(tmp_path: Path) -> None:
    """Over the file's; sinks that encode no video have none."""
    file = tmp_path / "v.yaml"
    file.write_text(
        "source: [{uri: 'rtsp://camera/1'}]\nprimary-gie: {model: street}\n"
        f"sink: [{{type: mp4, folder: {tmp_path}, encoder: nvenc}}, {{type: jsonl, folder: {tmp_path}}}]\n"
    )
    given, none = read_settings(file, Flags(encoder=EncoderKind.CPU)), read_settings(file)
    assert [getattr(sink, "encoder", "") for sink in given.sinks] == ["cpu", ""]
    assert [getattr(sink, "encoder", "") for sink in none.sinks] == ["nvenc", ""]
