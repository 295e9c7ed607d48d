"""A driver asked from a process of its own: an answer, or why there is none, in time."""

import subprocess
import sys
import time
from typing import Any

import pytest

from penstock.gpu import nvml as child_answer
from penstock.gpu.nvml import ChildProcessFailed, run_json_child


def test_process_that_cannot_be_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is stuck in its driver stays until that lets it go; who asked goes on."""
    monkeypatch.setattr(child_answer, "_REAP_S", 0.1)
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
