"""A run as Markdown: the HTML report's words and tables without its plots."""

import re
from pathlib import Path

from loadtest.report.contents import compose
from loadtest.report.document import Cell, Document, Section, Table, Tone
from loadtest.results import Run

_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_SPECIAL = re.compile(r"([\\`*\[\]|~])")


def write_markdown(run: Run, path: Path) -> None:
    """The report at that path. Raises OSError where it cannot be written."""
    path.write_text(render_markdown(run), encoding="utf-8")


def render_markdown(run: Run) -> str:
    """The report's text."""
    document = compose(run)
    blocks = [f"# {escape(document.title)}", *_complaints(document), f"**{escape(document.headline)}**"]
    blocks += [escape(document.about)] if document.about else []
    for section in document.sections:
        blocks += _section(section)
    if document.absences:
        blocks.append("## What is not in this report, and why")
        blocks.append("\n".join(f"- {escape(part.title)}: {escape(part.why)}" for part in document.absences))
    return "\n\n".join(blocks) + "\n"


def escape(text: str) -> str:
    """The text as it stands, whatever signs are in it: none of them marks anything up."""
    marked = "".join(_ENTITIES.get(sign, sign) for sign in text)
    return _SPECIAL.sub(r"\\\1", marked)


def _complaints(document: Document) -> list[str]:
    if not document.complaints:
        return []
    lines = [f"> - {escape(complaint)}" for complaint in document.complaints]
    return ["\n".join(["> **Nothing in this run can pass:**", ">", *lines])]


def _section(section: Section) -> list[str]:
    blocks = [f"## {escape(section.title)}", *map(escape, section.sentences)]
    blocks += [_table(table) for table in section.tables]
    return [*blocks, *map(escape, section.remarks)]


def _table(table: Table) -> str:
    rule = [":--" if index in table.texts else "--:" for index in range(len(table.head))]
    lines = [_row([escape(word) for word in table.head]), _row(rule)]
    lines += [_row([_cell(cell) for cell in row]) for row in table.rows]
    caption = f"**{escape(table.caption)}**\n\n" if table.caption else ""
    return caption + "\n".join(lines)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    text = escape(cell.text)
    if cell.tone in (Tone.GOOD, Tone.BAD):
        text = f"**{text}**"
    return f"{text} ({escape(cell.detail)})" if cell.detail else text
