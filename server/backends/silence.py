"""How long an engine has not answered its probe, and what is due because of it. Sans-IO."""

from enum import Enum


class Due(Enum):
    """What a silence calls for now."""

    NOTHING = "nothing"
    CUT = "end the calls that wait for the engine"
    RESTART = "start the engine again"


class Silence:
    """Calls are cut after cut_s of silence, once; a restart is due every restart_s. now: monotonic seconds."""

    def __init__(self, *, cut_s: float, restart_s: float) -> None:
        self._cut_s = cut_s
        self._restart_s = restart_s
        self._since: float | None = None
        self._restart_at = 0.0
        self._is_cut = False

    def heard(self) -> None:
        """The engine answered."""
        self._since = None

    def unheard(self, now: float) -> Due:
        """A probe went unanswered."""
        if self._since is None:
            self._since, self._restart_at, self._is_cut = now, now + self._restart_s, False
        if now >= self._restart_at:
            self._restart_at = now + self._restart_s
            return Due.RESTART
        if not self._is_cut and now - self._since >= self._cut_s:
            self._is_cut = True
            return Due.CUT
        return Due.NOTHING
