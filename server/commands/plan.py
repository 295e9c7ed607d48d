"""`penstock plan`: what an engine of a known profile can answer inside an SLO, and with whose batching."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from server.commands.plan_tables import show
from server.commands.terminal import fail, stoppable, table_console
from server.planning.arrivals import PATTERNS
from server.planning.contenders import Contender, Problem
from server.planning.engine import EngineModel
from server.planning.plan import Piece, Race, Result, as_object, do, gather, pieces_of
from server.planning.profile_file import ProfileError, find_profile
from server.planning.race import Case
from server.planning.search import Effort

BURSTY_S = 5.0  # a probe of bursts must see some dozens of them
_PR_SET_PDEATHSIG = 1
SLOS_SEEN = 60  # and any probe so many times the SLO


def plan(
    profile: Annotated[str, typer.Option(help="v100, h200, or a TOML or JSON file with points = [[rows, ms], …]")],
    slo_ms: Annotated[list[float], typer.Option(help="answered within so many ms; may be given again")],
    arrivals: Annotated[list[str], typer.Option(help="poisson, bursty, on-off or periodic; again")] = ["poisson"],  # noqa: B006
    policy: Annotated[list[str], typer.Option(help="only these; again [all]", show_default=False)] = [],  # noqa: B006
    share: Annotated[float, typer.Option(help="of the requests that must be answered in time")] = 0.99,
    instances: Annotated[int, typer.Option(min=1, help="calls that the engine runs at once")] = 1,
    way_ms: Annotated[float, typer.Option(min=0.0, help="from the gateway to the engine, and as long back")] = 0.0,
    overload: Annotated[list[float], typer.Option(help="times Nexus' bound; again")] = [1.5, 3.0],  # noqa: B006
    count: Annotated[int, typer.Option(min=1000, help="requests of one replay, at least")] = 20_000,
    seeds: Annotated[int, typer.Option(min=2, max=10, help="replays that decide")] = 5,
    jobs: Annotated[int, typer.Option(min=1, help="processes [one a core]", show_default=False)] = os.cpu_count() or 1,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object, and nothing else")] = False,
) -> None:
    """Race the gateway's batching against others, each tuned, before a replayed engine, beside what is possible at all.

    Nothing is sent anywhere and no engine is needed: the gateway's own queue runs under a manual clock.
    """
    if unusable := [times for times in overload if not times > 0]:
        fail(f"--overload {unusable[0]:g}: give more than 0")
    contenders = _contenders(policy)
    cases = _cases(profile, slo_ms, arrivals, share=share, engine=(instances, way_ms), effort=(count, seeds))
    with stoppable("nothing was kept"):
        races = _race(cases, contenders, tuple(overload), jobs)
    if as_json:
        sys.stdout.write(msgspec.json.encode(as_object(races)).decode() + "\n")
    else:
        show(races, table_console())


def _contenders(names: list[str]) -> list[Contender]:
    try:
        return [Contender(name) for name in names] or list(Contender)
    except ValueError:
        unknown = next(name for name in names if name not in set(Contender))
        fail(f"--policy {unknown}: name one of {', '.join(Contender)}")


def _cases(
    name: str,
    slos_ms: list[float],
    patterns: list[str],
    *,
    share: float,
    engine: tuple[int, float],
    effort: tuple[int, int],
) -> list[Case]:
    if unknown := [pattern for pattern in patterns if pattern not in PATTERNS]:
        fail(f"--arrivals {unknown[0]}: name one of {', '.join(PATTERNS)}")
    if not 0.5 <= share < 1.0:
        fail(f"--share {share}: give 0.5 or more, below 1")
    try:
        found = find_profile(name)
    except ProfileError as error:
        fail(str(error))
    instances, way_ms = engine
    model = EngineModel(found, instances=instances, before_s=way_ms / 1e3, after_s=way_ms / 1e3)
    cases = []
    for slo_ms in slos_ms:
        if not found.largest_within(slo_ms / 1e3):
            fail(f"--slo-ms {slo_ms:g}: {found.name} takes {found.seconds(1) * 1e3:g} ms for one row; give more")
        for pattern in patterns:
            span_s = max(SLOS_SEEN * slo_ms / 1e3, BURSTY_S if pattern == "bursty" else 0.0)
            deciding = Effort(count=effort[0], span_s=span_s, seeds=tuple(range(1, effort[1] + 1)))
            cases.append(Case(Problem(model, slo_ms / 1e3), pattern, share, deciding))
    return cases


def _race(cases: list[Case], contenders: list[Contender], multiples: tuple[float, ...], jobs: int) -> list[Race]:
    pieces = pieces_of(cases, contenders, multiples)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    shown = bar.add_task("replaying", total=len(pieces))
    results = []
    with _results(pieces, jobs) as arriving, bar:  # the processes are forked before the bar's thread is there
        for result in arriving:
            results.append(result)
            bar.advance(shown)
    return gather(cases, contenders, results)


@contextmanager
def _results(pieces: list[Piece], jobs: int) -> Iterator[Iterator[Result]]:
    """What the pieces give, as they end; their processes end with the block, however it ends."""
    if min(jobs, len(pieces)) == 1:
        yield map(do, pieces)
        return
    with get_context("fork").Pool(min(jobs, len(pieces)), initializer=_bind_to_the_parent) as pool:
        yield pool.imap_unordered(do, pieces)


def _bind_to_the_parent() -> None:
    """A worker's first act: Ctrl-C is the parent's to handle, and its death, however it comes, is the worker's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
