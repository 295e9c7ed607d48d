"""`penstock plan`: what an engine of a known profile can answer inside an SLO, and with whose batching."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from server.commands.defaults import ApiKey, gateway_of
from server.commands.plan_engine import engine_of_model, engine_of_profile
from server.commands.plan_tables import show
from server.commands.terminal import fail, stoppable, table_console
from server.planning.arrivals import PATTERNS
from server.planning.contenders import Contender, Problem
from server.planning.engine import EngineModel
from server.planning.plan import Piece, Race, Result, as_object, do, gather, pieces_of
from server.planning.race import Case
from server.planning.search import Effort

BURSTY_S = 5.0  # a probe of bursts must see some dozens of them
_PR_SET_PDEATHSIG = 1
SLOS_SEEN = 60  # and any probe so many times the SLO


def plan(
    profile: Annotated[
        str, typer.Option(help="v100, h200, or a TOML or JSON file with points = [[rows, ms], …]", show_default=False)
    ] = "",
    model: Annotated[
        str, typer.Option(help="of a running gateway, by what it measured, instead", show_default=False)
    ] = "",
    slo_ms: Annotated[
        list[float], typer.Option(help="answered within so many ms; again [the model's]", show_default=False)
    ] = [],  # noqa: B006
    arrivals: Annotated[list[str], typer.Option(help="poisson, bursty, on-off or periodic; again")] = ["poisson"],  # noqa: B006
    policy: Annotated[list[str], typer.Option(help="only these; again [all]", show_default=False)] = [],  # noqa: B006
    share: Annotated[float, typer.Option(help="of the requests that must be answered in time")] = 0.99,
    instances: Annotated[
        int | None,
        typer.Option(min=1, help="calls that the engine runs at once [1, or the model's]", show_default=False),
    ] = None,
    way_ms: Annotated[float, typer.Option(min=0.0, help="from the gateway to the engine, and as long back")] = 0.0,
    overload: Annotated[list[float], typer.Option(help="times Nexus' bound; again")] = [1.5, 3.0],  # noqa: B006
    count: Annotated[int, typer.Option(min=1000, help="requests of one replay, at least")] = 20_000,
    seeds: Annotated[int, typer.Option(min=2, max=10, help="replays that decide")] = 5,
    jobs: Annotated[int, typer.Option(min=1, help="processes [one a core]", show_default=False)] = os.cpu_count() or 1,
    url: Annotated[str | None, typer.Option(help="the gateway [http://127.0.0.1:8000]", show_default=False)] = None,
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object, and nothing else")] = False,
) -> None:
    """Race the gateway's batching against others, each tuned, before a replayed engine, beside what is possible at all.

    No request is sent: the gateway's own queue runs under a manual clock.
    """
    if unusable := [times for times in overload if not times > 0]:
        fail(f"--overload {unusable[0]:g}: give more than 0")
    if bool(profile) == bool(model):
        fail("say which engine: --profile v100, h200 or a file, or --model of a running gateway")
    contenders = _contenders(policy)
    if model:
        replayed = engine_of_model(model, gateway_of(url, api_key), instances=instances, way_ms=way_ms)
    else:
        replayed = engine_of_profile(profile, instances=instances, way_ms=way_ms)
    slos_ms = slo_ms or replayed.slos_ms
    cases = _cases(
        replayed.engine, slos_ms, arrivals, share=share, effort=Effort(count, seeds=tuple(range(1, seeds + 1)))
    )
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
    engine: EngineModel, slos_ms: Sequence[float], patterns: Sequence[str], *, share: float, effort: Effort
) -> list[Case]:
    if unknown := [pattern for pattern in patterns if pattern not in PATTERNS]:
        fail(f"--arrivals {unknown[0]}: name one of {', '.join(PATTERNS)}")
    if not 0.5 <= share < 1.0:
        fail(f"--share {share}: give 0.5 or more, below 1")
    if not slos_ms:
        fail("say within how many ms: --slo-ms 50")
    found, cases = engine.profile, []
    for slo_ms in slos_ms:
        if not found.largest_within(slo_ms / 1e3):
            fail(f"--slo-ms {slo_ms:g}: {found.name} takes {found.seconds(1) * 1e3:g} ms for one row; give more")
        for pattern in patterns:
            span_s = max(SLOS_SEEN * slo_ms / 1e3, BURSTY_S if pattern == "bursty" else 0.0)
            cases.append(Case(Problem(engine, slo_ms / 1e3), pattern, share, replace(effort, span_s=span_s)))
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
