"""Analytics sections: held against the rules' form when they are read, and made rules when the labels are known."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from deepstream_pipeline.analytics.reading import rules_from
from deepstream_pipeline.analytics.rules import NO_RULES, Rules
from deepstream_pipeline.errors import RuleRefused
from deepstream_pipeline.settings.complaints import Complaint, Complaints
from deepstream_pipeline.settings.section import Plain
from deepstream_pipeline.types import AnalyticsKind

_UNKNOWN_KEY = re.compile(r"there is no key '([^']*)'")
KINDS = tuple(kind.value for kind in AnalyticsKind)


def check_section(section: Plain | None, complaints: Complaints, *, has_tracker: bool = True) -> None:
    """Complains of every rule that cannot be meant. Class labels are left for who knows the model's."""
    if section is None:
        return
    for fault in _faults(section, _without_labels(section.content), (), has_tracker=has_tracker):
        complaints.add(*_placed(section, fault))


def check_classes(sections: Iterable[Plain], labels: Sequence[str]) -> None:
    """Raises SettingsRefused with every rule whose classes the model does not have. labels: of the model."""
    complaints = Complaints()
    for section in sections:
        for fault in _faults(section, section.content, labels):
            complaints.add(*_placed(section, fault))
    complaints.raise_any()


def rules_of(section: Plain | None, labels: Sequence[str]) -> Rules:
    """The section's rules, with the model's labels. Raises RuleRefused with the place in the file."""
    if section is None:
        return NO_RULES
    try:
        return rules_from(section.content, labels, where=section.path)
    except RuleRefused as refused:
        raise RuleRefused(str(Complaint(*_placed(section, refused.message)))) from None


def names_classes(section: Plain | None) -> bool:
    """Whether a rule names a class by its label."""
    return section is not None and _without_labels(section.content) != section.content


def _faults(section: Plain, content: object, labels: Sequence[str], *, has_tracker: bool = True) -> Iterator[str]:
    """content: the section's, as it is to be held against the rules' form."""
    fault_of = partial(_fault, where=section.path, labels=labels, has_tracker=has_tracker)
    if not isinstance(content, Mapping):
        yield from fault_of(content)
        return
    frame = {key: value for key, value in content.items() if key not in KINDS}
    found = list(fault_of(frame))
    frame = {} if found else frame
    for kind in KINDS:
        rules = content.get(kind)
        if not isinstance(rules, list):
            found += fault_of({kind: rules})
            continue
        for number, rule in enumerate(rules):
            at = f"{section.path}.{kind}"
            for text in fault_of({**frame, kind: [rule]}):
                if text.startswith(f"{at}[0]"):
                    found.append(text.replace(f"{at}[0]", f"{at}[{number}]", 1))
    yield from found or fault_of(content)  # faults across entries, such as duplicate names


def _fault(content: object, *, where: str, labels: Sequence[str], has_tracker: bool) -> Iterator[str]:
    try:
        rules_from(content, labels, where=where, has_tracker=has_tracker)
    except RuleRefused as refused:
        yield refused.message


def _without_labels(content: object) -> object:
    """The section without classes by label."""
    if isinstance(content, list):
        return [_without_labels(item) for item in content]
    if isinstance(content, Mapping):
        return {key: _without_labels(value) for key, value in content.items() if key != "class-id" or _is_number(value)}
    return content


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _placed(section: Plain, text: str) -> tuple[str, str]:
    """Where the fault stands, and its text."""
    path = text.partition(": ")[0]
    if unknown := _UNKNOWN_KEY.search(text):
        path = f"{path}.{unknown[1]}"
    return section.place(path) or "analytics", text
