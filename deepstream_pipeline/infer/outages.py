"""An engine that goes away and comes back, as the log tells of it."""

import asyncio
import time
from typing import Protocol

import structlog

LOOK_S = 0.25
GONE = "the engine is gone: until it is back, files wait (a minute a frame at most) and what cameras bring is dropped"
BACK = "the engine is back"

log = structlog.get_logger(component="video")


class Watched(Protocol):
    """A way to the engine, or all of them. reason: why it is not up."""

    @property
    def is_up(self) -> bool: ...

    @property
    def reason(self) -> str: ...


async def tell_outages(line: Watched, engine: str) -> None:
    """Looks for ever, begun when it has answered; ends by cancellation. engine: which it is, in words.

    What is over by the next look is not told: a core that is started again is back in a moment.
    """
    while True:
        await _until(line, is_up=False)
        gone_at = time.monotonic()
        await asyncio.sleep(LOOK_S)
        if line.is_up:
            continue
        log.warning(GONE, engine=engine, reason=line.reason)
        await _until(line, is_up=True)
        log.warning(BACK, engine=engine, away_s=round(time.monotonic() - gone_at, 1))


async def _until(line: Watched, *, is_up: bool) -> None:
    while line.is_up is not is_up:  # noqa: ASYNC110 - lines are looked at, they tell nobody
        await asyncio.sleep(LOOK_S)
