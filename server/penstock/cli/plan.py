"""`penstock plan`: the rate that an engine of a known profile sustains within an SLO, for each batching policy."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import active_children, get_context
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.cli.gateway_client import ApiKey, GatewayClient, Url, gateway_of
from penstock.cli.terminal import fail, print_json, progress_bar, stoppable, table_console
from penstock.planning.comparison import (
    ContenderResult,
    Effort,
    PlanPiece,
    Race,
    RaceCase,
    Rate,
    Result,
    gather_races,
    pieces_of,
    races_as_json,
    run_piece,
)
from penstock.planning.policies import Contender, PolicyProblem
from penstock.planning.profile import ProfileError, find_profile, linear_profile
from penstock.planning.simulation import PATTERNS, EngineModel
from penstock.protocol.errors import InferenceError


@dataclass(frozen=True, slots=True)
class ReplayedEngine:
    """The engine, and the SLOs in ms that are meant where none is said."""

    engine: EngineModel
    slos_ms: tuple[float, ...] = ()


def engine_of_profile(name: str, *, instances: int | None, way_ms: float) -> ReplayedEngine:
    """Of a built-in or measured profile, with one instance where nothing is said. Ends the command where it is none."""
    try:
        profile = find_profile(name)
    except ProfileError as error:
        fail(str(error))
    return ReplayedEngine(EngineModel(profile, instances or 1, before_s=way_ms / 1e3, after_s=way_ms / 1e3))


def engine_of_model(name: str, gateway: GatewayClient, *, instances: int | None, way_ms: float) -> ReplayedEngine:
    """As a running gateway knows the model's calls by now. Ends the command where it does not."""
    try:
        page = gateway.explain_model(name)
    except InferenceError as error:
        fail(str(error), code=1)
    fit, options = page.fit, page.options
    if fit is None:
        fail(f"{gateway.url} does not know yet how long {name} takes: send it requests of several sizes first", code=1)
    if fit.alpha_ms + fit.beta_ms_per_row <= 0:
        fail(f"{name} takes no time by what {gateway.url} measured: there is nothing to plan", code=1)
    profile = linear_profile(
        name,
        alpha_s=fit.alpha_ms / 1e3,
        beta_s=fit.beta_ms_per_row / 1e3,
        max_batch_size=max(options.max_batch_size, 1),
    )
    engine = EngineModel(profile, instances or options.instances, before_s=way_ms / 1e3, after_s=way_ms / 1e3)
    return ReplayedEngine(engine, (options.slo_p99_ms,) if options.slo_p99_ms else ())


def print_results(races: Sequence[Race], console: Console) -> None:
    """A table a race, the fastest first; above it the bounds, below it the knobs, at the end what the numbers mean."""
    for race in races:
        _show_one(console, race)
    console.print(
        "rate: requests/s at which the share is met, ± its 95 % confidence interval over the seeds; batch, p50 and p99 "
        "at that rate. at 1.5x: 1.5 times Nexus' bound is offered; requests/s answered in time, then the "
        "percentages that were refused, answered late, or timed out in the queue. "
        "Every policy but penstock has the knobs that were best for its rate.",
        style="dim",
    )


def _show_one(console: Console, race: Race) -> None:
    case, bounds = race.case, race.bounds
    console.print(
        f"[bold]{escape(case.problem.engine.profile.name)}, SLO {case.problem.slo_s * 1e3:g} ms, {case.pattern} "
        f"arrivals, {case.share * 100:g} % in time[/bold]"
    )
    possible = "" if bounds.possible is None else f"knowing all arrivals {_rate(bounds.possible)}, "
    console.print(
        f"bounds, requests/s: {possible}2 t(b) ≤ SLO (Nexus) {bounds.nexus:.0f}, evenly spaced {bounds.even:.0f}, "
        f"t(b) ≤ SLO {bounds.capacity:.0f}"
    )
    console.print(_table(race))
    for row in _ordered(race):
        tried = f" (best of {row.settings})" if row.settings > 1 else ""
        console.print(f"{row.contender.value}: {row.label}{tried}", style="dim")
    console.print()


def _ordered(race: Race) -> list[ContenderResult]:
    return sorted(race.rows, key=lambda one: -one.rate.per_s)


