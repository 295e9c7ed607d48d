"""The JSON of GET /v1/models: inputs, outputs, batches, latency and rate of each model."""

import msgspec

from penstock.protocol.inference import BatchOwner, CloseReason


class VersionState(msgspec.Struct, frozen=True):
    """A version. state: as in the repository index, such as READY; empty if it was never loaded."""

    version: str
    state: str
    reason: str = ""


class TensorReport(msgspec.Struct, frozen=True):
    """An input or output. shape: without the batch dimension; -1 for a variable one."""

    name: str
    datatype: str
    shape: list[int]


class CardReport(msgspec.Struct, frozen=True):
    """How images are preprocessed, and outputs postprocessed.

    network_type: detector, classifier, segmentation, instance_segmentation or other. width, height: of the input in
    pixels; null if they follow the picture. input value = scale · (pixel - offset) · channel_factor. options: the query
    parameters of /image that the model supports. conf, iou: thresholds without these parameters; null if the model has
    none. labels: the first ones. decoder: gateway or engine.
    """

    network_type: str
    layout: str
    width: int | None
    height: int | None
    color: str
    resize: str
    padding: float
    scale: float
    offsets: list[float]
    channel_factors: list[float]
    decoder: str
    options: list[str]
    conf: float | None
    iou: float | None
    label_count: int
    labels: list[str]
    keypoint_names: list[str]
    skeleton: list[list[int]]


class RunsOn(msgspec.Struct, frozen=True):
    """Where the engine runs a model. device: cpu or cuda:0, several with commas. precision: of its floats meanwhile.

    graph_batch_sizes: batch sizes with a CUDA graph. fallbacks: a sentence for each wish of its config that is not
    fulfilled, with the reason.
    """

    device: str
    precision: str
    graph_batch_sizes: list[int] = []
    fallbacks: list[str] = []

    @property
    def is_on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.startswith(("cuda", "tensorrt_rtx"))

    @property
    def text(self) -> str:
        """In a few words: `cuda:0 in FP16, CUDA graphs for 1, 2, 4, 8`, or `cpu in FP32`."""
        sizes = ", ".join(map(str, self.graph_batch_sizes))
        return f"{self.device} in {self.precision.upper()}" + (f", CUDA graphs for {sizes}" if sizes else "")


class BatchingReport(msgspec.Struct, frozen=True):
    """How batches are formed. owner: gateway, triton or off. unmerged: why requests are not merged; empty if they may.

    Of batches that the gateway formed since the start: count, rows, mean_rows (null for none), and closed_by
    reason.
    """

    owner: BatchOwner
    max_batch_size: int
    instances: int
    slo_p99_ms: float | None
    unmerged: str
    count: int
    rows: int
    mean_rows: float | None
    closed_by: dict[CloseReason, int]


class QueueState(msgspec.Struct, frozen=True):
    """Requests that wait for a batch, engine calls, and the predicted latency of a new request; null if unknown."""

    waiting: int
    in_flight: int
    wait_ms: float | None


class TrafficReport(msgspec.Struct, frozen=True):
    """Inferences. requests: since the start. codes: these by final status, of HTTP or gRPC. refused: by reason, in the
    queue.

    Over the last over_s seconds: requests per second, and p50_ms, p99_ms of the time from a request's head to its
    answer, interpolated in the buckets of penstock_request_seconds; null without requests.
    """

    requests: int
    codes: dict[str, int]
    refused: dict[str, int]
    over_s: float
    rate_per_s: float
    p50_ms: float | None
    p99_ms: float | None


class ModelCheck(msgspec.Struct, frozen=True):
    """The result of a model's check.

    verdict: ok, differs, cannot run, or not judged if there is nothing to compare with. compared_with: golden.json,
    golden.jpg, ONNX Runtime. reasons: why the verdict is not ok. notes: what else is worth knowing.
    """

    name: str
    verdict: str
    compared_with: list[str] = []
    reasons: list[str] = []
    notes: list[str] = []
    took_s: float = 0.0


class ModelReport(msgspec.Struct, frozen=True):
    """A model. state: ready, loading, unavailable or not loaded. reason: why it is not ready.

    card: null for a model that takes tensors only. card_problem: why the card cannot be used. is_removable: it was
    added or pulled, so DELETE /v1/models/{model} removes it. runs_on: null where the engine does not report it.
    """

    name: str
    state: str
    reason: str
    is_removable: bool
    versions: list[VersionState]
    backend: str
    inputs: list[TensorReport]
    outputs: list[TensorReport]
    card: CardReport | None
    card_problem: str
    batching: BatchingReport
    queue: QueueState
    traffic: TrafficReport
    runs_on: RunsOn | None = None


class ModelsReport(msgspec.Struct, frozen=True):
    """All models, by name. omitted: how many more there are."""

    models: list[ModelReport]
    omitted: int = 0
