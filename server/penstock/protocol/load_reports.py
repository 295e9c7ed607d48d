"""The JSON of /v1/load: scenarios, load test runs, and their progress."""

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_DURATION_S, MAX_RATE_PER_S, MAX_ROUNDS, MAX_TEXT = 3600.0, 100_000.0, 10, 256
ScenarioName = Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,64}$")]


class LoadScenario(msgspec.Struct, frozen=True, kw_only=True):
    """A built-in scenario. seconds: duration of all phases, without pauses; 0 if not known in advance."""

    name: str
    about: str
    slo_p99_ms: float
    models: tuple[str, ...]
    seconds: float


class LoadScenarios(msgspec.Struct, frozen=True, kw_only=True):
    """Scenarios and targets of load tests. targets: allowed URLs; the first is this gateway."""

    scenarios: tuple[LoadScenario, ...]
    targets: tuple[str, ...]


class LoadRunRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run to start. target: this gateway by default. model: instead of the scenario's.

    duration_s, rate_per_s: of the phases that are judged. api_key: sent to the target. By default this gateway gets the
    key of the request, and another target none.
    """

    scenario: ScenarioName
    target: Annotated[str, Meta(max_length=2048)] = ""
    model: Annotated[str, Meta(max_length=MAX_TEXT)] = ""
    duration_s: Annotated[float, Meta(gt=0, le=MAX_DURATION_S)] | None = None
    rate_per_s: Annotated[float, Meta(gt=0, le=MAX_RATE_PER_S)] | None = None
    slo_p99_ms: Annotated[float, Meta(gt=0, le=600_000)] | None = None
    rounds: Annotated[int, Meta(ge=1, le=MAX_ROUNDS)] = 1
    api_key: Annotated[str, Meta(max_length=4096, pattern=r"^[!-~]*$")] = ""


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run in a few figures: medians over its rounds. outcome: pass, fail or none.

    note: what else decided the figures, such as other programs. is_invalid: the figures cannot be trusted.
    """

    outcome: str
    headline: str
    began_at: str
    note: str = ""
    is_invalid: bool = False
    server: str = ""
    commit: str = ""
    version: str = ""
    machine: str = ""
    models: tuple[str, ...] = ()
    slo_p99_ms: float = 0.0
    offered_per_s: float | None = None
    ok_per_s: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    error_share: float | None = None
    capacity_per_s: float | None = None
    load_ms: float | None = None


class LoadRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run. state: running, passed, failed, no_verdict, stopped, error, or interrupted (the gateway ended).

    client: the name of the key that started it. ended_at: None while it runs. error: why there is no result.
    """

    id: str
    scenario: str
    target: str
    state: str
    started_at: str
    ended_at: str | None = None
    client: str = ""
    model: str = ""
    duration_s: float | None = None
    rate_per_s: float | None = None
    rounds: int = 1
    error: str = ""
    has_report: bool = False
    figures: LoadFigures | None = None


class LoadRuns(msgspec.Struct, frozen=True, kw_only=True):
    """The stored runs, newest first. running: ID of the run in progress, or null."""

    runs: tuple[LoadRun, ...]
    running: str | None = None


class LoadProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a run, at most once per second, or a message. at_s: seconds since the run started.

    p50_ms, p99_ms, ok_per_s: over the last seconds. Counts: of the phase so far.
    """

    at_s: float
    phase: str = ""
    phase_number: int = 0
    phase_count: int = 0
    round: int = 0
    rounds: int = 0
    elapsed_s: float = 0.0
    seconds: float = 0.0
    offered_per_s: float = 0.0
    ok_per_s: float = 0.0
    p50_ms: float | None = None
    p99_ms: float | None = None
    slo_p99_ms: float = 0.0
    ok: int = 0
    refused: int = 0
    failed: int = 0
    timeouts: int = 0
    in_flight: int = 0
    text: str = ""


class LoadRunProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A run and its progress since `after`. next: the `after` of the next request."""

    run: LoadRun
    progress: tuple[LoadProgress, ...]
    next: int


class LoadDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A metric of two runs. ratio: b / a, None if a is 0. low, high: its 95 % confidence interval, if known.

    is_larger_than_spread: None if the spread is unknown.
    """

    measure: str
    unit: str
    a: float
    b: float
    sentence: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    is_larger_than_spread: bool | None = None


class LoadComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two runs. warnings: limits of the comparison. changes: versions, commit and addresses that differ."""

    a: str
    b: str
    rows: tuple[LoadDifference, ...]
    warnings: tuple[str, ...]
    changes: tuple[str, ...]
