"""Waits for what another thread, process or server brings about."""

import asyncio
import inspect
import time
from collections.abc import Callable

SLACK = 3.0  # times are for an idle machine; a busy one gets so many times as long


def becomes_true(condition: Callable[[], object], timeout_s: float = 15.0) -> bool:
    """Whether the condition held within timeout_s, as it is."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() > began + timeout_s:
            return False
        time.sleep(_pause_s(began))
    return True


def _pause_s(began: float) -> float:
    """Until the next look: a twentieth of the wait so far, so that a long wait costs those it waits for no CPU."""
    return min(0.1, max(0.005, (time.monotonic() - began) / 20))


def wait_for(
    condition: Callable[[], object], timeout_s: float = 20.0, what: str | Callable[[], object] = "the condition"
) -> float:
    """Seconds until the condition held. what: for the error if it did not in time."""
    began = time.monotonic()
    if not becomes_true(condition, SLACK * timeout_s):
        raise AssertionError(f"not within {SLACK * timeout_s:g} s: {what() if callable(what) else what}")
    return time.monotonic() - began


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Returns when the condition holds; it may be a coroutine function. The loop runs on meanwhile."""
    began = time.monotonic()
    async with asyncio.timeout(SLACK * timeout_s):
        while True:
            outcome = condition()
            if await outcome if inspect.isawaitable(outcome) else outcome:
                return
            await asyncio.sleep(_pause_s(began))
