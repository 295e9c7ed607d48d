"""The JSON of batch explanations: of one request, and of a model (GET /v2/models/{model}/explain)."""

import msgspec

from penstock.protocol.inference import BatchOwner, CloseReason

EXPLAIN_HEADER = "x-penstock-explain"


class FitReport(msgspec.Struct, frozen=True):
    """Engine time: alpha_ms + beta_ms_per_row · rows, spread guard_ms. deliver_us_per_row: from response to client."""

    alpha_ms: float
    beta_ms_per_row: float
    guard_ms: float
    samples: int
    deliver_us_per_row: float = 0.0


class RequestExplanation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Explanation of one request's batch. owner: what forms the model's batches. text: for people.

    Optional fields are set if the gateway formed the batch. expected_ms: by the fit. slack_ms: from the expected end to
    the deadline. ahead: requests queued on arrival. busy of slots: calls in flight when it was formed.
    """

    model: str
    owner: BatchOwner
    text: str
    arrived_unix_s: float | None = None
    queue_ms: float | None = None
    engine_ms: float | None = None
    expected_ms: float | None = None
    slack_ms: float | None = None
    batch: int | None = None
    batch_requests: int | None = None
    batch_rows: int | None = None
    closed_by: CloseReason | None = None
    ahead: int | None = None
    busy: int | None = None
    slots: int | None = None
    fit: FitReport | None = None


class OptionsReport(msgspec.Struct, frozen=True):
    """Declared options, named as in config.pbtxt. instances: concurrent engine calls."""

    max_batch_size: int
    instances: int
    slo_p99_ms: float | None
    max_queue_delay_us: float
    max_queue_size: int
    max_queue_bytes: int


class QueueReport(msgspec.Struct, frozen=True):
    """State of the queue. wait_ms: estimate for a new one-row request. max_rows: lower while engine memory is short."""

    depth: int
    rows: int
    size_bytes: int
    in_flight: int
    slots: int
    max_rows: int
    wait_ms: float | None


class BatchesOfRows(msgspec.Struct, frozen=True):
    """Number of batches of one size."""

    rows: int
    batches: int


class ModelBatchReport(msgspec.Struct, frozen=True):
    """Response of GET /v2/models/{model}/explain.

    queue, closed_by, dropped: only if the gateway forms the batches. batches, fit: otherwise Triton's.
    """

    model: str
    owner: BatchOwner
    options: OptionsReport
    queue: QueueReport | None
    fit: FitReport | None
    batches: list[BatchesOfRows]
    closed_by: dict[CloseReason, int]
    dropped: dict[str, int]
    proposed_config: str
    misspelt: dict[str, str] = {}
    unmerged: str = ""
