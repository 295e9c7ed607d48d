"""Every metric of the gateway, declared in one table."""

from dataclasses import dataclass
from enum import Enum

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


class Kind(Enum):
    """How a metric's value comes about: counted or observed as it happens, or read when somebody scrapes."""

    COUNTER = "counter"
    HISTOGRAM = "histogram"
    READ_GAUGE = "gauge, read at the scrape"
    READ_COUNTER = "counter, read at the scrape"


@dataclass(frozen=True, slots=True)
class Declaration:
    """One row of the table. Names get the prefix penstock_; buckets are the histogram's upper bounds in its unit."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


TABLE = (
    Declaration(
        "loop_lag_seconds",
        Kind.READ_GAUGE,
        "Longest delay of the gateway's event loop in the last 10 to 20 seconds; high if it is blocked or lacks CPU.",
    ),
    Declaration(
        "requests_total",
        Kind.COUNTER,
        "Inference requests answered, by final status: HTTP's, or gRPC's for the protocols grpc and guest.",
        ("model", "protocol", "code"),
    ),
    Declaration(
        "request_seconds",
        Kind.HISTOGRAM,
        "From the head of an inference request to its answer.",
        ("model", "protocol"),
        SECONDS,
    ),
    Declaration("decode_seconds", Kind.HISTOGRAM, "Decoding an image.", ("model",), SECONDS),
    Declaration("preprocess_seconds", Kind.HISTOGRAM, "Resizing and normalising a decoded image.", ("model",), SECONDS),
    Declaration(
        "queue_seconds", Kind.HISTOGRAM, "Waiting in the gateway, for a decoder or an engine.", ("model",), SECONDS
    ),
    Declaration("infer_seconds", Kind.HISTOGRAM, "The call to the engine.", ("model",), SECONDS),
    Declaration("postprocess_seconds", Kind.HISTOGRAM, "From output tensors to results.", ("model",), SECONDS),
    Declaration("batch_size", Kind.HISTOGRAM, "Rows of an engine call that the gateway formed.", ("model",), ROWS),
    Declaration(
        "rejected_total", Kind.COUNTER, "Requests that the gateway refused or failed itself, by reason.", ("reason",)
    ),
    Declaration("inferences_accepted_total", Kind.COUNTER, "Inferences that got a place in flight."),
    Declaration(
        "inferences_answered_total",
        Kind.COUNTER,
        "Of these, those that came to an answer: a model's, or the engine's own refusal, handed on.",
    ),
    Declaration(
        "inferences_failed_total", Kind.COUNTER, "Of these, those that the gateway failed, by reason.", ("reason",)
    ),
    Declaration(
        "inferences_cancelled_total",
        Kind.COUNTER,
        "Of these, those whose caller left, by where they were: decode, queue, batch, engine, stream.",
        ("stage",),
    ),
    Declaration(
        "decode_errors_total", Kind.COUNTER, "Images that could not be decoded or were not taken.", ("codec", "reason")
    ),
    Declaration("cancelled_total", Kind.COUNTER, "Requests whose client went away, by transport.", ("protocol",)),
    Declaration("inflight_requests", Kind.READ_GAUGE, "Requests in flight now."),
    Declaration(
        "inflight_bytes",
        Kind.READ_GAUGE,
        "Bytes of the requests in flight now, and of answers that nobody has read yet.",
    ),
    Declaration("max_inflight_requests", Kind.READ_GAUGE, "How many requests may be in flight."),
    Declaration("max_inflight_bytes", Kind.READ_GAUGE, "How many bytes of them."),
    Declaration("receiving_bytes", Kind.READ_GAUGE, "Bytes of HTTP bodies that are still on their way."),
    Declaration("http_connections", Kind.READ_GAUGE, "Connections to the REST port."),
    Declaration("grpc_connections", Kind.READ_GAUGE, "Connections to the gRPC port."),
    Declaration("queue_depth", Kind.READ_GAUGE, "Jobs waiting in a queue now.", ("queue",)),
    Declaration("batch_queue_requests", Kind.READ_GAUGE, "Requests that wait for a batch now.", ("model",)),
    Declaration("batch_queue_bytes", Kind.READ_GAUGE, "Bytes of the tensors that wait for a batch now.", ("model",)),
    Declaration("batch_calls", Kind.READ_GAUGE, "Batches that the engine has now.", ("model",)),
    Declaration(
        "batch_wait_seconds",
        Kind.READ_GAUGE,
        "Until a request of one row that came now would be answered, as predicted.",
        ("model",),
    ),
    Declaration("batches_total", Kind.READ_COUNTER, "Batches formed, by why they closed.", ("model", "reason")),
    Declaration(
        "batch_refused_total", Kind.READ_COUNTER, "Requests that the queue gave up, by reason.", ("model", "reason")
    ),
    Declaration("decoder_restarts_total", Kind.READ_COUNTER, "Decoder processes that were replaced."),
    Declaration("engine_up", Kind.READ_GAUGE, "1 while the engine answers and its canary inference succeeds."),
    Declaration("engine_restarts_total", Kind.READ_COUNTER, "Restarts of the engine since the stack started."),
    Declaration(
        "engine_stalls_total", Kind.READ_COUNTER, "Times that calls and a probe went unanswered: the circuit opened."
    ),
    Declaration("engine_retries_total", Kind.READ_COUNTER, "Calls that were sent to the engine a second time."),
    Declaration(
        "replica_up",
        Kind.READ_GAUGE,
        "1 for a replica of the engine that gets calls, 0 for one left out.",
        ("replica",),
    ),
    Declaration(
        "replica_ejections_total",
        Kind.READ_COUNTER,
        "Times that a replica was left out for failing more than the others.",
        ("replica",),
    ),
    Declaration("gateway_restarts_total", Kind.READ_COUNTER, "Restarts of the gateway since the stack started."),
    Declaration("fronts", Kind.READ_GAUGE, "Fronts that the core serves now; 0 where one process does all."),
    Declaration("guests", Kind.READ_GAUGE, "Other programs of this host that the core serves now, such as video."),
    Declaration("front_restarts_total", Kind.READ_COUNTER, "Restarts of fronts since the stack started."),
    Declaration("access_keys", Kind.READ_GAUGE, "API keys that let a caller in now."),
    Declaration(
        "tls_certificate_expires_timestamp_seconds",
        Kind.READ_GAUGE,
        "Time at which the gateway's TLS certificate expires, in Unix seconds.",
    ),
    Declaration(
        "tls_failed_reads_total",
        Kind.READ_COUNTER,
        "Changes of the TLS files that could not be loaded; the last valid files stay in use.",
    ),
    Declaration("access_failed_reads_total", Kind.READ_COUNTER, "Changes of the access file that were not taken."),
    Declaration(
        "key_inflight_requests",
        Kind.READ_GAUGE,
        "Requests in flight now by API key; of all tokens as `tokens`, of all callers without a key as `none`.",
        ("key",),
    ),
    Declaration("spans_dropped_total", Kind.READ_COUNTER, "Spans that the collector of traces did not get."),
    Declaration(
        "slab_leased_bytes", Kind.READ_GAUGE, "Bytes of the memory shared with the engine that are in use now."
    ),
    Declaration("shared_memory_regions", Kind.READ_GAUGE, "Regions of memory that clients share with the engine now."),
    Declaration("shared_memory_bytes", Kind.READ_GAUGE, "Bytes of the regions that clients share now."),
    Declaration(
        "shared_memory_expired_total",
        Kind.READ_COUNTER,
        "Regions that went without being unregistered: unused for their lease, or their client's connection gone.",
        ("reason",),
    ),
    Declaration("ready", Kind.READ_GAUGE, "1 while the gateway says that it is ready."),
    Declaration(
        "model_ready",
        Kind.READ_GAUGE,
        "1 for a model that serves, 0 for one that failed or is refused; none for one that nobody wants loaded.",
        ("model",),
    ),
    Declaration(
        "model_unavailable",
        Kind.READ_GAUGE,
        "1 for a model that gets no calls until it recovers, by cause: hang, canary, traffic, trial, starting.",
        ("model", "cause"),
    ),
    Declaration("model_hangs_total", Kind.READ_COUNTER, "Number of times that a model hung.", ("model",)),
    Declaration(
        "mps_up",
        Kind.READ_GAUGE,
        "1 while an MPS daemon listens in CUDA_MPS_PIPE_DIRECTORY, as seen in the last 30 s; only where that is set.",
    ),
    Declaration(
        "gpu_up", Kind.READ_GAUGE, "1 for a card that answers, 0 for one that is lost or must be reset.", ("gpu",)
    ),
    Declaration(
        "gpu_sm_activity",
        Kind.READ_GAUGE,
        "SMs with work, of all SMs, over the last 10 s; source: gpm (NVML, Hopper and later) or dcgm (an exporter).",
        ("gpu", "source"),
    ),
    Declaration("gpu_sm_occupancy", Kind.READ_GAUGE, "Resident warps, of those that would fit.", ("gpu", "source")),
    Declaration("gpu_tensor_activity", Kind.READ_GAUGE, "Tensor pipes that work, of all.", ("gpu", "source")),
    Declaration(
        "gpu_memory_bandwidth_activity",
        Kind.READ_GAUGE,
        "Of what the card's memory can carry, the part that it carries.",
        ("gpu", "source"),
    ),
    Declaration(
        "gpu_nvdec_activity", Kind.READ_GAUGE, "Use of the card's video decoders, their mean.", ("gpu", "source")
    ),
    Declaration(
        "gpu_nvjpg_activity", Kind.READ_GAUGE, "Use of the card's JPEG decoders, their mean.", ("gpu", "source")
    ),
    Declaration(
        "gpu_kernel_running_share",
        Kind.READ_GAUGE,
        "nvidia-smi's util: share of time in which any kernel ran, however little of the card it used.",
        ("gpu",),
    ),
    Declaration(
        "gpu_process_memory_bytes",
        Kind.READ_GAUGE,
        "Memory of the card that a process holds; processes go by Triton's instance or by program.",
        ("gpu", "process"),
    ),
    Declaration(
        "gpu_process_time_share",
        Kind.READ_GAUGE,
        "Share of time in which a kernel of the process ran, as far as NVML tells; under MPS they overlap.",
        ("gpu", "process"),
    ),
    Declaration(
        "gpu_xid_errors_total",
        Kind.READ_COUNTER,
        "Xid errors that the driver reported since the start.",
        ("gpu", "xid"),
    ),
    Declaration("mps_clients", Kind.READ_GAUGE, "Processes of the engine that compute under MPS; with --mps only."),
    Declaration(
        "mps_unattached_processes",
        Kind.READ_GAUGE,
        "Processes of the engine that compute beside MPS, by turns with all others; with --mps only.",
    ),
    Declaration(
        "mps_restarts_total",
        Kind.READ_COUNTER,
        "Times that every client was restarted since MPS's daemon, its server or a client's fault had ended them.",
    ),
    Declaration(
        "mps_recovery_seconds", Kind.READ_GAUGE, "From the last such end, as it was seen, until requests were served."
    ),
    Declaration("build_info", Kind.READ_GAUGE, "Always 1; which version serves.", ("version",)),
)
