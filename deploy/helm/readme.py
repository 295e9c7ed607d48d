"""Writes the table of values, VALUES.md beside values.yaml, from that file's keys, defaults and comments.

python -m deploy.helm.readme            # writes it
python -m deploy.helm.readme --check    # ends with 1 where it is not what would be written
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

CHART = Path(__file__).resolve().parent / "penstock"
TABLE_BEGINS, TABLE_ENDS = "<!-- values -->\n", "<!-- /values -->\n"
_AS_KUBERNETES_HAS_IT = {
    *("nodeSelector", "tolerations", "affinity", "priorityClassName", "podAnnotations", "podLabels", "annotations"),
    *("requests", "limits", "maxUnavailable"),
}
_INDENTED = 3  # blanks after the #: a list in a comment, a line for each of its items


@dataclass(frozen=True, slots=True)
class Value:
    """One line of the table. key: with dots. default: as JSON. comment: the lines above the key, of a group as well."""

    key: str
    default: str
    comment: str


def read_values(text: str) -> list[Value]:
    """Every key of a values.yaml that has a default of its own, and every group that has a comment."""
    root = yaml.compose(text, yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    return list(_values(root, "", text.splitlines()))


def table(values: Sequence[Value]) -> str:
    """The values as a table of Markdown, a section for each key of the first level."""
    lines: list[str] = []
    section = ""
    for value in values:
        first = value.key.partition(".")[0]
        if first != section:
            section = first
            lines += ["", f"## {section}", "", "| value | default | what |", "|---|---|---|"]
        default = f"`{value.default}`" if value.default else ""
        lines.append(f"| `{value.key}` | {_cell(default)} | {_cell(value.comment or _usual(value.key))} |")
    return "\n".join(lines[1:]) + "\n"


def with_table(page: str, values: Sequence[Value]) -> str:
    """The page with this table between its markers."""
    before, _, rest = page.partition(TABLE_BEGINS)
    _, end, after = rest.partition(TABLE_ENDS)
    if not end:
        raise SystemExit(f"the page has no {TABLE_BEGINS.strip()} … {TABLE_ENDS.strip()}; write both, each on a line")
    return f"{before}{TABLE_BEGINS}\n{table(values)}\n{TABLE_ENDS}{after}"


def _values(node: yaml.MappingNode, prefix: str, lines: Sequence[str]) -> Iterator[Value]:
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        comment = _comment_above(lines, key.start_mark.line, key.start_mark.column)
        is_group = isinstance(value, yaml.MappingNode) and not value.flow_style
        if not is_group:
            yield Value(name, _as_json(value), comment)
            continue
        if comment:
            yield Value(name, "", comment)
        yield from _values(value, f"{name}.", lines)


def _comment_above(lines: Sequence[str], at: int, column: int) -> str:
    """The comment right above a key, as deep as the key."""
    opening = " " * column + "#"
    first = at
    while first and lines[first - 1].startswith(opening):
        first -= 1
    text = ""
    for line in lines[first:at]:
        said = line[len(opening) :]
        is_item = len(said) - len(said.lstrip()) >= _INDENTED
        text += _item(said.strip()) if is_item else f" {said.strip()}"
    return text.strip()


def _item(text: str) -> str:
    name, _, meaning = text.partition("  ")
    return f"<br>`{name}`: {meaning.strip()}" if meaning else f" {text}"


def _as_json(node: yaml.Node) -> str:
    return json.dumps(yaml.SafeLoader("").construct_object(node, deep=True), ensure_ascii=False)


def _usual(key: str) -> str:
    return "As Kubernetes has it." if key.rpartition(".")[2] in _AS_KUBERNETES_HAS_IT else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Writes VALUES.md, or says that it is stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 where the page is stale")
    is_check = parser.parse_args().check
    page = CHART / "VALUES.md"
    text = page.read_text()
    fresh = with_table(text, read_values((CHART / "values.yaml").read_text()))
    if not is_check:
        page.write_text(fresh)
    elif fresh != text:
        raise SystemExit("deploy/helm/penstock/VALUES.md is not what values.yaml says; python -m deploy.helm.readme")


if __name__ == "__main__":
    main()
