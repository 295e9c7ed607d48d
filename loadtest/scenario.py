"""What a load test asks, how often and for how long: the nouns of loadtest/scenarios/*.toml."""

from enum import StrEnum

import msgspec


class Kind(StrEnum):
    """How a request travels. IMAGE: an encoded picture over HTTP; VIDEO: a camera's stream, which the video program is
    told to read; the others: v2 tensors."""

    IMAGE = "image"
    REST = "rest"
    GRPC = "grpc"
    GRPC_STREAM = "grpc-stream"
    VIDEO = "video"


class Shape(StrEnum):
    """How arrivals are spread over a phase."""

    CONSTANT = "constant"
    POISSON = "poisson"
    RAMP = "ramp"
    STEP = "step"
    BURST = "burst"
    REPLAY = "replay"


class Unit(StrEnum):
    """What a rate counts in: requests a second, or shares of the capacity that this run found."""

    PER_S = "per_s"
    OF_CAPACITY = "of_capacity"


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of request. share: its weight among the scenario's requests.

    sizes: of a tensor's free dimensions after the batch, in order; shorter lists repeat their last; none: 256.
    picture_px: width and height of generated pictures. uri: of a video, as the video program is to open it.
    """

    kind: Kind
    model: str
    share: float = 1.0
    batch: int = 1
    sizes: tuple[int, ...] = ()
    picture_px: tuple[int, int] = (640, 480)
    uri: str = ""

    @property
    def label(self) -> str:
        """How tables and records name it."""
        return f"{self.kind} {self.model}"


class Arrivals(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When requests are sent, whatever the answers do.

    rate: of constant and poisson, where a ramp begins, between bursts. to_rate: where a ramp ends, the rate in a
    burst. rates: of equally long steps. every_s, burst_s: a burst begins every so often and lasts so long.
    file: a replay's recording (records.jsonl of a run, or one time in seconds a line); speed: 2 is twice as fast.
    """

    shape: Shape
    unit: Unit = Unit.PER_S
    rate: float = 0.0
    to_rate: float = 0.0
    rates: tuple[float, ...] = ()
    every_s: float = 0.0
    burst_s: float = 0.0
    file: str = ""
    speed: float = 1.0


class Phase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A stretch of a run: an open loop (arrivals), a closed one (callers), reloads of the model (reloads), or a search
    for how many video streams keep the SLO (streams: at most), each number tried for `seconds`.

    is_judged: its figures count for the verdict. is_capacity: its rate of good answers is this run's capacity.
    """

    name: str
    seconds: float = 0.0
    arrivals: Arrivals | None = None
    callers: int = 0
    reloads: int = 0
    streams: int = 0
    is_judged: bool = False
    is_capacity: bool = False


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A load test as data. slo_p99_ms: the latency that 99 % of the requests are to keep; goodput counts by it."""

    name: str
    about: str
    requests: tuple[Ask, ...] = msgspec.field(name="request")
    phases: tuple[Phase, ...] = msgspec.field(name="phase")
    slo_p99_ms: float = 100.0
    timeout_s: float = 10.0

    @property
    def is_video(self) -> bool:
        """Whether it is a search for a number of streams, of the video program."""
        return any(phase.streams for phase in self.phases)
