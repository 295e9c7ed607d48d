"""`penstock load`: load tests with a verdict, against this stack or any other server."""

import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from loadtest.measure.compare import compare as compare_runs
from loadtest.measure.run_folder import RunFolderError, read_run_folder
from loadtest.order import MAX_IN_FLIGHT, Order
from loadtest.scenario_files import read_scenario, scenario_names
from loadtest.swarm.command import locust_arguments
from server.commands import load_options as flags
from server.commands.defaults import ApiKey, gateway_url
from server.commands.load_end import say_comparison, write_reports
from server.commands.load_knee import knee
from server.commands.load_run import run_to_its_end
from server.commands.load_targets import targets
from server.commands.terminal import fail, table_console

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
    processes: flags.Processes = 1,
    max_in_flight: Annotated[int, typer.Option(min=1, help="requests under way at once")] = MAX_IN_FLIGHT,
    seed: flags.Seed = 1,
    out: flags.Out = None,
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
    order = Order(
        scenario=chosen,
        target=flags.endpoint_or_fail(url, flag="--target", grpc_address=grpc, image_path=image_path, headers=headers),
        beside=flags.beside_or_fail(beside, header or (), beside_header_file),
        rounds=rounds,
        seed=seed,
        processes=processes,
        max_in_flight=max_in_flight,
        images=str(images or ""),
        metrics_url=metrics,
        prometheus_url=prometheus,
        server_hardware=hardware,
        command=flags.command_line(),
        folder=flags.folder_or_fail(out, chosen.name),
    )
    run_to_its_end(order, rows, as_json=as_json, is_quiet=quiet)


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


@app.command(short_help="Write report.html and report.md of a run again.")
def report(folder: Annotated[Path, typer.Argument(exists=True, help="the folder of a run, or a run.json")]) -> None:
    """Write report.html and report.md again, from run.json alone."""
    try:
        path = write_reports(read_run_folder(folder).run, folder if folder.is_dir() else folder.parent)
    except RunFolderError as error:
        fail(str(error), code=1)
    except OSError as error:
        fail(f"{folder}: the report could not be written: {error.strerror or error}", code=1)
    except (ArithmeticError, ValueError) as error:
        fail(f"{folder}: it holds figures that no run has, so it is damaged ({error}); run the scenario again", code=1)
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
        name,
        target=gateway_url(target),
        capacity_per_s=capacity,
        headless=headless,
        workers=workers,
        web_port=web_port,
    )
    os.execv(sys.executable, [sys.executable, "-P", "-m", "locust", *arguments, *(more or [])])
