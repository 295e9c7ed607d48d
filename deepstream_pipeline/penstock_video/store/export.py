"""Exports events, tracks and counts as CSV, without formulas for spreadsheets, and as Parquet."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

from penstock_video.sinks.schemas import iso_time
from penstock_video.store.records import Box, Occupancy, StoredEvent, StoredTrack

PARQUET_ADVICE = "Parquet needs pyarrow: pip install 'penstock[parquet]'"
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # full-width signs
T = TypeVar("T")
Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """A column. kind: str, int or float; empty cells are allowed."""

    name: str
    kind: type
    of: Callable[[T], Cell]


def _box(of: Callable[[T], Box | None]) -> list[Column[T]]:
    def corner(number: int) -> Callable[[T], Cell]:
        return lambda row: None if (box := of(row)) is None else round(box[number], 3)

    return [Column(name, float, corner(number)) for number, name in enumerate(("x1", "y1", "x2", "y2"))]


EVENT_COLUMNS: Sequence[Column[StoredEvent]] = (
    Column("id", int, lambda row: row.id),
    Column("time", str, lambda row: iso_time(row.unix_s)),
    Column("source_id", str, lambda row: row.source_id),
    Column("kind", str, lambda row: row.kind),
    Column("rule", str, lambda row: row.rule),
    Column("direction", str, lambda row: row.direction),
    Column("label", str, lambda row: row.label),
    Column("track_id", int, lambda row: row.track_id),
    Column("value", float, lambda row: row.value),
    Column("score", float, lambda row: row.score),
    *_box(lambda row: row.xyxy),
    Column("width", int, lambda row: row.width),
    Column("height", int, lambda row: row.height),
    Column("frame_num", int, lambda row: row.frame_num),
    Column("pts_s", float, lambda row: row.pts_s),
    Column("clip", str, lambda row: row.clip or None),
)
TRACK_COLUMNS: Sequence[Column[StoredTrack]] = (
    Column("id", int, lambda row: row.id),
    Column("source_id", str, lambda row: row.source_id),
    Column("track_id", int, lambda row: row.track_id),
    Column("label", str, lambda row: row.label),
    Column("first_time", str, lambda row: iso_time(row.first_unix_s)),
    Column("last_time", str, lambda row: iso_time(row.last_unix_s)),
    Column("first_pts_s", float, lambda row: row.first_pts_s),
    Column("last_pts_s", float, lambda row: row.last_pts_s),
    Column("frames", int, lambda row: row.frames),
    Column("score", float, lambda row: row.score),
    *_box(lambda row: row.xyxy),
    Column("width", int, lambda row: row.width),
    Column("height", int, lambda row: row.height),
    Column("zones", str, lambda row: ";".join(row.zones)),
)
COUNT_COLUMNS: Sequence[Column[tuple[str, Occupancy]]] = (
    Column("source_id", str, lambda row: row[0]),
    Column("time", str, lambda row: iso_time(row[1].unix_s)),
    Column("kind", str, lambda row: row[1].kind),
    Column("rule", str, lambda row: row[1].rule),
    Column("mean", float, lambda row: round(row[1].mean, 3)),
    Column("most", int, lambda row: row[1].most),
    Column("events", int, lambda row: row[1].events),
    Column("in", int, lambda row: row[1].entered),
    Column("out", int, lambda row: row[1].left),
)


def csv_parts(columns: Sequence[Column[T]], pages: Iterable[Sequence[T]]) -> Iterator[bytes]:
    """The file in chunks: the header, then one chunk per page."""
    yield _csv([[column.name for column in columns]])
    for page in pages:
        yield _csv([[_safe(column.of(row)) for column in columns] for row in page])


def parquet_parts(columns: Sequence[Column[T]], pages: Iterable[Sequence[T]]) -> Iterator[bytes]:
    """The file in chunks, one row group per page. Requires pyarrow: see `has_parquet`."""
    import pyarrow
    import pyarrow.parquet

    kinds = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64()}
    schema = pyarrow.schema([pyarrow.field(column.name, kinds[column.kind]) for column in columns])
    written = io.BytesIO()
    with pyarrow.parquet.ParquetWriter(_Sequential(written), schema) as writer:
        for page in pages:
            cells: dict[str, list[Any]] = {column.name: [column.of(row) for row in page] for column in columns}
            writer.write_table(pyarrow.table(cells, schema))
            yield _taken(written)
    yield _taken(written)


def has_parquet() -> bool:
    """Whether pyarrow is installed."""
    return find_spec("pyarrow") is not None


class _Sequential(io.RawIOBase):
    """A write-only buffer. Taking its bytes does not reset its position."""

    def __init__(self, file: io.BytesIO) -> None:
        self._file, self._position = file, 0

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        count = self._file.write(content)
        self._position += count
        return count

    def tell(self) -> int:
        return self._position


def _taken(file: io.BytesIO) -> bytes:
    part = file.getvalue()
    file.seek(0)
    file.truncate()
    return part


def _csv(rows: Iterable[Sequence[Cell]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\r\n").writerows(rows)
    return text.getvalue().encode()


def _safe(cell: Cell) -> Cell:
    """Prefixes text with an apostrophe if a spreadsheet would evaluate it as a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell
