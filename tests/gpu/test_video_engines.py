"""What a card decodes, asked in a process of its own; the driver's two libraries are stand-ins here."""

import ctypes
import sys
from typing import Any

import msgspec
import pytest

from penstock.gpu import video_engines
from penstock.gpu.nvml import ChildProcessFailed, read_cards
from penstock.gpu.video_engines import Codec, EngineOutcome, VideoEngines, query_driver, read_engines


class FakeCuda:
    """libcuda's four functions that make a context current. fails: the one that answers 2 (out of memory)."""

    def __init__(self, fails: str = "") -> None:
        self._fails = fails

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 2 if name == self._fails else 0


class FakeCuvid:
    """cuvidGetDecoderCaps of a card that decodes H.264 and not HEVC; laid out by offset, as the header has it."""

    def cuvidGetDecoderCaps(self, caps: Any) -> int:
        content = ctypes.cast(caps, ctypes.POINTER(ctypes.c_ubyte * 88)).contents
        codec, chroma, depth = (int.from_bytes(bytes(content[at : at + 4]), "little") for at in (0, 4, 8))
        assert (chroma, depth) == (1, 0)
        if codec == 4:
            content[24], content[25] = 1, 7
            for at, value in ((28, 4096), (32, 4080)):
                content[at : at + 4] = list(value.to_bytes(4, "little"))
        return 0


def answered_by(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Lets this program stand in for the one that asks."""
    monkeypatch.setattr(video_engines, "_PROGRAM", (sys.executable, "-I", "-c", program))


def test_ask_driver_reads_what_the_card_decodes() -> None:
    """Engines and the largest picture of each codec that the video program takes to it."""
    assert query_driver(FakeCuda(), FakeCuvid()) == VideoEngines(
        EngineOutcome.ANSWERED, codecs=(Codec("H.264", 7, 4096, 4080), Codec("HEVC", 0))
    )


def test_ask_driver_call_that_fails_is_named() -> None:
    """With CUDA's number for why."""
    answer = query_driver(FakeCuda("cuDevicePrimaryCtxRetain"), FakeCuvid())
    assert answer == VideoEngines(EngineOutcome.FAILED, "cuDevicePrimaryCtxRetain answers 2")


def test_read_engines_passes_on_what_the_process_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer comes through the pipe as it was made."""
    answer = VideoEngines(EngineOutcome.ANSWERED, codecs=(Codec("HEVC", 3, 8192, 8192),), has_nvjpeg=True)
    answered_by(monkeypatch, f"import sys; sys.stdout.buffer.write({msgspec.json.encode(answer)!r})")
    assert read_engines() == answer


@pytest.mark.parametrize(
    ("is_late", "outcome"), [(True, EngineOutcome.TIMED_OUT), (False, EngineOutcome.FAILED)], ids=["hangs", "dies"]
)
def test_read_engines_process_that_hangs_or_dies_is_an_outcome(
    monkeypatch: pytest.MonkeyPatch, is_late: bool, outcome: EngineOutcome
) -> None:
    """A driver that never answers, or ends its process, is a finding with the reason, and no exception."""

    def fail(*_: object) -> VideoEngines:
        raise ChildProcessFailed("why", is_late=is_late)

    monkeypatch.setattr(video_engines, "run_json_child", fail)
    assert read_engines() == VideoEngines(outcome, "why")


def test_read_engines_here_answers() -> None:
    """The real program says something of this machine, whether it has a card or none."""
    assert read_engines().outcome in (EngineOutcome.NO_CUDA, EngineOutcome.NO_LIBRARY, EngineOutcome.ANSWERED)


@pytest.mark.gpu
def test_read_engines_of_a_card_knows_h264_and_hevc() -> None:
    """Every card that Penstock is for decodes both, in pictures of 4096 pixels at least."""
    answer = read_engines()
    assert answer.outcome is EngineOutcome.ANSWERED, answer
    assert all(codec.engines > 0 and codec.width >= 4096 for codec in answer.codecs), (answer, read_cards())
