"""What the tests of the supervisor share: a watcher of what it tells, and eyes on what is left of a Triton."""

import asyncio
import contextlib
import os
import re
import select
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from penstock.engines.run_directory import RunDirectory, claim_run_directory, reap, region_prefix
from penstock.engines.triton.endpoints import TritonListeners
from penstock.engines.triton.runtime import Launch
from penstock.engines.triton.supervisor import (
    EngineState,
    EngineStatus,
    RestartBackoff,
    TritonOptions,
    TritonSupervisor,
)
from penstock.gateway.workers.running_stacks import reachable_folder

WAIT_S = 60.0


class Watcher:
    """Takes statuses and log entries, and waits for them."""

    def __init__(self) -> None:
        self.statuses: list[EngineStatus] = []
        self.log: list[str] = []
        self.once_down: Callable[[], object] | None = None  # called while the supervisor waits for its next start
        self._news: asyncio.Queue[EngineStatus] = asyncio.Queue()

    def on_status(self, status: EngineStatus) -> None:
        self.statuses.append(status)
        if status.state is EngineState.RESTARTING and self.once_down is not None:
            act, self.once_down = self.once_down, None
            act()
        self._news.put_nowait(status)

    def emit(self, level: int, event: str, /, **fields: str | int) -> None:
        self.log.append(event)

    async def until(self, state: EngineState) -> EngineStatus:
        """The next status of that state."""
        async with asyncio.timeout(WAIT_S):
            while True:
                status = await self._news.get()
                if status.state is state:
                    return status
                if status.state is EngineState.FAILED:
                    raise AssertionError(f"failed: {status.reason}; its log: {self.log}")

    @property
    def stub_pids(self) -> list[int]:
        """What the fake's children were."""
        return [int(line.split()[1]) for line in self.log if re.fullmatch(r"stub \d+", line)]


@contextlib.contextmanager
def claimed_options(tmp_path: Path) -> Iterator[tuple[RunDirectory, TritonOptions]]:
    """A claimed run directory, Triton's listeners and an empty repository; Triton leaves nothing behind afterwards."""
    run_dir, _ = claim_run_directory(tmp_path / "runs")
    models = tmp_path / "models"
    models.mkdir()
    with run_dir:
        yield run_dir, TritonOptions(run_dir.engine_id, (models,), TritonListeners(reachable_folder(run_dir.path)))
        reap(run_dir.engine_id)


def quick() -> RestartBackoff:
    """A back-off for tests of what is restarted, not of when."""
    return RestartBackoff(first_s=0.01, cap_s=0.02)


@contextlib.asynccontextmanager
async def supervised(launch: Launch, options: TritonOptions, watcher: Watcher) -> AsyncIterator[TritonSupervisor]:
    """A supervisor at work, stopped at the end."""
    process = TritonSupervisor(launch, options, emit=watcher.emit, on_status=watcher.on_status, backoff=quick())
    task = asyncio.create_task(process.run())
    try:
        yield process
    finally:
        await process.stop(5.0)
        await task


def is_gone(pid: int, within_s: float = 0.0) -> bool:
    """Whether the process ended in that time; an unreaped zombie has."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        return bool(poller.poll(within_s * 1000))
    finally:
        os.close(handle)


def listening(folder: Path) -> list[str]:
    """The names of the Unix sockets in the folder that accept connections."""
    return [path.name for path in folder.iterdir() if path.is_socket() and _accepts(path)]


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


def regions_of(engine_id: str) -> list[Path]:
    """The engine's shared memory."""
    return list(Path("/dev/shm").glob(f"{region_prefix(engine_id)}*"))
