"""Analytics rules of the command line: --line and --zone."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock_video.settings.document import SettingsFaults, shown
from penstock_video.settings.section import Plain

_NUMBER = r"-?(?:\d+\.?\d*|\.\d+)"
_FORM = re.compile(rf"([^=]{{1,64}})=({_NUMBER}(?:,{_NUMBER})*)")


@dataclass(frozen=True, slots=True)
class _RuleFlag:
    """kind, key: of the rule and its points. form: what the value must be. least, most: number of coordinates."""

    flag: str
    kind: str
    key: str
    form: str
    least: int
    most: int


_LINE = _RuleFlag("--line", "line-crossing", "line", "NAME=x1,y1,x2,y2 is needed", 4, 4)
_ZONE = _RuleFlag(
    "--zone", "roi-filtering", "roi", "NAME=x1,y1,x2,y2,x3,y3,… is needed, with three corners or more", 6, 1000
)


def with_rule_flags(
    section: Plain | None, complaints: SettingsFaults, *, lines: Iterable[str], zones: Iterable[str]
) -> Plain | None:
    """The analytics section, with the rules of --line and --zone."""
    return _added(_added(section, _LINE, lines, complaints), _ZONE, zones, complaints)


def _added(section: Plain | None, flag: _RuleFlag, given: Iterable[str], complaints: SettingsFaults) -> Plain | None:
    rows = [row for text in given if (row := _rule(flag, text, complaints)) is not None]
    content = section.content if section is not None else {}
    if not rows or not isinstance(content, dict):
        return section
    before = content.get(flag.kind) or []
    before = before if isinstance(before, list) else [before]
    where = dict(section.where) if section is not None else {"analytics": flag.flag}
    where |= {f"analytics.{flag.kind}[{len(before) + number}]": flag.flag for number in range(len(rows))}
    return replace(section or Plain({}, "analytics"), content={**content, flag.kind: [*before, *rows]}, where=where)


def _rule(flag: _RuleFlag, text: str, complaints: SettingsFaults) -> dict[str, object] | None:
    """An entry of the section; None, reported, for another form."""
    found = _FORM.fullmatch(text)
    numbers = [float(number) for number in found[2].split(",")] if found else []
    if found is None or len(numbers) % 2 or not flag.least <= len(numbers) <= flag.most:
        complaints.add(
            flag.flag, f"{shown(text)}: {flag.form}, in pixels of the picture, or from 0 to 1 of its width and height"
        )
        return None
    return {"name": found[1], flag.key: [list(pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]}
