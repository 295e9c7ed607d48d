"""Messages between the load test and its driver processes, recorded arrivals, and the health of the load generator."""

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from penstock_load.clients.client import Answer, Endpoint
from penstock_load.results import GeneratorHealth, Record, Side, Status
from penstock_load.scenario import Arrivals, RequestSpec

MAX_LINE_BYTES = 16 << 20  # a batch of BATCH records with the longest errors is a tenth of it
BATCH = 2000
FLUSH_S = 0.1


class DriverError(Exception):
    """The load generator cannot go on (a process of it ended, is silent, or cannot reach the target). One sentence."""


def first_error(failure: BaseException) -> BaseException:
    """The first error inside exception groups."""
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure


class DriverSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What every phase of a run shares.

    max_in_flight: over all processes; what is due beyond it is recorded NOT_SENT. epoch_s: the run's start on the
    monotonic clock, from which records count. images: a folder of pictures, or empty. connect: who makes the
    clients, as module:function with the signature of penstock_load.clients.connect.connect.
    """

    endpoints: dict[Side, Endpoint]
    asks: tuple[RequestSpec, ...]
    slo_p99_ms: float
    timeout_s: float
    max_in_flight: int
    seed: int
    epoch_s: float
    images: str = ""
    connect: str = "penstock_load.clients.connect:connect"


class PhasePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One phase against one side: either arrivals (an open loop) or callers (a closed one).

    seconds 0 replays a recording to its end. The same round and phase have the same arrivals on both sides.
    """

    round: int
    phase: str
    side: Side
    seconds: float
    arrivals: Arrivals | None = None
    callers: int = 0
    capacity_per_s: float | None = None


class Begin(msgspec.Struct, frozen=True, tag=True):
    """To a process, first: what it is. part: its number from 0 among that many parts."""

    setup: DriverSetup
    part: int
    parts: int


class Go(msgspec.Struct, frozen=True, tag=True):
    """To a process: a phase, and when it begins on the host's one monotonic clock."""

    plan: PhasePlan
    begin_s: float


class Send(msgspec.Struct, frozen=True, tag=True):
    """To a process: one request of that lane of the target, now. number: its identity in the reply, and its payload."""

    number: int
    lane: int


class Sent(msgspec.Struct, frozen=True, tag=True):
    """From a process: the answer to a Send."""

    number: int
    answer: Answer
    took_s: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From a process: its clients are connected."""


class Batch(msgspec.Struct, frozen=True, tag=True):
    """From a process, every FLUSH_S: what ended since the last one (maybe nothing), and what is under way."""

    records: list[Record]
    in_flight: int


class PhaseEnd(msgspec.Struct, frozen=True, tag=True):
    """From a process: nothing is under way any more.

    count: the records it sent. seconds: how long the schedule lasted. cpu_s: what its loop's thread used of it.
    """

    count: int
    seconds: float
    cpu_s: float


class Failed(msgspec.Struct, frozen=True, tag=True):
    """From a process, last: why it cannot go on, in one sentence."""

    message: str


ToDriver = Begin | Go | Send
FromDriver = Ready | Batch | PhaseEnd | Sent | Failed


class _RecordedLine(msgspec.Struct):
    """What a replay needs of a record; of a bare time there is only that."""

    intended_s: float
    side: Side = Side.TARGET
    phase: str = ""
    round: int = 0


_DECODER = msgspec.json.Decoder(_RecordedLine | float)


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


def _decoded(text: bytes, place: str) -> _RecordedLine:
    try:
        said = _DECODER.decode(text.strip())
    except (msgspec.DecodeError, UnicodeDecodeError):
        shown = text[:60].decode(errors="replace").strip()
        raise ValueError(f"{place}: {shown!r} is neither a record nor a time in seconds") from None
    line = said if isinstance(said, _RecordedLine) else _RecordedLine(said)
    if not math.isfinite(line.intended_s):
        raise ValueError(f"{place}: {line.intended_s} is no time in seconds")
    return line


LEAST_SENT_SHARE = 0.99
ALLOWED_LAG_MS = 5.0
ALLOWED_LAG_SLO_SHARE = 0.1
MOST_BUSY = 0.95


@dataclass(frozen=True, slots=True)
class GeneratorLoad:
    """What one driver process says of a phase: how long its schedule lasted and what its loop's thread used of it."""

    seconds: float
    cpu_s: float


@dataclass(slots=True)
class SendTally:
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


def judge(tally: SendTally, loads: Sequence[GeneratorLoad], *, seconds: float) -> GeneratorHealth:
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


def _with_complaint(health: GeneratorHealth, tally: SendTally) -> GeneratorHealth:
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
