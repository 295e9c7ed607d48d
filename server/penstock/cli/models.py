"""`penstock models`: list, pull, load, unload and explain."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import DownloadColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from penstock.cli.add import add, remove
from penstock.cli.build import build
from penstock.cli.check import check
from penstock.cli.gateway_client import EMBEDDED_ENGINE, ApiKey, GatewayClient, Url, gateway_of, settings_or_fail
from penstock.cli.inspect import inspect
from penstock.cli.model_list import (
    UNTRIED_TEXT,
    installed_models,
    load_failure,
    load_where_one_runs,
    model_rows,
    model_table,
    reason_lines,
    unknown_model,
)
from penstock.cli.optimize import optimize
from penstock.cli.terminal import AsJson, fail, print_json, progress_bar, stoppable, table_console, waiting
from penstock.gateway.batching.explanation import WHY_CLOSED
from penstock.models.catalogue import CatalogueEntry, CatalogueError, find_entry, read_catalogue
from penstock.models.model_folder import repository_of
from penstock.models.pull import MODEL_FILE, Pulled
from penstock.models.pull import pull as pull_model
from penstock.protocol.batch_reports import BatchesOfRows, FitReport, ModelBatchReport, OptionsReport, QueueReport
from penstock.protocol.engine import ModelState
from penstock.protocol.errors import InferenceError, PermissionDenied, Unauthenticated
from penstock.protocol.inference import BatchOwner, CloseReason
from penstock.protocol.model_reports import ModelsReport, RunsOn

BAR_COLUMNS, LABEL_COLUMNS = 40, 8
MIB = 1 << 20
_OWNERS = {
    BatchOwner.GATEWAY: "the gateway forms its batches",
    BatchOwner.TRITON: "Triton forms its batches; the counts are Triton's statistics",
    BatchOwner.OFF: "no batches are formed; the counts are the engine's statistics",
}


def explain(
    name: Annotated[str, typer.Argument(help="the model's name")],
    url: Url = None,
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="one object, and nothing else")] = False,
) -> None:
    """Show what forms a model's batches, its queue, the fit of batch times, and its batch sizes.

    The last part is a config.pbtxt snippet to let Triton form them, from the fit and the model's slo_p99_ms.
    """
    try:
        page = gateway_of(url, api_key).explain_model(name)
    except InferenceError as error:
        fail(str(error), code=1)
    if as_json:
        print_json(page)
        return
    print_page(page, Console(highlight=False))


def print_page(page: ModelBatchReport, console: Console) -> None:
    """Prints the page. On a terminal, sentences wrap at words; elsewhere, each is one line."""
    _print_lines(console, f"{page.model}: {_OWNERS[page.owner]}", is_whole=not console.is_terminal)
    if console.is_terminal:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, min_width=LABEL_COLUMNS)
        table.add_column()
        for label, text in _summary(page):
            table.add_row(label, Text(text))
        console.print(table)
    else:
        _print_lines(console, *(f"{label:<{LABEL_COLUMNS}}  {text}" for label, text in _summary(page)))
    _print_lines(console, "", *_histogram(page.batches))
    if page.proposed_config:
        _print_lines(console, "", page.proposed_config.rstrip("\n"))


def _print_lines(console: Console, *lines: str, is_whole: bool = True) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=is_whole)


def _summary(page: ModelBatchReport) -> Iterator[tuple[str, str]]:
    """Rows of (label, text)."""
    yield "declared", _options(page.options, page.owner)
    if page.misspelt:
        yield "unread", ", ".join(f"{name} (did you mean {meant}?)" for name, meant in page.misspelt.items())
    if page.unmerged:
        yield "merged", f"no, each request and picture goes to the engine alone: {page.unmerged}"
    if page.queue is not None:
        yield "queue", _queue(page.queue)
    yield "fit", _fit(page.fit)
    for number, reason in enumerate(_closed(page.closed_by)):
        yield "" if number else "closed", reason
    if page.dropped:
        yield "refused", _counts(page.dropped)


def _closed(closed_by: Mapping[CloseReason, int]) -> list[str]:
    """Why batches were closed, the most frequent reason first."""
    by_count = sorted(closed_by.items(), key=lambda item: -item[1])
    return [f"{count} because {WHY_CLOSED[reason]}" for reason, count in by_count]


def _options(options: OptionsReport, owner: BatchOwner) -> str:
    """Includes the queue's limits if the gateway has the queue."""
    slo = "no slo_p99_ms" if options.slo_p99_ms is None else f"slo_p99_ms {options.slo_p99_ms:g}"
    text = f"max_batch_size {options.max_batch_size}, {options.instances} instance{_s(options.instances)}, {slo}"
    if owner is not BatchOwner.GATEWAY:
        return text
    return (
        f"{text}, max_queue_delay_us {options.max_queue_delay_us:g}, max_queue_size {options.max_queue_size}, "
        f"max_queue_bytes {_size(options.max_queue_bytes)}"
    )


def _queue(queue: QueueReport) -> str:
    wait = "" if queue.wait_ms is None else f"; one row more would be answered in {queue.wait_ms:.1f} ms"
    return (
        f"{queue.depth} request{_s(queue.depth)} of {queue.rows} row{_s(queue.rows)} waiting, {queue.in_flight} of "
        f"{queue.slots} calls at the engine, at most {queue.max_rows} row{_s(queue.max_rows)} a batch now{wait}"
    )


def _fit(fit: FitReport | None) -> str:
    if fit is None:
        return "none yet: it needs calls of two sizes"
    guard = f"{fit.guard_ms:.2f} ms more at times"
    delivery = f"; {fit.deliver_us_per_row:.0f} µs a row to deliver" if fit.deliver_us_per_row else ""
    return f"t(b) = {fit.alpha_ms:.3f} + {fit.beta_ms_per_row:.4f} b ms, {guard}, by {fit.samples} calls{delivery}"


def _histogram(batches: list[BatchesOfRows]) -> Iterator[str]:
    if not batches:
        yield "no batches yet"
        return
    most = max(row.batches for row in batches)
    yield "rows  batches"
    for row in batches:
        bar = "█" * max(1, round(BAR_COLUMNS * row.batches / most))
        yield f"{row.rows:>4}  {bar} {row.batches}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))


def _size(size_bytes: int) -> str:
    return f"{size_bytes / MIB:g} MiB" if size_bytes >= MIB else f"{size_bytes} bytes"


def _s(count: int) -> str:
    return "" if count == 1 else "s"


app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

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
        runs_on=_runs_on(gateway) if index else None,
    )
    if as_json:
        print_json(rows)
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
    as_json: AsJson = False,
) -> None:
    """Fetch a model of the catalogue, verify it, and load it where a gateway runs on this machine."""
    settings = settings_or_fail(home)
    try:
        entry = find_entry(name, read_catalogue())
        with stoppable("the same command goes on from there"):
            pulled = _pull_with_progress(entry, source, settings.home_path)
    except CatalogueError as error:
        fail(str(error), code=1)
    if not as_json:
        for line in _pulled_lines(entry, pulled, source):
            typer.echo(line)
    try:
        with waiting(f"loading {name}"):
            state = load_where_one_runs(name, gateway_of(url, api_key), settings)
    except InferenceError as error:
        fail(str(error), code=1)
    if as_json:
        place = {"folder": str(pulled.folder), "changed": not pulled.was_present, "preserved": list(pulled.preserved)}
        print_json({"model": name, **place, "licence": entry.licence, "state": state})
    else:
        typer.echo(state)


def _pulled_lines(entry: CatalogueEntry, pulled: Pulled, source: str | None) -> Iterator[str]:
    place = f"already in {pulled.folder}, its model file unchanged" if pulled.was_present else f"in {pulled.folder}"
    yield f"{entry.name} is {place} (SHA-256 verified, licence {entry.licence})"
    if pulled.was_present and source is not None:
        yield f"{source} was not read; to install from it, remove {pulled.folder / MODEL_FILE} and pull again"
    if entry.untried:
        yield f"{UNTRIED_TEXT} {entry.name}: check its answers on your own pictures"
    for file_name in pulled.preserved:
        path = pulled.folder / file_name
        yield f"kept your {file_name}, which differs from the catalogue's; to replace it, remove {path} and pull again"


