"""`penstock load`: run, knee, compare, history, report, scenarios, targets, locust."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from penstock.cli.gateway_client import ApiKey, gateway_url
from penstock.cli.terminal import fail, table_console, waiting
from penstock_load.cli import options as flags
from penstock_load.cli.history import history
from penstock_load.cli.options import scenario_or_fail
from penstock_load.cli.output import (
    composed,
    end_run,
    run_to_its_end,
    say_comparison,
    watch_for,
    write_json,
    write_reports,
)
from penstock_load.cli.progress import watch_or_fail
from penstock_load.committed import ResultsError, TargetRow, read_committed, target_rows
from penstock_load.main import KneeOptions, judged, run_knee
from penstock_load.measure.compare import compare as compare_runs
from penstock_load.measure.run_folder import RunFolderError, read_run_folder
from penstock_load.phase_runner import MAX_IN_FLIGHT, RunOptions
from penstock_load.results import State
from penstock_load.scenario import read_scenario, scenario_names
from penstock_load.targets import UNITS, Target, TargetsError, read_targets
from penstock_load.users.options import locust_arguments
from penstock_load.witness.witness import Given

KNEE = "knee_per_s"


def knee(
    scenario: flags.Name = "image-steady",
    target: flags.TargetUrl = None,
    grpc: flags.GrpcAddress = "",
    model: flags.Model = "",
    images: flags.Images = None,
    image_path: flags.ImagePath = "",
    header: flags.Header = None,
    api_key: ApiKey = "",
    slo_p99_ms: flags.SloP99 = None,
    error_share: Annotated[float, typer.Option(min=0, max=1, help="errors that a rate may have")] = 0.01,
    seconds: Annotated[float, typer.Option(help="of a trial, or longer at low rates; thrice to confirm")] = 5.0,
    start: Annotated[float | None, typer.Option(help="the first rate [half of the capacity]")] = None,
    highest: Annotated[float, typer.Option(help="do not go above")] = 100_000.0,
    precision: Annotated[float, typer.Option(help="how near is near enough, as a share")] = 0.05,
    min_rate: flags.MinRate = None,
    targets: flags.TargetsFile = None,
    hardware: flags.Hardware = "",
    processes: flags.Processes = 1,
    seed: flags.Seed = 1,
    commit: flags.Commit = None,
    out: flags.Out = None,
    as_json: flags.AsJson = False,
    quiet: flags.Quiet = False,
) -> None:
    """Find the highest Poisson rate at which 99 % of the scenario's requests keep the SLO.

    Rates double until one breaks, then the interval is halved; the result is confirmed by a longer trial.

    Exit code 0: a rate was confirmed, and no target is above it. 1: none was, a target was missed, or the load
    generator was the bottleneck. 2: the command line is wrong.
    """
    for value, flag in ((seconds, "--seconds"), (start, "--start"), (highest, "--highest"), (precision, "--precision")):
        flags.above_zero_or_fail(value, flag)
    chosen = flags.changed_or_fail(flags.scenario_or_fail(scenario), model=model, slo_p99_ms=slo_p99_ms)
    rows = flags.targets_or_fail(targets, chosen, min_rate_per_s=min_rate)
    headers = flags.identified(header or (), api_key)
    order = RunOptions(
        scenario=chosen,
        target=flags.endpoint_or_fail(
            gateway_url(target), flag="--target", grpc_address=grpc, image_path=image_path, headers=headers
        ),
        processes=processes,
        seed=seed,
        images=str(images or ""),
        server_hardware=hardware,
        command=flags.command_line(),
        commit=flags.commit_or_fail(commit),
        folder=flags.folder_or_fail(out, f"knee-{chosen.name}"),
    )
    options = KneeOptions(
        trial_s=seconds, error_share=error_share, precision=precision, start_per_s=start or 0.0, highest_per_s=highest
    )
    _search(order, options, [_of_knee(row) for row in rows if row.measure in (KNEE, "ok_per_s")], (as_json, quiet))


def _search(order: RunOptions, options: KneeOptions, targets: Sequence[Target], say: tuple[bool, bool]) -> None:
    """Exit code 0 where a rate was confirmed and no target is above it."""
    as_json, is_quiet = say
    with watch_for(is_quiet=is_quiet) as watch:
        run, found = composed(order, run_knee(order, options, watch), as_json=as_json)
    run = judged(run, targets)
    is_missed = any(verdict.state is State.FAIL for verdict in run.verdicts)
    code = 1 if found is None or found.sustained_per_s is None or is_missed or run.complaints else 0
    end_run(run, order.folder, as_json=as_json, code=code)
    if found is not None:
        typer.echo(found.sentence, err=as_json)
    raise typer.Exit(code)


def _of_knee(target: Target) -> Target:
    """--min-rate speaks of the knee here."""
    return msgspec.structs.replace(target, measure=KNEE, unit=UNITS[KNEE], title="the highest rate that keeps the SLO")


_COLOURS = {"pass": "green", "fail": "red"}


def targets(
    scenario: Annotated[str, typer.Argument(help="only those of this scenario: a name, or a .toml of yours")] = "",
    file: Annotated[Path | None, typer.Option("--targets", help="your targets.toml", dir_okay=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="an array of objects, and nothing else")] = False,
) -> None:
    """List the documented figures with their conditions, and the verdict of the newest committed result on each."""
    name = scenario_or_fail(scenario).name if scenario.endswith(".toml") else scenario
    try:
        known = read_targets(file, also=(name,))
        rows = target_rows(known, read_committed(known))
    except (TargetsError, ResultsError) as error:
        fail(str(error), code=1)
    rows = tuple(row for row in rows if not name or name in row.target.scenarios)
    if not rows:
        there = ", ".join(sorted({name for target in known for name in target.scenarios}))
        fail(f"no target applies to {name!r}; there are {there}")
    if as_json:
        write_json(rows)
        return
    table = Table("target", "scenario", "figure", "hardware", "verdict", "why")
    for row in rows:
        table.add_row(*_cells(row))
    table_console().print(table)


def _cells(row: TargetRow) -> tuple[str, ...]:
    colour = _COLOURS.get(row.state, "dim")
    of_memory = " (from memory)" if row.target.from_memory else ""
    return (
        f"{escape(row.target.title)}{of_memory}\n[dim]{escape(row.target.id)}[/dim]",
        ", ".join(row.target.scenarios),
        escape(row.target.wanted),
        str(row.target.hardware),
        f"[{colour}]{row.state}[/{colour}]",
        escape(row.why),
    )


app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


@app.command("run", short_help="Run a scenario: figures, verdict, report.")
def run(
    scenario: flags.Name,
    target: flags.TargetUrl = None,
    grpc: flags.GrpcAddress = "",
    beside: Annotated[str, typer.Option(help="compare with this server, phase by phase (its gRPC: one port on)")] = "",
    beside_header_file: flags.BesideHeaderFile = None,
    model: flags.Model = "",
    images: flags.Images = None,
    image_path: flags.ImagePath = "",
    header: flags.Header = None,
    api_key: ApiKey = "",
    duration: Annotated[float | None, typer.Option(metavar="SECONDS", help="of the phases that are judged")] = None,
    rate: Annotated[float | None, typer.Option(help="requests a second in the phases that are judged")] = None,
    replay: flags.Replay = None,
    stream: flags.Stream = "",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="repeat all of it; figures get a spread")] = 1,
    slo_p99_ms: flags.SloP99 = None,
    min_rate: flags.MinRate = None,
    targets: flags.TargetsFile = None,
    hardware: flags.Hardware = "",
    metrics: flags.MetricsUrl = "",
    prometheus: flags.PrometheusUrl = "",
    server_pid: flags.ServerPid = 0,
    processes: flags.Processes = 1,
    max_in_flight: Annotated[int, typer.Option(min=1, help="requests under way at once")] = MAX_IN_FLIGHT,
    seed: flags.Seed = 1,
    commit: flags.Commit = None,
    out: flags.Out = None,
    progress: flags.Progress = None,
    as_json: flags.AsJson = False,
    quiet: flags.Quiet = False,
) -> None:
    """Run a scenario and judge what was reached against the documented targets and the scenario's SLO.

    Exit code 0: something passed and nothing failed. 1: a target was missed, nothing could be judged, or the load
    generator was the bottleneck. 2: the command line is wrong. 130: stopped before there was anything to report.
    """
    found = flags.scenario_or_fail(scenario)
    chosen = flags.changed_or_fail(
        found, model=model, replay=replay, stream=stream, duration_s=duration, rate_per_s=rate, slo_p99_ms=slo_p99_ms
    )
    rows = flags.targets_or_fail(targets, chosen, min_rate_per_s=min_rate)
    headers = flags.identified(header or (), api_key)
    url = flags.VIDEO_URL if target is None and chosen.is_video else gateway_url(target)
    order = RunOptions(
        scenario=chosen,
        target=flags.endpoint_or_fail(url, flag="--target", grpc_address=grpc, image_path=image_path, headers=headers),
        beside=flags.beside_or_fail(beside, header or (), beside_header_file),
        rounds=rounds,
        seed=seed,
        processes=processes,
        max_in_flight=max_in_flight,
        images=str(images or ""),
        given=Given(metrics, prometheus, server_pid),
        server_hardware=hardware,
        command=flags.command_line(),
        commit=flags.commit_or_fail(commit),
        folder=flags.folder_or_fail(out, chosen.name),
    )
    run_to_its_end(order, rows, watch_or_fail(progress, is_quiet=quiet), as_json=as_json)


app.command("knee", short_help="Find the highest rate that keeps the SLO.")(knee)


@app.command(short_help="Tell whether run B differs from run A.")
def compare(
    a: Annotated[Path, typer.Argument(exists=True, help="the folder of a run, or a run.json")],
    b: Annotated[Path, typer.Argument(exists=True, help="another")],
    as_json: flags.AsJson = False,
) -> None:
    """Compare two runs: each figure's ratio with a 95 % confidence interval, and a sentence."""
    try:
        comparison = compare_runs(read_run_folder(a), read_run_folder(b))
    except RunFolderError as error:
        fail(str(error), code=1)
    say_comparison(comparison, as_json=as_json)


