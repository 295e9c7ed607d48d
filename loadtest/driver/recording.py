"""Reads a recording to replay: records.jsonl of a run, or one time in seconds a line."""

import math
from pathlib import Path

import msgspec

from loadtest.results import Side


class _Line(msgspec.Struct):
    """What a replay needs of a record."""

    intended_s: float
    side: Side = Side.TARGET


_DECODER = msgspec.json.Decoder(_Line | float)


def read_recording(path: Path) -> list[float]:
    """The moments at which requests were to be sent, sorted, the first at 0.

    Of a run's records those of the target count. Raises ValueError with file and line for a line that is neither,
    for a file that cannot be read, and for one without a moment.
    """
    moments: list[float] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    moments += _moments_of(line, f"{path}:{number}")
    except OSError as error:
        raise ValueError(f"the recording {path} cannot be read: {error.strerror}") from None
    if not moments:
        raise ValueError(f"{path} holds no time to send at; give records.jsonl of a run, or one time in seconds a line")
    first_s = min(moments)
    return sorted(at_s - first_s for at_s in moments)


def _moments_of(line: bytes, place: str) -> list[float]:
    try:
        said = _DECODER.decode(line.strip())
    except (msgspec.DecodeError, UnicodeDecodeError):
        shown = line[:60].decode(errors="replace").strip()
        raise ValueError(f"{place}: {shown!r} is neither a record nor a time in seconds") from None
    if isinstance(said, _Line):
        return [said.intended_s] if said.side is Side.TARGET else []
    if not math.isfinite(said):
        raise ValueError(f"{place}: {said} is no time in seconds")
    return [said]
