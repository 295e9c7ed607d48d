"""Decides which rate or which number of streams a search tries next, and whether a trial passed. No I/O."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

import msgspec

from penstock_load.results import PhaseResult

SERVED_SHARE = 0.99
TRIALS_AT_MOST = 60


class TrialOutcome(StrEnum):
    """How a trial of a rate ended. UNUSABLE: the generator was the bottleneck, so it says nothing of the server."""

    KEPT = "kept"
    BROKEN = "broken"
    UNUSABLE = "unusable"


class Knee(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found. kept_per_s: the highest rate that a long trial confirmed; None: not one was kept.

    broken_per_s: the lowest rate that broke; None: none did, and the knee lies above the highest rate that was
    allowed. why: what broke there. is_generators_limit: the generator broke there, so the knee may lie higher.
    """

    sustained_per_s: float | None
    broken_per_s: float | None
    why: str
    is_generators_limit: bool
    trials: int

    @property
    def sentence(self) -> str:
        """The result for a person."""
        if self.sustained_per_s is None:
            at = f"even at {self.broken_per_s:.4g}/s" if self.broken_per_s is not None else "at any rate that was tried"
            return f"The SLO was not kept {at}: {self.why}."
        if self.broken_per_s is None:
            return f"{self.sustained_per_s:.4g}/s kept the SLO, and nothing higher was allowed: the knee lies above."
        if self.is_generators_limit:
            broken = f"at {self.broken_per_s:.4g}/s the generator failed: {self.why}."
            return f"{self.sustained_per_s:.4g}/s kept the SLO; {broken}"
        return f"{self.sustained_per_s:.4g}/s kept the SLO; {self.broken_per_s:.4g}/s did not: {self.why}."


class _Step(Enum):
    SEEK = auto()
    CONFIRM = auto()
    CHALLENGE = auto()
    DONE = auto()


class KneeSearch:
    """Doubles the rate until it breaks (halves it until it keeps), then bisects between the two, geometrically.

    A noisy machine breaks a rate by accident, so a rate that broke is tried once more, and the second trial counts.
    It also keeps one by accident: when kept and broken lie within the precision (0.05: a ratio of 1.05), the kept rate
    must be kept again in a longer trial (is_confirming); where it is not, it counts as broken and the search goes on.
    Last, the broken rate is given a longer trial, too: if it is kept after all, the search goes on above it.
    """

    def __init__(
        self, start_per_s: float, highest_per_s: float, *, precision: float = 0.05, lowest_per_s: float = 1.0
    ) -> None:
        """Searches from lowest to highest, both included. ValueError where the rates do not ascend."""
        if not 0 < lowest_per_s <= start_per_s <= highest_per_s or precision <= 0:
            raise ValueError(
                f"a search from {start_per_s:g}/s within {lowest_per_s:g} to {highest_per_s:g}/s at precision "
                f"{precision:g} is impossible; give 0 < lowest <= start <= highest and a precision above 0"
            )
        self._lowest, self._highest, self._precision = lowest_per_s, highest_per_s, precision
        self._kept: list[float] = []
        self._broken: tuple[float, TrialOutcome, str] | None = None
        self._rate: float | None = start_per_s
        self._step = _Step.SEEK
        self._is_second_try = False
        self._confirmed: float | None = None
        self._trials = 0

    def next_rate(self) -> float | None:
        """The rate to try now, requests a second; None: the search has ended."""
        return self._rate

    @property
    def is_confirming(self) -> bool:
        """Whether the rate to try now is to be tried for longer."""
        return self._step in (_Step.CONFIRM, _Step.CHALLENGE)

    @property
    def result(self) -> Knee | None:
        """What was found; None while the search goes on."""
        if self._rate is not None:
            return None
        rate, outcome, why = self._broken or (None, TrialOutcome.KEPT, "")
        return Knee(
            sustained_per_s=self._confirmed,
            broken_per_s=rate,
            why=why or "the trials contradicted each other until there were too many",
            is_generators_limit=outcome is TrialOutcome.UNUSABLE,
            trials=self._trials,
        )

    def record(self, rate_per_s: float, outcome: TrialOutcome, reason: str) -> None:
        """How the trial of next_rate() ended, and why it broke. ValueError for another rate than that."""
        if rate_per_s != self._rate:
            raise ValueError(f"a trial of {rate_per_s:g}/s was recorded where {self._rate} was to be tried")
        self._trials += 1
        if outcome is TrialOutcome.KEPT:
            self._keep(rate_per_s)
        elif self._is_second_try or self._step is _Step.CHALLENGE:
            self._break(rate_per_s, outcome, reason)
        else:
            self._is_second_try = True
        if self._trials >= TRIALS_AT_MOST or self._step is _Step.DONE:
            self._rate = None

    def _keep(self, rate: float) -> None:
        if self.is_confirming:
            self._confirmed = rate
        if self._step is _Step.CHALLENGE:
            self._broken = None
        self._kept.append(rate)
        self._go_on()

    def _break(self, rate: float, outcome: TrialOutcome, reason: str) -> None:
        self._broken = (rate, outcome, reason)
        self._kept = [kept for kept in self._kept if kept < rate]
        if self._step is _Step.CHALLENGE:
            self._step = _Step.DONE
        else:
            self._go_on()

    def _go_on(self) -> None:
        self._is_second_try = False
        kept = max(self._kept, default=None)
        if self._broken is None:
            self._go_up(kept or self._lowest)
        elif kept is None:
            self._go_down(self._broken[0])
        elif self._broken[0] / kept > 1 + self._precision:
            self._step, self._rate = _Step.SEEK, (kept * self._broken[0]) ** 0.5
        elif kept == self._confirmed:
            self._step, self._rate = _Step.CHALLENGE, self._broken[0]
        else:
            self._step, self._rate = _Step.CONFIRM, kept

    def _go_up(self, kept: float) -> None:
        if kept < self._highest:
            self._step, self._rate = _Step.SEEK, min(kept * 2, self._highest)
        elif kept == self._confirmed:
            self._step = _Step.DONE
        else:
            self._step, self._rate = _Step.CONFIRM, kept

    def _go_down(self, broken: float) -> None:
        if broken <= self._lowest:
            self._step = _Step.DONE
        else:
            self._step, self._rate = _Step.SEEK, max(broken / 2, self._lowest)


