"""Whether the load generator was itself the bottleneck: one rule, pure.

It was, where one of these holds.

* It handed over fewer than 99 % of the intended requests by the schedule's end. Then the server was spared.
* The 99th percentile of its lag (from the intended moment to the send) is above 5 ms and above a tenth of the SLO.
  Latency counts from the intended moment, so lag is in it: the figures are still upper bounds, but they are the
  generator's. 5 ms is about what one other program's time slice costs; a tenth of the SLO is what a verdict bears.
* The thread of its loop was busy for more than 95 % of the time. Then answers waited to be read, in a closed loop too,
  where there is no lag.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from loadtest.results import GeneratorHealth, Record, Status

LEAST_SENT_SHARE = 0.99
ALLOWED_LAG_MS = 5.0
ALLOWED_LAG_SLO_SHARE = 0.1
MOST_BUSY = 0.95


@dataclass(frozen=True, slots=True)
class Load:
    """What one driver process says of a phase: how long its schedule lasted and what its loop's thread used of it."""

    seconds: float
    cpu_s: float


@dataclass(slots=True)
class Tally:
    """What the records of a phase say of the generator. end_s: of the schedule, on the records' clock.

    lags_s: of what was sent, in any order. in_time: sent by the end, or within the allowed lag after it.
    """

    end_s: float
    allowed_lag_s: float
    intended: int = 0
    in_time: int = 0
    lags_s: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, records: Sequence[Record]) -> None:
        """Counts them."""
        latest_s = self.end_s + self.allowed_lag_s
        for record in records:
            self.intended += 1
            if record.status is not Status.NOT_SENT:
                self.lags_s.append(record.sent_s - record.intended_s)
                self.in_time += record.sent_s <= latest_s


def allowed_lag_s(slo_p99_ms: float) -> float:
    """The 99th percentile of lag that a verdict bears."""
    return max(ALLOWED_LAG_MS, ALLOWED_LAG_SLO_SHARE * slo_p99_ms) / 1000


def judge(tally: Tally, loads: Sequence[Load], *, seconds: float) -> GeneratorHealth:
    """The health of a phase whose schedule lasted so long, by the rule above. loads: one a process."""
    lags_ms = np.asarray(tally.lags_s, dtype=np.float64) * 1000
    p50, p99 = np.quantile(lags_ms, [0.5, 0.99], method="inverted_cdf").tolist() if len(lags_ms) else (0.0, 0.0)
    health = GeneratorHealth(
        intended=tally.intended,
        sent=len(lags_ms),
        intended_per_s=tally.intended / seconds,
        sent_per_s=tally.in_time / seconds,
        lag_p50_ms=p50,
        lag_p99_ms=p99,
        cpu=max((load.cpu_s / load.seconds for load in loads if load.seconds > 0), default=0.0),
        processes=len(loads),
    )
    return _with_complaint(health, tally)


def _with_complaint(health: GeneratorHealth, tally: Tally) -> GeneratorHealth:
    found: list[str] = []
    share = tally.in_time / tally.intended if tally.intended else 1.0
    if share < LEAST_SENT_SHARE:
        refused = tally.intended - len(tally.lags_s)
        cause = f", {refused} not at all for want of room in flight" if refused else ""
        found.append(f"it sent {share:.1%} of the {tally.intended} intended requests in time{cause}")
    if health.lag_p99_ms > tally.allowed_lag_s * 1000:
        found.append(f"1 % of the requests left more than {health.lag_p99_ms:.1f} ms late")
    if health.cpu > MOST_BUSY:
        found.append(f"its loop was busy {health.cpu:.0%} of the time")
    if not found:
        return health
    way_out = "ask less, give it more --processes, or a machine of its own"
    words = f"the load generator was the bottleneck: {', and '.join(found)}; {way_out}"
    return msgspec.structs.replace(health, complaint=words)
