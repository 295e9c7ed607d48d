"""A run of `penstock load run` from its order to its exit code."""

import asyncio
import signal
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import typer

from loadtest.order import Order
from loadtest.session import SessionError, judged, run_session
from loadtest.streams_session import run_streams
from loadtest.targets import Target
from loadtest.verdict import exit_code
from server.commands.load_end import end_run, give_up
from server.commands.load_watch import watch_for

T = TypeVar("T")


def run_to_its_end(order: Order, targets: Sequence[Target], *, as_json: bool, is_quiet: bool) -> None:
    """Runs, judges, reports, and ends the command with its exit code."""
    with watch_for(is_quiet=is_quiet) as watch:
        begin = run_streams if order.scenario.is_video else run_session
        run = composed(order, begin(order, watch), as_json=as_json)
    run = judged(run, targets)
    code = exit_code(run.verdicts, run.complaints)
    end_run(run, order.folder, as_json=as_json, code=code)
    raise typer.Exit(code)


def composed(order: Order, session: Coroutine[Any, Any, T], *, as_json: bool) -> T:
    """What the session comes to; exit code 1 and one sentence where it cannot begin or cannot write.

    Ctrl-C and SIGTERM end it with a report of what it had; before the first phase, or twice, without one.
    """
    try:
        return asyncio.run(_stopped_by_sigterm(session))
    except SessionError as error:
        _remove_if_empty(order)
        give_up(str(error), code=1, as_json=as_json)
    except OSError as error:
        sentence = f"{order.folder}: the records could not be written: {error.strerror or error}"
        give_up(sentence, code=1, as_json=as_json)
    except (KeyboardInterrupt, asyncio.CancelledError) as stop:
        _remove_if_empty(order)
        left = f"the requests so far are in {order.folder}, without a report"
        sentence = f"stopped: {left}" if order.folder.exists() else "stopped before the first phase"
        give_up(sentence, code=130 if isinstance(stop, KeyboardInterrupt) else 143, as_json=as_json)


async def _stopped_by_sigterm(session: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run does with Ctrl-C."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "this is a coroutine"
    loop.add_signal_handler(signal.SIGTERM, task.cancel, "SIGTERM")
    try:
        return await session
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _remove_if_empty(order: Order) -> None:
    """A folder in which nothing was measured is of no use."""
    for path in order.folder.glob("records.jsonl"):
        if path.stat().st_size == 0:
            path.unlink()
    if not any(order.folder.iterdir()):
        order.folder.rmdir()
