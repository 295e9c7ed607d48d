"""What is said of a source: what its decode process tells, with what became of its frames."""

from collections import Counter

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
        inferred=way.inferred,
        drops=dict(Counter(way.drops)),
        restarts=snapshot.restarts if snapshot is not None else 0,
        width=opened.width if opened is not None else 0,
        height=opened.height if opened is not None else 0,
        codec=opened.codec if opened is not None else "",
        is_live=opened.is_live if opened is not None else is_live(config.uri),
        is_frozen=snapshot.is_frozen if snapshot is not None else False,
        latency_s=way.typical_latency_s(),
        position_s=last.frame.pts_s if last is not None else 0.0,
        duration_s=opened.duration_s if opened is not None else None,
        counts=last.analytics.counts if last is not None else {},
    )
