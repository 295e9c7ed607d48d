"""A version's section of the changelog as Markdown: `python -m deploy.release.notes 0.1.0`, or Unreleased."""

import argparse
import re
import sys
from datetime import date
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
UNRELEASED = "Unreleased"
_HEADING = re.compile(r"^## \[(?P<version>[^\]]+)\](?: - (?P<date>\S+))?[ \t]*$", re.MULTILINE)
_LINKS = re.compile(r"^\[[^\]]+\]: .*\n?", re.MULTILINE)


class NoNotesError(Exception):
    """There are no notes for the version; the message says what to do."""


def notes_of(version: str, changelog: str) -> str:
    """The section's text without its heading. Raises NoNotesError where it is missing, undated or empty."""
    headings = list(_HEADING.finditer(changelog))
    known = [heading["version"] for heading in headings]
    if version not in known:
        raise NoNotesError(
            f"the changelog has no section [{version}], only {', '.join(known) or 'none'}; write it first"
        )
    at = known.index(version)
    if version != UNRELEASED:
        _check_date(version, headings[at]["date"])
    end = headings[at + 1].start() if at + 1 < len(headings) else len(changelog)
    text = _LINKS.sub("", changelog[headings[at].end() : end]).strip()
    if not text:
        raise NoNotesError(f"the changelog's section [{version}] is empty; say what changed")
    return text + "\n"


def _check_date(version: str, written: str | None) -> None:
    try:
        date.fromisoformat(written or "")
    except ValueError:
        found = f"the date {written!r}" if written else "no date"
        raise NoNotesError(
            f"the changelog's section [{version}] has {found}; its heading looks like '## [{version}] - 2026-11-22'"
        ) from None


def main() -> None:
    """Writes the notes on standard output, or ends with the sentence that says why there are none."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("version", help=f"such as 0.1.0, or {UNRELEASED}")
    parser.add_argument("--changelog", type=Path, default=CHECKOUT / "CHANGELOG.md")
    chosen = parser.parse_args()
    try:
        sys.stdout.write(notes_of(chosen.version, chosen.changelog.read_text(encoding="utf-8")))
    except NoNotesError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