def trial_verdict(phase: PhaseResult, *, slo_p99_ms: float, error_share: float = 0.01) -> tuple[TrialOutcome, str]:
    """Whether a trial kept the SLO, and in a clause what broke.

    Kept: p99 within the SLO, no more errors (refusals, failures, timeouts) than the share, and 99 % of the offered
    rate answered. Unusable: the generator complained, or nothing was asked.
    """
    asked = phase.all
    if phase.health.complaint or not asked.intended:
        return TrialOutcome.UNUSABLE, phase.health.complaint.rstrip(".") or "nothing was asked"
    errors = (asked.intended - asked.ok) / asked.intended
    if errors > error_share:
        return TrialOutcome.BROKEN, f"{errors:.2%} of the requests got no right answer (allowed: {error_share:.2%})"
    if phase.ok_per_s < SERVED_SHARE * phase.offered_per_s:
        return TrialOutcome.BROKEN, f"{phase.ok_per_s:.4g}/s were answered of {phase.offered_per_s:.4g}/s"
    if asked.latency.p99 > slo_p99_ms:
        return TrialOutcome.BROKEN, f"p99 was {asked.latency.p99:.4g} ms (SLO {slo_p99_ms:g} ms)"
    return TrialOutcome.KEPT, ""


def find_knee(points: Iterable[tuple[float, float, float]], slo_p99_ms: float) -> float | None:
    """The knee of a measured curve of (offered per s, ok per s, p99 ms): the last rate before the first that broke.

    A point above a broken one does not count, though it was kept. None: the lowest broke, or there is no point.
    """
    knee = None
    for offered_per_s, ok_per_s, p99_ms in sorted(points):
        if ok_per_s < SERVED_SHARE * offered_per_s or p99_ms > slo_p99_ms:
            break
        knee = offered_per_s
    return knee


MOST_DROPPED = 0.01  # of the decoded frames
LEAST_PLAYED = 0.97  # of the time that passed: a camera that is read too slowly falls behind


@dataclass(frozen=True, slots=True)
class Trial:
    """A number of streams for some seconds. p99_ms: of results, decoding to sinks; NaN where there were none.

    dropped_share: of the decoded frames. played_share: how far the slowest stream came, by the seconds that passed.
    trouble: a stream that does not run, in words.
    """

    streams: int
    p99_ms: float
    dropped_share: float
    played_share: float
    rate: float
    trouble: str = ""

    def complaint(self, slo_p99_ms: float) -> str:
        """Why the number was not held; empty where it was."""
        if self.trouble:
            return self.trouble
        if not self.p99_ms <= slo_p99_ms:  # NaN is no latency
            return f"p99 {self.p99_ms:.0f} ms"
        if self.dropped_share > MOST_DROPPED:
            return f"{self.dropped_share:.1%} of the frames dropped"
        if self.played_share < LEAST_PLAYED:
            return f"the slowest stream played {self.played_share:.0%} of the time"
        return ""


class StreamSearch:
    """Doubles until a number is not held, then halves what lies between."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0
        self._broken = most + 1

    def next_count(self) -> int | None:
        """What to try; None if `held` is known."""
        if self._broken - self.held <= 1:
            return None
        if self._broken > self._most and not self.held:
            return 1
        if self._broken > self._most:
            return min(2 * self.held, self._most)
        return (self.held + self._broken) // 2

    def record(self, count: int, *, is_held: bool) -> None:
        """What came of a trial."""
        if is_held:
            self.held = max(self.held, count)
        else:
            self._broken = min(self._broken, count)
