"""Reads the analytics section of a configuration into rules. Invalid values are rejected with the fix."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from penstock_video.analytics.registry import USER_RULES, known_kinds
from penstock_video.analytics.rules import (
    GROUND,
    MODELS,
    Ground,
    LineCrossing,
    Reading,
    Rules,
    Segment,
    Unfit,
    UserRule,
    finite,
    is_relative,
    nearest,
    rule_name,
    section_of,
    split_numbers,
)
from penstock_video.errors import RuleRefused
from penstock_video.types import CrossingDirection, counter_name

__all__ = ["rules_from", "section_of"]

_SECTION = ("config-width", "config-height", "ground")
_NEED_TRACKS = ("line-crossing", "direction-detection", "dwell")


def refused(where: str, value: object, fix: str) -> RuleRefused:
    """The error for a key path, its value, and the fix."""
    text = repr(value)
    return RuleRefused(f"{where}: {text if len(text) <= 80 else text[:77] + '...'}: {fix}")


def rules_from(section: object, labels: Sequence[str], *, where: str = "analytics", has_tracker: bool = True) -> Rules:
    """The rules of a section from YAML or JSON; None for none. labels: by class_id; empty if unknown, then class-id
    takes numbers only. where: the section's key path. has_tracker: False refuses rules that follow objects. Raises
    RuleRefused."""
    if section is None:
        return Rules()
    keys = _mapping(section, where, (*_SECTION, *known_kinds()))
    width, height = (_size(keys.get(key, 0), f"{where}.{key}") for key in _SECTION[:2])
    if bool(width) != bool(height):
        raise refused(where, {"config-width": width, "config-height": height}, "give both or neither")
    reading = Reading(width, height, tuple(labels))
    ground = _ground(keys.get("ground"), f"{where}.ground", reading)
    found: dict[str, tuple[Any, ...]] = {}
    for kind in known_kinds():
        listed, at = keys.get(kind), f"{where}.{kind}"
        if listed is None:
            continue
        if not isinstance(listed, list | tuple):
            raise refused(at, listed, "this takes a list of rules, each with a name")
        if listed and not has_tracker and _needs_tracks(kind):
            raise RuleRefused(
                f"{at}[0]: {kind} needs tracks, and the tracker's type is none; "
                "set tracker type bytetrack, or remove the rule"
            )
        found[kind] = rules = tuple(_rule(kind, entry, f"{at}[{place}]", reading) for place, entry in enumerate(listed))
        _refuse_equal_names(kind, rules, at)
    users = tuple(rule for kind in USER_RULES for rule in found.pop(kind, ()))
    kinds = {kind.replace("-", "_"): rules for kind, rules in found.items()}
    return Rules(width, height, **kinds, users=users, ground=ground)


def _ground(value: object, where: str, reading: Reading) -> Ground | None:
    if value is None:
        return None
    given = {key: one for key, one in _mapping(value, where, _keys_of(GROUND)).items() if one is not None}
    if given.keys() not in ({"picture", "metres"}, {"metres-per-pixel"}):
        raise refused(where, given, "give four points as picture and metres, or metres-per-pixel")
    try:
        return GROUND.validate_python(given, context=reading)
    except ValidationError as error:
        raise _refused_for(error.errors(include_url=False)[0], where) from None


def _refuse_equal_names(kind: str, rules: Sequence[Any], at: str) -> None:
    """Rejects a rule if another rule of its kind has its name or the name of its counter (Door.in)."""
    taken: set[str] = set()
    for place, rule in enumerate(rules):
        counters = {rule.name}
        if isinstance(rule, LineCrossing) and rule.direction is None:
            counters |= {counter_name(rule.name, way) for way in CrossingDirection}
        if counters & taken:
            fix = f"another rule of {kind} has that name, or a counter of that name; choose another name"
            raise refused(f"{at}[{place}].name", rule.name, fix)
        taken |= counters


def _rule(kind: str, entry: object, where: str, reading: Reading) -> Any:
    """One rule of a list, of a built-in or a user's kind. Raises RuleRefused with its first fault."""
    user = USER_RULES.get(kind)
    known = user.keys if user is not None else _keys_of(MODELS[kind])
    if kind == "dwell":
        _refuse_milliseconds(entry, where)
    given = _mapping(entry, where, known)
    if user is not None:
        return _user_rule(kind, given, where)
    keys = {key: value for key, value in given.items() if value is not None}
    try:
        if kind == "line-crossing":
            _split_direction(keys)
        rule = MODELS[kind].validate_python(keys, context=reading)
    except ValidationError as error:
        raise _refused_for(error.errors(include_url=False)[0], where) from None
    except Unfit as unfit:  # the line's eight numbers
        raise refused(f"{where}.line", unfit.value, unfit.fix) from None
    if isinstance(rule, LineCrossing) and rule.direction is not None:
        _refuse_unfit_direction(rule.line, rule.direction, f"{where}.direction")
    return rule


