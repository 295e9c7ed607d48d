"""A program that a bench starts: its output in a log file, and its end with everything that it started."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from loadtest.bench.wire import BadAnswer

CHECKOUT = Path(__file__).resolve().parents[2]
KILL_S = 10.0
_LAST_LINES, _LAST_CHARACTERS = 15, 1500


class Child:
    """A running program in a session of its own. It may not be ready yet; `end` ends it."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None,
        *, folder: Path = CHECKOUT,
    ) -> None:  # fmt: skip
        """name: in messages. folder: its working directory. Raises BadAnswer if it cannot be started."""
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("wb") as output:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ, cwd=folder,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise BadAnswer(f"{name} cannot be started ({command[0]}: {error.strerror})") from error
        self._known: set[psutil.Process] = set()

    def text(self) -> str:
        """Its output so far."""
        return self.log.read_text(errors="replace")

    def failure(self, what: str) -> BadAnswer:
        """The error, with the end of its output."""
        end = "\n".join(self.text().strip().splitlines()[-_LAST_LINES:])[-_LAST_CHARACTERS:]
        return BadAnswer(f"{self.name} {what}; its log ends:\n{end or '(empty)'}")

    def wait(self, is_ready: Callable[[], bool], until_s: float, pause_s: float = 0.1) -> None:
        """Until it is ready, or that moment of the monotonic clock. Raises BadAnswer, also if the program ends."""
        while not is_ready():
            self.family()
            if self.process.poll() is not None:
                raise self.failure(f"ended with {self.process.returncode} while it started")
            if time.monotonic() > until_s:
                raise self.failure("was not ready in time")
            time.sleep(pause_s)

    def family(self) -> list[psutil.Process]:
        """The process and its living descendants, also those that lost their parent since an earlier call."""
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            self._known.update((root, *root.children(recursive=True)))
        return [process for process in self._known if process.is_running()]

    def end(self, stop_s: float = 20.0, orphans_s: float = 0.0) -> None:
        """SIGTERM to the process, after stop_s SIGKILL to its family. orphans_s: wait for its children before that."""
        family = self.family()
        self.process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(stop_s)
            psutil.wait_procs(family, timeout=orphans_s)
        finally:  # also if Ctrl-C interrupts the wait
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            with suppress(ProcessLookupError):  # processes that joined the group since
                os.killpg(self.process.pid, signal.SIGKILL)
        psutil.wait_procs(family, timeout=KILL_S)
        self.process.wait(KILL_S)
