"""`penstock video events`: lists or exports the events, tracks and counts that a run stored."""

import http
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode, urlsplit

import typer
from rich.table import Table
from rich.text import Text

from penstock.cli.terminal import fail, one_line, stoppable, table_console
from penstock.network import client_context
from penstock_video.api.options import KEY_VARIABLE
from penstock_video.cli.progress import write_json
from penstock_video.errors import PipelineError
from penstock_video.store.database import FILE
from penstock_video.store.export import (
    COUNT_COLUMNS,
    EVENT_COLUMNS,
    PARQUET_ADVICE,
    TRACK_COLUMNS,
    Column,
    csv_parts,
    has_parquet,
    parquet_parts,
)
from penstock_video.store.reader import MAX_PAGE, EventReader, Filter, StoreUnreadable, pages
from penstock_video.store.records import Occupancy, StoredEvent, StoredTrack

MAX_SHOWN = 20  # rows of the table, without --limit
_TIMEOUT_S = 30.0
_DAY_S = 86_400.0
_HIDDEN = ("x1", "y1", "x2", "y2", "width", "height", "frame_num", "clip", "first_pts_s", "last_pts_s")
Pages = Iterator[list[Any]]


class What(StrEnum):
    """The table to list or export."""

    EVENTS = "events"
    TRACKS = "tracks"
    COUNTS = "counts"


_COLUMNS: dict[What, Sequence[Column[Any]]] = {
    What.EVENTS: EVENT_COLUMNS,
    What.TRACKS: TRACK_COLUMNS,
    What.COUNTS: COUNT_COLUMNS,
}


def _moment(text: str) -> float:
    """Unix seconds of a time, UTC if it names no zone. Raises BadParameter."""
    try:
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        with suppress(ValueError):
            return float(text)
    raise typer.BadParameter(
        f"{text!r} is not a time; use 2026-11-28T09:30 (UTC), 2026-11-28T09:30+02:00, or unix seconds"
    )


Folder = Annotated[
    Path | None,
    typer.Argument(metavar="[FOLDER]", help="output folder of a run, or event store [PENSTOCK_HOME/video/events]"),
]
Since = Annotated[
    float | None, typer.Option(parser=_moment, metavar="TIME", help="from this time on", show_default=False)
]
Until = Annotated[
    float | None, typer.Option(parser=_moment, metavar="TIME", help="before this time", show_default=False)
]


def events(
    folder: Folder = None,
    what: Annotated[What, typer.Option(help="events, tracks, or counts per rule and minute")] = What.EVENTS,
    source: Annotated[str, typer.Option(help="only this source", show_default=False)] = "",
    rule: Annotated[str, typer.Option(help="only this rule; tracks: that it matched", show_default=False)] = "",
    kind: Annotated[str, typer.Option(help="only events of this kind, such as line-crossing", show_default=False)] = "",
    label: Annotated[str, typer.Option(help="only objects of this class", show_default=False)] = "",
    since: Since = None,
    until: Until = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help=f"maximum number of rows, newest first [all; {MAX_SHOWN} in a table]")
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="write CSV; - for standard output")] = None,
    parquet: Annotated[Path | None, typer.Option("--parquet", metavar="FILE", help="write Parquet")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object per row")] = False,
    url: Annotated[
        str, typer.Option(help="control API of a running video program, instead of a folder", show_default=False)
    ] = "",
) -> None:
    """Lists the events of a run, or writes them to a file: what happened, where and when.

    FOLDER is what `penstock video run --out FOLDER` wrote, also while it runs. With --url the control API of a running
    program is asked; its key comes from PENSTOCK_VIDEO_API_KEY or PENSTOCK_API_KEY.
    """
    if parquet is not None and not has_parquet():
        fail(PARQUET_ADVICE)
    most = limit or (sys.maxsize if csv or parquet or as_json else MAX_SHOWN)
    which = Filter(source, rule, kind, label, since, until, most)
    try:
        with stoppable("no file is half written"):
            rows = _remote(url, what, which) if url else _stored(_store_in(folder), what, which)
            _give_out(_COLUMNS[what], rows, csv, parquet, as_json=as_json)
    except PipelineError as error:
        fail(error.message, code=1)
    except OSError as error:
        fail(f"{error.filename or csv or parquet}: {error.strerror or error}", code=1)


def _store_in(folder: Path | None) -> EventReader:
    home = Path(os.environ.get("PENSTOCK_HOME") or "~/.penstock").expanduser() / "video"
    given = home if folder is None else folder
    found = next((one for one in (given, given / "events") if (one / FILE).is_file()), None)
    if found is None:
        raise StoreUnreadable(f"no events are stored in {given}: give the folder of a run's --out or --events-folder")
    return EventReader(found)


def _stored(reader: EventReader, what: What, which: Filter) -> Pages:
    if what is What.EVENTS:
        return pages(reader.events, which, lambda one: (one.unix_s, one.id))
    if what is What.TRACKS:
        return pages(reader.tracks, which, lambda one: (one.first_unix_s, one.id))
    return _limited(_counts(reader, which), which.limit)


