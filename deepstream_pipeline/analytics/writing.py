"""Rules back to the section that they are read from."""

from deepstream_pipeline.analytics.rules import (
    DirectionDetection,
    Dwell,
    LineCrossing,
    Overcrowding,
    Point,
    RoiFiltering,
    Rules,
)

Entry = dict[str, object]


def section_of(rules: Rules) -> dict[str, object]:
    """Plain dicts, lists, numbers and strings; rules_from makes equal rules of it. What is not there is left out."""
    section: dict[str, object] = {}
    if rules.config_width and rules.config_height:
        section |= {"config-width": rules.config_width, "config-height": rules.config_height}
    lists: dict[str, list[Entry]] = {
        "roi-filtering": [_roi(rule) for rule in rules.roi_filtering],
        "overcrowding": [_overcrowding(rule) for rule in rules.overcrowding],
        "line-crossing": [_line(rule) for rule in rules.line_crossing],
        "direction-detection": [_direction(rule) for rule in rules.direction_detection],
        "dwell": [_dwell(rule) for rule in rules.dwell],
    }
    return section | {kind: entries for kind, entries in lists.items() if entries}


def _roi(rule: RoiFiltering) -> Entry:
    entry: Entry = {"name": rule.name, "roi": _points(rule.polygon)}
    if rule.is_inverse:
        entry["inverse-roi"] = True
    return entry | _classes(rule.class_ids)


def _overcrowding(rule: Overcrowding) -> Entry:
    entry: Entry = {"name": rule.name, "roi": _points(rule.polygon), "object-threshold": rule.object_threshold}
    return entry | {"time-threshold": _plain(round(rule.time_threshold_s * 1000, 6))} | _classes(rule.class_ids)


def _line(rule: LineCrossing) -> Entry:
    entry: Entry = {"name": rule.name, "line": _points(rule.line)}
    if rule.direction is not None:
        entry["direction"] = _points(rule.direction)
    return entry | {"mode": str(rule.mode), "extended": rule.is_extended} | _classes(rule.class_ids)


def _direction(rule: DirectionDetection) -> Entry:
    entry: Entry = {"name": rule.name, "direction": _points(rule.direction), "mode": str(rule.mode)}
    return entry | _classes(rule.class_ids)


def _dwell(rule: Dwell) -> Entry:
    entry: Entry = {"name": rule.name, "roi": _points(rule.polygon)}
    return entry | {"time-threshold-s": _plain(round(rule.after_s, 6))} | _classes(rule.class_ids)


def _classes(class_ids: tuple[int, ...]) -> Entry:
    return {"class-id": list(class_ids)} if class_ids else {}


def _points(points: tuple[Point, ...]) -> list[list[float]]:
    return [[_plain(x), _plain(y)] for x, y in points]


def _plain(value: float) -> float:
    """A whole number without its .0, as people write it."""
    return int(value) if value == int(value) else value
