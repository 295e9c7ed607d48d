"""The video program's part of a card: what it decodes, encodes, and what is missing for it."""

import msgspec
import pytest

from penstock.doctor import gpu as video
from penstock.doctor.finding import Severity
from penstock.doctor.gpu import VideoFacts
from penstock.gpu.nvml import GpuDevice
from penstock.gpu.video_engines import Codec, EngineOutcome, VideoEngines
from tests.doctor.machines import pick

H264, HEVC = Codec("H.264", 7, 4096, 4096), Codec("HEVC", 7, 8192, 8192)
ALL = VideoEngines(EngineOutcome.ANSWERED, codecs=(H264, HEVC), has_nvjpeg=True, has_nvrtc=True)
MADE = "make gpu"


@pytest.mark.parametrize(
    ("facts", "status", "found", "advice"),
    [
        (VideoFacts(ALL), Severity.OK, "7 engines: H.264 to 4096x4096, HEVC to 8192x8192, 8 bit 4:2:0", ""),
        (VideoFacts(msgspec.structs.replace(ALL, has_nvrtc=False)), Severity.NOTE, "libnvrtc is not installed", MADE),
        (VideoFacts(ALL, video.PACKAGES), Severity.NOTE, "cuda-bindings is not installed", MADE),
        (
            VideoFacts(msgspec.structs.replace(ALL, has_nvrtc=False), video.PACKAGES),
            Severity.NOTE,
            "cuda-bindings and libnvrtc are not installed",
            MADE,
        ),
        (
            VideoFacts(msgspec.structs.replace(ALL, codecs=(Codec("H.264", 1, 4096, 4096), Codec("HEVC", 0)))),
            Severity.OK,
            "1 engine: H.264 to 4096x4096, 8 bit",
            "",
        ),
        (VideoFacts(VideoEngines(EngineOutcome.ANSWERED, codecs=(Codec("H.264", 0),))), Severity.OK, "neither", ""),
        (
            VideoFacts(VideoEngines(EngineOutcome.NO_LIBRARY)),
            Severity.NOTE,
            "libnvcuvid.so.1 is not",
            "libnvidia-decode",
        ),
        (
            VideoFacts(VideoEngines(EngineOutcome.NO_LIBRARY), (), "docker"),
            Severity.NOTE,
            "libnvcuvid",
            "utility,video",
        ),
        (VideoFacts(VideoEngines(EngineOutcome.NO_CUDA), (), "docker"), Severity.NOTE, "libcuda.so.1", "utility,video"),
        (VideoFacts(VideoEngines(EngineOutcome.TIMED_OUT, "10 s")), Severity.WARNING, "within 10 s", "Xid"),
        (VideoFacts(VideoEngines(EngineOutcome.FAILED, "cuInit answers 2")), Severity.NOTE, "cuInit answers 2", "smi"),
    ],
)
def test_nvdec_each_state_has_its_own_finding(facts: VideoFacts, status: Severity, found: str, advice: str) -> None:
    """What keeps the video program from the card is named with its remedy; nothing of it keeps a stack from serving."""
    finding = pick(video.video_findings(facts), "video.nvdec")
    assert (finding.status, found in finding.found, advice in finding.advice) == (status, True, True), finding
    assert bool(finding.advice) == (status is not Severity.OK)


def test_nvdec_without_a_card_is_one_line() -> None:
    """Nothing is asked, and nothing is missing."""
    (finding,) = video.no_card_findings()
    assert (finding.id, finding.status, finding.advice) == ("video.nvdec", Severity.OK, "")
    assert finding.found == "no NVIDIA GPU: the video program decodes on the CPU"


def test_nvjpeg_that_is_missing_says_how_to_get_it() -> None:
    """It comes with the other packages."""
    there, missing = (
        pick(video.video_findings(VideoFacts(engines)), "video.nvjpeg")
        for engines in (ALL, VideoEngines(EngineOutcome.NO_LIBRARY))
    )
    assert (there.status, missing.status) == (Severity.OK, Severity.NOTE)
    assert MADE in missing.advice


def test_packages_that_are_not_installed_are_named() -> None:
    """By this Python's own list, without importing them."""
    assert video.missing_of(("msgspec", "no-such-package-of-anybody")) == ("no-such-package-of-anybody",)


@pytest.mark.parametrize(
    ("capabilities", "found"),
    [
        ([(9, 0), (9, 0)], "H200 has no video encoder: annotated video is encoded on the CPU"),
        ([(9, 0), (8, 9)], "L4: this kind of GPU has a video encoder; the video program tries it"),
    ],
)
def test_nvenc_is_found_by_the_kind_of_the_cards(capabilities: list[tuple[int, int]], found: str) -> None:
    """One card of several is enough."""
    cards = [
        GpuDevice(index, "L4" if capability == (8, 9) else "H200", capability, 1 << 34, 0)
        for index, capability in enumerate(capabilities)
    ]
    assert pick(video.video_findings(VideoFacts(ALL), cards), "video.nvenc").found == found
