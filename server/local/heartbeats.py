"""Which fronts hang: one that lives counts its beats on the limits page; whoever looks sees when they stand still."""

from collections.abc import Mapping
from dataclasses import dataclass

LOOK_S = 0.5
SILENCE_S = 10.0
_MOST_OF_A_LOOK_S = 2 * LOOK_S


@dataclass(slots=True)
class _Seen:
    """A beat, and for how long nothing followed it."""

    beat: int
    silent_s: float = 0.0


class Heartbeats:
    """Sans-IO: `now` is monotonic seconds. Look each LOOK_S.

    Silence is counted in the looker's own running time: a look that comes late adds as much as one that is due, so
    that a machine that was suspended, or a looker that was stopped, finds nobody silent.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._looked_at: float | None = None

    def look(self, beats: Mapping[int, int], now: float) -> dict[int, float]:
        """Who hangs, and for how many seconds it has been silent; told once, and again after as long a silence.

        beats: of each front by its index; 0 where it has not begun.
        """
        passed_s = 0.0 if self._looked_at is None else min(now - self._looked_at, _MOST_OF_A_LOOK_S)
        self._looked_at = now
        hanging: dict[int, float] = {}
        for index, beat in beats.items():
            seen = self._seen.get(index)
            if seen is None or seen.beat != beat or not beat:
                self._seen[index] = _Seen(beat)
                continue
            seen.silent_s += passed_s
            if seen.silent_s >= SILENCE_S:
                hanging[index] = seen.silent_s
                self._seen[index] = _Seen(beat)
        return hanging
