"""To the stack of this host, as its guest: over the core's Unix socket, tensors through its slab."""

import asyncio
import contextlib
from pathlib import Path

from server.backends.core_relay import CORE_GONE
from server.core.errors import BackendUnavailable
from server.core.infer import InferRequest, InferResponse
from server.core.model import ModelConfig
from server.core.slab import Slab
from server.local.core_link import CORE_SILENT, CoreLink
from server.local.guests import MAX_GUEST_ASKS
from server.local.lent_slab import BorrowedSlab
from server.local.messages import Visit
from server.local.running import stack_at
from server.local.socket_folder import reachable

GUEST = "video"
LOOK_S = 0.25
UP_LOOK_S = 0.02
_IN_WORDS = {CORE_GONE: "it was stopped, or starts again", CORE_SILENT: "it does not answer"}  # people start stacks


class GuestLine:
    """See Line. A stack that was started again at the same port is joined in its new run directory."""

    def __init__(self, run_dir: Path, http_url: str) -> None:
        self._run_dir = run_dir
        self._http_url = http_url
        self._slab = BorrowedSlab(asyncio.get_running_loop().call_later)
        self._link = self._new_link()
        self._asking: set[asyncio.Task[object]] = set()
        self._cut_for: dict[asyncio.Task[object], str] = {}

    @property
    def is_up(self) -> bool:
        return self._link.is_up

    @property
    def reason(self) -> str:
        return _IN_WORDS.get(self._link.reason, self._link.reason)

    @property
    def slab(self) -> Slab:
        return self._slab

    async def run(self) -> None:
        while True:
            joining = asyncio.create_task(self._link.run())
            try:
                self._run_dir = await self._until_moved()
            finally:
                joining.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await joining
            self._link = self._new_link()

    async def until_up(self) -> None:
        while not self.is_up:  # noqa: ASYNC110 - the link that comes up may be another than the one of now
            await asyncio.sleep(UP_LOOK_S)

    async def config(self, model_name: str, version: str) -> ModelConfig:
        """Of the version that the engine serves; one that is named is asked for with each row."""
        return await self._link.find(model_name)

    async def infer(self, request: InferRequest) -> InferResponse:
        """See Line. An engine that has fallen silent ends it, as the core says."""
        if not self._link.is_up:
            raise BackendUnavailable(f"the engine is not ready: {self.reason}")
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("inferences are asked by tasks")
        self._asking.add(task)
        try:
            return await self._link.infer(request, client=GUEST)
        except asyncio.CancelledError:
            reason = self._cut_for.pop(task, None)
            if reason is None or task.uncancel() > 0:
                raise
            raise BackendUnavailable(f"the engine fell silent over this request: {reason}") from None
        finally:
            self._asking.discard(task)
            self._cut_for.pop(task, None)

    async def aclose(self) -> None:
        """The link ended with run."""

    def _new_link(self) -> CoreLink:
        link = CoreLink(reachable(self._run_dir), Visit(GUEST), max_asks=MAX_GUEST_ASKS, slab=self._slab)
        link.when_silent(self._cut)
        return link

    async def _until_moved(self) -> Path:
        """The run directory of the stack that took the place of the one that was joined."""
        while True:
            await asyncio.sleep(LOOK_S)
            if not self.is_up and (moved := await asyncio.to_thread(_moved, self._run_dir, self._http_url)) is not None:
                return moved

    def _cut(self, reason: str) -> None:
        for task in self._asking:
            self._cut_for[task] = reason
            task.cancel()


def _moved(run_dir: Path, http_url: str) -> Path | None:
    """Where the stack at that address is now; None where it is nowhere else."""
    if run_dir.is_dir():
        return None
    stack = stack_at(http_url)
    return stack.run_dir if stack is not None and stack.run_dir != run_dir else None
