"""An MPS daemon of the bench's own, and who its clients are. What a stack does with MPS is server.gpu.mps."""

import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from loadtest.bench.wire import BadAnswer
from server.gpu.mps import PIPE_DIRECTORY, daemon_listens
from server.gpu.mps.control import PROGRAM as CONTROL
from server.gpu.mps.options import LIMIT_VARIABLES, LOG_DIRECTORY

THREAD_PERCENTAGE, _ = LIMIT_VARIABLES
START_S, ASK_S, QUIT_S = 20.0, 10.0, 5


class MpsDaemon:
    """A context: entered, the daemon takes clients that get `environ`."""

    def __init__(self, folder: Path, threads: int = 100) -> None:
        """folder: an empty one, its path short: a socket lies in it. threads: percent of a card's, for a client."""
        self.folder = folder
        self.environ = {PIPE_DIRECTORY: str(folder), LOG_DIRECTORY: str(folder)}
        if threads < 100:
            self.environ[THREAD_PERCENTAGE] = str(threads)

    def __enter__(self) -> Self:
        if shutil.which(CONTROL) is None:
            raise BadAnswer(f"{CONTROL} is not on PATH; it comes with NVIDIA's driver")
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "daemon.log").open("wb") as log:
            self.process = subprocess.Popen(
                [CONTROL, "-f"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | self.environ
            )
        until = time.monotonic() + START_S
        while not daemon_listens(self.folder):
            if self.process.poll() is not None or time.monotonic() > until:
                self.process.kill()
                self.process.wait()
                raise BadAnswer(f"{CONTROL} does not answer: {(self.folder / 'daemon.log').read_text()[-500:]}")
            time.sleep(0.05)
        return self

    def ask(self, command: str) -> str:
        """What the daemon says to it; empty where it does not."""
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                [CONTROL], input=command + "\n", capture_output=True, text=True, timeout=ASK_S,
                env=os.environ | self.environ,
            )  # fmt: skip
            return done.stdout.strip() if done.returncode == 0 else ""
        return ""

    def client_pids(self) -> list[int]:
        """The processes that are attached now."""
        servers = [word for word in self.ask("get_server_list").split() if word.isdecimal()]
        clients = [self.ask(f"get_client_list {server}").split() for server in servers]
        return sorted({int(word) for words in clients for word in words if word.isdecimal()})

    def __exit__(self, *_: object) -> None:
        self.ask(f"quit -t {QUIT_S}")
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(QUIT_S + 5)
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(QUIT_S)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
