"""Running calls that can be ended with an error."""

import asyncio
from types import TracebackType

from penstock.protocol.errors import EngineUnavailable


class RunningCalls:
    """Context manager of each call. `cut` cancels the tasks inside it, for which EngineUnavailable is then raised."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[object]] = set()
        self._cut: dict[asyncio.Task[object], str] = {}

    def cut(self, text: str) -> None:
        """End every running call with this error."""
        for task in self._running - self._cut.keys():
            self._cut[task] = text
            task.cancel()

    def begin(self) -> None:
        """The current task can be cut until `end`."""
        self._running.add(_current_task())

    def end(self, error: BaseException | None) -> EngineUnavailable | None:
        """The error to raise instead of the cancellation; None if the task was not cancelled by `cut` alone."""
        task = _current_task()
        self._running.discard(task)
        text = self._cut.pop(task, None)
        if text is None or not isinstance(error, asyncio.CancelledError) or task.uncancel() > 0:
            return None
        return EngineUnavailable(text)

    __enter__ = begin

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        cut = self.end(error)
        if cut is not None:
            raise cut from None


def _current_task() -> "asyncio.Task[object]":
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("calls are served by tasks")
    return task
