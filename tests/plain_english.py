"""Refuses words that this project once used as terms of its own: python -m tests.plain_english [FILE…].

Identifiers, docstrings, comments and messages of Python files are checked. STYLE of the contributing guide names the
words to use instead. A line that must have such a word, such as a name of a library, ends in `# plain-english: ok`.
"""

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
WORDS = (
    *("told", "nobody", "somebody", "whoever", "keepers?", "passages?"),  # plain-english: ok
    *("passengers?", "seat(s|ed)?", "guests?", "bells?", "lenders?"),  # plain-english: ok
    *("doubt(s|ed|ful)?", "patience", "folk", "condemn(s|ed)?", "heard", "lap(s|ped)?"),  # plain-english: ok
)
_PATTERN = rf"(?<![a-z])(?:{'|'.join(WORDS)})(?![a-z])|none where"  # plain-english: ok
REFUSED = re.compile(_PATTERN, re.IGNORECASE)
ALLOWED = "# plain-english: ok"
_KINDS = {tokenize.NAME, tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def refused_words(text: str) -> Iterator[tuple[int, str]]:
    """Line and word for each refused word in the Python source."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _KINDS:
            continue
        spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", token.string) if token.type == tokenize.NAME else token.string
        for found in REFUSED.finditer(spaced.replace("_", " ")):
            line = token.start[0] + spaced.count("\n", 0, found.start())
            if ALLOWED not in lines[line - 1]:
                yield line, found[0]


def main(arguments: Sequence[str]) -> int:
    """The exit code: 1 if a word was found."""
    paths = [Path(name) for name in arguments] or _python_files()
    found = [
        f"{path}:{line}: {word!r}" for path in paths for line, word in refused_words((CHECKOUT / path).read_text())
    ]
    if found:
        sys.stderr.write("".join(f"{one} is not plain English here; see STYLE\n" for one in found))
    return bool(found)


def _python_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=CHECKOUT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    names = [name for name in listed.stdout.split("\0") if name]
    return [Path(name) for name in names if (CHECKOUT / name).is_file()]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
