"""Decode processes: started without a shell, ended for good, and reaped; and the line to one that is a source's own."""

import os
import signal
import subprocess
from contextlib import suppress

from deepstream_pipeline.sources.line import BrokenPromise, Line
from deepstream_pipeline.sources.messages import Start

__all__ = ["BrokenPromise", "DecodeProcess", "Running"]

_LAST_WORDS_BYTES = 65_536


class Running:
    """A process, from the moment that this is made. Raises OSError where it cannot be started, and leaves nothing then.

    descriptors: it is given them, and their numbers as its last arguments. Its standard error goes to a pipe that
    nobody reads while it runs and that loses what does not fit. In a session of its own: Ctrl-C in a terminal is for
    the parent, which ends its children in order.
    """

    def __init__(self, command: tuple[str, ...], descriptors: tuple[int, ...]) -> None:
        self._stderr, stderr = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._process = subprocess.Popen(
                (*command, *(str(descriptor) for descriptor in descriptors)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=descriptors,
                start_new_session=True,
            )
        except BaseException:
            os.close(self._stderr)
            raise
        finally:
            os.close(stderr)
        self.pid = self._process.pid

    def kill(self) -> None:
        """It, and whatever it started, whether it runs, hangs or is stopped."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def exit_text(self) -> str | None:
        """How it ended, as "was ended by SIGSEGV", reaped; None while it runs. The first time with its last words."""
        status = self._process.poll()
        if status is None:
            return None
        if status < 0:
            return f"was ended by {_signal_name(-status)}"
        words = self._last_words()
        return f"ended with status {status}" + (f": {words}" if words else "")

    def is_reaped(self, timeout_s: float) -> bool:
        """Whether it is over within the time; its state is taken from the system then."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode is not None

    def close(self) -> None:
        """Its descriptor, once."""
        os.close(self._stderr)

    def _last_words(self) -> str:
        with suppress(BlockingIOError):
            lines = os.read(self._stderr, _LAST_WORDS_BYTES).decode(errors="replace").strip().splitlines()
            return lines[-1].strip() if lines else ""
        return ""


class DecodeProcess(Line):
    """A source's own process. It runs from the moment that this is made. Raises OSError, and leaves nothing then."""

    def __init__(self, command: tuple[str, ...], start: Start, name: str) -> None:
        super().__init__(start, name)
        try:
            self._running = Running(command, (self._theirs.fileno(), self._ring_fd))
        except BaseException:
            self.socket.close()
            raise
        finally:
            self._handed_over()
        self.pidfd = _pidfd(self._running.pid)
        self.flush()

    @property
    def pid(self) -> int:
        return self._running.pid

    def kill(self) -> None:
        self._running.kill()

    def condemn(self) -> None:
        self._running.kill()

    def exit_text(self) -> str | None:
        return self._running.exit_text()

    def is_reaped(self, timeout_s: float) -> bool:
        return self._running.is_reaped(timeout_s)

    def close(self) -> None:
        super().close()
        self._running.close()


def _pidfd(pid: int) -> int:
    """A descriptor that is readable once the process is over; -1 where the system has none."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
