"""The live table of `penstock video run`, fitted to its terminal: numbers stay whole, the rest gives way."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deepstream_pipeline.types import SourceState, SourceStatistics
from server.commands.terminal import one_line
from server.commands.video_rows import COLOURS, FAILED, WAITING, Sums, dropped, duration, is_looped, left_s, share_done
from server.commands.video_rows import sums as sums_of

MAX_ROWS = 12
MAX_REASONS = 6
_GAP = 2
_BAR_WIDTH, _LEAST_BAR_WIDTH = 16, 6
_ID_WIDTH, _LEAST_ID_WIDTH = 16, 5  # one that is longer is cut where the numbers need its room
_REASON_ROWS = 2


@dataclass(frozen=True, slots=True)
class _Row:
    """What a line of the table says. done: from 0 to 1, None for no bar."""

    name: str
    state: Text
    done: float | None
    frames: str
    fps: str
    dropped: Text
    latency: str
    left: str


@dataclass(frozen=True, slots=True)
class _Layout:
    """Widths of the id and of the bar, 0 for none, and which of the lesser figures are shown."""

    name: int
    bar: int
    has_latency: bool = True
    has_left: bool = True
    has_total: bool = True


def live_table(sources: Sequence[SourceStatistics], width: int) -> Group:
    """A row a source, those in trouble first where there are many, then the sums, then why those in trouble are in it.

    width: in columns, of which no line takes more.
    """
    shown = list(sources)
    if len(shown) > MAX_ROWS:
        shown = sorted(shown, key=lambda source: _trouble(source.state))[:MAX_ROWS]
    rows = list(map(_row, shown))
    if len(sources) > 1:
        rows.append(_total_row(sums_of(sources), len(sources) - len(shown)))
    return Group(_table(rows, _layout(rows, width)), *_reasons(shown, width))


def cut_in_the_middle(name: str, width: int) -> str:
    """Both ends tell cameras apart."""
    if len(name) <= width:
        return name
    tail = (width - 1) // 2
    return f"{name[: width - 1 - tail]}…{name[len(name) - tail :]}"


def _layout(rows: Sequence[_Row], width: int) -> _Layout:
    """The first that leaves the ids enough, from all that there is to the numbers alone; ids get what is left."""
    longest = max(len(row.name) for row in rows) if rows else 0
    has_bar = any(row.done is not None for row in rows)
    most = _Layout(0, _BAR_WIDTH if has_bar else 0, has_left=any(row.left for row in rows))
    ways = [most, replace(most, bar=min(most.bar, _LEAST_BAR_WIDTH)), replace(most, bar=0)]
    ways.append(replace(ways[-1], has_latency=False))
    ways.append(replace(ways[-1], has_left=False))
    ways.append(replace(ways[-1], has_total=False))
    room = [width - _width_of_others(rows, way) for way in ways]
    enough = min(max(longest, len("source")), _ID_WIDTH)
    at = next((at for at, left in enumerate(room) if left >= enough), len(ways) - 1)
    name = max(min(longest, room[at]), _LEAST_ID_WIDTH)
    spare = max(room[at] - max(name, len("source")), 0)
    bar = min(ways[at].bar + spare, _BAR_WIDTH) if ways[at].bar else 0
    return replace(ways[at], name=name, bar=bar)


def _width_of_others(rows: Sequence[_Row], layout: _Layout) -> int:
    """Of all but the id, with the gaps."""
    others = [max(len(title), *(len(cell) for cell in cells)) for title, cells in _columns(rows, layout)]
    return sum(others) + layout.bar + _GAP * (len(others) + bool(layout.bar))


def _columns(rows: Sequence[_Row], layout: _Layout) -> list[tuple[str, list[Text]]]:
    """Title and cells of each behind the id, without the bar."""
    columns = [
        ("state", [row.state for row in rows]),
        ("frames", [Text(row.frames if layout.has_total else row.frames.partition("/")[0]) for row in rows]),
        ("fps", [Text(row.fps) for row in rows]),
        ("dropped", [row.dropped for row in rows]),
    ]
    if layout.has_latency:
        columns.append(("latency", [Text(row.latency) for row in rows]))
    if layout.has_left:
        columns.append(("left", [Text(row.left) for row in rows]))
    return columns


def _table(rows: Sequence[_Row], layout: _Layout) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), collapse_padding=True, header_style="dim")
    table.add_column("source", no_wrap=True)
    columns = _columns(rows, layout)
    for title, _ in columns:
        table.add_column(title, justify="left" if title == "state" else "right", no_wrap=True)
        if title == "state" and layout.bar:
            table.add_column("", width=layout.bar, no_wrap=True)
    for at, row in enumerate(rows):
        cells: list[Text | ProgressBar] = [Text(cut_in_the_middle(row.name, layout.name))]
        for title, texts in columns:
            cells.append(texts[at])
            if title == "state" and layout.bar:
                cells.append(Text() if row.done is None else ProgressBar(1.0, row.done, width=layout.bar))
        is_total = len(rows) > 1 and at == len(rows) - 1
        table.add_row(*cells, style="bold" if is_total else "")
    return table


def _row(source: SourceStatistics) -> _Row:
    has_total = source.frames_total and not is_looped(source) and source.frames <= source.frames_total
    lost, left = dropped(source), left_s(source)
    state = f"{source.state}{' (frozen)' if source.is_frozen else ''}"
    return _Row(
        name=one_line(source.source_id),
        state=Text(state, style=COLOURS.get(source.state, "yellow")),
        done=None if source.reason else share_done(source),
        frames=f"{source.frames}/{source.frames_total}" if has_total else str(source.frames),
        fps=f"{source.fps:.1f}",
        dropped=Text(str(lost), style="yellow" if lost else ""),
        latency="" if source.latency_s is None else f"{source.latency_s * 1e3:.0f} ms",
        left=duration(left) if left else "",
    )


def _total_row(total: Sums, hidden: int) -> _Row:
    return _Row(
        name=f"… and {hidden} more" if hidden else "all",
        state=Text(f"{total.running} of {total.sources} run"),
        done=None,
        frames=str(total.frames),
        fps=f"{total.fps:.1f}",
        dropped=Text(str(total.dropped)),
        latency="",
        left=duration(total.left_s or None),
    )


def _reasons(shown: Sequence[SourceStatistics], width: int) -> list[Text]:
    """A sentence for each that has one, of two lines at most, those in trouble first."""
    told = sorted((source for source in shown if source.reason), key=lambda source: _trouble(source.state))
    lines = [_sentence(source, width) for source in told[:MAX_REASONS]]
    more = len(told) - MAX_REASONS
    return lines + ([Text(f"… and {more} more with a reason")] if more > 0 else [])


def _sentence(source: SourceStatistics, width: int) -> Text:
    """As much of it as there is room for; the source's own address, which people know, goes first."""
    name, reason, uri = (one_line(text) for text in (source.source_id, source.reason, source.uri))
    most = _REASON_ROWS * width - _REASON_ROWS * _GAP
    text = f"{name}: {reason}"
    if len(text) > most and uri:
        text = f"{name}: {reason.replace(uri, 'it', 1)}"
    return Text(text if len(text) <= most else f"{text[: most - 1]}…", style="dim", overflow="fold")


def _trouble(state: SourceState) -> int:
    """Lower is shown first."""
    if state in FAILED:
        return 0
    return 1 if state in WAITING else 2 + (state is not SourceState.RUNNING)