def _user_rule(kind: str, keys: Mapping[str, object], where: str) -> UserRule:
    """A rule of a user's kind, read by the user's model. Its name follows the rules of built-in kinds."""
    user, name = USER_RULES[kind], keys.get("name")
    if name is None:
        raise RuleRefused(f"{where}: name is missing")
    try:
        options = user.options.validate_python(dict(keys))
        return UserRule(kind, rule_name(name), json.dumps(keys, sort_keys=True), partial(user.evaluator, options))
    except ValidationError as error:
        raise _refused_for(error.errors(include_url=False)[0], where) from None
    except Unfit as unfit:
        raise refused(f"{where}.name", unfit.value, unfit.fix) from None


def _refused_for(fault: ErrorDetails, where: str) -> RuleRefused:
    key = str(fault["loc"][0]) if fault["loc"] else ""
    if fault["type"] == "missing":
        return RuleRefused(f"{where}: {key} is missing")
    path, unfit = f"{where}.{key}" if key else where, fault.get("ctx", {}).get("error")
    if isinstance(unfit, Unfit):
        return refused(f"{path}{unfit.at}", unfit.value, unfit.fix)
    return refused(path, fault["input"], fault["msg"])


def _keys_of(model: TypeAdapter[Any]) -> tuple[str, ...]:
    return tuple(model.json_schema()["properties"])


def _split_direction(keys: dict[str, object]) -> None:
    """Splits nvdsanalytics' eight numbers into the direction, which comes first, and the line."""
    value = keys.get("line")
    numbers = split_numbers(value) if isinstance(value, str) else []
    if len(numbers) == 8:
        if "direction" in keys:
            raise Unfit(value, "eight numbers hold the direction, too; leave the key direction out")
        keys["direction"], keys["line"] = ([part[:2], part[2:]] for part in (numbers[:4], numbers[4:]))


def _refuse_unfit_direction(line: Segment, direction: Segment, where: str) -> None:
    if is_relative(line) != is_relative(direction):
        raise refused(where, direction, "line and direction are either both in pixels, or both from 0 to 1")
    if _is_parallel(line, direction):
        raise refused(where, direction, "the direction is parallel to the line; give one that crosses it")


def _is_parallel(line: Segment, direction: Segment) -> bool:
    """Whether they are parallel within a degree."""
    (ax, ay), (bx, by) = ((end[0] - start[0], end[1] - start[1]) for start, end in (line, direction))
    return abs(ax * by - ay * bx) < 0.0175 * math.hypot(ax, ay) * math.hypot(bx, by)


def _needs_tracks(kind: str) -> bool:
    user = USER_RULES.get(kind)
    return kind in _NEED_TRACKS if user is None else user.needs_tracks


def _refuse_milliseconds(entry: object, where: str) -> None:
    """Refuses dwell's former key, with the value converted to the new unit."""
    if not isinstance(entry, Mapping) or "time-threshold" not in entry:
        return
    at, value = f"{where}.time-threshold", entry["time-threshold"]
    try:
        seconds = finite(value) / 1000
    except Unfit as unfit:
        raise refused(at, value, unfit.fix) from None
    raise refused(at, value, f"dwell takes seconds; write time-threshold-s: {seconds:g}")


def _mapping(value: object, where: str, known: Sequence[str]) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise refused(where, value, f"this takes keys and values: {', '.join(known)}")
    for key in value:
        if key not in known:
            raise RuleRefused(f"{where}: there is no key {key!r}{nearest(key, known)}; keys: {', '.join(known)}")
    return value


def _size(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 65_536:
        raise refused(where, value, "this takes a number of pixels, 0 for the source's own")
    return value
