"""`penstock models`: what there is, fetched from the catalogue, in and out of service."""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from server.batching.page import ModelExplained
from server.catalogue.catalogue import CatalogueEntry, find_entry, read_catalogue
from server.catalogue.errors import CatalogueError
from server.catalogue.placing import repository_of
from server.catalogue.pull import Pulled
from server.catalogue.pull import pull as pull_model
from server.commands.defaults import ApiKey, gateway_of, settings_or_fail
from server.commands.explain import explain
from server.commands.gateway import EMBEDDED_ENGINE, Gateway, GatewayError, IndexRow, NotAllowed
from server.commands.local_models import installed_models, load_failure, load_where_one_runs, unknown_model
from server.commands.model_check import check
from server.commands.model_rows import model_rows, model_table, reason_lines
from server.commands.optimize import optimize
from server.commands.terminal import fail, stoppable, table_console

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

Url = Annotated[str | None, typer.Option(help="the gateway [http://127.0.0.1:8000]", show_default=False)]
Home = Annotated[Path | None, typer.Option(help="where pulled models are [~/.penstock]", show_default=False)]
Name = Annotated[str, typer.Argument(help="the model's name")]


@app.command("list", short_help="What is here, in the catalogue and in the running gateway.")
def list_models(
    url: Url = None,
    api_key: ApiKey = "",
    home: Home = None,
    as_json: Annotated[bool, typer.Option("--json", help="an array of objects, and nothing else")] = False,
) -> None:
    """List the models of this machine, of the catalogue and of the running gateway, with their state there."""
    settings = settings_or_fail(home)
    gateway = gateway_of(url, api_key)
    installed = installed_models(settings)
    index = _index(gateway)
    rows = model_rows(
        installed=installed,
        home_repository=repository_of(settings.home_path),
        catalogue=read_catalogue(),
        index=index,
        is_batching=index is None or _is_batching(gateway),
        batches=_explained(gateway, index or ()),
    )
    if as_json:
        sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")
    else:
        console = table_console()
        console.print(model_table(rows))
        for line in reason_lines(rows):
            console.print(line, markup=False, soft_wrap=True)


@app.command(short_help="Fetch a model of the catalogue, verify it, load it.")
def pull(
    name: Name,
    source: Annotated[
        str | None,
        typer.Option("--from", help="a folder, a file or an address (a folder's ends in /) instead of the catalogue's"),
    ] = None,
    url: Url = None,
    api_key: ApiKey = "",
    home: Home = None,
) -> None:
    """Fetch a model of the catalogue, verify it, and load it where a gateway runs on this machine."""
    settings = settings_or_fail(home)
    try:
        entry = find_entry(name, read_catalogue())
        with stoppable("the same command goes on from there"):
            pulled = _pull_with_progress(entry, source, settings.home_path)
    except CatalogueError as error:
        fail(str(error), code=1)
    typer.echo(f"{name} is in {pulled.folder} (SHA-256 verified, {entry.licence})")
    for kept in pulled.kept:
        path = pulled.folder / kept
        typer.echo(
            f"your {kept} differs from the catalogue's and was kept; for the catalogue's, remove {path} and pull again"
        )
    try:
        typer.echo(load_where_one_runs(name, gateway_of(url, api_key), settings))
    except GatewayError as error:
        fail(str(error), code=1)


@app.command(short_help="Load a model, or load it again after a change.")
def load(name: Name, url: Url = None, api_key: ApiKey = "") -> None:
    """Load a model of the gateway's repositories, or load it again after a change."""
    gateway = gateway_of(url, api_key)
    try:
        gateway.load(name)
    except GatewayError as error:
        fail(load_failure(name, str(error), settings_or_fail()), code=1)
    typer.echo(f"{name} is loaded at {gateway.url}")


@app.command()
def unload(name: Name, url: Url = None, api_key: ApiKey = "") -> None:
    """Take a model out of service; it stays on disk."""
    gateway = gateway_of(url, api_key)
    try:
        known = _known_models(gateway)
        if known is not None and name not in known:
            fail(unknown_model(name, known, f"at {gateway.url}", url=gateway.url), code=1)
        gateway.unload(name)
    except GatewayError as error:
        fail(str(error), code=1)
    typer.echo(f"{name} is unloaded at {gateway.url}")


app.command(short_help="Send each model a known input and compare its answer.")(check)
app.command(short_help="Tell how a model's batches are formed.")(explain)
app.command(short_help="Make a model's INT8 twin; show what it costs and what it wins.")(optimize)


def _known_models(gateway: Gateway) -> set[str] | None:
    """Names in the repository index; None if the client may not read it (role `read`)."""
    try:
        return {row.name for row in gateway.repository_index()}
    except NotAllowed:
        return None


def _index(gateway: Gateway) -> tuple[IndexRow, ...] | None:
    """What the gateway knows; None, with a word on standard error, where none answers."""
    try:
        return gateway.repository_index()
    except GatewayError as error:
        typer.echo(f"penstock: states are not known: {error}", err=True)
        return None


def _explained(gateway: Gateway, index: Sequence[IndexRow]) -> dict[str, ModelExplained]:
    """How batches of served models are formed, by model; empty if the server does not report it."""
    pages = {}
    with contextlib.suppress(GatewayError):
        for name in {row.name for row in index if row.state == "READY"}:
            pages[name] = gateway.explain_model(name)
    return pages


def _is_batching(gateway: Gateway) -> bool:
    """Whether the engine that runs forms batches where a model asks for that: the embedded one does not."""
    try:
        return gateway.engine_name() != EMBEDDED_ENGINE
    except GatewayError as error:
        typer.echo(f"penstock: who forms batches is as under Triton: the engine's name is not known: {error}", err=True)
        return True


def _pull_with_progress(entry: CatalogueEntry, source: str | None, home: Path) -> Pulled:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(entry.name, total=entry.size_bytes)
        return pull_model(
            entry,
            source=source,
            home=home,
            progress=lambda done_bytes: bar.update(task, completed=done_bytes),
            on_wait=lambda: console.print(f"another pull of {entry.name} runs; waiting for it"),
        )
