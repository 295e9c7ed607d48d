"""Whether calls may go to an engine, by what became of the last ones and of probes. Sans-IO.

    CLOSED ── failures in a row ──► DOUBTED ── probe unanswered ──► OPEN ── pause over ──► HALF_OPEN
       ▲                               │                             ▲                        │
       └──────── answered ─────────────┘                             └─── probe unanswered ───┤
       └──────────────────────────────── probe answered ──────────────────────────────────────┘

A slow model is no dead engine: calls that were late raise a doubt, and only a probe that goes unanswered as well opens
the circuit. One probe at a time, and no call of a client's, finds out whether it may close again.
"""

from dataclasses import dataclass
from enum import Enum


class CircuitState(Enum):
    """closed, doubted: calls pass. open, half open: they are refused at once."""

    CLOSED = "closed"
    DOUBTED = "doubted"
    OPEN = "open"
    HALF_OPEN = "half open"


@dataclass(frozen=True, slots=True)
class CircuitOptions:
    """failures: in a row, that raise a doubt. calm_s: how long an answered doubt is not raised again by late calls,
    broken_calm_s: by broken ones.

    first_pause_s, max_pause_s: between two probes of an open circuit, doubling.
    """

    failures: int = 5
    calm_s: float = 1.0
    broken_calm_s: float = 0.1
    first_pause_s: float = 0.2
    max_pause_s: float = 5.0


class Circuit:
    """now: monotonic seconds."""

    def __init__(self, options: CircuitOptions | None = None) -> None:
        self._options = options or CircuitOptions()
        self._pause_s = self._options.first_pause_s
        self._probe_at = 0.0
        self._answered_at: float | None = None
        self.state = CircuitState.CLOSED
        self.failures = 0
        self.openings = 0

    @property
    def is_passable(self) -> bool:
        """Whether calls may go through."""
        return self.state is CircuitState.CLOSED or self.state is CircuitState.DOUBTED

    @property
    def is_refuted(self) -> bool:
        """Whether a doubt is over though its own probe was not answered: a call was meanwhile, or another probe."""
        return self.is_passable and self.failures == 0

    def answered(self) -> None:
        """A call was answered, with whatever."""
        self.failures = 0

    def failed(self, now: float, *, is_broken: bool = False) -> None:
        """A call was not. is_broken: for want of a connection, which raises the doubt at once; else it was late."""
        calm_s = self._options.broken_calm_s if is_broken else self._options.calm_s
        is_calm = self._answered_at is not None and now < self._answered_at + calm_s
        if self.state is not CircuitState.CLOSED or is_calm:
            return
        self.failures += 1
        if is_broken or self.failures >= self._options.failures:
            self.state = CircuitState.DOUBTED

    def is_probe_due(self, now: float) -> bool:
        """Whether somebody should ask the engine now; say `probing` when it is done."""
        if self.state is CircuitState.OPEN:
            return now >= self._probe_at
        return self.state is CircuitState.DOUBTED

    def probing(self) -> None:
        """A probe is on its way."""
        if self.state is CircuitState.OPEN:
            self.state = CircuitState.HALF_OPEN

    def probe_answered(self, now: float) -> None:
        """The engine answered a probe, one that was due or any other."""
        if self.state is not CircuitState.CLOSED:
            self._answered_at = now
            self.failures = 0
        self.state = CircuitState.CLOSED
        self._pause_s = self._options.first_pause_s

    def probe_unanswered(self, now: float) -> None:
        """It did not."""
        if self.is_passable:
            self.openings += 1
        self.state = CircuitState.OPEN
        self._probe_at = now + self._pause_s
        self._pause_s = min(self._pause_s * 2, self._options.max_pause_s)

    def __repr__(self) -> str:
        return f"<Circuit {self.state.value}, {self.failures} failures in a row>"
