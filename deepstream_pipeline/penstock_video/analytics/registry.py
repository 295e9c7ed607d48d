"""Kinds of analytics rules: the built-in ones, and those of users that a settings file named as module:Class."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from penstock.protocol.extensions import ExtensionError, load_extension
from penstock_video.analytics.scene import RuleEvaluator
from penstock_video.types import AnalyticsKind


@dataclass(frozen=True, slots=True)
class UserRuleKind:
    """A user's RuleEvaluator class. options: validates an entry. keys: of an entry. needs_tracks: it is refused without
    a tracker."""

    evaluator: Callable[[Any], RuleEvaluator]
    options: TypeAdapter[Any]
    keys: tuple[str, ...]
    needs_tracks: bool


USER_RULES: dict[str, UserRuleKind] = {}


def known_kinds() -> tuple[str, ...]:
    """Every kind of rule, the built-in ones first."""
    return (*(kind.value for kind in AnalyticsKind), *USER_RULES)


def register_rule(name: str) -> str:
    """Loads `module:Class` and returns its kind. Raises ExtensionError. For names in the operator's files only."""
    found = load_extension(name)
    for attribute in ("kind", "Options", "fit", "observe"):
        if not hasattr(found, attribute):
            raise ExtensionError(f"it has no {attribute}; a rule has kind, Options, fit and observe")
    kind, known = str(found.kind), USER_RULES.get(found.kind)
    if kind in tuple(AnalyticsKind) or (known is not None and known.evaluator is not found):
        raise ExtensionError(f"there is another rule of the kind {kind!r}")
    options: TypeAdapter[Any] = TypeAdapter(found.Options)
    keys = tuple(options.json_schema()["properties"])
    if "name" not in keys:
        raise ExtensionError("its Options have no field name")
    USER_RULES[kind] = UserRuleKind(found, options, keys, bool(getattr(found, "needs_tracks", False)))
    return kind
