"""Response bodies of the event store's routes."""

from typing import Self

from pydantic import BaseModel, Field

from penstock_video.sinks.schemas import iso_time
from penstock_video.store.records import Occupancy, StoredEvent, StoredTrack


class Event(BaseModel):
    """An event. snapshot, clip: paths of this API, or null. clip_offset_s: position of the event in the clip."""

    id: int
    time: str
    source_id: str
    kind: str
    rule: str
    direction: str | None
    label: str | None
    class_id: int | None
    track_id: int | None
    value: float
    score: float | None
    xyxy: tuple[float, float, float, float] | None
    width: int
    height: int
    frame_num: int
    pts_s: float
    snapshot: str | None
    clip: str | None
    clip_offset_s: float | None

    @classmethod
    def of(cls, event: StoredEvent) -> Self:
        """The event for clients."""
        path = f"/v1/events/{event.id}"
        fields = {name: getattr(event, name) for name in cls.model_fields.keys() & set(event.__slots__)}
        return cls(
            **fields
            | {
                "time": iso_time(event.unix_s),
                "snapshot": f"{path}/snapshot.jpg" if event.snapshot_id is not None else None,
                "clip": f"{path}/clip.mp4" if event.clip else None,
                "clip_offset_s": round(event.clip_offset_s, 3) if event.clip else None,
            }
        )


class Events(BaseModel):
    """Events, newest first. next: `after` of the next page, or null. alarm: why events are not stored at present."""

    events: list[Event]
    next: str | None
    alarm: str


class TrackedObject(BaseModel):
    """A tracked object. score, xyxy: of the detection with the highest score. zones: rules that matched it. path:
    relative positions of its foot, from 0 to 1. event_id: its newest event. snapshot: path of that event's snapshot in
    this API, or null."""

    id: int
    source_id: str
    track_id: int
    label: str
    class_id: int
    first_time: str
    last_time: str
    first_pts_s: float
    last_pts_s: float
    duration_s: float
    frames: int
    score: float
    xyxy: tuple[float, float, float, float]
    width: int
    height: int
    zones: tuple[str, ...]
    path: tuple[tuple[float, float], ...]
    event_id: int | None
    snapshot: str | None

    @classmethod
    def of(cls, track: StoredTrack) -> Self:
        """The track for clients."""
        fields = {name: getattr(track, name) for name in cls.model_fields.keys() & set(track.__slots__)}
        return cls(
            **fields
            | {
                "first_time": iso_time(track.first_unix_s),
                "last_time": iso_time(track.last_unix_s),
                "duration_s": round(track.last_pts_s - track.first_pts_s, 3),
                "snapshot": f"/v1/events/{track.event_id}/snapshot.jpg" if track.has_snapshot else None,
            }
        )


class TrackedObjects(BaseModel):
    """Tracks, latest start first. next: `after` of the next page, or null."""

    tracks: list[TrackedObject]
    next: str | None


class OccupancyPoint(BaseModel):
    """Counts of a rule for one step from `time`. mean, most: objects at once. entered, left: events by direction."""

    time: str
    mean: float
    most: int
    events: int
    entered: int = Field(serialization_alias="in")
    left: int = Field(serialization_alias="out")

    @classmethod
    def of(cls, row: Occupancy) -> Self:
        """The point for clients."""
        return cls(
            time=iso_time(row.unix_s), mean=round(row.mean, 3), most=row.most, events=row.events, entered=row.entered,
            left=row.left,
        )  # fmt: skip


class OccupancySeries(BaseModel):
    """The points of one rule; steps without objects and events are omitted. kind `objects`: the whole frame, with the
    class as rule."""

    kind: str
    rule: str
    points: list[OccupancyPoint]


class OccupancyAnswer(BaseModel):
    """clock: wall, or video for a file, whose times are `began` plus the position in the file."""

    source_id: str
    clock: str
    began: str | None
    since: str
    until: str
    step_s: int
    series: list[OccupancySeries]


class HeatAnswer(BaseModel):
    """seconds: rows of a grid over the whole frame, from the top left: seconds with an object's foot in each cell."""

    source_id: str
    since: str
    until: str
    columns: int
    rows: int
    seconds: list[list[float]]


class RuleCounter(BaseModel):
    """Event counts of a rule, by direction, and the objects that match it now (null if it only counts events, or the
    source is not running)."""

    kind: str
    rule: str
    events: int
    entered: int = Field(serialization_alias="in")
    left: int = Field(serialization_alias="out")
    current: int | None


class Counters(BaseModel):
    """The counters of a source since that time."""

    source_id: str
    since: str
    until: str
    rules: list[RuleCounter]
