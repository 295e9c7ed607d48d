"""What a run shows of itself while it runs."""

import msgspec

from loadtest.results import Side


class LiveView(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a phase. phase_number and round count from 1; the figures are of the phase so far.

    offered_per_s: what the schedule wants, 0 where it is not known or over; rate_per_s: right answers a second, lately.
    recent: the p99 of the last moments in ms, oldest first, NaN where nothing was answered. p50_ms, p99_ms: None
    before the first answer. complaint: one sentence while the generator cannot keep up, else empty.
    """

    phase: str
    phase_number: int
    phase_count: int
    round: int
    rounds: int
    elapsed_s: float
    seconds: float
    offered_per_s: float
    sent: int
    ok: int
    refused: int
    failed: int
    timeouts: int
    in_flight: int
    rate_per_s: float
    slo_p99_ms: float
    generator_lag_ms: float
    p50_ms: float | None = None
    p99_ms: float | None = None
    complaint: str = ""
    recent: tuple[float, ...] = ()
    side: Side = Side.TARGET
    is_open_loop: bool = True
