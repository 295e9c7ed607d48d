"""NVML asked from a process of its own: what that process does is the outcome, whatever it does."""

import subprocess
import sys
import time
from typing import Any

import msgspec
import pytest

from penstock.gpu import nvml
from penstock.gpu.nvml import ChildProcessFailed, GpuDevice, NvmlOutcome, NvmlReading, read_cards, run_json_child


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


def test_process_that_cannot_be_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is stuck in its driver stays until that lets it go; who asked goes on."""
    monkeypatch.setattr(nvml, "_REAP_S", 0.1)
    started: list[subprocess.Popen[bytes]] = []
    kill = subprocess.Popen.kill

    def unkillable(child: "subprocess.Popen[bytes]") -> None:
        started.append(child)

    monkeypatch.setattr(subprocess.Popen, "kill", unkillable)
    began = time.monotonic()
    with pytest.raises(ChildProcessFailed, match=r"0\.1 s") as late:
        run_json_child((sys.executable, "-I", "-c", "import signal; signal.pause()"), dict[str, Any], 0.1)
    assert late.value.is_late
    assert time.monotonic() - began < 5.0
    kill(started[0])
    assert started[0].wait(10) < 0


def test_program_that_is_not_there_is_no_answer() -> None:
    """In the system's words."""
    with pytest.raises(ChildProcessFailed, match="No such file"):
        run_json_child(("/nowhere/program",), dict[str, Any], 1.0)
