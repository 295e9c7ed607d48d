"""What the summary page shows of a run, in bounded memory: series over time, tracks, stays, positions, a picture."""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from penstock_video.detections import foot_cells
from penstock_video.sinks.jsonl import Folder
from penstock_video.sinks.osd import Osd
from penstock_video.sinks.poster import Poster, PosterChooser
from penstock_video.types import AnalyticsKind, FloatArray, FrameResult, counter_name

MAX_BINS = 120
MAX_SOURCES = 64  # with a record; a run over more lists the others in its table only
HEAT_WIDTH, HEAT_HEIGHT = 64, 36  # cells
_PICTURE_PX = 1280
_MAX_TRACKS = 4096  # of a source that are known by their ID
_MAX_STEP_S = 1.0  # an object's time in a cell between two frames
STAY_LIMITS_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)


@dataclass(slots=True)
class TimeBin:
    """objects: sum over the frames by class; events: by KIND/COUNTER."""

    frames: int = 0
    objects: Counter[int] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)

    def add(self, other: "TimeBin") -> None:
        self.frames += other.frames
        self.objects += other.objects
        self.events += other.events


class TimeBins:
    """Bins of equal width from the first frame on. When they are MAX_BINS, their width doubles."""

    def __init__(self) -> None:
        self.width_s = 1.0
        self.begin_s: float | None = None
        self._bins: list[TimeBin] = []

    def at(self, pts_s: float) -> TimeBin:
        """The bin of a time, which may be made."""
        if self.begin_s is None:
            self.begin_s = pts_s
        at_s = max(pts_s - self.begin_s, 0.0)
        while at_s >= self.width_s * MAX_BINS:
            self._merge()
        index = int(at_s // self.width_s)
        while len(self._bins) <= index:
            self._bins.append(TimeBin())
        return self._bins[index]

    def __iter__(self) -> Iterator[TimeBin]:
        return iter(self._bins)

    def __len__(self) -> int:
        return len(self._bins)

    def _merge(self) -> None:
        self.width_s *= 2
        for first, second in zip(self._bins[::2], self._bins[1::2], strict=False):
            first.add(second)
        del self._bins[1::2]


class Stays:
    """Lengths of stays of a dwell rule. An event at the threshold is followed by one with the whole length."""

    def __init__(self) -> None:
        self._open: OrderedDict[int, float] = OrderedDict()  # last seconds by track
        self._counts = [0] * (len(STAY_LIMITS_S) + 1)
        self._sum_s = self._longest_s = 0.0

    def observe(self, track_id: int, seconds: float) -> None:
        """Takes an event of a track."""
        former = self._open.pop(track_id, None)
        if former is not None and seconds < former:  # it came again
            self._close(former)
        self._open[track_id] = seconds
        while len(self._open) > _MAX_TRACKS:
            self._close(self._open.popitem(last=False)[1])

    def figures(self) -> "StayFigures":
        """Of all stays so far."""
        while self._open:
            self._close(self._open.popitem(last=False)[1])
        number = sum(self._counts)
        return StayFigures(number, self._sum_s / max(number, 1), self._longest_s, tuple(self._counts))

    def _close(self, seconds: float) -> None:
        self._counts[sum(seconds >= limit for limit in STAY_LIMITS_S)] += 1
        self._sum_s += seconds
        self._longest_s = max(self._longest_s, seconds)


@dataclass(frozen=True, slots=True)
class StayFigures:
    """counts: of stays below each of STAY_LIMITS_S, and of longer ones."""

    number: int
    mean_s: float
    longest_s: float
    counts: tuple[int, ...]


class SourceRecord:
    """Of one source. heat: (HEAT_HEIGHT, HEAT_WIDTH) seconds that feet were in a cell."""

    def __init__(self, chooser: PosterChooser) -> None:
        self._chooser = chooser
        self._known: OrderedDict[int, None] = OrderedDict()
        self._last_s: float | None = None
        self.frames = 0
        self.began_unix_s = 0.0
        self.labels: tuple[str, ...] = ()
        self.bins = TimeBins()
        self.tracks: Counter[int] = Counter()
        self.stays: dict[str, Stays] = {}
        self.counts: Mapping[str, int] = {}
        self.heat: FloatArray = np.zeros((HEAT_HEIGHT, HEAT_WIDTH), np.float32)

    @property
    def poster(self) -> Poster | None:
        return self._chooser.poster

    @property
    def seconds(self) -> float:
        """Of the video, from its first frame to its last."""
        return 0.0 if self._last_s is None or self.bins.begin_s is None else self._last_s - self.bins.begin_s

    def label(self, class_id: int) -> str:
        """The class's name, or its number."""
        return self.labels[class_id] if 0 <= class_id < len(self.labels) else f"class {class_id}"

    def observe(self, result: FrameResult) -> None:
        """Adds a frame."""
        frame, tracks = result.frame, result.tracks
        if not self.frames:
            self.began_unix_s = frame.captured_unix_s
        self.frames += 1
        self.labels, self.counts = result.labels or self.labels, result.analytics.counts or self.counts
        at = self.bins.at(frame.pts_s)
        at.frames += 1
        classes = tracks.detections.class_id.tolist()
        at.objects.update(classes)
        for track_id, class_id in zip(tracks.track_id.tolist(), classes, strict=True):
            self._meet(track_id, class_id)
        for event in result.analytics.events:
            at.events[f"{event.kind}/{counter_name(event.rule, event.direction)}"] += 1
            if event.kind == AnalyticsKind.DWELL and event.track_id is not None:
                self.stays.setdefault(event.rule, Stays()).observe(event.track_id, event.value)
        self._warm(result)
        self._chooser.offer(result)

    def _meet(self, track_id: int, class_id: int) -> None:
        if track_id < 0:
            return
        if track_id in self._known:
            self._known.move_to_end(track_id)
            return
        self._known[track_id] = None
        self.tracks[class_id] += 1
        if len(self._known) > _MAX_TRACKS:
            self._known.popitem(last=False)

    def _warm(self, result: FrameResult) -> None:
        frame, before_s = result.frame, self._last_s
        self._last_s = frame.pts_s
        step_s = 0.0 if before_s is None else min(max(frame.pts_s - before_s, 0.0), _MAX_STEP_S)
        if step_s and len(result.tracks):
            rows, columns = foot_cells(result.tracks.detections, frame.width, frame.height, self.heat.shape)
            np.add.at(self.heat, (rows, columns), np.float32(step_s))


@dataclass(frozen=True, slots=True)
class SummaryOptions:
    """folder: of summary.html, which `penstock video run` writes at its end."""

    folder: Folder


class SummarySink:
    """Records a run for its summary page. Writes no file."""

    def __init__(self, options: SummaryOptions, osd: Osd, *, is_single: bool = False) -> None:
        self._osd = osd
        self.records: dict[str, SourceRecord] = {}

    def write(self, result: FrameResult) -> None:
        """Adds the frame to its source's record."""
        source_id = result.frame.source_id
        record = self.records.get(source_id)
        if record is None:
            if len(self.records) >= MAX_SOURCES:
                return
            chooser = PosterChooser(self._osd.draw, max_width=_PICTURE_PX, has_plain=True)
            record = self.records[source_id] = SourceRecord(chooser)
        record.observe(result)

    def end_source(self, source_id: str) -> None:
        """Keeps the record until the page is written."""
        self._osd.drop_pictures(source_id)

    def close(self) -> None:
        """Does nothing."""
