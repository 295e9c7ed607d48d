"""The on-screen display: draws boxes, labels, trails and rules of a frame onto a copy of its picture."""

import threading
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import cv2
import numpy as np
from pydantic import Field

from penstock.vision.drawing import oriented_corners
from penstock.vision.lettering import drawable
from penstock.vision.palette import Color, color_of
from penstock_video.sinks.canvas import Canvas, LabelLayout, Pixel, Side, neighbours
from penstock_video.sinks.rule_drawing import Panel, RuleNames, RuleShapes, Sheet, counters_of, draw_rules
from penstock_video.sinks.schemas import iso_time
from penstock_video.types import ByteArray, FrameResult

_TRAIL_POINTS = 64
_MAX_TRAILS = 512
_MASK_STRENGTH = 0.4
_NARROW_PX = 400  # in narrower pictures, labels have no score
_LONGEST_LABEL = 32  # characters of a class
_CROWDED_SHARE, _CALM_SHARE = 0.22, 0.16  # of the picture under full labels: where they become short, and full again
Sides = Mapping[int, Side | None]  # of each track's box: where its label is


@dataclass(frozen=True, slots=True)
class OsdOptions:
    """What is drawn. has_boxes: with keypoints. has_labels: class and identity on boxes; has_scores: also the score.
    has_trails: an object's path of the last trail_s seconds. has_rules: zones, lines and directions with counts.
    has_title: the source's name and the file position, or the time for a camera. has_counters: objects by class and
    counts of rules below the title. is_coloured_by_class: else each object has a colour.
    """

    has_boxes: Annotated[bool, Field(alias="display-bbox")] = True
    has_labels: Annotated[bool, Field(alias="display-text")] = True
    has_masks: Annotated[bool, Field(alias="display-mask")] = True
    has_scores: Annotated[bool, Field(alias="display-score")] = True
    has_trails: Annotated[bool, Field(alias="display-trail")] = True
    has_rules: Annotated[bool, Field(alias="display-rules")] = True
    has_title: Annotated[bool, Field(alias="display-title")] = True
    has_counters: Annotated[bool, Field(alias="display-counters")] = True
    is_coloured_by_class: Annotated[bool, Field(alias="color-by-class")] = False
    trail_s: Annotated[float, Field(alias="trail-duration", ge=0, le=60)] = 3.0


Trail = deque[tuple[float, float, float]]  # pts_s, x, y