app.command("history", short_help="List earlier runs, with their commits.")(history)


@app.command(short_help="Write report.html and report.md of a run again.")
def report(
    folder: Annotated[Path, typer.Argument(exists=True, help="the folder of a run, or a run.json")],
    as_json: Annotated[bool, typer.Option("--json", help="the path in an object, and nothing else")] = False,
) -> None:
    """Write report.html and report.md again, from run.json alone."""
    try:
        with waiting("writing the report"):
            path = write_reports(read_run_folder(folder).run, folder if folder.is_dir() else folder.parent)
    except RunFolderError as error:
        fail(str(error), code=1)
    except OSError as error:
        fail(f"{folder}: the report could not be written: {error.strerror or error}", code=1)
    except (ArithmeticError, ValueError) as error:
        fail(f"{folder}: it holds figures that no run has, so it is damaged ({error}); run the scenario again", code=1)
    if as_json:
        write_json({"report": str(path)})
    else:
        typer.echo(f"report: {path}")


@app.command(short_help="List the scenarios that ship.")
def scenarios(
    as_json: Annotated[bool, typer.Option("--json", help="an array of objects, and nothing else")] = False,
) -> None:
    """List the scenarios that ship; one of your own is a file like theirs."""
    found = [read_scenario(name) for name in scenario_names()]
    if as_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        return
    table = Table("scenario", "asks", "SLO, p99", "what it is")
    for scenario in found:
        asks = ", ".join(dict.fromkeys(ask.label for ask in scenario.requests))
        table.add_row(scenario.name, asks, f"{scenario.slo_p99_ms:g} ms", scenario.about)
    table_console().print(table)


app.command("targets", short_help="List the documented figures, and how they stand.")(targets)


@app.command(short_help="Run a scenario with locust, its web page or headless.")
def locust(
    scenario: flags.Name,
    target: flags.TargetUrl = None,
    capacity: Annotated[float | None, typer.Option(help="requests a second that shares of the capacity mean")] = None,
    workers: Annotated[int, typer.Option(min=0, max=64, help="processes that ask; 0: locust's own")] = 0,
    headless: Annotated[bool, typer.Option("--headless", help="no web page: run, judge, end")] = False,
    web_port: Annotated[int, typer.Option(min=1, max=65535, help="of the web page, on this machine only")] = 8089,
    more: Annotated[list[str] | None, typer.Argument(metavar="[-- LOCUST'S OWN FLAGS]")] = None,
) -> None:
    """Run a scenario with locust: its users wait for their answers, so the published figures come from `load run`."""
    name = flags.scenario_or_fail(scenario).name if not Path(scenario).is_file() else scenario
    arguments = locust_arguments(
        name, target=gateway_url(target), capacity_per_s=capacity, headless=headless, workers=workers, web_port=web_port
    )
    os.execv(sys.executable, [sys.executable, "-P", "-m", "locust", *arguments, *(more or [])])
