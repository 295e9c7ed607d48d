"""`penstock load knee`: the highest rate that keeps the SLO."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from loadtest.knee_session import KneeOptions, run_knee
from loadtest.order import Order
from loadtest.results import State
from loadtest.session import judged
from loadtest.targets import UNITS, Target
from server.commands import load_options as flags
from server.commands.defaults import ApiKey, gateway_url
from server.commands.load_end import end_run
from server.commands.load_run import composed
from server.commands.load_watch import watch_for

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
    order = Order(
        scenario=chosen,
        target=flags.endpoint_or_fail(
            gateway_url(target), flag="--target", grpc_address=grpc, image_path=image_path, headers=headers
        ),
        processes=processes,
        seed=seed,
        images=str(images or ""),
        server_hardware=hardware,
        command=flags.command_line(),
        folder=flags.folder_or_fail(out, f"knee-{chosen.name}"),
    )
    options = KneeOptions(
        trial_s=seconds, error_share=error_share, precision=precision, start_per_s=start or 0.0, highest_per_s=highest
    )
    _search(order, options, [_of_knee(row) for row in rows if row.measure in (KNEE, "ok_per_s")], (as_json, quiet))


def _search(order: Order, options: KneeOptions, targets: Sequence[Target], say: tuple[bool, bool]) -> None:
    """Exit code 0 where a rate was confirmed and no target is above it."""
    as_json, is_quiet = say
    with watch_for(is_quiet=is_quiet) as watch:
        run, found = composed(order, run_knee(order, options, watch), as_json=as_json)
    run = judged(run, targets)
    is_missed = any(verdict.state is State.FAIL for verdict in run.verdicts)
    code = 1 if found is None or found.kept_per_s is None or is_missed or run.complaints else 0
    end_run(run, order.folder, as_json=as_json, code=code)
    if found is not None:
        typer.echo(found.sentence, err=as_json)
    raise typer.Exit(code)


def _of_knee(target: Target) -> Target:
    """--min-rate speaks of the knee here."""
    return msgspec.structs.replace(target, measure=KNEE, unit=UNITS[KNEE], title="the highest rate that keeps the SLO")
