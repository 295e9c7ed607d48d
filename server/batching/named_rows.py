"""Which requests of a batch an engine refuses, where it names their rows. Sans-IO.

Our backend `torch` does of pictures that it cannot decode: "model 'm': row 3 of 16: the picture …; rows 5, 9 of 16: …",
rows counted from 0. Words count only where they stand as that backend puts them: other engines repeat in their errors
what a client sent, and one client could say with it that the others' rows are bad.
"""

import re
from collections.abc import Sequence

_NAMED = re.compile(r"(?:^|; )rows? ([0-9]{1,6}(?:, [0-9]{1,6})*) of ([0-9]{1,6}): ")


def refused_rows(text: str, rows: int, model_name: str) -> dict[int, str]:
    """What is said against each row that is named of a call of so many; empty where the text names none of such a call.

    Only the model's name may stand before the first name; it is said against all of them.
    """
    begin = f"model '{model_name}': "
    begin = begin if text.startswith(begin) else ""
    text = text[len(begin) :]
    found = [match for match in _NAMED.finditer(text) if int(match[2]) == rows]
    if not found or found[0].start():
        return {}
    ends = [*[match.start() for match in found[1:]], len(text)]
    said = {
        int(number): begin + text[match.end() : end]
        for match, end in zip(found, ends, strict=True)
        for number in match[1].split(", ")
    }
    return said if max(said) < rows else {}


def refused_requests(said: dict[int, str], order: Sequence[int], row_counts: Sequence[int]) -> dict[int, str]:
    """What is said against each request, by its first row that is named. order, row_counts: see MergedRequest."""
    refused: dict[int, str] = {}
    if not said:
        return refused
    owners = [request for request, count in zip(order, row_counts, strict=True) for _ in range(count)]
    for row in sorted(said):
        refused.setdefault(owners[row], said[row])
    return refused
