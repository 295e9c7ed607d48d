"""The nouns of a report: what is said, before it becomes HTML, Markdown or a terminal's table."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum


class Tone(StrEnum):
    """How a text is meant; each way to write a report has its own colours, and none says anything by colour alone."""

    PLAIN = "plain"
    GOOD = "good"
    BAD = "bad"
    QUIET = "quiet"


class PlotName(StrEnum):
    """The plots; a name is also the anchor of its figure."""

    LATENCY = "latency"
    TIME = "time"
    THROUGHPUT = "throughput"
    BATCHES = "batches"
    STAGES = "stages"
    LOAD = "load"


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table. detail: what stands small beside it: a spread, a source."""

    text: str
    detail: str = ""
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True, slots=True)
class Table:
    """A table. texts: the columns that hold words and stand to the left; the others are figures."""

    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    texts: frozenset[int] = frozenset({0})
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands under it: sentences, a plot with how to read it, tables, remarks."""

    id: str
    title: str
    sentences: tuple[str, ...] = ()
    plot: PlotName | None = None
    how_to_read: str = ""
    tables: tuple[Table, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Absence:
    """What this run cannot show, and why, in one sentence."""

    title: str
    why: str


@dataclass(frozen=True, slots=True)
class Document:
    """A whole report. headline: one sentence; tone: whether it is good news."""

    title: str
    headline: str
    tone: Tone
    about: str
    complaints: tuple[str, ...]
    sections: tuple[Section, ...]
    absences: tuple[Absence, ...]


def keep_columns(table: Table, is_kept: Callable[[int], bool]) -> Table:
    """The table with those columns only."""
    kept = [index for index in range(len(table.head)) if is_kept(index)]
    texts = frozenset(new for new, old in enumerate(kept) if old in table.texts)
    rows = tuple(tuple(row[index] for index in kept) for row in table.rows)
    return Table(tuple(table.head[index] for index in kept), rows, texts, table.caption)


def drop_columns(table: Table, word: str, *, of: Collection[str] | None = None) -> Table:
    """The table without the columns (after the first; of: only those of these heads) that say the word in every row."""

    def is_kept(index: int) -> bool:
        is_meant = index > 0 and (of is None or table.head[index] in of)
        return not is_meant or any(row[index].text != word for row in table.rows)

    return keep_columns(table, is_kept)