@app.command(short_help="Load a model, or load it again after a change.")
def load(name: Name, url: Url = None, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """Load a model of the gateway's repositories, or load it again after a change."""
    gateway = gateway_of(url, api_key)
    try:
        with waiting(f"loading {name}"):
            gateway.load(name)
    except InferenceError as error:
        fail(load_failure(name, str(error), settings_or_fail()), code=1)
    _print_state(name, "loaded", gateway.url, as_json=as_json)


@app.command()
def unload(name: Name, url: Url = None, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """Take a model out of service; it stays on disk."""
    gateway = gateway_of(url, api_key)
    try:
        known = _known_models(gateway)
        if known is not None and name not in known:
            fail(unknown_model(name, known, f"at {gateway.url}", url=gateway.url), code=1)
        with waiting(f"unloading {name}"):
            gateway.unload(name)
    except InferenceError as error:
        fail(str(error), code=1)
    _print_state(name, "unloaded", gateway.url, as_json=as_json)


def _print_state(name: str, state: str, url: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"model": name, "state": state, "url": url})
    else:
        typer.echo(f"{name} is {state} at {url}")


app.command(short_help="Show a model file's recognised layout and its card.")(inspect)
app.command(short_help="Add model files, and load them.")(add)
app.command(short_help="Unload a model and remove its folder.")(remove)
app.command(short_help="Send each model a known input and compare its answer.")(check)
app.command(short_help="Tell how a model's batches are formed.")(explain)
app.command(short_help="Build TensorRT-RTX engines on this CPU; show what was fused.")(build)
app.command(short_help="Make a faster copy of a model: INT8 for the CPU, or PyTorch for a GPU.")(optimize)


def _known_models(gateway: GatewayClient) -> set[str] | None:
    """Names in the repository index; None if the client may not read it (role `read`)."""
    try:
        return {row.name for row in gateway.repository_index()}
    except (PermissionDenied, Unauthenticated):
        return None


def _index(gateway: GatewayClient) -> tuple[ModelState, ...] | None:
    """The gateway's index; None, with a message on standard error, if no gateway answers."""
    try:
        return gateway.repository_index()
    except InferenceError as error:
        typer.echo(f"penstock: states are not known: {error}", err=True)
        return None


def _explained(gateway: GatewayClient, index: Sequence[ModelState]) -> dict[str, ModelBatchReport]:
    """How batches of served models are formed, by model; empty if the server does not report it."""
    pages = {}
    with contextlib.suppress(InferenceError):
        for name in {row.name for row in index if row.state == "READY"}:
            pages[name] = gateway.explain_model(name)
    return pages


def _runs_on(gateway: GatewayClient) -> dict[str, RunsOn]:
    """Where served models run; empty if the server does not report it."""
    with contextlib.suppress(InferenceError):
        models = gateway.read("/v1/models", ModelsReport).models
        return {model.name: model.runs_on for model in models if model.runs_on is not None}
    return {}


def _is_batching(gateway: GatewayClient) -> bool:
    """Whether the engine forms batches for models with dynamic batching; the embedded one does not."""
    try:
        return gateway.engine().name != EMBEDDED_ENGINE
    except InferenceError as error:
        typer.echo(f"penstock: who forms batches is as under Triton: the engine's name is not known: {error}", err=True)
        return True


def _pull_with_progress(entry: CatalogueEntry, source: str | None, home: Path) -> Pulled:
    with progress_bar(DownloadColumn(), TransferSpeedColumn()) as bar:
        task = bar.add_task(entry.name, total=entry.size_bytes)
        return pull_model(
            entry,
            source=source,
            home=home,
            progress=lambda done_bytes: bar.update(task, completed=done_bytes),
            on_wait=lambda: bar.console.print(f"another pull of {entry.name} runs; waiting for it"),
        )
