"""Reads a recording to replay: records.jsonl of a run, or one time in seconds a line."""

import math
from collections.abc import Iterable
from pathlib import Path

import msgspec

from loadtest.results import Side


class _Line(msgspec.Struct):
    """What a replay needs of a record; of a bare time there is only that."""

    intended_s: float
    side: Side = Side.TARGET
    phase: str = ""
    round: int = 0


_DECODER = msgspec.json.Decoder(_Line | float)


def read_recording(path: Path, *, phase: str = "", round: int = 1) -> list[float]:
    """The moments at which requests were to be sent, sorted, the first at 0.

    Of a run's records those of the target count, and where some are of a phase with that name, those alone: of that
    round, else of the first. What callers asked in other phases is no load to repeat. Raises ValueError with file and
    line for a line that is neither, for a file that cannot be read, and for one without a moment.
    """
    moments: dict[tuple[str, int], list[float]] = {}
    try:
        with path.open("rb") as lines:
            for number, text in enumerate(lines, 1):
                line = _decoded(text, f"{path}:{number}") if text.strip() else None
                if line and line.side is Side.TARGET:
                    moments.setdefault((line.phase, line.round), []).append(line.intended_s)
    except OSError as error:
        raise ValueError(f"the recording {path} cannot be read: {error.strerror}") from None
    if not moments:
        raise ValueError(f"{path} holds no time to send at; give records.jsonl of a run, or one time in seconds a line")
    wanted = _rounds_of(moments, phase)
    chosen = [(phase, round if round in wanted else wanted[0])] if wanted else moments
    return _from_0([at_s for each in chosen for at_s in moments[each]])


def _rounds_of(stretches: Iterable[tuple[str, int]], phase: str) -> list[int]:
    return sorted(number for name, number in stretches if name == phase and phase)


def _from_0(moments: list[float]) -> list[float]:
    first_s = min(moments)
    return sorted(at_s - first_s for at_s in moments)


def _decoded(text: bytes, place: str) -> _Line:
    try:
        said = _DECODER.decode(text.strip())
    except (msgspec.DecodeError, UnicodeDecodeError):
        shown = text[:60].decode(errors="replace").strip()
        raise ValueError(f"{place}: {shown!r} is neither a record nor a time in seconds") from None
    line = said if isinstance(said, _Line) else _Line(said)
    if not math.isfinite(line.intended_s):
        raise ValueError(f"{place}: {line.intended_s} is no time in seconds")
    return line
