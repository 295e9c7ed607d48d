"""Whether NVENC is here: asked of a process that may hang, crash or babble."""

import sys
from pathlib import Path

import av
import pytest

from penstock_video.sinks import encoder as nvenc
from penstock_video.sinks.encoder import (
    H264,
    Encoder,
    EncoderRefused,
    NvencAnswer,
    Quality,
    ask_nvenc,
    lone_encoder,
    try_nvenc,
)

HERE = (Path(__file__),)  # a device file that is there

# What FFmpeg logs of a card without NVENC, as its nvenc.c has it.
LOG_OF_NONE = [
    (av.logging.VERBOSE, "h264_nvenc", "[ GPU #0 - < NVIDIA H200 > has Compute SM 9.0 ]\n"),
    (av.logging.ERROR, "h264_nvenc", "OpenEncodeSessionEx failed: unsupported device (2): (no details)\n"),
    (av.logging.FATAL, "h264_nvenc", "No capable devices found\n"),
]


def asked(program: str, timeout_s: float = 30.0) -> NvencAnswer:
    """What is made of a program that stands in for the trial."""
    return ask_nvenc(timeout_s, command=(sys.executable, "-c", program), devices=HERE)


def test_nvenc_without_a_card_is_not_asked(tmp_path: Path) -> None:
    """Without the driver's device no process is started."""
    answer = ask_nvenc(command=("/no/such/program",), devices=(tmp_path / "nvidiactl",))
    assert answer == NvencAnswer(why_not="no NVIDIA card is here")


def test_nvenc_answer_of_the_trial_is_taken() -> None:
    """The card's name, or why not, as the trial's one line says it."""
    assert asked("""print('{"card": "NVIDIA L4"}')""") == NvencAnswer(card="NVIDIA L4")


def test_nvenc_trial_that_hangs_is_ended() -> None:
    """A driver that never answers costs its deadline, and is the reason."""
    answer = asked("import time; time.sleep(600)", timeout_s=0.2)
    assert answer.why_not == "the driver took longer than 0.2 s"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os; os.abort()", "its trial ended with -6"),
        ("print('Traceback')", "its trial ended with 0"),
        ("raise SystemExit(3)", "its trial ended with 3"),
    ],
)
def test_nvenc_trial_that_crashes_is_a_no(program: str, said: str) -> None:
    """A driver that takes its process down does not take the program with it."""
    assert asked(program).why_not == said


def test_nvenc_trial_that_cannot_start_is_a_no() -> None:
    """As with too many processes."""
    answer = ask_nvenc(command=("/no/such/program",), devices=HERE)
    assert answer.why_not == "its trial does not start: No such file or directory"


def test_nvenc_trial_says_nothing_on_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    """FFmpeg's own log of what failed stays in the trial; its reason is in the answer."""
    answer = ask_nvenc(devices=HERE)
    if not answer.why_not:
        pytest.skip(f"{answer.card} has NVENC")
    assert answer.why_not != ""
    assert capfd.readouterr() == ("", "")


def test_nvenc_demands_hold_of_x264() -> None:
    """A live encoder gives each packet at once and key frames where they are asked for: x264 does, here for real."""
    assert nvenc._faults_of(lone_encoder(nvenc.SIZE, Quality(is_live=True), H264.X264)) == ""


def test_nvenc_that_holds_packets_back_is_a_no() -> None:
    """An encoder that looks ahead would make HLS segments begin with the wrong frame."""
    fault = nvenc._faults_of(lone_encoder(nvenc.SIZE, Quality(is_live=False), H264.X264))
    assert fault == "it gave 0 packets for picture 0, not one"


def test_nvenc_that_ignores_key_frames_is_a_no() -> None:
    """HLS cuts at the key frames that it asks for; here x264 is not asked for the second one."""
    encoder = lone_encoder(nvenc.SIZE, Quality(is_live=True), H264.X264)
    encoder.pictures._next_key = 1 << 60
    assert nvenc._faults_of(encoder) == "picture 2 was to be a key frame"


class Logged:
    """A stand-in for av.logging.Capture, of a card without NVENC."""

    def __init__(self, *, local: bool) -> None: ...

    def __enter__(self) -> list[tuple[int, str, str]]:
        return LOG_OF_NONE

    def __exit__(self, *failure: object) -> None: ...


def test_nvenc_of_a_card_without_one_names_the_card_and_ffmpegs_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads the answer knows which card it was, and what FFmpeg said."""

    def refuse(size: tuple[int, int], quality: Quality, codec: H264) -> Encoder:
        raise EncoderRefused("Generic error in an external library")

    monkeypatch.setattr(av.logging, "Capture", Logged)
    monkeypatch.setattr(av.logging, "set_level", lambda level: None)
    monkeypatch.setattr(nvenc, "lone_encoder", refuse)
    answer = try_nvenc()
    assert answer.card == "NVIDIA H200"
    assert answer.why_not.startswith("OpenEncodeSessionEx failed: unsupported device (2)")
