"""Every metric of the gateway, declared in one table."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
Readings = Mapping[tuple[str, ...], float]  # label values to the value
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


class MetricKind(Enum):
    """How a metric gets its value: counted or observed as it happens, or read at each scrape."""

    COUNTER = "counter"
    HISTOGRAM = "histogram"
    READ_GAUGE = "gauge, read at the scrape"
    READ_COUNTER = "counter, read at the scrape"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One row of the table. Names get the prefix penstock_; buckets are the histogram's upper bounds in its unit."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS = (
    MetricSpec(
        "loop_lag_seconds",
        MetricKind.READ_GAUGE,
        "Longest delay of the gateway's event loop in the last 10 to 20 seconds; high if it is blocked or lacks CPU.",
    ),
    MetricSpec(
        "requests_total",
        MetricKind.COUNTER,
        "Inference requests answered, by final status: of HTTP, or of gRPC for grpc and guest.",  # plain-english: ok
        ("model", "protocol", "code"),
    ),
    MetricSpec(
        "request_seconds",
        MetricKind.HISTOGRAM,
        "From the head of an inference request to its answer.",
        ("model", "protocol"),
        SECONDS,
    ),
    MetricSpec("decode_seconds", MetricKind.HISTOGRAM, "Decoding an image.", ("model",), SECONDS),
    MetricSpec(
        "preprocess_seconds", MetricKind.HISTOGRAM, "Resizing and normalising a decoded image.", ("model",), SECONDS
    ),
    MetricSpec(
        "queue_seconds",
        MetricKind.HISTOGRAM,
        "Waiting in the gateway, for a decoder or an engine.",
        ("model",),
        SECONDS,
    ),
    MetricSpec("infer_seconds", MetricKind.HISTOGRAM, "The call to the engine.", ("model",), SECONDS),
    MetricSpec("postprocess_seconds", MetricKind.HISTOGRAM, "From output tensors to results.", ("model",), SECONDS),
    MetricSpec("batch_size", MetricKind.HISTOGRAM, "Rows of an engine call that the gateway formed.", ("model",), ROWS),
    MetricSpec(
        "rejected_total",
        MetricKind.COUNTER,
        "Requests that the gateway refused or failed itself, by reason.",
        ("reason",),
    ),
    MetricSpec("inferences_accepted_total", MetricKind.COUNTER, "Inferences that got a place in flight."),
    MetricSpec(
        "inferences_answered_total",
        MetricKind.COUNTER,
        "Of these, those that came to an answer: a model's, or the engine's own refusal, handed on.",
    ),
    MetricSpec(
        "inferences_failed_total",
        MetricKind.COUNTER,
        "Of these, those that the gateway failed, by reason.",
        ("reason",),
    ),
    MetricSpec(
        "inferences_cancelled_total",
        MetricKind.COUNTER,
        "Of these, those whose caller left, by where they were: decode, queue, batch, engine, stream.",
        ("stage",),
    ),
    MetricSpec(
        "decode_errors_total",
        MetricKind.COUNTER,
        "Images that could not be decoded or were not taken.",
        ("codec", "reason"),
    ),
    MetricSpec("cancelled_total", MetricKind.COUNTER, "Requests whose client went away, by transport.", ("protocol",)),
    MetricSpec("inflight_requests", MetricKind.READ_GAUGE, "Requests in flight now."),
    MetricSpec(
        "inflight_bytes",
        MetricKind.READ_GAUGE,
        "Bytes of the requests in flight now, and of answers that are not read yet.",
    ),
    MetricSpec("max_inflight_requests", MetricKind.READ_GAUGE, "How many requests may be in flight."),
    MetricSpec("max_inflight_bytes", MetricKind.READ_GAUGE, "How many bytes of them."),
    MetricSpec("receiving_bytes", MetricKind.READ_GAUGE, "Bytes of HTTP bodies that are still on their way."),
    MetricSpec("http_connections", MetricKind.READ_GAUGE, "Connections to the REST port."),
    MetricSpec("grpc_connections", MetricKind.READ_GAUGE, "Connections to the gRPC port."),
    MetricSpec("queue_depth", MetricKind.READ_GAUGE, "Jobs waiting in a queue now.", ("queue",)),
    MetricSpec("batch_queue_requests", MetricKind.READ_GAUGE, "Requests that wait for a batch now.", ("model",)),
    MetricSpec(
        "batch_queue_bytes", MetricKind.READ_GAUGE, "Bytes of the tensors that wait for a batch now.", ("model",)
    ),
    MetricSpec("batch_calls", MetricKind.READ_GAUGE, "Batches that the engine has now.", ("model",)),
    MetricSpec(
        "batch_wait_seconds",
        MetricKind.READ_GAUGE,
        "Until a request of one row that came now would be answered, as predicted.",
        ("model",),
    ),
    MetricSpec("batches_total", MetricKind.READ_COUNTER, "Batches formed, by why they closed.", ("model", "reason")),
    MetricSpec(
        "batch_refused_total",
        MetricKind.READ_COUNTER,
        "Requests that the queue gave up, by reason.",
        ("model", "reason"),
    ),
    MetricSpec("decoder_restarts_total", MetricKind.READ_COUNTER, "Decoder processes that were replaced."),
    MetricSpec("engine_up", MetricKind.READ_GAUGE, "1 while the engine answers and its canary inference succeeds."),
    MetricSpec("engine_restarts_total", MetricKind.READ_COUNTER, "Restarts of the engine since the stack started."),
    MetricSpec(
        "engine_stalls_total",
        MetricKind.READ_COUNTER,
        "Times that calls and a probe went unanswered: the circuit opened.",
    ),
    MetricSpec("engine_retries_total", MetricKind.READ_COUNTER, "Calls that were sent to the engine a second time."),
    MetricSpec(
        "replica_up",
        MetricKind.READ_GAUGE,
        "1 for a replica of the engine that gets calls, 0 for one left out.",
        ("replica",),
    ),
    MetricSpec(
        "replica_ejections_total",
        MetricKind.READ_COUNTER,
        "Times that a replica was left out for failing more than the others.",
        ("replica",),
    ),
    MetricSpec("gateway_restarts_total", MetricKind.READ_COUNTER, "Restarts of the gateway since the stack started."),
    MetricSpec("fronts", MetricKind.READ_GAUGE, "Workers that the core serves now; 0 where one process does all."),
    MetricSpec(
        "guests",  # plain-english: ok
        MetricKind.READ_GAUGE,
        "Other programs of this host that the core serves now, such as video.",
    ),
    MetricSpec("front_restarts_total", MetricKind.READ_COUNTER, "Restarts of workers since the stack started."),
    MetricSpec("access_keys", MetricKind.READ_GAUGE, "API keys that let a caller in now."),
    MetricSpec(
        "tls_certificate_expires_timestamp_seconds",
        MetricKind.READ_GAUGE,
        "Time at which the gateway's TLS certificate expires, in Unix seconds.",
    ),
    MetricSpec(
        "tls_failed_reads_total",
        MetricKind.READ_COUNTER,
        "Changes of the TLS files that could not be loaded; the last valid files stay in use.",
    ),
    MetricSpec("access_failed_reads_total", MetricKind.READ_COUNTER, "Changes of the access file that were not taken."),
    MetricSpec(
        "key_inflight_requests",
        MetricKind.READ_GAUGE,
        "Requests in flight now by API key; of all tokens as `tokens`, of all callers without a key as `none`.",
        ("key",),
    ),
    MetricSpec("spans_dropped_total", MetricKind.READ_COUNTER, "Spans that the collector of traces did not get."),
    MetricSpec(
        "slab_leased_bytes", MetricKind.READ_GAUGE, "Bytes of the memory shared with the engine that are in use now."
    ),
    MetricSpec(
        "shared_memory_regions", MetricKind.READ_GAUGE, "Regions of memory that clients share with the engine now."
    ),
    MetricSpec("shared_memory_bytes", MetricKind.READ_GAUGE, "Bytes of the regions that clients share now."),
    MetricSpec(
        "shared_memory_expired_total",
        MetricKind.READ_COUNTER,
        "Regions that went without being unregistered: unused for their lease, or their client's connection gone.",
        ("reason",),
    ),
    MetricSpec("ready", MetricKind.READ_GAUGE, "1 while the gateway says that it is ready."),
    MetricSpec(
        "model_ready",
        MetricKind.READ_GAUGE,
        "1 for a model that serves, 0 for one that failed or is refused; none for one that is not wanted.",
        ("model",),
    ),
    MetricSpec(
        "model_unavailable",
        MetricKind.READ_GAUGE,
        "1 for a model that gets no calls until it recovers, by cause: hang, canary, traffic, trial, starting.",
        ("model", "cause"),
    ),
    MetricSpec("model_hangs_total", MetricKind.READ_COUNTER, "Number of times that a model hung.", ("model",)),
    MetricSpec(
        "mps_up",
        MetricKind.READ_GAUGE,
        "1 while an MPS daemon listens in CUDA_MPS_PIPE_DIRECTORY, as seen in the last 30 s; only where that is set.",
    ),
    MetricSpec("gpu_info", MetricKind.READ_GAUGE, "1, with the GPU's UUID.", ("gpu", "uuid")),
    MetricSpec(
        "gpu_up", MetricKind.READ_GAUGE, "1 for a GPU that answers, 0 for one that is lost or must be reset.", ("gpu",)
    ),
    MetricSpec(
        "gpu_sm_activity",
        MetricKind.READ_GAUGE,
        "SMs with work, of all SMs, over the last 10 s; source: gpm (NVML, Hopper and later) or dcgm (an exporter).",
        ("gpu", "source"),
    ),
    MetricSpec(
        "gpu_sm_occupancy", MetricKind.READ_GAUGE, "Resident warps, of those that would fit.", ("gpu", "source")
    ),
    MetricSpec("gpu_tensor_activity", MetricKind.READ_GAUGE, "Tensor pipes that work, of all.", ("gpu", "source")),
    MetricSpec(
        "gpu_memory_bandwidth_activity",
        MetricKind.READ_GAUGE,
        "Share of the GPU's memory bandwidth in use.",
        ("gpu", "source"),
    ),
    MetricSpec(
        "gpu_nvdec_activity", MetricKind.READ_GAUGE, "Mean utilization of the GPU's video decoders.", ("gpu", "source")
    ),
    MetricSpec(
        "gpu_nvjpg_activity", MetricKind.READ_GAUGE, "Mean utilization of the GPU's JPEG decoders.", ("gpu", "source")
    ),
    MetricSpec(
        "gpu_kernel_running_share",
        MetricKind.READ_GAUGE,
        "nvidia-smi's util: share of time in which any kernel ran, however little of the GPU it used.",
        ("gpu",),
    ),
    MetricSpec(
        "gpu_process_memory_bytes",
        MetricKind.READ_GAUGE,
        "GPU memory of a process; label: Triton's instance or the program.",
        ("gpu", "process"),
    ),
    MetricSpec(
        "gpu_process_time_share",
        MetricKind.READ_GAUGE,
        "Share of time in which a kernel of the process ran, as far as NVML tells; under MPS they overlap.",
        ("gpu", "process"),
    ),
    MetricSpec(
        "gpu_xid_errors_total",
        MetricKind.READ_COUNTER,
        "Xid errors that the driver reported since the start.",
        ("gpu", "xid"),
    ),
    MetricSpec(
        "mps_clients", MetricKind.READ_GAUGE, "Processes of the engine that compute under MPS; with --mps only."
    ),
    MetricSpec(
        "mps_unattached_processes",
        MetricKind.READ_GAUGE,
        "Processes of the engine that compute beside MPS, by turns with all others; with --mps only.",
    ),
    MetricSpec(
        "mps_restarts_total",
        MetricKind.READ_COUNTER,
        "Times that every client was restarted since MPS's daemon, its server or a client's fault had ended them.",
    ),
    MetricSpec(
        "mps_recovery_seconds",
        MetricKind.READ_GAUGE,
        "From the last such end, as it was seen, until requests were served.",
    ),
    MetricSpec("build_info", MetricKind.READ_GAUGE, "Always 1; which version serves.", ("version",)),
)
