"""`penstock models check`: does each model answer, and is it the answer that it should give?"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from penstock.cli.gateway_client import ApiKey, GatewayClient, Url, gateway_of, settings_or_fail
from penstock.cli.model_list import installed_models, unknown_model
from penstock.cli.terminal import fail, print_failure, print_json, printable, progress_bar, stoppable, table_console
from penstock.gateway.settings import Settings
from penstock.logs import LogFormat, configure_logs
from penstock.models.catalogue import CatalogueError, InstalledModel, read_catalogue
from penstock.models.model_folder import repository_of
from penstock.protocol.errors import InferenceError, PermissionDenied, Unauthenticated

if TYPE_CHECKING:  # they import ONNX Runtime, which `penstock models list` need not
    from penstock.cli.check_request import CheckContext
    from penstock.cli.check_result import CheckRow, CheckTarget
    from penstock.models.check.compare import OutputRow

COLORS = {"ok": "green", "differs": "red", "cannot run": "red", "not judged": "yellow"}
KEY_WANTED = "a check wants a key with the roles infer and read"


def check(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="models; without one, all on this machine")
    ] = None,
    url: Url = None,
    api_key: ApiKey = "",
    home: Annotated[Path | None, typer.Option(help="where pulled models are [~/.penstock]", show_default=False)] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="INPUT:N,N,…", help="of an input whose dimensions vary, as in images:1,3,224,224"),
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="write golden.json from today's answers of the named models")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="an array of objects, and nothing else")] = False,
) -> None:
    """Send a known input through each model and compare what comes back.

    Through the gateway at --url, with a key that has the roles infer and read. Without --url through the one that runs
    here, and in this process (ONNX models) where none can be asked. Compared with the model's golden.json, and an ONNX
    model also with plain ONNX Runtime on the same file. The exit code is 1 where a model differs or cannot run, and
    where the gateway at --url cannot be asked.
    """
    settings = settings_or_fail(home)
    configure_logs(LogFormat.TEXT, "error")
    shapes = _shapes(shape or [])
    if record and not names:
        fail("--record wants the names of the models whose answers are right today")
    subjects = _check_targets(names or [], settings)
    around = _check_context(gateway_of(url, api_key), shapes, is_chosen=url is not None)
    with stoppable("no model was changed"):
        rows = asyncio.run(_check_all(subjects, around, is_recording=record))
    if as_json:
        print_json(rows)
    else:
        _print(rows)
    if any(row.verdict.is_failure for row in rows):
        raise typer.Exit(1)


def _shapes(given: list[str]) -> dict[str, tuple[int, ...]]:
    """`x:1,3,224,224` by input; a name may hold colons itself."""
    shapes = {}
    for text in given:
        name, _, sizes = text.rpartition(":")
        numbers = sizes.split(",")
        if not name or not all(number.isascii() and number.isdecimal() and len(number) < 10 for number in numbers):
            fail(f"--shape {text!r} should look like images:1,3,224,224")
        shapes[name] = tuple(int(number) for number in numbers)
    return shapes


def _check_targets(names: list[str], settings: Settings) -> "list[CheckTarget]":
    """The named models, or all. Only models in home's repository are the catalogue's."""
    from penstock.cli.check_result import CheckTarget

    here = installed_models(settings)
    known = {model.name for model in here}
    for name in names:
        if name not in known:
            fail(unknown_model(name, known, "on this machine"), code=1)
    catalogue, home_repository = read_catalogue(), repository_of(settings.home_path)

    def sha256_of(model: InstalledModel) -> str | None:
        entry = catalogue.get(model.name) if model.repository == home_repository else None
        return entry.served_sha256 if entry is not None else None

    return [
        CheckTarget(model, sha256_of(model), is_named=model.name in names)
        for model in here
        if not names or model.name in names
    ]


def _check_context(gateway: GatewayClient, shapes: dict[str, tuple[int, ...]], *, is_chosen: bool) -> "CheckContext":
    """The gateway and its models. Without an answer, ends the command if the user named the gateway (is_chosen)."""
    from penstock.cli.check_request import CheckContext

    try:
        return CheckContext(gateway, gateway.repository_index(), shapes, is_chosen=is_chosen)
    except InferenceError as error:
        remedy = f" ({KEY_WANTED})" if isinstance(error, PermissionDenied | Unauthenticated) else ""
        if is_chosen:
            fail(f"no model was checked, since {error}{remedy}", code=1)
        print_failure(f"models are checked in this process, since {error}{remedy}")
        return CheckContext(gateway, None, shapes)


async def _check_all(subjects: "list[CheckTarget]", around: "CheckContext", *, is_recording: bool) -> "list[CheckRow]":
    from penstock.cli.check_result import check_model

    rows = []
    with progress_bar() as bar:
        task = bar.add_task("", total=len(subjects))
        for subject in subjects:
            bar.update(task, description=escape(subject.model.name))
            if is_recording:
                await _record(subject.model, around)
            rows.append(await check_model(subject, around))
            bar.advance(task)
    return rows


async def _record(model: InstalledModel, around: "CheckContext") -> None:
    from penstock.cli.check_request import ModelCannotRun, NotCheckable
    from penstock.cli.check_result import record_golden

    try:
        path = await record_golden(model, around)
    except (ModelCannotRun, CatalogueError, InferenceError, NotCheckable) as error:
        fail(f"{model.name} is not recorded: {error}", code=1)
    typer.echo(f"recorded {path}", err=True)


def _print(rows: "list[CheckRow]") -> None:
    console = table_console()
    if not rows:
        console.print("no models on this machine; `penstock models list` shows what can be pulled", soft_wrap=True)
        return
    console.print(_table(rows))
    for row in rows:
        for sentence in (*row.reasons, *row.notes):
            console.print(printable(f"{row.name}: {sentence}"), markup=False, soft_wrap=True)


def _table(rows: "list[CheckRow]") -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column(
        "model", no_wrap=True, min_width=max(len(row.name) for row in rows)
    )  # a name in part names nothing
    for header in ("verdict", "ran", "compared with", "of allowed"):
        table.add_column(header)
    for row in rows:
        color = COLORS[row.verdict]
        references = dict.fromkeys("golden" if name.startswith("golden") else name for name in row.compared_with)
        cells = (row.ran or "-", ", ".join(references) or "nothing", _share(row.outputs))
        table.add_row(escape(row.name), f"[{color}]{row.verdict}[/]", *map(escape, cells))
    return table


def _share(outputs: "list[OutputRow]") -> str:
    """The largest difference of an output, as a share of the allowed one."""
    shares = [row.share for row in outputs if row.difference is not None]
    if not shares:
        return "-"
    return f"{max(shares):.1%}" if max(shares) < 10 else "far over"
