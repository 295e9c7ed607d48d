"""What is said of a source: what its decode process tells, with what became of its frames."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import replace

from deepstream_pipeline.decode.uri import is_live, redacted
from deepstream_pipeline.runner.way import SourceWay
from deepstream_pipeline.types import SourceState, SourceStatistics


def statistics_of(way: SourceWay) -> SourceStatistics:
    """As its way was told last."""
    config, last, snapshot = way.config, way.last, way.snapshot
    opened = snapshot.opened if snapshot is not None else None
    return SourceStatistics(
        source_id=config.source_id,
        camera_name=config.camera_name,
        uri=redacted(config.uri),
        state=snapshot.state if snapshot is not None else SourceState.CONNECTING,
        reason=snapshot.reason if snapshot is not None else "",
        fps=snapshot.fps if snapshot is not None else 0.0,
        frames=snapshot.frames if snapshot is not None else 0,
        frames_total=opened.frames_total if opened is not None else None,
        inferred=way.inferred - way.unreadable,
        drops=dict(Counter(way.drops)),
        restarts=snapshot.restarts if snapshot is not None else 0,
        width=opened.width if opened is not None else 0,
        height=opened.height if opened is not None else 0,
        codec=opened.codec if opened is not None else "",
        decoder=opened.decoder if opened is not None else "",
        is_live=opened.is_live if opened is not None else is_live(config.uri),
        is_frozen=snapshot.is_frozen if snapshot is not None else False,
        latency_s=way.typical_latency_s(),
        position_s=last.frame.pts_s if last is not None else 0.0,
        duration_s=opened.duration_s if opened is not None else None,
        counts=last.analytics.counts if last is not None else {},
        events=dict(way.events),
        is_loop=config.is_loop,
        active_s=way.active_s,
    )


class Removed:
    """The last words about sources that were removed while the program ran. Of more than `most` the oldest become one,
    so that sums stay true."""

    OTHERS = "(others)"

    def __init__(self, most: int = 1_000) -> None:
        self._most = most
        self._kept: deque[SourceStatistics] = deque()

    def keep(self, source: SourceStatistics) -> None:
        self._kept.append(source)
        if len(self._kept) > self._most:
            self._kept.appendleft(_joined(self._kept.popleft(), self._kept.popleft()))

    def all(self) -> tuple[SourceStatistics, ...]:
        """In the order in which they went."""
        return tuple(self._kept)


def _joined(one: SourceStatistics, other: SourceStatistics) -> SourceStatistics:
    return replace(
        other,
        source_id=Removed.OTHERS,
        camera_name="",
        uri="",
        frames=one.frames + other.frames,
        inferred=one.inferred + other.inferred,
        restarts=one.restarts + other.restarts,
        active_s=one.active_s + other.active_s,
        drops=_sum(one.drops, other.drops),
        events=_sum(one.events, other.events),
        decoder="",
        counts={},
    )


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return dict(Counter(one) + Counter(other))
