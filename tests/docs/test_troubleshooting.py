"""docs/troubleshooting.md quotes the sentences that the programs print."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.stack import CHECKOUT

PAGE = CHECKOUT / "docs" / "troubleshooting.md"
FOLDERS = ("server/penstock", "deepstream_pipeline/penstock_video", "loadtest/penstock_load")
NOT_SENTENCES = re.compile(r"UNAVAILABLE|queue|decode|in|out|objects\.jsonl|timings_ms|(\"track_id\": null)")
LEAST_CHARACTERS = 5  # of a fixed part: the words between two names


def literals() -> str:
    """Every text of the programs, one a line: a field of an f-string separates two texts."""
    lines = [(CHECKOUT / "Makefile").read_text()]
    for folder in FOLDERS:
        lines += [path.read_text() for path in (CHECKOUT / folder).glob("console/static/**/*.js")]
        for path in (CHECKOUT / folder).rglob("*.py"):
            lines += strings(path)
    return "\n".join(lines)


def strings(path: Path) -> Iterator[str]:
    """The string literals of a module, and its docstrings."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def quoted_sentences() -> list[str]:
    """The code in the first column of the page's tables."""
    rows = re.findall(r"(?m)^\| (.+?) \| .+ \| .+ \|$", PAGE.read_text())
    found = [code for row in rows for code in re.findall(r"`([^`]+)`", row)]
    return [code for code in found if not NOT_SENTENCES.fullmatch(code)]


def test_every_quoted_sentence_is_one_of_the_programs() -> None:
    """A message that was reworded is reworded on the page, too: its fixed parts are in the source."""
    sentences, source = quoted_sentences(), literals()
    assert len(sentences) >= 40
    for sentence in sentences:
        parts = [part.strip(" ;:,()") for part in sentence.split("…")]
        parts = [part for part in parts if len(part) >= LEAST_CHARACTERS]
        assert parts, sentence
        assert all(part in source for part in parts), sentence


def test_every_row_says_why_and_what_to_do() -> None:
    """No cell of the page is empty."""
    rows = re.findall(r"(?m)^\|(.+)\|$", PAGE.read_text())
    assert len(rows) >= 50
    assert all(
        len(cells := row.split(" | ")) == 3 and all(cell.strip() for cell in cells) for row in rows if "---" not in row
    )