def _counts(reader: EventReader, which: Filter) -> Pages:
    """Minutes of each source, a day at a time."""
    for source_id, first, last in reader.minutes():
        if which.source_id not in ("", source_id):
            continue
        begin = max(first, which.since or 0.0)
        end = min(last + 60.0, which.until or last + 60.0)
        while begin < end:
            until = min(begin + _DAY_S, end)
            rows = reader.occupancy(source_id, begin, until, 60)
            yield [(source_id, row) for row in rows if _is_wanted(row, which)]
            begin = until


def _is_wanted(row: Occupancy, which: Filter) -> bool:
    return which.rule in ("", row.rule) and which.kind in ("", row.kind)


def _limited(rows: Pages, most: int) -> Pages:
    for page in rows:
        yield page[:most]
        most -= len(page)
        if most <= 0:
            return


def _remote(url: str, what: What, which: Filter) -> Pages:
    """Pages of a running program."""
    if what is What.COUNTS:
        fail("counts are read from a folder; a running program has /v1/streams/ID/occupancy")
    if urlsplit(url).scheme not in ("http", "https"):
        fail(f"--url {url!r}: give a URL such as http://127.0.0.1:8010")
    names = {
        "source_id": which.source_id, "label": which.label, "since": which.since, "until": which.until,
        **({"rule": which.rule, "kind": which.kind} if what is What.EVENTS else {"zone": which.rule}),
    }  # fmt: skip
    query: dict[str, object] = {name: value for name, value in names.items() if value not in ("", None)}
    make = _event_of if what is What.EVENTS else _track_of
    return _limited(_remote_pages(url.rstrip("/"), what, query, make, which.limit), which.limit)


def _remote_pages(
    url: str, what: What, query: dict[str, object], make: Callable[[dict[str, Any]], object], most: int
) -> Pages:
    import urllib3  # other commands need no HTTP

    key = os.environ.get(KEY_VARIABLE) or os.environ.get("PENSTOCK_API_KEY", "")
    pool = urllib3.PoolManager(
        ssl_context=client_context() if url.startswith("https") else None, timeout=_TIMEOUT_S, retries=False
    )
    after: dict[str, object] = {}
    while True:
        path = f"{url}/v1/{what}?{urlencode({**query, **after, 'limit': min(most, MAX_PAGE)})}"
        try:
            answer = pool.request("GET", path, headers={"x-api-key": key} if key else {})
            body = answer.json()
        except (urllib3.exceptions.HTTPError, ValueError) as error:
            raise StoreUnreadable(
                f"{url}: no valid response ({type(error).__name__}); check that a video program runs there"
            ) from error
        if answer.status != http.HTTPStatus.OK:
            raise StoreUnreadable(f"{url}: {body.get('error', answer.status)}")
        yield [make(row) for row in body[str(what)]]
        if body["next"] is None:
            return
        after = {"after": body["next"]}


def _event_of(row: dict[str, Any]) -> StoredEvent:
    """The event in a response of /v1/events."""
    same = {one.name: row[one.name] for one in fields(StoredEvent) if one.name in row}
    return StoredEvent(
        **same
        | {
            "unix_s": datetime.fromisoformat(row["time"]).timestamp(),
            "snapshot_id": None,
            "clip": row["clip"] or "",
            "clip_offset_s": row["clip_offset_s"] or 0.0,
        }
    )


def _track_of(row: dict[str, Any]) -> StoredTrack:
    """The track in a response of /v1/tracks."""
    same = {one.name: row[one.name] for one in fields(StoredTrack) if one.name in row}
    return StoredTrack(
        **same
        | {
            "first_unix_s": datetime.fromisoformat(row["first_time"]).timestamp(),
            "last_unix_s": datetime.fromisoformat(row["last_time"]).timestamp(),
            "has_snapshot": row["snapshot"] is not None,
        }
    )


def _give_out(
    columns: Sequence[Column[Any]], rows: Pages, csv: Path | None, parquet: Path | None, *, as_json: bool
) -> None:
    """Writes the rows as a table, as JSON lines, or to one of the files."""
    if csv is not None and str(csv) == "-":
        for part in csv_parts(columns, rows):
            sys.stdout.buffer.write(part)
    elif csv is not None:
        _write(csv, csv_parts(columns, rows))
    elif parquet is not None:
        _write(parquet, parquet_parts(columns, rows))
    elif as_json:
        for row in (row for page in rows for row in page):
            write_json({column.name: column.of(row) for column in columns})
    else:
        _show(columns, rows)


def _write(path: Path, parts: Iterator[bytes]) -> None:
    """Replaces the file only after it was written completely."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.writelines(parts)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _show(columns: Sequence[Column[Any]], rows: Pages) -> None:
    table = Table(header_style="bold")
    shown = [column for column in columns if column.name not in _HIDDEN]
    for column in shown:
        table.add_column(column.name, justify="left" if column.kind is str else "right", overflow="fold")
    for row in (row for page in rows for row in page):
        table.add_row(*(Text(_cell(column.of(row))) for column in shown))
    console = table_console()
    console.print(table if table.row_count else "no events: nothing that fits is stored")


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else one_line(str(value))
