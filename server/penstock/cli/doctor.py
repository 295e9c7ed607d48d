"""`penstock doctor`: what this machine has, what fits it, what is missing, what to do."""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.gateway_client import API_KEY_VARIABLE, GatewayClient, local_url
from penstock.cli.model_list import in_short
from penstock.cli.terminal import AsJson, one_line, waiting
from penstock.doctor import finding as configuration
from penstock.doctor.examination import examine
from penstock.doctor.finding import Finding, Severity, StackPlan, can_serve
from penstock.engines.triton.runtime import default_environment
from penstock.engines.watch import NOT_LOADED, UNLOADED
from penstock.gateway.settings import PREFIX, Settings
from penstock.gateway.settings_sources import OTHER_VARIABLES, SettingsError, read_settings
from penstock.protocol.errors import GatewayUnreachable, InferenceError

STYLES = {Severity.OK: "green", Severity.NOTE: "cyan", Severity.WARNING: "yellow", Severity.PROBLEM: "bold red"}


def doctor(
    config: Annotated[Path | None, typer.Option(help="TOML file of settings, as for `penstock up`")] = None,
    as_json: AsJson = False,
) -> None:
    """Look at this machine as `penstock up` would use it, and say what to do.

    ok, note (works, could be better), warning (will hurt), problem (`penstock up` cannot serve). Nothing is changed,
    and nothing is sent to another machine. If a gateway runs here, its list of models is requested. Exit code 1 if
    there is a problem.
    """
    settings, mistake = _settings(config)
    with waiting("looking at this machine"):
        findings = [*configuration.settings_findings(mistake, _given(config)), *examine(plan_of(settings))]
    gateway = GatewayClient(local_url(settings), os.environ.get(API_KEY_VARIABLE, ""))
    findings += model_findings(gateway)
    if as_json:
        sys.stdout.write(as_object(findings) + "\n")
    else:
        show(findings, Console(highlight=False))
    sys.stdout.flush()
    if not can_serve(findings):
        raise typer.Exit(1)


def examine_from_stdin() -> None:
    """For the gateway: reads its settings as JSON from standard input, writes findings on the machine as `--json`."""
    os.nice(10)
    settings = Settings.model_validate_json(sys.stdin.read())
    sys.stdout.write(as_object(examine(plan_of(settings))))


def _settings(config: Path | None) -> tuple[Settings, str]:
    """Settings of `penstock up`; if they are invalid, the defaults and the error."""
    try:
        return read_settings({}, file=config), ""
    except SettingsError as error:
        return read_settings({}, environ={}), str(error)


def _given(config: Path | None) -> list[str]:
    file = config or os.environ.get(f"{PREFIX}CONFIG")
    names = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in OTHER_VARIABLES)
    return [*([str(file)] if file else []), *names]


def plan_of(settings: Settings) -> StackPlan:
    """The settings that the probes need."""
    ports = {
        name.replace("_", "-"): port
        for name in Settings.model_fields
        if name.endswith("_port")
        and (name != "video_port" or settings.video)
        and (port := getattr(settings, name)) is not None
    }
    return StackPlan(
        host=settings.host,
        ports=ports,
        engine=settings.engine,
        gpus=settings.gpus,
        engine_environment=settings.engine_environment or default_environment(Path(sys.prefix), settings.home_path),
        home=settings.home_path,
        repositories=settings.repositories,
        max_inflight_requests=settings.max_inflight_requests,
        max_inflight_bytes=settings.max_inflight_bytes,
    )


def model_findings(gateway: GatewayClient) -> list[Finding]:
    """Each model that the gateway cannot serve, with the reason; none if no gateway runs there."""
    try:
        index = gateway.repository_index()
    except GatewayUnreachable:
        return []
    except InferenceError as error:
        return [Finding("models.index", Severity.NOTE, f"which models are served is not known: {error}")]
    reasons = {
        row.name: in_short(row.reason)
        for row in index
        if row.state != "READY" and row.reason not in ("", NOT_LOADED, UNLOADED)
    }
    served = len({row.name for row in index if row.state == "READY"})
    found = [Finding("models.served", Severity.OK, f"{served} served by the gateway at {gateway.url}")]
    return found + [
        Finding(
            f"models.{name}",
            Severity.WARNING,
            f"{name}: {why}",
            f"fix the cause, then run: penstock models load {name}",
        )
        for name, why in reasons.items()
    ]


def as_object(findings: Sequence[Finding]) -> str:
    """{"findings": [{"id", "subject", "status", "found", "advice"}, …], "summary": {a count a status, "can_serve"}}."""
    rows = [
        {"id": one.id, "subject": one.subject, "status": one.status, "found": one.found, "advice": one.advice}
        for one in findings
    ]
    counts = Counter(one.status for one in findings)
    summary = {status.value: counts[status] for status in Severity} | {"can_serve": can_serve(findings)}
    return msgspec.json.encode({"findings": rows, "summary": summary}).decode()


def show(findings: Sequence[Finding], console: Console) -> None:
    """Prints a table of subject, status, finding and advice, then a summary."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    last = ""
    for finding in findings:
        text = Text(one_line(finding.found))
        if finding.advice:
            text.append(f"\n> {one_line(finding.advice)}", style="bold")
        subject = "" if finding.subject == last else finding.subject
        last = finding.subject
        table.add_row(subject, Text(finding.status.value, style=STYLES[finding.status]), text)
    console.print(table)
    console.print()
    console.print(summary_line(findings))


def summary_line(findings: Sequence[Finding]) -> str:
    """Whether `penstock up` can serve, and the number of findings by status."""
    counts = Counter(one.status for one in findings)
    parts = [f"{counts[status]} {status.value}" for status in Severity if counts[status]]
    verdict = "penstock up can serve here" if can_serve(findings) else "penstock up cannot serve here"
    return f"{verdict}: {', '.join(parts)}"


if __name__ == "__main__":
    examine_from_stdin()
