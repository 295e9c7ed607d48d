"""The thread for calls that may never come back."""

import subprocess
import sys
import threading
import time

import pytest

from penstock_video.infer.gpu_client import Copier

STUCK = """
import time
from penstock_video.infer.gpu_client import Copier
Copier("card").submit(time.sleep, 60)
"""


def test_calls_come_back_in_order_with_what_they_gave_or_raised() -> None:
    """On one thread, which ends behind them."""
    copier, seen = Copier("card"), []
    futures = [copier.submit(seen.append, number) for number in range(3)]
    failed, cancelled = copier.submit(int, "no number"), copier.submit(time.sleep, 0)
    futures.append(copier.submit(threading.current_thread))
    cancelled.cancel()
    thread = futures[-1].result(5.0)
    copier.shutdown()
    assert isinstance(thread, threading.Thread)
    thread.join(5.0)
    assert (seen, thread.name, thread.is_alive()) == ([0, 1, 2], "card", False)
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result(5.0)


def test_program_ends_while_a_call_does_not() -> None:
    """An executor's thread would be waited for."""
    assert subprocess.run([sys.executable, "-c", STUCK], timeout=20.0, check=False).returncode == 0