class _Memory:
    """State of a source between frames: trails, and when rules fired, in pts."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.frame_num = -1
        self.segment = -1
        self.trails: OrderedDict[int, Trail] = OrderedDict()
        self.flashes: dict[str, float] = {}
        self.sides: Sides = {}
        self.is_crowded = False
        self.drawn: dict[int, ByteArray] = {}  # of the newest frame, by width

    def observe(self, result: FrameResult, trail_s: float) -> None:
        """Adds the frame, if it is newer than the last."""
        frame = result.frame
        if frame.frame_num <= self.frame_num:
            return
        self.frame_num = frame.frame_num
        self.drawn.clear()
        if frame.segment != self.segment:
            self.segment = frame.segment
            self.trails.clear()
        boxes = result.tracks.detections.xyxy.tolist()
        for track_id, (left, _, right, bottom) in zip(result.tracks.track_id.tolist(), boxes, strict=True):
            self.trails.setdefault(track_id, deque(maxlen=_TRAIL_POINTS)).append(
                (frame.pts_s, (left + right) / 2, bottom)
            )
            self.trails.move_to_end(track_id)
        self._forget(frame.pts_s - trail_s)
        for event in result.analytics.events:
            self.flashes[f"{event.kind}/{event.rule}"] = frame.pts_s

    def _forget(self, before_s: float) -> None:
        while self.trails:
            track_id, trail = next(iter(self.trails.items()))
            if trail[-1][0] >= before_s and len(self.trails) <= _MAX_TRAILS:
                break
            del self.trails[track_id]
        for trail in self.trails.values():
            while len(trail) > 1 and trail[0][0] < before_s:
                trail.popleft()


class Osd:
    """Draws results. Thread-safe: pictures of one source are drawn one at a time."""

    def __init__(self, options: OsdOptions | None = None) -> None:
        self.options = options or OsdOptions()
        self._lock = threading.Lock()
        self._memories: dict[str, _Memory] = {}
        self._titles: dict[str, tuple[str, bool]] = {}  # name, and whether it is live
        self._rules: dict[str, RuleShapes] = {}

    def set_source(
        self, source_id: str, *, name: str = "", rules: RuleShapes | None = None, is_live: bool = False
    ) -> None:
        """Sets a source's name and rules, and whether it is live (only then the time of day is drawn)."""
        self._titles[source_id] = (name or source_id, is_live)
        if rules is None:
            self._rules.pop(source_id, None)
        else:
            self._rules[source_id] = rules

    def drop_pictures(self, source_id: str) -> None:
        """Drops trails and pictures of a source that ended. Each sink calls it after its last frame."""
        with self._lock:
            self._memories.pop(source_id, None)

    def forget(self, source_id: str) -> None:
        """Forgets a source. Called by the caller of set_source when the source is removed."""
        self.drop_pictures(source_id)
        self._titles.pop(source_id, None)
        self._rules.pop(source_id, None)

    def draw(self, result: FrameResult, *, max_width: int = 0) -> ByteArray | None:
        """The picture (H, W, 3) RGB with everything drawn, or None; shared and read-only. max_width: 0 for any."""
        image = result.frame.image
        if image is None:
            return None
        memory = self._memory(result.frame.source_id)
        width = min(max_width, result.frame.width) if max_width else result.frame.width
        with memory.lock:
            memory.observe(result, self.options.trail_s)
            is_newest = result.frame.frame_num == memory.frame_num
            if is_newest and width in memory.drawn:
                return memory.drawn[width]
            picture = scaled_copy(image, width)
            self._draw_all(Sheet(Canvas(picture), width / result.frame.width, result), memory)
            if is_newest:
                memory.drawn[width] = picture
        return picture

    def _memory(self, source_id: str) -> _Memory:
        with self._lock:
            return self._memories.setdefault(source_id, _Memory())

    def _draw_all(self, sheet: Sheet, memory: _Memory) -> None:
        options, source_id = self.options, sheet.result.frame.source_id
        rules, names = self._rules.get(source_id), RuleNames(sheet.canvas)
        title = _title(sheet, *self._titles.get(source_id, (source_id, False))) if options.has_title else []
        panel = Panel(sheet.canvas, title, counters_of(sheet.result, rules) if options.has_counters else ())
        names.reserve((0, 0), panel.width, len(panel.lines))
        if options.has_rules and rules is not None:
            draw_rules(sheet, rules, memory.flashes, names)
        if options.has_trails:
            _draw_trails(sheet, memory.trails, options)
        _draw_objects(sheet, options, names, memory)
        names.draw()
        panel.draw()


def scaled_copy(image: ByteArray, width: int) -> ByteArray:
    """The picture at this width, never the same array."""
    if width == image.shape[1]:
        return image.copy()
    height = max(1, round(image.shape[0] * width / image.shape[1]))
    smaller: ByteArray = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)
    return smaller


@dataclass(frozen=True, slots=True)
class _Drawn:
    """An object to draw: its row, the two corners of its box on the canvas, and its color."""

    index: int
    first: Pixel
    second: Pixel
    color: Color


def _draw_objects(sheet: Sheet, options: OsdOptions, names: RuleNames, memory: _Memory) -> None:
    """Draws boxes, then labels, older objects first. names: of rules, which no label may cover."""
    tracks = sheet.result.tracks
    boxes = tracks.detections.xyxy
    numbers = tracks.detections.class_id if options.is_coloured_by_class else tracks.track_id
    drawn = []
    for index in np.flatnonzero(np.isfinite(boxes).all(axis=1)).tolist():
        left, top, right, bottom = boxes[index].tolist()
        color = color_of(int(numbers[index]))
        drawn.append(_Drawn(index, sheet.pixel(left, top), sheet.pixel(right, bottom), color))
    if options.has_masks and tracks.detections.masks is not None:
        for one in drawn:
            sheet.canvas.tint_mask(tracks.detections.masks[one.index], sheet.scale, one.color, _MASK_STRENGTH)
    if options.has_boxes:
        _draw_outlines(sheet, drawn)
    if options.has_labels:
        places = LabelLayout((sheet.canvas.width, sheet.canvas.height), sheet.canvas.lettering.height)
        names.keep_free(places)
        by_age = sorted(drawn, key=lambda one: int(tracks.track_id[one.index]))
        texts = [_texts(sheet, one.index, options) for one in by_age]
        memory.is_crowded = _is_crowded(sheet.canvas, texts, was_crowded=memory.is_crowded)
        if memory.is_crowded:
            texts = [forms[-1:] for forms in texts]
        memory.sides = _draw_labels(sheet, list(zip(by_age, texts, strict=True)), places, memory.sides)


