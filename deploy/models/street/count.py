"""Counts who crosses a clip's line, and compares with the truth: `python -m deploy.models.street.count --seed 11`.

The association of detections over time is the evaluation's own, simple on purpose: boxes move on at their last speed,
the best pairs of a class are joined first, a track lives on unseen for a while. A track has crossed when its foot was
clearly on one side of the line and later is clearly on the other.
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import cv2
import numpy as np
import numpy.typing as npt

from deploy.models.street.clip import Clip, Line, make_clip
from deploy.models.street.detector import StreetDetector
from deploy.models.street.progress import Progress, tell
from deploy.models.street.scene import SCENARIOS
from deploy.models.street.stage import LABELS, FrameTruth
from server.core.result import Detections

Box = npt.NDArray[np.float64]
Counts = Counter[tuple[str, str]]

_MEMORY_S = 1.5  # a track lives on unseen
_CONFIRMED_S = 0.4  # of sightings before a track counts
_LEAST_MATCH = 0.15
_DOUBLE = 0.55  # of a new box in one that is taken: the same thing seen twice
_CLEAR = 0.2  # of the box's width: so far from the line is clearly on a side
_INERTIA = 0.7  # of the speed, from one sighting to the next


@dataclass(slots=True)
class Track:
    """box: xyxy where it was last seen or should be now. speed: of the box's corners, pixels a frame."""

    class_id: int
    box: Box
    speed: Box = field(default_factory=lambda: np.zeros(4))
    unseen: int = 0
    sightings: int = 1
    side: int = 0
    turns: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Report:
    """Crossings by label and direction, found and true; the mean error of the count in a frame, by class."""

    found: Counts
    true: Counts
    frame_error: tuple[float, ...]

    @property
    def is_equal(self) -> bool:
        return self.found == self.true


class LineCounter:
    """Takes the detections of frame after frame; counts() at any time."""

    def __init__(self, line: Line, fps: float) -> None:
        self._start = np.array(line.start)
        self._along = np.array(line.end) - self._start
        self._memory = round(_MEMORY_S * fps)
        self._confirmed = max(round(_CONFIRMED_S * fps), 2)
        self._tracks: list[Track] = []
        self._gone: list[Track] = []

    def see(self, found: Detections) -> None:
        """The next frame's detections."""
        for track in self._tracks:
            track.box = track.box + track.speed
            track.unseen += 1
        boxes, classes = found.xyxy.astype(np.float64), found.class_id
        taken = self._join(boxes, classes)
        for number in range(len(boxes)):
            if number not in taken and not self._is_double(boxes[number]):
                self._tracks.append(Track(int(classes[number]), boxes[number]))
        self._gone += [track for track in self._tracks if track.unseen > self._memory]
        self._tracks = [track for track in self._tracks if track.unseen <= self._memory]
        for track in self._tracks:
            if track.unseen == 0:
                self._take_side(track)

    def counts(self) -> Counts:
        """By label and direction; a track that went there and back again has not crossed."""
        total: Counts = Counter()
        for track in (*self._gone, *self._tracks):
            if track.sightings >= self._confirmed and (net := sum(track.turns)):
                total[LABELS[track.class_id], "right" if net > 0 else "left"] += 1
        return total

    def _join(self, boxes: Box, classes: npt.NDArray[np.int64]) -> set[int]:
        """Gives boxes to the tracks, the best pairs first; the numbers of those that are taken."""
        if not self._tracks or not len(boxes):
            return set()
        match = _likeness(np.stack([track.box for track in self._tracks]), boxes)
        match *= np.array([track.class_id for track in self._tracks])[:, None] == classes[None]
        taken: set[int] = set()
        joined: set[int] = set()
        for flat in np.argsort(-match, axis=None, kind="stable"):
            row, number = divmod(int(flat), len(boxes))
            if match[row, number] < _LEAST_MATCH:
                break
            if row not in joined and number not in taken:
                joined.add(row)
                taken.add(number)
                _move(self._tracks[row], boxes[number])
        return taken

    def _is_double(self, box: Box) -> bool:
        seen = [track.box for track in self._tracks if track.unseen == 0 and track.sightings > 1]
        return bool(seen) and float(_overlap(np.stack(seen), box[None]).max()) > _DOUBLE

    def _take_side(self, track: Track) -> None:
        left, _, right, bottom = track.box
        offset = np.array([(left + right) / 2, bottom]) - self._start
        across = self._along[0] * offset[1] - self._along[1] * offset[0]
        distance = across / float(np.hypot(*self._along))
        if abs(distance) < _CLEAR * (right - left):
            return
        side = 1 if distance > 0 else -1
        if track.side and side != track.side:
            track.turns.append(side)
        track.side = side


