"""Data of a run: records (records.jsonl, one a request), phase results (run.json) and the live view."""

from enum import StrEnum

import msgspec


class Status(StrEnum):
    """How a request ended. REFUSED: 429, 503 or 504 and their gRPC twins; NOT_SENT: the generator could not."""

    OK = "ok"
    REFUSED = "refused"
    FAILED = "failed"
    TIMEOUT = "timeout"
    NOT_SENT = "not_sent"


class Side(StrEnum):
    """Who was asked: the server under test, or the one it is compared with in the same run (--beside)."""

    TARGET = "target"
    BESIDE = "beside"


class Stages(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the server's answer says of its own time, in milliseconds."""

    decode_ms: float = 0.0
    preprocess_ms: float = 0.0
    queue_ms: float = 0.0
    infer_ms: float = 0.0
    postprocess_ms: float = 0.0
    total_ms: float = 0.0


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request: a line of records.jsonl, flat. request: the label of what was asked.

    latency = done_s - intended_s (what a user would have waited); service time = done_s - sent_s.
    Stage times and batch_size are 0 where the server does not say.
    """

    round: int
    phase: str
    side: Side
    request: str
    intended_s: float
    sent_s: float
    done_s: float
    status: Status
    code: str = ""
    error: str = ""
    sent_bytes: int = 0
    received_bytes: int = 0
    batch_size: int = 0
    decode_ms: float = 0.0
    preprocess_ms: float = 0.0
    queue_ms: float = 0.0
    infer_ms: float = 0.0
    postprocess_ms: float = 0.0
    total_ms: float = 0.0


class Percentiles(msgspec.Struct, frozen=True):
    """Of a set of latencies in milliseconds; each is one that was measured. All 0 where count is 0."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    p999: float
    highest: float


class GeneratorHealth(msgspec.Struct, frozen=True):
    """Whether the load generator was itself the bottleneck in a phase.

    lag: from the intended moment to the moment the request was handed to the socket. cpu: busy share of its
    busiest process's core. complaint: one sentence where it was the bottleneck, else empty.
    """

    intended: int
    sent: int
    intended_per_s: float
    sent_per_s: float
    lag_p50_ms: float
    lag_p99_ms: float
    cpu: float
    processes: int
    complaint: str = ""


class RequestSummary(msgspec.Struct, frozen=True):
    """One label's requests in one phase; label "all" stands for every one.

    Latencies are of answers that came (ok) and of timeouts, which count as long as they were waited for; refusals
    and failures are counted apart (refusals: how long those took). histogram: (upper bound ms, count), no empty bin.
    good: ok and within the SLO. stages: means in ms of what the server said; batch_sizes: (rows, answers).
    """

    label: str
    intended: int
    ok: int
    good: int
    refused: int
    failed: int
    timeouts: int
    not_sent: int
    latency: Percentiles
    service: Percentiles
    refusals: Percentiles
    histogram: tuple[tuple[float, int], ...] = ()
    stages: Stages | None = None
    batch_sizes: tuple[tuple[int, int], ...] = ()
    errors: tuple[tuple[str, int], ...] = ()


class Second(msgspec.Struct, frozen=True):
    """One second of a phase, by intended time. The loads are None if they could not be read.

    server_cpu: cores used by the server's processes; machine_cpu: busy share of all cores; gpu: share of time
    in which a kernel ran; gpu_sm: share of its SMs that had work.
    """

    at_s: float
    offered: int
    ok: int
    bad: int
    p50_ms: float
    p99_ms: float
    in_flight: int
    server_cpu: float | None = None
    machine_cpu: float | None = None
    gpu: float | None = None
    rss_mib: float | None = None
    gpu_sm: float | None = None


class Load(msgspec.Struct, frozen=True):
    """What was read of the machines around one moment, in seconds since the run's start; None if unreadable.

    server_cpu: cores used by the server's processes; machine_cpu: busy share of all cores; gpu: share of time
    in which a kernel ran; gpu_sm: share of its SMs that had work.
    """

    at_s: float
    server_cpu: float | None = None
    machine_cpu: float | None = None
    gpu: float | None = None
    rss_mib: float | None = None
    gpu_sm: float | None = None


class ServerQuantile(msgspec.Struct, frozen=True):
    """A quantile by a histogram's buckets: it lies between low and high. high is inf above the last bucket."""

    quantile: float
    low_ms: float
    high_ms: float


class Witness(msgspec.Struct, frozen=True):
    """What the server's own metrics say of a phase. source: where that was read. answered: requests it counted.

    disagreements: sentences, one for each thing on which client and server do not agree.
    """

    source: str
    answered: int
    mean_ms: float
    quantiles: tuple[ServerQuantile, ...] = ()
    stages_ms: tuple[tuple[str, float], ...] = ()
    batch_sizes: tuple[tuple[int, int], ...] = ()
    disagreements: tuple[str, ...] = ()


class PhaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of one round against one side. offered_per_s: the schedule's; ok_per_s: answers that were good or
    late but right. cpu_ms_per_ok: CPU of the server's processes for an answer. capacity_per_s: what of_capacity meant.
    """

    round: int
    phase: str
    side: Side
    is_judged: bool
    is_capacity: bool
    is_open_loop: bool
    began_s: float
    seconds: float
    offered_per_s: float
    ok_per_s: float
    good_per_s: float
    all: RequestSummary
    by_request: tuple[RequestSummary, ...]
    timeline: tuple[Second, ...]
    health: GeneratorHealth
    witness: Witness | None = None
    cpu_ms_per_ok: float | None = None


class Reload(msgspec.Struct, frozen=True):
    """One unload, load and first answer of a model."""

    round: int
    side: Side
    model: str
    load_ms: float
    first_answer_ms: float
    second_answer_ms: float


class Spread(msgspec.Struct, frozen=True):
    """A figure over the rounds."""

    median: float
    low: float
    high: float


class Measurement(msgspec.Struct, frozen=True):
    """A figure that targets speak of. measure: p99_ms, ok_per_s, … (the list:
    loadtest/penstock_load/measure/measures.py).
    """

    measure: str
    unit: str
    spread: Spread
    rounds: int


class State(StrEnum):
    """The four verdicts."""

    PASS = "pass"
    FAIL = "fail"
    NOT_COMPARABLE = "not comparable"
    NOT_MEASURED = "not measured"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One target's row. value: the median that was judged; ratio: value / the target's figure, also where the hardware
    is another. why: one sentence for a person. meets_goal: None if the target has no goal.
    """

    target_id: str
    title: str
    state: State
    measure: str
    comparison: str
    figure: float
    unit: str
    why: str
    value: float | None = None
    ratio: float | None = None
    goal: float | None = None
    meets_goal: bool | None = None
    hardware: str = "any"
    source: str = ""


class Machine(msgspec.Struct, frozen=True):
    """What the figures belong to. gpus: names; versions: (what, which)."""

    cpu: str
    cores: int
    memory_gib: float
    gpus: tuple[str, ...]
    system: str
    versions: tuple[tuple[str, str], ...]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run: run.json. began_at: UTC, ISO 8601. server: name and version by its own word.

    machine: the generator's; is_local: the target ran there, too. complaints: why the run cannot pass, if so.
    commit: of the checkout that the command was called in, "" if unknown.
    """

    scenario: str
    about: str
    command: str
    began_at: str
    target_url: str
    beside_url: str
    server: str
    is_local: bool
    machine: Machine
    server_hardware: str
    models: tuple[str, ...]
    slo_p99_ms: float
    rounds: int
    seed: int
    phases: tuple[PhaseResult, ...]
    reloads: tuple[Reload, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    complaints: tuple[str, ...] = ()
    commit: str = ""


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
