"""A running video program in figures: of a source, the sums, and one line of it all."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepstream_pipeline.types import SourceState, SourceStatistics
from server.commands.terminal import one_line

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
    """Of all sources. left_s: until the last file ends at today's rate; None where nobody knows."""

    sources: int
    running: int
    frames: int
    inferred: int
    dropped: int
    fps: float
    left_s: float | None


def dropped(source: SourceStatistics) -> int:
    """Of all reasons."""
    return sum(source.drops.values())


def is_looped(source: SourceStatistics) -> bool:
    """Whether it begins anew, or gave more frames than its file has (containers are a little wrong about that)."""
    return source.is_loop or (bool(source.frames_total) and source.frames > (source.frames_total or 0) * 1.05)


def left_s(source: SourceStatistics) -> float | None:
    """Until the file's end at the rate of the last seconds; 0 when it is over, None where nobody knows."""
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
    """Of a file, from 0 to 1; None where its length is not known."""
    if is_looped(source):
        return None
    if source.frames_total:
        return min(source.frames / source.frames_total, 1.0)
    return min(source.position_s / source.duration_s, 1.0) if source.duration_s else None


def sums(sources: Sequence[SourceStatistics]) -> Sums:
    """Of all sources."""
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
    """All of it in one line of a log, those in trouble by name."""
    total = sums(sources)
    left = f", {duration(total.left_s)} left" if total.left_s else ""
    figures = f"{total.frames} frames, {total.fps:.1f} fps, {total.dropped} dropped{left}"
    trouble = [
        f"{source.source_id} {source.state}{_because(source)}"
        for source in sources
        if source.state in (*WAITING, *FAILED)
    ]
    told = "; ".join([*trouble[:4], *([f"{len(trouble) - 4} more in trouble"] if len(trouble) > 4 else [])])
    head = f"{duration(seconds)}: {total.running} of {total.sources} running, {figures}"
    return one_line(f"{head}; {told}" if told else head)


def record_of(source: SourceStatistics) -> dict[str, object]:
    """For programs."""
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
    """12 s, 3:05, 1:02:03."""
    if seconds is None:
        return ""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def drops_in_words(drops: Iterable[tuple[str, int]]) -> str:
    """3 too_old, 1 corrupt."""
    return ", ".join(f"{count} {reason}" for reason, count in drops if count)


def _because(source: SourceStatistics) -> str:
    return f" ({source.reason})" if source.reason else ""
