"""NVML asked from a process of its own: what that process does is the outcome, whatever it does."""

import sys

import msgspec
import pytest

from penstock.gpu import nvml
from penstock.gpu.nvml import GpuDevice, NvmlOutcome, NvmlReading, read_cards


def answered_by(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Lets this program stand in for the one that asks NVML."""
    monkeypatch.setattr(nvml, "_PROGRAM", (sys.executable, "-I", "-c", program))


def test_read_cards_passes_on_what_the_process_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reading comes through the pipe as it was made."""
    card = GpuDevice(0, "NVIDIA H200", (9, 0), 150_000_000_000, 1 << 30, "DEFAULT", False, (7,))
    reading = NvmlReading(NvmlOutcome.ANSWERED, "", "580.159.03", (13, 0), (card,))
    answered_by(monkeypatch, f"import sys; sys.stdout.buffer.write({msgspec.json.encode(reading)!r})")
    assert read_cards() == reading


def test_read_cards_driver_hangs_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that never answers is ended at the deadline."""
    answered_by(monkeypatch, "import signal; signal.pause()")
    assert read_cards(timeout_s=0.2) == NvmlReading(NvmlOutcome.TIMED_OUT, "0.2 s")


@pytest.mark.parametrize(
    ("program", "detail"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "the process ended with -11"),
        ("raise OSError('no such driver')", "OSError: no such driver"),
    ],
)
def test_read_cards_process_dies_is_an_outcome(monkeypatch: pytest.MonkeyPatch, program: str, detail: str) -> None:
    """A library that ends its process ends that one only."""
    answered_by(monkeypatch, program)
    assert read_cards() == NvmlReading(NvmlOutcome.FAILED, detail)


def test_read_cards_here_answers() -> None:
    """The real program says something of this machine, whether it has a card or none."""
    reading = read_cards()
    assert reading.outcome in (NvmlOutcome.ANSWERED, NvmlOutcome.NO_LIBRARY, NvmlOutcome.NO_DRIVER), reading
    assert bool(reading.cards) <= (reading.outcome is NvmlOutcome.ANSWERED)