def _is_crowded(canvas: Canvas, texts: Sequence[Sequence[str]], *, was_crowded: bool) -> bool:
    """Whether full labels would cover too much of the picture, so that all are short. It does not flicker."""
    area = sum(canvas.lettering.width(full) for full, *_ in texts) * canvas.lettering.height
    share = _CALM_SHARE if was_crowded else _CROWDED_SHARE
    return bool(area > share * canvas.width * canvas.height)


def _draw_outlines(sheet: Sheet, drawn: Sequence[_Drawn]) -> None:
    """Draws oriented boxes if the model has them, else upright ones; and keypoints."""
    seen, canvas, scale = sheet.result.tracks.detections, sheet.canvas, sheet.scale
    corners = None if seen.xywhr is None else oriented_corners(seen.xywhr) * scale
    for one in drawn:
        if corners is None:
            canvas.box(one.first, one.second, one.color)
        else:
            canvas.outline(corners[one.index], one.color)
    if seen.keypoints is not None:
        for one in drawn:
            canvas.keypoints(seen.keypoints[one.index] * (scale, scale, 1.0), sheet.result.skeleton, one.color)


def _draw_labels(
    sheet: Sheet, labelled: Sequence[tuple[_Drawn, Sequence[str]]], places: LabelLayout, former: Sides
) -> Sides:
    """labelled: with the forms of each label, the best first. former: earlier label positions. Returns the new ones."""
    canvas, sides = sheet.canvas, dict[int, Side | None]()
    edge, width_of = canvas.line_px, canvas.lettering.width
    boxes = [((one.first[0] - edge, one.first[1]), (one.second[0] + edge, one.second[1])) for one, _ in labelled]
    others = neighbours(boxes, max((width_of(first) for _, (first, *_) in labelled), default=0), places.height)
    for (one, forms), box, near in zip(labelled, boxes, others, strict=True):
        track_id = int(sheet.result.tracks.track_id[one.index])
        for text in forms:
            if (width := width_of(text)) > canvas.width:
                continue
            place = places.take(box, width, near, former=former.get(track_id))
            if place is not None:
                sides[track_id] = place.side
                canvas.plate(text, place.at, one.color, width=width)
                break
    return sides


def _texts(sheet: Sheet, index: int, options: OsdOptions) -> list[str]:
    """The label in full, and shorter for a crowd."""
    result = sheet.result
    name, track_id = result.label(int(result.tracks.detections.class_id[index])), int(result.tracks.track_id[index])
    short = f"#{track_id}" if track_id >= 0 else name
    words = [name[:_LONGEST_LABEL], short] if track_id >= 0 else [name[:_LONGEST_LABEL]]
    if result.attributes:
        words += [one.label[:_LONGEST_LABEL] for one in result.attributes[index] if one.label][:2]
    if options.has_scores and sheet.canvas.width >= _NARROW_PX:
        words.append(f" {float(result.tracks.detections.score[index]):.2f}")
    full, short = (drawable(text) for text in (" ".join(words), short))
    return [full, short] if short != full else [full]


def _draw_trails(sheet: Sheet, trails: Mapping[int, Trail], options: OsdOptions) -> None:
    class_ids = sheet.result.tracks.detections.class_id
    for index, track_id in enumerate(sheet.result.tracks.track_id.tolist()):
        trail = trails.get(track_id)
        if trail is None or len(trail) < 2:
            continue
        color = color_of(int(class_ids[index]) if options.is_coloured_by_class else track_id)
        points = sheet.canvas.pixels(np.array(trail)[:, 1:] * sheet.scale)
        if len(points) > 1:
            sheet.canvas.polyline(points, color)


def _title(sheet: Sheet, name: str, is_live: bool) -> list[str]:
    """The source's name and time, and the best class of a picture that a classifier described."""
    lines = [f"{drawable(name)}   {_clock(sheet) if is_live else _position(sheet.result.frame.pts_s)}"]
    return lines + [f"{drawable(best.label)} {best.score:.2f}" for best in sheet.result.classes[:1]]


def _clock(sheet: Sheet) -> str:
    """The capture time, without the date if there is no room."""
    day, _, time_of_day = iso_time(sheet.result.frame.captured_unix_s)[:19].partition("T")
    return f"{day} {time_of_day} UTC" if sheet.canvas.width >= _NARROW_PX else f"{time_of_day} UTC"


def _position(pts_s: float) -> str:
    minutes, seconds = divmod(max(pts_s, 0.0), 60)
    return f"{int(minutes) // 60}:{int(minutes) % 60:02}:{seconds:04.1f}"