def _table(race: Race) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for title in ("rate", "batch", "p50 ms", "p99 ms"):
        table.add_column(title, justify="right", no_wrap=True)
    if race.bounds.possible is not None:
        table.add_column("of possible", justify="right", min_width=len("possible"))
    for multiple in [multiple for multiple, _ in race.rows[0].overload] if race.rows else []:
        table.add_column(f"at {multiple:g}x\nin time/s,\n% refused/\nlate/timeout", justify="right")
    for row in _ordered(race):
        table.add_row(*_cells(row, race), style="bold" if row.contender is Contender.OURS else None)
    return table


def _cells(row: ContenderResult, race: Race) -> list[str]:
    load = row.at_rate
    cells = [row.contender.value, _rate(row.rate), f"{load.mean_batch:.1f}"]
    cells += [f"{load.p50_ms:.1f}", f"{load.p99_ms:.1f}"]
    if race.bounds.possible is not None:
        cells.append(f"{row.rate.per_s / max(race.bounds.possible.per_s, 1e-9):.0%}")
    for _, over in row.overload:
        lost = "/".join(f"{share * 100:.0f}" for share in (over.refused, over.late, over.expired))
        cells.append(f"{over.goodput:.0f} {lost}")
    return cells


def _rate(rate: Rate) -> str:
    return f"{rate.per_s:.0f} ± {rate.plus_minus:.0f}"


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
    url: Url = None,
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
        races = _race(cases, contenders, tuple(overload), jobs, is_quiet=as_json)
    if as_json:
        print_json(races_as_json(races))
    else:
        print_results(races, table_console())


def _contenders(names: list[str]) -> list[Contender]:
    try:
        return [Contender(name) for name in names] or list(Contender)
    except ValueError:
        unknown = next(name for name in names if name not in set(Contender))
        fail(f"--policy {unknown}: name one of {', '.join(Contender)}")


def _cases(
    engine: EngineModel, slos_ms: Sequence[float], patterns: Sequence[str], *, share: float, effort: Effort
) -> list[RaceCase]:
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
            cases.append(RaceCase(PolicyProblem(engine, slo_ms / 1e3), pattern, share, replace(effort, span_s=span_s)))
    return cases


def _race(
    cases: list[RaceCase], contenders: list[Contender], multiples: tuple[float, ...], jobs: int, *, is_quiet: bool
) -> list[Race]:
    """is_quiet: no lines of progress if standard error is no terminal."""
    pieces = pieces_of(cases, contenders, multiples)
    bar = progress_bar()
    has_lines = bar.disable and not is_quiet
    shown = bar.add_task("replaying", total=len(pieces))
    results: list[Result] = []
    if has_lines:
        _report_progress(0, len(pieces))
    with _results(pieces, jobs) as arriving, bar:  # the processes are forked before the bar's thread is there
        for result in arriving:
            results.append(result)
            bar.advance(shown)
            if has_lines and len(results) * 10 // len(pieces) > (len(results) - 1) * 10 // len(pieces):
                _report_progress(len(results), len(pieces))
    return gather_races(cases, contenders, results)


def _report_progress(done: int, total: int) -> None:
    sys.stderr.write(f"replayed {done} of {total} parts\n")


@contextmanager
def _results(pieces: list[PlanPiece], jobs: int) -> Iterator[Iterator[Result]]:
    """What the pieces give, as they end; their processes end with the block, however it ends."""
    if min(jobs, len(pieces)) == 1:
        yield map(run_piece, pieces)
        return
    # Not multiprocessing.Pool: its terminate() waits forever if a process waits for its first piece.
    jobs = min(jobs, len(pieces))
    with ProcessPoolExecutor(jobs, get_context("fork"), initializer=_bind_to_the_parent) as pool:
        try:
            pending = [pool.submit(run_piece, piece) for piece in pieces]
            yield (ended.result() for ended in as_completed(pending))
        except BaseException:
            for process in active_children():
                process.kill()
            raise


def _bind_to_the_parent() -> None:
    """A worker's first act: Ctrl-C is the parent's to handle, and its death, however it comes, is the worker's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
