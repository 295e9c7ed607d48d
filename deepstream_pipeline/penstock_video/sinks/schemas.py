"""Results as JSON: our full lines and DeepStream's minimal payload. SCHEMAS.md describes every field."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from penstock.protocol.vision_results import Mask
from penstock.vision.masks import rle_of
from penstock_video.types import (
    NO_ANALYTICS,
    AnalyticsEvent,
    ClassScore,
    Detections,
    FloatArray,
    Frame,
    FrameAnalytics,
    FrameResult,
    Tracks,
    counter_name,
)

MINIMAL_VERSION = "4.0"  # of DeepStream's schema, in every payload of its nvmsgconv


class Schema(StrEnum):
    """full: ours, everything that is known. minimal: as DeepStream's nvmsgconv writes it."""

    FULL = "full"
    MINIMAL = "minimal"


class ClassLine(msgspec.Struct, frozen=True):
    """One class of a picture or object, or its text or vector. score: from the model's parser."""

    model: str
    class_id: int
    label: str
    score: float
    vector: tuple[float, ...] | UnsetType = UNSET


class MaskLine(msgspec.Struct, frozen=True):
    """COCO's compressed run-length encoding of a mask. size: [height, width] of the picture."""

    size: tuple[int, int]
    counts: str


class ObjectLine(msgspec.Struct, frozen=True):
    """One object. track_id: None without a track, with the age 0. xyxy: its corners in source pixels. rules: names of
    those that hold for it now. Masks, keypoints and oriented boxes are present if the model has them; speed_mps, in
    metres a second, if the source has a ground, None while it is not known."""

    track_id: int | None
    age_frames: int
    class_id: int
    label: str
    score: float
    xyxy: tuple[float, float, float, float]
    rules: tuple[str, ...] = ()
    attributes: tuple[ClassLine, ...] = ()
    mask: MaskLine | UnsetType = UNSET
    keypoints: tuple[tuple[float, float, float], ...] | UnsetType = UNSET
    xywhr: tuple[float, float, float, float, float] | UnsetType = UNSET
    speed_mps: float | UnsetType | None = UNSET


class ObjectsLine(msgspec.Struct, frozen=True):
    """One frame, with or without objects: a line of objects.jsonl."""

    source_id: str
    frame_num: int
    pts_s: float
    time: str
    width: int
    height: int
    segment: int
    is_inferred: bool
    is_corrupt: bool
    objects: tuple[ObjectLine, ...]
    classes: tuple[ClassLine, ...] = ()
    counts: dict[str, int] = {}


class EventLine(msgspec.Struct, frozen=True):
    """One event: a line of events.jsonl. direction: in or out, of a line that counts both ways. score, xyxy: of the
    object, if the frame shows it."""

    kind: str
    rule: str
    value: float
    source_id: str
    frame_num: int
    pts_s: float
    time: str
    track_id: int | None
    class_id: int | None
    label: str | None
    direction: str | None = None
    score: float | None = None
    xyxy: tuple[float, float, float, float] | None = None


class _Minimal(msgspec.Struct, frozen=True, omit_defaults=True):
    version: str
    id: int
    timestamp: str = msgspec.field(name="@timestamp")
    sensor_id: str = msgspec.field(name="sensorId")
    objects: list[str]
    custom_message: list[str] = msgspec.field(name="customMessage", default_factory=list)


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ObjectsLine).decode


def objects_line(result: FrameResult, schema: Schema = Schema.FULL) -> bytes:
    """The frame's line of objects, without a newline; also of a frame without any."""
    if schema == Schema.MINIMAL:
        return _encode(_minimal(result.frame, _minimal_objects(result)))
    return _encode(_full(result))


def event_lines(result: FrameResult, schema: Schema = Schema.FULL) -> list[bytes]:
    """A line for each event of the frame, in the order of its rules, without newlines."""
    if schema == Schema.MINIMAL:
        return [_encode(_minimal_event(result, event)) for event in result.analytics.events]
    return [_encode(_full_event(result, event)) for event in result.analytics.events]


