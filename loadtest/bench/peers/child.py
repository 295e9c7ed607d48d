"""A server as a child: started with a deadline, its output in a file, ended with all that it has started."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from loadtest.bench.peers.contenders import SERVERS, Contender, Place
from loadtest.bench.peers.model import ServedModel
from loadtest.bench.peers.servers.detector import ENVIRONMENT_NAME

END_TIMEOUT_S = 15.0
ORPHAN_TIMEOUT_S = 1.0  # LitServe leaves its workers to themselves at SIGTERM
_TAIL_LINES = 12
_SHARED_MEMORY = "/dev/shm/"


class NotServing(Exception):
    """A server did not come up or does not answer; the message is a sentence with what it printed last."""


@dataclass(frozen=True, slots=True)
class Child:
    """A server that was started. It may not be ready yet. known: every process of it that was ever seen."""

    contender: Contender
    port: int
    process: subprocess.Popen[bytes]
    output: Path
    known: set[psutil.Process] = field(default_factory=set)

    @property
    def url(self) -> str:
        """Where it listens or will listen."""
        return f"http://127.0.0.1:{self.port}"

    def failure(self, what: str) -> NotServing:
        """The error that says what happened, and the end of what it printed."""
        lines = self.output.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return NotServing(f"{self.contender.name} {what}; it printed last: {' | '.join(lines) or 'nothing'}")

    def family(self) -> list[psutil.Process]:
        """The process and all its descendants that live; those, too, that lost their parent since an earlier call."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            self.known.update((root, *root.children(recursive=True)))
        return [process for process in self.known if process.is_running()]


@contextlib.contextmanager
def running(contender: Contender, model: ServedModel) -> Iterator[Child]:
    """The server for as long as the block, in an empty folder of its own. Raises NotServing, NotPrepared."""
    folder = Path(tempfile.mkdtemp(prefix="peer-"))
    child = None
    try:
        child = _start(contender, Place(_free_port(), folder, model))
        yield child
    finally:
        if child:
            end(child)
        shutil.rmtree(folder, ignore_errors=True)


def end(child: Child) -> None:
    """SIGTERM to the process, SIGKILL to whatever of its family outlives that; its shared memory goes, too.

    Takes as long as the process needs, 15 s at most.
    """
    family = child.family()
    shared = _shared_memory(family)
    child.process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.process.wait(END_TIMEOUT_S)
    _, alive = psutil.wait_procs(family, timeout=ORPHAN_TIMEOUT_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    with contextlib.suppress(ProcessLookupError):  # whoever joined the group since
        os.killpg(child.process.pid, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=END_TIMEOUT_S)
    child.process.wait(END_TIMEOUT_S)
    for path in shared:
        path.unlink(missing_ok=True)


def _start(contender: Contender, place: Place) -> Child:
    output = place.folder / "output.log"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "PYTHON"))}
    ours = {
        ENVIRONMENT_NAME: place.model.card_json,
        "PEER_WORKERS": str(place.model.instances),
        "HOME": str(place.folder),
        "TMPDIR": str(place.folder),
    }
    if not contender.is_ours:
        ours["PYTHONPATH"] = str(SERVERS)
    command = contender.command(place)
    try:
        with output.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=place.folder,
                env={**kept, **ours, **contender.variables(place)},
                start_new_session=True,
            )
    except OSError as error:
        raise NotServing(f"{contender.name} cannot be started ({command[0]}: {error.strerror})") from error
    return Child(contender, place.port, process, output)


def _shared_memory(family: list[psutil.Process]) -> set[Path]:
    """The files under /dev/shm that these processes have mapped."""
    found = set()
    for process in family:
        with contextlib.suppress(psutil.Error, OSError):
            found |= {Path(m.path) for m in process.memory_maps() if m.path.startswith(_SHARED_MEMORY)}
    return {path for path in found if path.exists()}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
