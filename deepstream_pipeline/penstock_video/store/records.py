"""Records of the store: events, tracks, occupancy and positions."""

from dataclasses import dataclass

Box = tuple[float, float, float, float]
GRID_WIDTH, GRID_HEIGHT = 64, 36  # cells of a heat map, which covers the whole frame


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event. unix_s: when its frame was captured. direction: in, out or None. value: as AnalyticsEvent. xyxy, score:
    of its object, in pixels of width x height; None if the rule counts objects. snapshot_id: None without a picture.
    clip: file name of its recording, empty without one; it happens clip_offset_s after the clip's start."""

    id: int
    unix_s: float
    source_id: str
    kind: str
    rule: str
    direction: str | None
    label: str | None
    class_id: int | None
    track_id: int | None
    value: float
    score: float | None
    xyxy: Box | None
    width: int
    height: int
    frame_num: int
    pts_s: float
    snapshot_id: int | None
    clip: str
    clip_offset_s: float


@dataclass(frozen=True, slots=True)
class StoredTrack:
    """A tracked object, looked at five times a second. track_id: unique in its source and run. frames: its age in
    frames. score, xyxy: of its best moment. zones: names of the rules that held for it. path: at most 32 positions of
    its foot, as shares of the picture's size. event_id: of its newest event, or None; has_snapshot: of that event."""

    id: int
    source_id: str
    track_id: int
    label: str
    class_id: int
    first_unix_s: float
    last_unix_s: float
    first_pts_s: float
    last_pts_s: float
    frames: int
    score: float
    xyxy: Box
    width: int
    height: int
    zones: tuple[str, ...]
    path: tuple[tuple[float, float], ...]
    event_id: int | None
    has_snapshot: bool


@dataclass(frozen=True, slots=True)
class Occupancy:
    """A rule's numbers in the time from unix_s on. kind `objects`: all objects of the class `rule`. mean, most:
    objects for which the rule held; 0 for lines. events, entered, left: events, and those with a direction."""

    kind: str
    rule: str
    unix_s: float
    mean: float
    most: int
    events: int
    entered: int
    left: int


@dataclass(frozen=True, slots=True)
class RuleCount:
    """Events of a rule in a time range: all, and by direction."""

    kind: str
    rule: str
    events: int
    entered: int
    left: int


@dataclass(frozen=True, slots=True)
class SourceTimes:
    """began_unix_s: when its last run began. is_live: a camera; the times of a file's occupancy are its start plus the
    position in the file. last_unix_s: end of the newest minute with objects or events; for a file, at most the newest
    position of an object."""

    began_unix_s: float
    is_live: bool
    last_unix_s: float
