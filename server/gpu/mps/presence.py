"""Whether NVIDIA's MPS control daemon is there, asked without CUDA, without a process and without waiting."""

import socket
import time
from collections.abc import Callable
from pathlib import Path

PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"  # NVIDIA's variable, by which the daemon and its clients find each other
BELIEVED_S = 30.0  # each look writes two lines into the daemon's log


def daemon_listens(pipe_directory: Path) -> bool:
    """Whether somebody takes connections on the daemon's control socket. Returns at once.

    A dead daemon leaves its files behind, and connecting is refused. One that is stopped, as by SIGSTOP, listens until
    its queue of connections is full.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.setblocking(False)  # a Unix socket connects at once, or is refused, or would wait for a full queue
            probe.connect(str(pipe_directory / "control"))
    except OSError:
        return False
    return True


class DaemonSight:
    """What was seen of the daemon, at most 30 s ago: a scrape may ask as often as it likes."""

    def __init__(self, pipe_directory: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._pipe_directory = pipe_directory
        self._clock = clock
        self._looked_at: float | None = None
        self._is_up = False

    def is_up(self) -> bool:
        """Whether it listened when it was last looked for."""
        now = self._clock()
        if self._looked_at is None or now - self._looked_at >= BELIEVED_S:
            self._looked_at, self._is_up = now, daemon_listens(self._pipe_directory)
        return self._is_up
