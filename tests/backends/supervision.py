"""What the tests of the supervisor share: a watcher of what it tells, and eyes on what is left of a Triton."""

import asyncio
import contextlib
import os
import re
import select
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from server.backends.reaper import RunDirectory, claim_run_directory, reap, region_prefix
from server.backends.triton_backoff import RestartBackoff
from server.backends.triton_ports import pick_free_ports
from server.backends.triton_process import TritonOptions, TritonProcess
from server.backends.triton_runtime import Launch
from server.backends.triton_status import EngineState, EngineStatus

WAIT_S = 20.0


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
    """A claimed run directory, free ports and an empty repository; afterwards nothing of the engine is left."""
    run_dir, _ = claim_run_directory(tmp_path / "runs")
    models = tmp_path / "models"
    models.mkdir()
    http_port, grpc_port, metrics_port = pick_free_ports("127.0.0.1", 3)
    with run_dir:
        yield run_dir, TritonOptions(run_dir.engine_id, (models,), http_port, grpc_port, metrics_port)
        reap(run_dir.engine_id)


def quick() -> RestartBackoff:
    """A back-off for tests of what is restarted, not of when."""
    return RestartBackoff(first_s=0.01, cap_s=0.02)


@contextlib.asynccontextmanager
async def supervised(launch: Launch, options: TritonOptions, watcher: Watcher) -> AsyncIterator[TritonProcess]:
    """A supervisor at work, stopped at the end."""
    process = TritonProcess(launch, options, emit=watcher.emit, on_status=watcher.on_status, backoff=quick())
    task = asyncio.create_task(process.run())
    try:
        yield process
    finally:
        await process.stop(5.0)
        await task


def is_gone(pid: int, within_s: float = 0.0) -> bool:
    """Whether the process ended in that time; a zombie that nobody waits for has."""
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


def can_bind(port: int) -> bool:
    """Whether nobody listens there."""
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def regions_of(engine_id: str) -> list[Path]:
    """The engine's shared memory."""
    return list(Path("/dev/shm").glob(f"{region_prefix(engine_id)}*"))
