"""Figures of the running program, and the live table fitted to the terminal's width."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.cli.terminal import one_line
from penstock_video.interfaces import SourceStatistics
from penstock_video.types import SourceState

COLOURS = {
    SourceState.RUNNING: "green",
    SourceState.ENDED: "dim",
    SourceState.PAUSED: "dim",
    SourceState.FAILED: "red",
    SourceState.AUTH_FAILED: "red",
}
FAILED = (SourceState.FAILED, SourceState.AUTH_FAILED)
WAITING = (SourceState.CONNECTING, SourceState.STALLED, SourceState.RECONNECTING)


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over all sources. left_s: until the last file ends at the current rate; None if unknown."""

    sources: int
    running: int
    frames: int
    inferred: int
    dropped: int
    fps: float
    left_s: float | None


def dropped(source: SourceStatistics) -> int:
    """Drops for all reasons."""
    return sum(source.drops.values())


def is_looped(source: SourceStatistics) -> bool:
    """Whether it restarts at its end, or has more frames than its file reports (containers are inexact)."""
    return source.is_loop or (bool(source.frames_total) and source.frames > (source.frames_total or 0) * 1.05)


def left_s(source: SourceStatistics) -> float | None:
    """Until the file's end at the rate of the last seconds; 0 when it is over, None if unknown."""
    if source.state in (SourceState.ENDED, *FAILED):
        return 0.0
    if source.is_live or source.fps <= 0:
        return None
    if is_looped(source):
        return None
    if source.frames_total:
        return max(source.frames_total - source.frames, 0) / source.fps
    if source.duration_s and source.position_s > 0 and source.frames:
        return max(source.duration_s - source.position_s, 0.0) * (source.frames / source.position_s) / source.fps
    return None


def share_done(source: SourceStatistics) -> float | None:
    """The share of a file that is done, from 0 to 1; None if its length is unknown."""
    if is_looped(source):
        return None
    if source.frames_total:
        return min(source.frames / source.frames_total, 1.0)
    return min(source.position_s / source.duration_s, 1.0) if source.duration_s else None


def sums(sources: Sequence[SourceStatistics]) -> Sums:
    """The sums over all sources."""
    left = [left_s(source) for source in sources]
    return Sums(
        sources=len(sources),
        running=sum(source.state is SourceState.RUNNING for source in sources),
        frames=sum(source.frames for source in sources),
        inferred=sum(source.inferred for source in sources),
        dropped=sum(map(dropped, sources)),
        fps=sum(source.fps for source in sources if source.state is SourceState.RUNNING),
        left_s=None if None in left else max((one for one in left if one is not None), default=None),
    )


def line_of(sources: Sequence[SourceStatistics], seconds: float) -> str:
    """A log line of all sources, with those in trouble by name."""
    total = sums(sources)
    left = f", {duration(total.left_s)} left" if total.left_s else ""
    figures = f"{total.frames} frames, {total.fps:.1f} fps, {total.dropped} dropped{left}"
    trouble = [
        f"{source.source_id} {source.state}{_because(source)}"
        for source in sources
        if source.state in (*WAITING, *FAILED)
    ]
    reasons = "; ".join([*trouble[:4], *([f"{len(trouble) - 4} more in trouble"] if len(trouble) > 4 else [])])
    head = f"{duration(seconds)}: {total.running} of {total.sources} running, {figures}"
    return one_line(f"{head}; {reasons}" if reasons else head)


def record_of(source: SourceStatistics) -> dict[str, object]:
    """The JSON record of all sources."""
    left = left_s(source)
    known = {
        "source_id": source.source_id,
        "state": source.state.value,
        "reason": source.reason,
        "decoder": source.decoder,
        "frames": source.frames,
        "frames_total": None if source.is_loop else source.frames_total,
        "inferred": source.inferred,
        "fps": round(source.fps, 3),
        "dropped": dict(source.drops),
        "restarts": source.restarts,
        "latency_s": None if source.latency_s is None else round(source.latency_s, 6),
        "left_s": None if left is None else round(left, 3),
        "counts": dict(source.counts),
    }
    return {name: value for name, value in known.items() if value is not None and value != ""}


