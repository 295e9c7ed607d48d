"""The on-screen display: draws boxes, labels, trails and rules of a frame onto a copy of its picture."""

import threading
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import cv2
import numpy as np
from pydantic import Field

from penstock.vision.drawing import oriented_corners
from penstock_video.sinks.canvas import (
    ALARM,
    INK,
    WHITE,
    Canvas,
    Colour,
    LabelLayout,
    Pixel,
    Side,
    colour_of,
    neighbours,
)
from penstock_video.sinks.schemas import iso_time
from penstock_video.types import ByteArray, CrossingDirection, Frame, FrameResult, counter_name

FLASH_S = 1.0  # a rule that fired is highlighted for this long
_TRAIL_POINTS = 64
_MAX_TRAILS = 512
_MASK_STRENGTH = 0.4
_NARROW_PX = 400  # in narrower pictures, labels have no score
_REGION_KINDS = (("roi-filtering", 3), ("overcrowding", 7), ("dwell", 12))

Point = tuple[float, float]
Sides = Mapping[int, Side | None]  # of each track's box: where its label is


class NamedRegion(Protocol):
    """A rule with a polygon."""

    @property
    def name(self) -> str: ...
    @property
    def polygon(self) -> Sequence[Point]: ...


class NamedLine(Protocol):
    """A rule with a line; direction: from, to, or None."""

    @property
    def name(self) -> str: ...
    @property
    def line(self) -> tuple[Point, Point]: ...
    @property
    def direction(self) -> tuple[Point, Point] | None: ...


class RuleShapes(Protocol):
    """The shapes of analytics.rules.Rules. scale: factors from a shape's points to pixels of a picture."""

    def scale(self, points: Sequence[Point], width: int, height: int) -> tuple[float, float]: ...
    @property
    def roi_filtering(self) -> Sequence[NamedRegion]: ...
    @property
    def overcrowding(self) -> Sequence[NamedRegion]: ...
    @property
    def dwell(self) -> Sequence[NamedRegion]: ...
    @property
    def line_crossing(self) -> Sequence[NamedLine]: ...


@dataclass(frozen=True, slots=True)
class OsdOptions:
    """What is drawn. has_boxes: with keypoints. has_labels: class and identity on boxes; has_scores: also the score.
    has_trails: an object's path of the last trail_s seconds. has_rules: regions and lines with counts. has_title: the
    source's name and the file position, or the time for a camera. is_coloured_by_class: else each object has a colour.
    """

    has_boxes: Annotated[bool, Field(alias="display-bbox")] = True
    has_labels: Annotated[bool, Field(alias="display-text")] = True
    has_masks: Annotated[bool, Field(alias="display-mask")] = True
    has_scores: Annotated[bool, Field(alias="display-score")] = True
    has_trails: Annotated[bool, Field(alias="display-trail")] = True
    has_rules: Annotated[bool, Field(alias="display-rules")] = True
    has_title: Annotated[bool, Field(alias="display-title")] = True
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
            picture = _scaled_copy(image, width)
            self._draw_all(_Sheet(Canvas(picture), width / result.frame.width, result), memory)
            if is_newest:
                memory.drawn[width] = picture
        return picture

    def _memory(self, source_id: str) -> _Memory:
        with self._lock:
            return self._memories.setdefault(source_id, _Memory())

    def _draw_all(self, sheet: "_Sheet", memory: _Memory) -> None:
        options, frame = self.options, sheet.result.frame
        names = _Names(sheet.canvas)
        if options.has_rules and frame.source_id in self._rules:
            _draw_rules(sheet, self._rules[frame.source_id], memory.flashes, names)
        if options.has_trails:
            _draw_trails(sheet, memory.trails, options)
        _draw_objects(sheet, options, names, memory)
        names.draw()
        if options.has_title:
            _draw_title(sheet, *self._titles.get(frame.source_id, (frame.source_id, False)))


@dataclass(frozen=True, slots=True)
class _Sheet:
    """scale: pixels of the canvas per pixel of the source."""

    canvas: Canvas
    scale: float
    result: FrameResult

    def pixel(self, x: float, y: float) -> Pixel:
        return self.canvas.pixel(x * self.scale, y * self.scale)


def _scaled_copy(image: ByteArray, width: int) -> ByteArray:
    if width == image.shape[1]:
        return image.copy()
    height = max(1, round(image.shape[0] * width / image.shape[1]))
    smaller: ByteArray = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)
    return smaller


@dataclass(frozen=True, slots=True)
class _Drawn:
    """An object to draw: its row, the two corners of its box on the canvas, and its colour."""

    index: int
    first: Pixel
    second: Pixel
    colour: Colour


