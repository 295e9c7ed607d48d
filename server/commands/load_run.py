"""A run of `penstock load run` from its order to its exit code."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import typer

from loadtest.order import Order
from loadtest.session import SessionError, judged, run_session
from loadtest.targets import Target
from loadtest.verdict import exit_code
from server.commands.load_end import end_run
from server.commands.load_watch import watch_for
from server.commands.terminal import fail

T = TypeVar("T")


def run_to_its_end(order: Order, targets: Sequence[Target], *, as_json: bool, is_quiet: bool) -> None:
    """Runs, judges, reports, and ends the command with its exit code."""
    with watch_for(is_quiet=is_quiet) as watch:
        run = composed(order, run_session(order, watch))
    run = judged(run, targets)
    code = exit_code(run.verdicts, run.complaints)
    end_run(run, order.folder, as_json=as_json, code=code)
    raise typer.Exit(code)


def composed(order: Order, session: Coroutine[Any, Any, T]) -> T:
    """What the session comes to; exit code 1 and one sentence where it cannot begin or cannot write."""
    try:
        return asyncio.run(session)
    except SessionError as error:
        _remove_if_empty(order)
        fail(str(error), code=1)
    except OSError as error:
        fail(f"{order.folder}: the records could not be written: {error.strerror or error}", code=1)
    except KeyboardInterrupt:
        _remove_if_empty(order)
        fail("stopped before the first phase", code=130)


def _remove_if_empty(order: Order) -> None:
    """A folder in which nothing was measured is of no use."""
    for path in order.folder.glob("records.jsonl"):
        if path.stat().st_size == 0:
            path.unlink()
    if not any(order.folder.iterdir()):
        order.folder.rmdir()
