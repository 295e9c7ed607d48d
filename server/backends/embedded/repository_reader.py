"""The repositories read in a thread: a disk that does not answer costs its news, not the models in memory."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from server.backends.embedded.repository import ModelFolder, scan
from server.backends.embedded.repository_config import ConfigProblems
from server.core.errors import BackendUnavailable
from server.logs import get_logger

log = get_logger("engine")


@dataclass(frozen=True, slots=True)
class OnDisk:
    """The models' folders by name, and why some of them cannot be served."""

    folders: Mapping[str, ModelFolder]
    problems: Mapping[str, str]


class RepositoryReader:
    """Of one event loop. patience_s: what a look at the disk may take; while one takes longer, none is begun."""

    def __init__(self, repositories: tuple[Path, ...], *, patience_s: float) -> None:
        self._repositories = repositories
        self._patience_s = patience_s
        self._problems = ConfigProblems()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="repository")
        self._stuck: asyncio.Future[OnDisk] | None = None
        self._last: OnDisk | None = None

    async def read(self) -> OnDisk:
        """What is there now. Raises BackendUnavailable where the disk does not answer, or the reader is closed."""
        if self._stuck is not None and not self._stuck.done():
            raise self._silent()
        look = asyncio.get_running_loop().run_in_executor(self._thread, self._look)
        done, _ = await asyncio.wait((look,), timeout=self._patience_s)
        if not done:
            self._stuck = look
            raise self._silent()
        if look.cancelled():
            raise BackendUnavailable("the embedded engine is closed")
        self._last = look.result()
        return self._last

    async def read_or_remember(self) -> OnDisk:
        """What is there now, else what was there when the disk last answered. Raises as `read` where it never did."""
        was_stuck = self._stuck is not None and not self._stuck.done()
        try:
            return await self.read()
        except BackendUnavailable as error:
            if self._last is None:
                raise
            if not was_stuck:
                log.error("the disk is silent; what is loaded is served on", reason=str(error))
            return self._last

    def close(self) -> None:
        """Ends what has not begun; a look that hangs is left to itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _look(self) -> OnDisk:
        folders = scan(self._repositories)
        problems = {name: self._problems.of(folder) for name, folder in folders.items()}
        return OnDisk(folders, {name: reason for name, reason in problems.items() if reason})

    def _silent(self) -> BackendUnavailable:
        return BackendUnavailable(f"the model repository could not be read within {self._patience_s:g} s")
