"""`penstock models explain`: how a model's batches are formed, how that went, and how Triton could form them."""

import sys
from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from server.batching.explanation import WHY_CLOSED, FitTold
from server.batching.page import BatchesOfRows, ModelExplained, OptionsTold, QueueTold
from server.commands.defaults import ApiKey, gateway_of
from server.commands.gateway import GatewayError
from server.commands.terminal import fail
from server.core.batching import CloseReason, Owner

BAR_COLUMNS, LABEL_COLUMNS = 40, 8
MIB = 1 << 20
_OWNERS = {
    Owner.GATEWAY: "the gateway forms its batches",
    Owner.TRITON: "Triton forms its batches; the counts are Triton's statistics",
    Owner.OFF: "no batches are formed; the counts are the engine's statistics",
}


def explain(
    name: Annotated[str, typer.Argument(help="the model's name")],
    url: Annotated[str | None, typer.Option(help="the gateway [http://127.0.0.1:8000]", show_default=False)] = None,
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="one object, and nothing else")] = False,
) -> None:
    """Show what forms a model's batches, its queue, the fit of batch times, and its batch sizes.

    The last part is a config.pbtxt snippet to let Triton form them, from the fit and the model's slo_p99_ms.
    """
    try:
        page = gateway_of(url, api_key).explain_model(name)
    except GatewayError as error:
        fail(str(error), code=1)
    if as_json:
        sys.stdout.write(msgspec.json.encode(page).decode() + "\n")
        return
    print_page(page, Console(highlight=False))


def print_page(page: ModelExplained, console: Console) -> None:
    """The page for a person: on a terminal its sentences are broken at words, elsewhere each is one line."""
    _print_lines(console, f"{page.model}: {_OWNERS[page.owner]}", is_whole=not console.is_terminal)
    if console.is_terminal:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, min_width=LABEL_COLUMNS)
        table.add_column()
        for label, told in _told(page):
            table.add_row(label, Text(told))
        console.print(table)
    else:
        _print_lines(console, *(f"{label:<{LABEL_COLUMNS}}  {told}" for label, told in _told(page)))
    _print_lines(console, "", *_histogram(page.batches))
    if page.proposed_config:
        _print_lines(console, "", page.proposed_config.rstrip("\n"))


def _print_lines(console: Console, *lines: str, is_whole: bool = True) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=is_whole)


def _told(page: ModelExplained) -> Iterator[tuple[str, str]]:
    """A label, and what is told under it."""
    yield "declared", _options(page.options, page.owner)
    if page.misspelt:
        yield "unread", ", ".join(f"{name} (did you mean {meant}?)" for name, meant in page.misspelt.items())
    if page.unmerged:
        yield "merged", f"no, each request and picture goes to the engine alone: {page.unmerged}"
    if page.queue is not None:
        yield "queue", _queue(page.queue)
    yield "fit", _fit(page.fit)
    for number, told in enumerate(_closed(page.closed_by)):
        yield "" if number else "closed", told
    if page.dropped:
        yield "refused", _counts(page.dropped)


def _closed(closed_by: Mapping[CloseReason, int]) -> list[str]:
    """Why batches were closed, the most frequent reason first."""
    by_count = sorted(closed_by.items(), key=lambda item: -item[1])
    return [f"{count} because {WHY_CLOSED[reason]}" for reason, count in by_count]


def _options(options: OptionsTold, owner: Owner) -> str:
    """The queue's bounds stand there where there is a queue of ours."""
    slo = "no slo_p99_ms" if options.slo_p99_ms is None else f"slo_p99_ms {options.slo_p99_ms:g}"
    told = f"max_batch_size {options.max_batch_size}, {options.instances} instance{_s(options.instances)}, {slo}"
    if owner is not Owner.GATEWAY:
        return told
    return (
        f"{told}, max_queue_delay_us {options.max_queue_delay_us:g}, max_queue_size {options.max_queue_size}, "
        f"max_queue_bytes {_size(options.max_queue_bytes)}"
    )


def _queue(queue: QueueTold) -> str:
    wait = "" if queue.wait_ms is None else f"; one row more would be answered in {queue.wait_ms:.1f} ms"
    return (
        f"{queue.depth} request{_s(queue.depth)} of {queue.rows} row{_s(queue.rows)} waiting, {queue.in_flight} of "
        f"{queue.slots} calls at the engine, at most {queue.max_rows} row{_s(queue.max_rows)} a batch now{wait}"
    )


def _fit(fit: FitTold | None) -> str:
    if fit is None:
        return "none yet: it needs calls of two sizes"
    guard = f"{fit.guard_ms:.2f} ms more at times"
    told = f"; {fit.deliver_us_per_row:.0f} µs a row to deliver" if fit.deliver_us_per_row else ""
    return f"t(b) = {fit.alpha_ms:.3f} + {fit.beta_ms_per_row:.4f} b ms, {guard}, by {fit.samples} calls{told}"


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
