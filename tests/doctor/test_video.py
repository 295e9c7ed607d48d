"""The video program's part of a card: what it decodes, encodes, and what is missing for it."""

import msgspec
import pytest

from server.doctor import video
from server.doctor.finding import Status
from server.doctor.video import VideoFacts
from server.gpu.video_engines import Codec, EngineOutcome, VideoEngines
from tests.doctor.machines import A100, H100, T4, V100, pick, reading

H264, HEVC = Codec("H.264", 7, 4096, 4096), Codec("HEVC", 7, 8192, 8192)
ALL = VideoEngines(EngineOutcome.ANSWERED, codecs=(H264, HEVC), has_nvjpeg=True, has_nvrtc=True)
MADE = "make gpu"


@pytest.mark.parametrize(
    ("facts", "status", "found", "advice"),
    [
        (VideoFacts(ALL), Status.OK, "7 engines: H.264 to 4096x4096, HEVC to 8192x8192, 8 bit 4:2:0", ""),
        (VideoFacts(msgspec.structs.replace(ALL, has_nvrtc=False)), Status.NOTE, "libnvrtc is not installed", MADE),
        (VideoFacts(ALL, ("PyNvVideoCodec",)), Status.NOTE, "PyNvVideoCodec is not installed", MADE),
        (VideoFacts(ALL, video.PACKAGES), Status.NOTE, "PyNvVideoCodec and cuda-bindings are not installed", MADE),
        (
            VideoFacts(msgspec.structs.replace(ALL, codecs=(Codec("H.264", 1, 4096, 4096), Codec("HEVC", 0)))),
            Status.OK,
            "1 engine: H.264 to 4096x4096, 8 bit",
            "",
        ),
        (VideoFacts(VideoEngines(EngineOutcome.ANSWERED, codecs=(Codec("H.264", 0),))), Status.OK, "neither", ""),
        (VideoFacts(VideoEngines(EngineOutcome.NO_LIBRARY)), Status.NOTE, "libnvcuvid.so.1 is not", "libnvidia-decode"),
        (VideoFacts(VideoEngines(EngineOutcome.NO_LIBRARY), (), "docker"), Status.NOTE, "libnvcuvid", "utility,video"),
        (VideoFacts(VideoEngines(EngineOutcome.NO_CUDA), (), "docker"), Status.NOTE, "libcuda.so.1", "utility,video"),
        (VideoFacts(VideoEngines(EngineOutcome.TIMED_OUT, "10 s")), Status.WARNING, "within 10 s", "Xid"),
        (VideoFacts(VideoEngines(EngineOutcome.FAILED, "cuInit answers 2")), Status.NOTE, "cuInit answers 2", "smi"),
    ],
)
def test_nvdec_each_way_to_it_is_told_apart(facts: VideoFacts, status: Status, found: str, advice: str) -> None:
    """What keeps the video program from the card is named with its remedy; nothing of it keeps a stack from serving."""
    finding = pick(video.findings_of(facts, reading(H100)), "video.nvdec")
    assert (finding.status, found in finding.found, advice in finding.advice) == (status, True, True), finding
    assert bool(finding.advice) == (status is not Status.OK)


def test_nvdec_without_a_card_is_one_line() -> None:
    """Nothing is asked, and nothing is missing."""
    (finding,) = video.no_card()
    assert (finding.id, finding.status, finding.advice) == ("video.nvdec", Status.OK, "")
    assert finding.found == "no NVIDIA GPU: the video program decodes on the CPU"


@pytest.mark.parametrize(("card", "has_one"), [(A100, False), (H100, False), (V100, True), (T4, True)])
def test_nvenc_is_told_by_the_kind_of_card(card: object, has_one: bool) -> None:
    """Cards of data centres since Ampere that are made for training have none, and nobody needs to look for it."""
    finding = pick(video.findings_of(VideoFacts(ALL), reading(card)), "video.nvenc")  # type: ignore[arg-type]
    assert (finding.status, "has none" in finding.found) == (Status.OK, not has_one)


def test_nvjpeg_that_is_missing_says_how_to_get_it() -> None:
    """It comes with the other packages."""
    there, missing = (
        pick(video.findings_of(VideoFacts(engines), reading(H100)), "video.nvjpeg")
        for engines in (ALL, VideoEngines(EngineOutcome.NO_LIBRARY))
    )
    assert (there.status, missing.status) == (Status.OK, Status.NOTE)
    assert MADE in missing.advice


def test_packages_that_are_not_installed_are_named() -> None:
    """By this Python's own list, without importing them."""
    assert video.missing_of(("msgspec", "no-such-package-of-anybody")) == ("no-such-package-of-anybody",)
