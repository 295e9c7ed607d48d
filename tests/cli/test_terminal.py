"""What commands print of names that other people chose."""

import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from penstock.cli.build import print_engine
from penstock.cli.terminal import Failed, print_failure, printable, stoppable
from penstock.engines.ort_serving.placement import Precision
from penstock.models.tensorrt_rtx.build import BuiltEngine
from penstock.models.tensorrt_rtx.layers import EngineLayer, FusionTable, OnnxNode

EVIL = "a\x1b[31m\x1b]0;title\x07\x9b2J\u202e"


def test_name_cannot_move_the_cursor_or_write_the_title() -> None:
    """Escape sequences, one-byte controls and right-to-left marks are shown as text; blanks and letters stay."""
    assert printable(f"  {EVIL}é") == r"  a\x1b[31m\x1b]0;title\x07\x9b2J\u202eé"


def test_engine_of_a_model_with_a_hostile_name_is_shown_as_text() -> None:
    """In the summary, in the table and in the paths; square brackets are no markup."""
    node = OnnxNode("n", f"[bold]{EVIL}[/bold]")
    table = FusionTable(1, (EngineLayer("layer", "conv", (node,), ()),), 0, {EVIL: 1})
    shapes = {f"x{EVIL}": ((1, 3), (8, 3))}
    built = BuiltEngine((8, 9), Precision.FP32, "1.7", "0" * 64, 1, 1.0, shapes, table)
    written = io.StringIO()
    print_engine(Console(file=written, width=200), EVIL, built, Path(f"/models/{EVIL}.onnx"))
    text = written.getvalue()
    assert all(sign.isprintable() or sign == "\n" for sign in text)
    assert r"[bold]a\x1b[31m" in text
    assert text.count(r"\x1b]0;title") == 6


def test_failure_with_a_long_name_is_one_short_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A node of an ONNX file may have a name of megabytes."""
    print_failure(f"operator {'N' * 1_000_000}\nis not supported")
    text = capsys.readouterr().err
    assert len(text) < 8100
    assert text.endswith("N… (1000026 characters)\n")


STUCK = """
import ctypes, os, signal, sys, threading
from penstock.cli import terminal
terminal._GRACE_S = 0.1
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
with terminal.stoppable("nothing was written", runs_models=True):
    libc.pthread_mutex_lock(mutex)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    libc.pthread_mutex_lock(mutex)  # as a library that never returns
"""


def test_interrupt_ends_a_command_whose_library_never_returns() -> None:
    """Ctrl-C stops `models optimize` while ONNX Runtime computes an endless loop."""
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "penstock: stopped: nothing was written\n")


def test_interrupt_in_time_leaves_no_thread_descriptor_or_handler(capsys: pytest.CaptureFixture[str]) -> None:
    """The block's own cleaning runs, and may take longer than a library that is stuck."""
    cleaned: list[bool] = []

    def interrupted() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            cleaned.append(True)

    def state() -> tuple[object, ...]:
        return threading.active_count(), len(os.listdir("/proc/self/fd")), signal.getsignal(signal.SIGINT)

    before = state()
    with pytest.raises(Failed) as failed, stoppable("all is clean", runs_models=True):
        interrupted()
    with stoppable("unused", runs_models=True):
        pass
    assert (failed.value.exit_code, cleaned) == (130, [True])
    assert capsys.readouterr().err == "penstock: stopped: all is clean\n"
    assert state() == before
