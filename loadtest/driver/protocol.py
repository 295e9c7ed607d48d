"""What the parent and its driver processes say to each other: a line of JSON each way, and the nouns in it."""

import msgspec

from loadtest.clients.client import Endpoint
from loadtest.results import Record, Side
from loadtest.scenario import Arrivals, Ask

MAX_LINE_BYTES = 16 << 20  # a batch of BATCH records with the longest errors is a tenth of it
BATCH = 2000
FLUSH_S = 0.1


class DriverError(Exception):
    """The load generator cannot go on (a process of it ended, is silent, or cannot reach the target). One sentence."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What every phase of a run shares.

    max_in_flight: over all processes; what is due beyond it is recorded NOT_SENT. epoch_s: the run's start on the
    monotonic clock, from which records count. images: a folder of pictures, or empty. connect: who makes the
    clients, as module:function with the signature of loadtest.clients.connect.connect.
    """

    endpoints: dict[Side, Endpoint]
    asks: tuple[Ask, ...]
    slo_p99_ms: float
    timeout_s: float
    max_in_flight: int
    seed: int
    epoch_s: float
    images: str = ""
    connect: str = "loadtest.clients.connect:connect"


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

    setup: Setup
    part: int
    parts: int


class Go(msgspec.Struct, frozen=True, tag=True):
    """To a process: a phase, and when it begins on the host's one monotonic clock."""

    plan: PhasePlan
    begin_s: float


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


ToDriver = Begin | Go
FromDriver = Ready | Batch | PhaseEnd | Failed
