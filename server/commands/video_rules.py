"""What came of the rules: events and counts, by source and rule, as tables and for programs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from deepstream_pipeline.types import AnalyticsKind
from server.commands.terminal import one_line

RULE_KINDS = {kind.value for kind in AnalyticsKind}
UNKNOWN = "–"


@dataclass(frozen=True, slots=True)
class RulesOfSource:
    """events: how many there were. counts: those of the last frame: of line-crossing all that there were, of others who
    is there now. Both by KIND/RULE and KIND/RULE/LABEL."""

    source_id: str
    events: Mapping[str, int]
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RuleRow:
    """at_the_end: None of a rule that is not in force any more."""

    rule: str
    events: int
    at_the_end: int | None


def event_total(events: Mapping[str, int]) -> int:
    """Of all rules: each event is counted under its rule once, and once under its class, where it has one."""
    return sum(count for key, count in events.items() if key == _rule_of(key))


def events_by_rule(source: RulesOfSource) -> dict[str, int]:
    """For programs: every rule and class, also those without an event."""
    return {row.rule: row.events for row in _all_rows(source)}


def rule_rows(source: RulesOfSource) -> list[RuleRow]:
    """Sorted; the classes of a rule only where there are several: one alone says what the rule says."""
    rows = _all_rows(source)
    classes: dict[str, int] = {}
    for row in rows:
        rule = _rule_of(row.rule)
        classes[rule] = classes.get(rule, -1) + 1  # the rule itself is none
    return [row for row in rows if row.rule == _rule_of(row.rule) or classes[_rule_of(row.rule)] > 1]


def rule_table(sources: Iterable[RulesOfSource]) -> Table:
    """A row a source and rule."""
    table = Table(header_style="bold")
    table.add_column("source", overflow="fold")
    table.add_column("rule", overflow="fold")
    for title in ("events", "at the end"):
        table.add_column(title, no_wrap=True, justify="right")
    for source in sources:
        for row in rule_rows(source):
            names = (Text(one_line(name)) for name in (source.source_id, row.rule))
            table.add_row(*names, str(row.events), UNKNOWN if row.at_the_end is None else str(row.at_the_end))
    return table


def _all_rows(source: RulesOfSource) -> list[RuleRow]:
    """What merely stood in the last picture is no result."""
    known = {key for key in source.counts if key.partition("/")[0] in RULE_KINDS}
    in_force = {_rule_of(key) for key in known}
    keys = sorted(known | set(source.events))
    return [
        RuleRow(key, source.events.get(key, 0), source.counts.get(key, 0) if _rule_of(key) in in_force else None)
        for key in keys
    ]


def _rule_of(key: str) -> str:
    """KIND/RULE of KIND/RULE/LABEL; a rule's name has no "/", a label may."""
    return "/".join(key.split("/", 2)[:2])