def count_clip(
    clip: Clip, detector: StreetDetector, *, frames: Iterable[tuple[npt.NDArray[np.uint8], FrameTruth]]
) -> Report:
    """What the detector and the association make of the clip's frames, and the truth."""
    counter, progress = LineCounter(clip.line, clip.fps), Progress(clip.frame_count, "frames", reports=4)
    errors = []
    for number, (picture, truth) in enumerate(frames, 1):
        found = detector.find([picture])[0]
        counter.see(found)
        shown = np.bincount(truth.class_id[~truth.is_ignored], minlength=len(LABELS))
        errors.append(np.abs(np.bincount(found.class_id, minlength=len(LABELS)) - shown))
        progress.reached(number)
    true: Counts = Counter((crossing.label, crossing.direction) for crossing in clip.crossings())
    return Report(counter.counts(), true, tuple(float(value) for value in np.mean(errors, axis=0)))


def _move(track: Track, box: Box) -> None:
    """The speed is that of the box's middle; a box that is cut off by something does not grow on."""
    before = track.box - track.speed * track.unseen
    shift = (box[:2] + box[2:] - before[:2] - before[2:]) / 2 / track.unseen
    speed = np.concatenate([shift, shift])
    track.speed = speed if track.sightings == 1 else _INERTIA * track.speed + (1 - _INERTIA) * speed
    track.box, track.unseen, track.sightings = box, 0, track.sightings + 1


def _overlap(ours: Box, theirs: Box) -> npt.NDArray[np.float64]:
    """(n, m) intersection over union."""
    low, high = np.maximum(ours[:, None, :2], theirs[None, :, :2]), np.minimum(ours[:, None, 2:], theirs[None, :, 2:])
    shared = np.clip(high - low, 0, None).prod(axis=-1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(axis=-1) for boxes in (ours, theirs)]
    share: npt.NDArray[np.float64] = shared / np.maximum(areas[0][:, None] + areas[1][None] - shared, 1e-9)
    return share


def _likeness(ours: Box, theirs: Box) -> npt.NDArray[np.float64]:
    """(n, m) in [0, 1]: half by overlap, half by how near the middles are, in units of the larger box's diagonal."""
    middles = [(boxes[:, :2] + boxes[:, 2:]) / 2 for boxes in (ours, theirs)]
    sizes = [np.hypot(*(boxes[:, 2:] - boxes[:, :2]).T) for boxes in (ours, theirs)]
    apart = np.hypot(*(middles[0][:, None] - middles[1][None]).transpose(2, 0, 1))
    near = np.clip(1 - apart / (0.6 * np.maximum(sizes[0][:, None], sizes[1][None])), 0, None)
    likeness: npt.NDArray[np.float64] = 0.5 * _overlap(ours, theirs) + 0.5 * near
    return likeness


def _rows(report: Report) -> Iterator[str]:
    for key in sorted(report.true | report.found):
        label, direction = key
        remark = "" if report.true[key] == report.found[key] else "   differs"
        yield f"  {label:8} {direction:6} true {report.true[key]:3}  found {report.found[key]:3}{remark}"
    errors = ", ".join(f"{label} {error:.2f}" for label, error in zip(LABELS, report.frame_error, strict=True))
    yield f"  mean error of a frame's count: {errors}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Renders clips, counts, compares; ends with 1 where a count differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=11, help="of the first clip")
    parser.add_argument("--clips", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--fps", type=float, default=15.0)
    parser.add_argument("--scenario", choices=SCENARIOS, default="plain")
    chosen = parser.parse_args(arguments)
    cv2.setNumThreads(1)
    detector, equal = StreetDetector(), 0
    for seed in range(chosen.seed, chosen.seed + chosen.clips):
        clip = make_clip(seed, chosen.seconds, chosen.fps, scenario=chosen.scenario)
        report = count_clip(clip, detector, frames=clip.frames())
        equal += report.is_equal
        tell(f"clip of seed {seed}, {chosen.seconds:g} s: {'equal' if report.is_equal else 'NOT equal'}")
        for row in _rows(report):
            tell(row)
    tell(f"{equal} of {chosen.clips} clips: crossings by class and direction equal to the truth")
    raise SystemExit(0 if equal == chosen.clips else 1)


if __name__ == "__main__":
    main()
