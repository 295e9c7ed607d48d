"""A report as data (sections, tables, cells), and the formatting of numbers and foreign text."""

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

NOTHING = "–"
_ERROR_CHARACTERS = 300


def number(value: float) -> str:
    """Three significant digits, thousands apart: 0.08, 0.0123, 1.23, 41.2, 128, 5,707."""
    if math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    if abs(value) >= 1e15:
        return f"{value:.3g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{min(digits, 6)}f}"
    return text.rstrip("0").rstrip(".") if abs(value) < 1 else text


def plain_number(value: float) -> str:
    """The number for a sentence: no zeros after the point that say nothing."""
    text = number(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


def count(value: float) -> str:
    """A whole number, thousands apart."""
    return f"{round(value):,}"


def percent(share: float) -> str:
    """A share as per cent: 0.5 is 50 %. What is not nothing is never 0 %, and what is not all is never 100 %."""
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    if abs(share) < 0.001:
        return "< 0.1 %"
    if 0.995 <= share < 1:
        return f"{min(100 * share, 99.99):.2f} %"
    return f"{100 * share:.{0 if share >= 0.1 else 1}f} %"


def duration(seconds: float) -> str:
    """Seconds as a person says them: 0.4 s, 42 s, 3 min 20 s, 10 h 05 min."""
    if seconds < 120:
        return f"{plain_number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest:02d} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def moment(text: str) -> str:
    """An ISO 8601 time in UTC as 2026-11-21 10:31 UTC; another text as it is."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d)(:\d\d)?(\+00:00|Z)", text)
    return f"{found[1]} {found[2]} UTC" if found else one_line(text, at_most=80)


def times(amount: int, thing: str) -> str:
    """1 round, 3 rounds."""
    return f"{amount:,} {thing}" if amount == 1 else f"{amount:,} {thing}s"


def join(words: Sequence[str]) -> str:
    """a; a and b; a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def one_line(text: str, *, at_most: int = _ERROR_CHARACTERS) -> str:
    """A foreign text without line breaks and control characters, cut where it is too long."""
    line = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in " ".join(text.split()))
    return line if len(line) <= at_most else f"{line[: at_most - 1]}…"


def sentence(text: str) -> str:
    """The text with a full stop, if it lacks one."""
    line = one_line(text, at_most=1000)
    return line if not line or line[-1] in ".!?…" else f"{line}."


class Tone(StrEnum):
    """How a text is meant; each way to write a report has its own colours, and none says anything by colour alone."""

    PLAIN = "plain"
    GOOD = "good"
    BAD = "bad"
    QUIET = "quiet"


class PlotName(StrEnum):
    """The plots. KEY_…: small ones beside the verdict."""

    LATENCY = "latency"
    TIME = "time"
    THROUGHPUT = "throughput"
    BATCHES = "batches"
    STAGES = "stages"
    LOAD = "load"
    KEY_LATENCY = "key-latency"
    KEY_RATES = "key-rates"
    KEY_QUEUE = "key-queue"
    KEY_MEMORY = "key-memory"
    KEY_CURVE = "key-curve"
    KEY_ANSWERED = "key-answered"
    KEY_PERCENTILES = "key-percentiles"
    KEY_REFUSALS = "key-refusals"
    KEY_LOADS = "key-loads"
    KEY_FIRST_ANSWERS = "key-first-answers"


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table. detail: what stands small beside it: a spread, a source."""

    text: str
    detail: str = ""
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True, slots=True)
class Table:
    """A table. texts: the columns that hold words and stand to the left; the others are figures.

    is_folded: only the caption is shown until the reader opens it.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    texts: frozenset[int] = frozenset({0})
    caption: str = ""
    is_folded: bool = False


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
class KeyFigure:
    """A figure beside the verdict, such as "p99" and 60.4 ms with the SLO as the cell's detail."""

    name: str
    cell: Cell


@dataclass(frozen=True, slots=True)
class KeyChart:
    """A small chart that supports the verdict. finding: what it shows, in one sentence."""

    plot: PlotName
    title: str
    finding: str


@dataclass(frozen=True, slots=True)
class Absence:
    """What this run cannot show, and why, in one sentence."""

    title: str
    why: str


@dataclass(frozen=True, slots=True)
class Document:
    """A whole report. headline: one sentence; tone: whether it is good news. subject: scenario, target, server, time.

    note: what else decided the figures, in one sentence; or "". terms: each with its meaning.
    figures, charts, comparison: support the headline. sections, absences: the details.
    """

    title: str
    headline: str
    tone: Tone
    note: str
    terms: tuple[tuple[str, str], ...]
    subject: str
    about: str
    complaints: tuple[str, ...]
    figures: tuple[KeyFigure, ...]
    charts: tuple[KeyChart, ...]
    comparison: Section | Absence
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
