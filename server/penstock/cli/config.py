"""`penstock config`: settings with their values and origins."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from penstock.cli.gateway_client import ApiKey, Url, gateway_of
from penstock.cli.terminal import fail, one_line, print_failure, print_json, table_console
from penstock.gateway.settings_report import setting_rows
from penstock.gateway.settings_sources import SettingsError, read_settings, settings_origins
from penstock.protocol.errors import GatewayUnreachable, InferenceError
from penstock.protocol.system_reports import SettingReport, SettingsReport

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def _config() -> None:
    """Show settings with their values and origins."""


@app.command(short_help="Show each setting, its value and its origin.")
def show(
    names: Annotated[list[str] | None, typer.Argument(help="settings to show, such as http_port [all]")] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file: show what `penstock up --config FILE` would use")
    ] = None,
    changed: Annotated[bool, typer.Option("--changed", help="only settings that differ from their default")] = False,
    url: Url = None,
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON array only")] = False,
) -> None:
    """Show each setting, its value and its origin: default, file, variable, flag, or start (chosen at startup).

    If a stack is running, shows its effective settings; this requires the role admin. Otherwise shows what
    `penstock up` would use. Secrets are hidden.
    """
    rows = _of_file(config) if config is not None else _in_force(url, api_key)
    unknown = sorted(set(names or ()) - {row.name for row in rows})
    if unknown:
        fail(f"no setting is named {unknown[0]!r}; `penstock config show` lists them")
    shown = [row for row in rows if (not names or row.name in names) and (not changed or row.origin != "default")]
    if as_json:
        print_json(shown)
    else:
        table_console().print(_table(shown))


def _in_force(url: str | None, api_key: str) -> list[SettingReport]:
    """Settings of the running stack, or of this command if no stack runs and no URL was given."""
    gateway = gateway_of(url, api_key)
    try:
        return gateway.read("/v1/system/config", SettingsReport).settings
    except GatewayUnreachable as error:
        if url is not None:
            fail(str(error), code=1)
        print_failure(f"nothing answers at {gateway.url}: showing the settings that `penstock up` would use")
        return _of_file(None)
    except InferenceError as error:
        fail(str(error), code=1)


def _of_file(config: Path | None) -> list[SettingReport]:
    try:
        return setting_rows(read_settings({}, file=config), settings_origins({}, file=config))
    except SettingsError as error:
        fail(str(error))


def _table(rows: list[SettingReport]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("origin", overflow="fold")
    for row in rows:
        style = "dim" if row.origin == "default" else ""
        origin = f"{row.origin} {row.source}".rstrip()
        table.add_row(Text(one_line(row.name)), Text(one_line(_value(row.value)), style), Text(one_line(origin), style))
    return table


def _value(value: object) -> str:
    """The value as text; lists separated by commas."""
    match value:
        case None | "":
            return "not set"
        case str():
            return value
        case list():
            return ", ".join(map(str, value)) or "none"
    return json.dumps(value, ensure_ascii=False)