def _draw_objects(sheet: _Sheet, options: OsdOptions, names: "_Names", memory: _Memory) -> None:
    """Draws boxes, then labels, older objects first. names: of rules, which no label may cover."""
    tracks = sheet.result.tracks
    boxes = tracks.detections.xyxy
    numbers = tracks.detections.class_id if options.is_coloured_by_class else tracks.track_id
    drawn = []
    for index in np.flatnonzero(np.isfinite(boxes).all(axis=1)).tolist():
        left, top, right, bottom = boxes[index].tolist()
        colour = colour_of(int(numbers[index]))
        drawn.append(_Drawn(index, sheet.pixel(left, top), sheet.pixel(right, bottom), colour))
    if options.has_masks and tracks.detections.masks is not None:
        for one in drawn:
            sheet.canvas.tint_mask(tracks.detections.masks[one.index], sheet.scale, one.colour, _MASK_STRENGTH)
    if options.has_boxes:
        _draw_outlines(sheet, drawn)
    if options.has_labels:
        places = LabelLayout((sheet.canvas.width, sheet.canvas.height), sheet.canvas.text_size(" ")[1])
        names.keep_free(places)
        by_age = sorted(drawn, key=lambda one: int(tracks.track_id[one.index]))
        memory.sides = _draw_labels(sheet, by_age, options, places, memory.sides)


def _draw_outlines(sheet: _Sheet, drawn: Sequence[_Drawn]) -> None:
    """Draws oriented boxes if the model has them, else upright ones; and keypoints."""
    seen, canvas, scale = sheet.result.tracks.detections, sheet.canvas, sheet.scale
    corners = None if seen.xywhr is None else oriented_corners(seen.xywhr) * scale
    for one in drawn:
        if corners is None:
            canvas.box(one.first, one.second, one.colour)
        else:
            canvas.outline(corners[one.index], one.colour)
    if seen.keypoints is not None:
        for one in drawn:
            canvas.keypoints(seen.keypoints[one.index] * (scale, scale, 1.0), sheet.result.skeleton, one.colour)


def _draw_labels(
    sheet: _Sheet, drawn: Sequence[_Drawn], options: OsdOptions, places: LabelLayout, former: Sides
) -> Sides:
    """former: earlier label positions. Returns the new ones."""
    canvas, sides = sheet.canvas, dict[int, Side | None]()
    edge, free = canvas.line_px, []
    texts = [_label(sheet, one.index, options) for one in drawn]
    widths = [canvas.text_size(text)[0] for text in texts]
    boxes = [((one.first[0] - edge, one.first[1]), (one.second[0] + edge, one.second[1])) for one in drawn]
    others = neighbours(boxes, max(widths, default=0), places.height)
    for one, text, width, box, near in zip(drawn, texts, widths, boxes, others, strict=True):
        track_id = int(sheet.result.tracks.track_id[one.index])
        place = places.take(box, width, near, former=former.get(track_id))
        sides[track_id] = place.side
        if place.is_free:
            free.append((text, place.at, one.colour))
        else:
            canvas.chip(text, place.at, one.colour)
    for text, at, colour in free:
        canvas.chip(text, at, colour)
    return sides


def _label(sheet: _Sheet, index: int, options: OsdOptions) -> str:
    result = sheet.result
    words = [result.label(int(result.tracks.detections.class_id[index])), f"#{int(result.tracks.track_id[index])}"]
    if result.attributes:
        words += [one.label for one in result.attributes[index] if one.label][:2]
    if options.has_scores and sheet.canvas.width >= _NARROW_PX:
        words.append(f" {float(result.tracks.detections.score[index]):.2f}")
    return " ".join(words)


def _draw_trails(sheet: _Sheet, trails: Mapping[int, Trail], options: OsdOptions) -> None:
    class_ids = sheet.result.tracks.detections.class_id
    for index, track_id in enumerate(sheet.result.tracks.track_id.tolist()):
        trail = trails.get(track_id)
        if trail is None or len(trail) < 2:
            continue
        colour = colour_of(int(class_ids[index]) if options.is_coloured_by_class else track_id)
        points = sheet.canvas.pixels(np.array(trail)[:, 1:] * sheet.scale)
        if len(points) > 1:
            sheet.canvas.polyline(points, colour)