def duration(seconds: float | None) -> str:
    """Formats seconds: 12 s, 3:05, 1:02:03."""
    if seconds is None:
        return ""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def drops_text(drops: Iterable[tuple[str, int]]) -> str:
    """Formats drops: 3 too_old, 1 corrupt."""
    return ", ".join(f"{count} {reason}" for reason, count in drops if count)


def _because(source: SourceStatistics) -> str:
    return f" ({source.reason})" if source.reason else ""


MAX_ROWS = 12
MAX_REASONS = 6
_GAP = 2
_BAR_WIDTH, _LEAST_BAR_WIDTH = 16, 6
_ID_WIDTH, _LEAST_ID_WIDTH = 16, 5  # one that is longer is cut where the numbers need its room
_REASON_ROWS = 2


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the table. done: from 0 to 1, None for no bar."""

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
    """Widths of the id and the bar, 0 for none, and which optional columns are shown."""

    name: int
    bar: int
    has_latency: bool = True
    has_left: bool = True
    has_total: bool = True


def live_table(sources: Sequence[SourceStatistics], width: int) -> Group:
    """A table with a row per source, those in trouble first if there are many, then sums and reasons.

    width: columns of the terminal; no line is longer.
    """
    shown = list(sources)
    if len(shown) > MAX_ROWS:
        shown = sorted(shown, key=lambda source: _trouble(source.state))[:MAX_ROWS]
    rows = list(map(_row, shown))
    if len(sources) > 1:
        rows.append(_total_row(sums(sources), len(sources) - len(shown)))
    return Group(_table(rows, _layout(rows, width)), *_reasons(shown, width))


def cut_in_the_middle(name: str, width: int) -> str:
    """Keeps both ends, which distinguish cameras."""
    if len(name) <= width:
        return name
    tail = (width - 1) // 2
    return f"{name[: width - 1 - tail]}…{name[len(name) - tail :]}"


def _layout(rows: Sequence[_Row], width: int) -> _Layout:
    """The first layout that leaves enough room for ids, from all columns to numbers only."""
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
    """Width of all columns without the id, with gaps."""
    others = [max(len(title), *(len(cell) for cell in cells)) for title, cells in _columns(rows, layout)]
    return sum(others) + layout.bar + _GAP * (len(others) + bool(layout.bar))


def _columns(rows: Sequence[_Row], layout: _Layout) -> list[tuple[str, list[Text]]]:
    """Title and cells of each column after the id, without the bar."""
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
    """A sentence for each source with a reason, at most two lines each, those in trouble first."""
    with_reason = sorted((source for source in shown if source.reason), key=lambda source: _trouble(source.state))
    lines = [_sentence(source, width) for source in with_reason[:MAX_REASONS]]
    more = len(with_reason) - MAX_REASONS
    return lines + ([Text(f"… and {more} more with a reason")] if more > 0 else [])


def _sentence(source: SourceStatistics, width: int) -> Text:
    """The sentence cut to the room; the source's own address goes first."""
    name, reason, uri = (one_line(text) for text in (source.source_id, source.reason, source.uri))
    most = _REASON_ROWS * width - _REASON_ROWS * _GAP
    text = f"{name}: {reason}"
    if len(text) > most and uri:
        text = f"{name}: {reason.replace(uri, 'it', 1)}"
    return Text(text if len(text) <= most else f"{text[: most - 1]}…", style="dim", overflow="fold")


def _trouble(state: SourceState) -> int:
    """Sort key; lower is shown first."""
    if state in FAILED:
        return 0
    return 1 if state in WAITING else 2 + (state is not SourceState.RUNNING)