def read_objects_line(line: bytes) -> FrameResult:
    """The rounded result of a "full" line, without events, picture and masks. Raises ValueError for another line."""
    read = _decode(line)
    tracked = tuple(one for one in read.objects if one.track_id is not None)
    captured = datetime.fromisoformat(read.time).timestamp()
    frame = Frame(
        source_id=read.source_id,
        frame_num=read.frame_num,
        pts_s=read.pts_s,
        captured_at=captured,
        width=read.width,
        height=read.height,
        captured_unix_s=captured,
        segment=read.segment,
        is_corrupt=read.is_corrupt,
    )
    return FrameResult(
        frame,
        _read_tracks(read.objects),
        FrameAnalytics((), read.counts, tuple(one.rules for one in tracked), _read_speeds(tracked)),
        labels=_read_labels(read.objects),
        classes=_read_classes(read.classes),
        attributes=tuple(_read_classes(one.attributes) for one in tracked),
        is_inferred=read.is_inferred,
    )


def iso_time(unix_s: float) -> str:
    """ISO 8601 as DeepStream writes it: 2026-11-22T04:59:59.828Z."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _full(result: FrameResult) -> ObjectsLine:
    frame = result.frame
    counts: Mapping[str, int] = result.analytics.counts
    return ObjectsLine(
        source_id=frame.source_id,
        frame_num=frame.frame_num,
        pts_s=round(frame.pts_s, 6),
        time=iso_time(frame.captured_unix_s),
        width=frame.width,
        height=frame.height,
        segment=frame.segment,
        is_inferred=result.is_inferred,
        is_corrupt=frame.is_corrupt,
        objects=_full_objects(result),
        classes=_classes(result.classes),
        counts=dict(counts),
    )


def _full_objects(result: FrameResult) -> tuple[ObjectLine, ...]:
    """Of the tracks, then of detections without a track."""
    tracks, others = result.tracks, result.tracks.untracked
    tracked = _object_lines(
        result, tracks.detections, tracks.track_id.tolist(), tracks.age_frames.tolist(), result.analytics,
        result.attributes,
    )  # fmt: skip
    return tracked + _object_lines(result, others, [None] * len(others), [0] * len(others)) if len(others) else tracked


def _object_lines(
    result: FrameResult,
    seen: Detections,
    ids: Sequence[int | None],
    ages: Sequence[int],
    analytics: FrameAnalytics = NO_ANALYTICS,
    attributes: tuple[tuple[ClassScore, ...], ...] = (),
) -> tuple[ObjectLine, ...]:
    boxes, scores, class_ids = _rounded(seen.xyxy, 3), _rounded(seen.score, 6), seen.class_id.tolist()
    absent, rules_of = (UNSET,) * len(seen), analytics.rules_of
    speeds = tuple(None if one is None else round(one, 3) for one in analytics.speeds_mps) or absent
    masks = absent if seen.masks is None else tuple(map(_mask_line, seen.masks))
    keypoints = absent if seen.keypoints is None else _rounded(seen.keypoints, 3)
    oriented = absent if seen.xywhr is None else _rounded(seen.xywhr, 5)
    return tuple(
        ObjectLine(
            ids[index],
            ages[index],
            class_ids[index],
            result.label(class_ids[index]),
            scores[index],
            tuple(boxes[index]),
            rules_of[index] if rules_of else (),
            _classes(attributes[index]) if attributes else (),
            masks[index],
            keypoints[index],
            oriented[index],
            speeds[index],
        )
        for index in range(len(seen))
    )


def _rounded(values: FloatArray, decimals: int) -> Any:
    return np.round(values.astype(np.float64), decimals).tolist()


def _mask_line(mask: Mask) -> MaskLine:
    return MaskLine((mask.height, mask.width), rle_of(mask))


def _classes(scores: tuple[ClassScore, ...]) -> tuple[ClassLine, ...]:
    return tuple(
        ClassLine(one.model, one.class_id, one.label, round(one.score, 6), one.vector or UNSET) for one in scores
    )


def _full_event(result: FrameResult, event: AnalyticsEvent) -> EventLine:
    return EventLine(
        kind=str(event.kind),
        rule=event.rule,
        value=round(event.value, 6),
        source_id=event.source_id,
        frame_num=event.frame_num,
        pts_s=round(event.pts_s, 6),
        time=iso_time(result.frame.captured_unix_s),
        track_id=event.track_id,
        class_id=event.class_id,
        label=None if event.class_id is None else result.label(event.class_id),
        direction=event.direction,
        score=event.score,
        xyxy=event.xyxy,
    )


def _minimal(frame: Frame, objects: list[str], custom: tuple[str, ...] = ()) -> _Minimal:
    time = iso_time(frame.captured_unix_s)
    return _Minimal(MINIMAL_VERSION, frame.frame_num, time, frame.source_id, objects, list(custom))


def _minimal_objects(result: FrameResult) -> list[str]:
    """As nvmsgconv prints them: numbers with six significant digits, classifiers and the confidence after "#"."""
    boxes, attributes = result.tracks.detections.xyxy.tolist(), result.attributes
    class_ids, scores = result.tracks.detections.class_id.tolist(), result.tracks.detections.score.tolist()
    lines = []
    for index, track_id in enumerate(result.tracks.track_id.tolist()):
        line = "|".join([str(track_id), *(f"{v:g}" for v in boxes[index]), _plain(result.label(class_ids[index]))])
        labels = [_plain(one.label) for one in attributes[index] if one.label] if attributes else []
        if labels:
            line += "|#|" + "|".join([*labels, f"{scores[index]:g}"])
        lines.append(line)
    return lines


def _plain(label: str) -> str:
    return label.replace("|", "/")


def _minimal_event(result: FrameResult, event: AnalyticsEvent) -> _Minimal:
    ids = result.tracks.track_id.tolist()
    said = "|".join([str(event.kind), _plain(counter_name(event.rule, event.direction)), f"{event.value:g}"])
    if event.track_id is None:
        return _minimal(result.frame, _minimal_objects(result), (said,))
    objects = [text for one, text in zip(ids, _minimal_objects(result), strict=True) if one == event.track_id]
    return _minimal(result.frame, objects, (said,))


def _read_tracks(objects: tuple[ObjectLine, ...]) -> Tracks:
    tracked = [one for one in objects if one.track_id is not None]
    ids = np.array([one.track_id for one in tracked], np.int64)
    ages = np.array([one.age_frames for one in tracked], np.int64)
    others = [one for one in objects if one.track_id is None]
    return Tracks(_read_detections(tracked), ids, ages, untracked=_read_detections(others))


def _read_detections(objects: Sequence[ObjectLine]) -> Detections:
    return Detections(
        np.array([one.xyxy for one in objects], np.float32).reshape(-1, 4),
        np.array([one.score for one in objects], np.float32),
        np.array([one.class_id for one in objects], np.int64),
        keypoints=_read_floats([one.keypoints for one in objects]),
        xywhr=_read_floats([one.xywhr for one in objects]),
    )


def _read_floats(given: list[Any]) -> FloatArray | None:
    """None if an object has no such values."""
    return np.array(given, np.float32) if given and UNSET not in given else None


def _read_speeds(objects: Sequence[ObjectLine]) -> tuple[float | None, ...]:
    """Empty if no object has one, not even an unknown one."""
    speeds = (one.speed_mps for one in objects if one.speed_mps is not UNSET)
    return tuple(None if speed is None else float(speed) for speed in speeds)


def _read_labels(objects: tuple[ObjectLine, ...]) -> tuple[str, ...]:
    known = {one.class_id: one.label for one in objects if one.class_id >= 0}
    return tuple(known.get(class_id, f"class {class_id}") for class_id in range(max(known, default=-1) + 1))


def _read_classes(lines: tuple[ClassLine, ...]) -> tuple[ClassScore, ...]:
    return tuple(
        ClassScore(one.model, one.class_id, one.label, one.score, () if one.vector is UNSET else one.vector)
        for one in lines
    )
