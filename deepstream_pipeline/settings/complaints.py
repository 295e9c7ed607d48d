"""What is wrong with settings: every fault with its place, collected, and told all at once."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from deepstream_pipeline.errors import PipelineError

LONGEST_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Complaint:
    """One fault. where: FILE:LINE:COLUMN, or the flag. text: the key path, the value, what is allowed."""

    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


class SettingsRefused(PipelineError):
    """Settings that cannot be meant. complaints: every fault that was found, in the order of the file."""

    reason = "bad_settings"

    def __init__(self, complaints: Iterable[Complaint]) -> None:
        self.complaints = tuple(complaints)
        super().__init__("\n".join(map(str, self.complaints)))


class Complaints:
    """Collects faults, so that a person hears of all of them at once."""

    def __init__(self) -> None:
        self._found: list[Complaint] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, where: str, text: str) -> None:
        """One more."""
        self._found.append(Complaint(where, text))

    def raise_any(self) -> None:
        """Raises SettingsRefused where there was one."""
        if self._found:
            raise SettingsRefused(sorted(self._found, key=_in_the_file))


def _in_the_file(complaint: Complaint) -> tuple[str, int, int]:
    found = re.fullmatch(r"(.*):(\d+):(\d+)", complaint.where, re.DOTALL)
    return (found[1], int(found[2]), int(found[3])) if found else (complaint.where, 0, 0)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The known word that is close, as the end of a sentence; else all that is known."""
    names = sorted(known)
    return close_to(word, names) or (f"there are {', '.join(names)}" if names else "nothing may stand here")


def close_to(word: str, known: Iterable[str]) -> str:
    """The known word that is close, asked for as the end of a sentence; empty where none is."""
    by_form = {_form(name): name for name in sorted(known)}
    close = difflib.get_close_matches(_form(word), by_form, n=1)
    return f"did you mean {by_form[close[0]]}?" if close else ""


def choices(word: str, known: Iterable[str]) -> str:
    """All that is taken, as the end of a sentence, behind the known word that is close."""
    names = tuple(known)
    close, all_names = close_to(word, names), ", ".join(names)
    return f"{close} It takes {all_names}" if close else f"it takes {all_names}"


def _form(name: str) -> str:
    """What people mix up is one: camera-id, camera_id, cameraId."""
    return re.sub(r"[-_ ]", "", name).lower()


def shown(value: str) -> str:
    """The value as an error may show it: short, no control characters, and nothing that may be a password."""
    return repr(shortened(without_secrets(value)))


def shortened(text: str) -> str:
    """At most LONGEST_SHOWN signs of it."""
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 1] + "…"


def without_secrets(text: str) -> str:
    """The text without what stands before an @, and without an address's query: both may hold a password."""
    before, mark, rest = text.partition("://")
    if not mark:
        before, rest = "", text
    scheme = re.sub(r".*[^a-zA-Z0-9+.-]", "", before, flags=re.DOTALL)
    if "@" in rest:
        rest = f"…@{rest.rpartition('@')[2]}"
    if mark:
        rest = re.sub(r"[?&].*", "?…", rest, flags=re.DOTALL)
    return f"{scheme}{mark}{rest}"
