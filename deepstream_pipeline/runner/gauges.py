"""What sources tell in sums and snapshots, as metrics: counters by what was added since, gauges as they are now."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepstream_pipeline.metrics import DECODERS, VideoMetrics
from deepstream_pipeline.sources.messages import Beat
from deepstream_pipeline.sources.snapshot import ProcessSnapshot, SourceSnapshot


@dataclass(slots=True)
class _Told:
    """Of one source, so far."""

    decoded: int = 0
    decode_s: float = 0.0
    prepare_s: float = 0.0
    restarts: int = 0


class Gauges:
    """From any thread: beat by the sources', refresh by whoever reads the metrics."""

    def __init__(self, metrics: VideoMetrics) -> None:
        self._metrics = metrics
        self._told: dict[str, _Told] = {}
        self._lock = threading.Lock()  # nothing is added twice

    def beat(self, source_id: str, beat: Beat) -> None:
        """Each frame of the last second counts with that second's mean."""
        with self._lock:
            told = self._told.setdefault(source_id, _Told())
            frames = beat.decoded - told.decoded
            if frames <= 0:
                return
            decode_s, prepare_s = beat.decode_s - told.decode_s, beat.prepare_s - told.prepare_s
            told.decoded, told.decode_s, told.prepare_s = beat.decoded, beat.decode_s, beat.prepare_s
        self._metrics.decoded(source_id, frames)
        self._metrics.decode_s(source_id, max(decode_s, 0.0) / frames, frames)
        self._metrics.prepare_s(source_id, max(prepare_s, 0.0) / frames, frames)

    def refresh(self, snapshots: Iterable[SourceSnapshot], processes: Sequence[ProcessSnapshot]) -> None:
        """What is true at this moment."""
        for decoder in DECODERS:
            self._metrics.decode_processes(decoder, sum(process.decoder == decoder for process in processes))
        for snapshot in snapshots:
            self._metrics.fps(snapshot.source_id, snapshot.fps)
            self._metrics.frozen(snapshot.source_id, snapshot.is_frozen)
            if snapshot.opened is not None:
                self._metrics.decoder(snapshot.source_id, snapshot.opened.decoder)
            for _ in range(self._new_restarts(snapshot)):
                self._metrics.restarted(snapshot.source_id)

    def forget(self, source_id: str) -> None:
        """The source is gone."""
        with self._lock:
            self._told.pop(source_id, None)

    def _new_restarts(self, snapshot: SourceSnapshot) -> int:
        with self._lock:
            told = self._told.setdefault(snapshot.source_id, _Told())
            count = max(snapshot.restarts - told.restarts, 0)
            told.restarts += count
        return count
