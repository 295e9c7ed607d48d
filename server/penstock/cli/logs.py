"""`penstock logs`: the log of all processes of the running stack."""

import re
import sys
import time
from typing import Annotated, NoReturn
from urllib.parse import urlencode

import typer
from rich.console import Console
from rich.text import Text

from penstock.cli.gateway_client import ApiKey, GatewayClient, Url, gateway_of
from penstock.cli.terminal import fail, one_line, print_failure, print_json, stoppable
from penstock.log_file import LEVELS, LogLine
from penstock.protocol.errors import InferenceError
from penstock.protocol.system_reports import LogReport

POLL_S = 1.0
TIMEOUT_S = 15.0  # the gateway reads one log at a time
LEVEL_STYLES = {"debug": "dim", "warning": "yellow", "error": "bold red", "critical": "bold red"}
_BARE = re.compile(r"[\w.:/+,@%-]+")


def logs(
    text: Annotated[str, typer.Argument(help="only lines that contain this text; case-insensitive")] = "",
    level: Annotated[str, typer.Option(help=f"least severe level to show: {', '.join(LEVELS)}")] = "debug",
    since: Annotated[str, typer.Option(help="lines since then: 30s, 10m, 2h, 1d or 2026-11-29T03:00:00Z [all]")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="maximum number of lines")] = 200,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="also show new lines, until Ctrl-C")] = False,
    url: Url = None,
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object per line")] = False,
) -> None:
    """Show the newest lines of the log of all processes: parent, gateway, workers, Triton, video program.

    Requires the role admin. The log is limited to 8 MiB. It has no lines below the stack's --log-level.
    """
    gateway = gateway_of(url, api_key)
    query = {"level": level} | ({"text": text} if text else {})
    try:
        page = _page(gateway, query | {"limit": str(limit)} | ({"since": since} if since else {}))
    except InferenceError as error:
        fail(str(error), code=1)
    console = Console(highlight=False)
    _show(page, console, as_json=as_json)
    if follow:
        with stoppable("the stack runs on"):
            _follow(gateway, query, page.next, console, as_json=as_json)


def _page(gateway: GatewayClient, query: dict[str, str]) -> LogReport:
    return gateway.read(f"/v1/logs?{urlencode(query)}", LogReport, TIMEOUT_S)


def _follow(gateway: GatewayClient, query: dict[str, str], at: str, console: Console, *, as_json: bool) -> NoReturn:
    """Shows new lines until Ctrl-C. If the gateway stops responding, prints one error and keeps polling."""
    is_gone = False
    while True:
        time.sleep(POLL_S)
        try:
            page = _page(gateway, query | {"after": at, "limit": "1000"})
        except InferenceError as error:
            if not is_gone:
                print_failure(f"{error}; waiting")
            is_gone = True
            continue
        at, is_gone = page.next, False
        _show(page, console, as_json=as_json)


def _show(page: LogReport, console: Console, *, as_json: bool) -> None:
    for line in page.lines:
        if as_json:
            print_json(line)
        else:
            console.print(shown(line), soft_wrap=True)
    sys.stdout.flush()


def shown(line: LogLine) -> Text:
    """The line in the format of the stack's standard error, with the process."""
    text = Text(one_line(f"{line.time[:23]}Z") + " ", "dim").append(
        f"{one_line(line.level):<7}", LEVEL_STYLES.get(line.level, "")
    )
    text.append(f" {one_line(line.process)} {one_line(line.component)}: ", "dim").append(one_line(line.event))
    for key, value in line.fields.items():
        word = one_line(value)
        text.append(f" {one_line(key)}=", "dim").append(word if _BARE.fullmatch(word) else repr(word))
    return text