def _draw_rules(sheet: _Sheet, rules: RuleShapes, flashes: Mapping[str, float], names: "_Names") -> None:
    regions = (rules.roi_filtering, rules.overcrowding, rules.dwell)
    for (kind, hue), group in zip(_REGION_KINDS, regions, strict=True):
        for region in group:
            key = f"{kind}/{region.name}"
            points = _scaled(sheet, rules, region.polygon)
            colour = ALARM if _is_flashing(key, sheet.result.frame, flashes) else colour_of(hue)
            sheet.canvas.tint(points, colour, 0.28 if colour == ALARM else 0.12)
            sheet.canvas.polyline(points, colour, is_closed=True)
            lowest = max(points, key=lambda point: point[1])
            names.add(_counted(key, region.name, sheet), lowest, colour)
    for line in rules.line_crossing:
        key = f"line-crossing/{line.name}"
        colour = ALARM if _is_flashing(key, sheet.result.frame, flashes) else WHITE
        names.add(_counted(key, line.name, sheet), _draw_line(sheet, rules, line, colour), colour)


class _Names:
    """Names of rules with their counts. Rules that share a line or region are listed below each other."""

    def __init__(self, canvas: Canvas) -> None:
        self._canvas = canvas
        self._placed: list[tuple[str, Pixel, Colour, Pixel]] = []

    def add(self, text: str, at: Pixel, colour: Colour) -> None:
        """at: the upper left corner, if there is room."""
        width, height = self._canvas.text_size(text)
        left = max(0, min(at[0], self._canvas.width - width))
        top = max(0, min(at[1], self._canvas.height - height))
        taken = [y for _, (x, y), _, (right, _) in self._placed if x < left + width and left < right]
        beside = (y + step for y in taken for step in (height, -height))
        inside = (y for y in beside if 0 <= y <= self._canvas.height - height)
        rows = [top, *sorted(inside, key=lambda y: (y < top, abs(y - top)))]
        top = next((row for row in rows if all(abs(row - y) >= height for y in taken)), top)
        self._placed.append((text, (left, top), colour, (left + width, top + height)))

    def keep_free(self, places: LabelLayout) -> None:
        """Reserves the areas of these names in the label layout."""
        for _, at, _, (right, _) in self._placed:
            places.keep_free(at, right - at[0])

    def draw(self) -> None:
        """Draws all names on top."""
        for text, at, colour, _ in self._placed:
            self._canvas.chip(text, at, colour, strength=0.85)


def _draw_line(sheet: _Sheet, rules: RuleShapes, line: NamedLine, colour: Colour) -> Pixel:
    """Returns the position of its name."""
    begin, end = _scaled(sheet, rules, line.line)
    canvas = sheet.canvas
    canvas.polyline([begin, end], INK, width_px=canvas.line_px * 2 + 2)
    canvas.polyline([begin, end], colour, width_px=canvas.line_px * 2)
    if line.direction is not None:
        from_at, to_at = _scaled(sheet, rules, line.direction)
        canvas.arrow(from_at, to_at, colour)
    return (begin[0] + end[0]) // 2 + canvas.text_px // 2, (begin[1] + end[1]) // 2 + canvas.text_px // 2


def _scaled(sheet: _Sheet, rules: RuleShapes, points: Sequence[Point]) -> list[Pixel]:
    across, down = rules.scale(points, sheet.result.frame.width, sheet.result.frame.height)
    return [sheet.pixel(x * across, y * down) for x, y in points]


def _is_flashing(key: str, frame: Frame, flashes: Mapping[str, float]) -> bool:
    at = flashes.get(key)
    return at is not None and 0 <= frame.pts_s - at < FLASH_S


def _counted(key: str, name: str, sheet: _Sheet) -> str:
    counts = sheet.result.analytics.counts
    ways = [f" {way} {counts[counter]}" for way in CrossingDirection if (counter := counter_name(key, way)) in counts]
    return f"{name}{''.join(ways)}" if key not in counts else f"{name} {counts[key]}"


def _draw_title(sheet: _Sheet, name: str, is_live: bool) -> None:
    words = [name, _clock(sheet) if is_live else _position(sheet.result.frame.pts_s)]
    sheet.canvas.chip("   ".join(words), (0, 0), INK, strength=0.7)
    if sheet.result.classes:
        best = sheet.result.classes[0]
        sheet.canvas.chip(f"{best.label} {best.score:.2f}", (0, sheet.canvas.text_size(" ")[1]), INK, strength=0.7)


def _clock(sheet: _Sheet) -> str:
    """The capture time, without the date if there is no room."""
    day, _, time_of_day = iso_time(sheet.result.frame.captured_unix_s)[:19].partition("T")
    return f"{day} {time_of_day} UTC" if sheet.canvas.width >= _NARROW_PX else f"{time_of_day} UTC"


def _position(pts_s: float) -> str:
    minutes, seconds = divmod(max(pts_s, 0.0), 60)
    return f"{int(minutes) // 60}:{int(minutes) % 60:02}:{seconds:04.1f}"
