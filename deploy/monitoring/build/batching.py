"""Batches: how large, why they closed, what waits and how long, what the engine takes, and what Triton itself says."""

from deploy.monitoring.build.board import (
    GREEN,
    ORANGE,
    Board,
    Look,
    Panel,
    Query,
    Row,
    figure,
    heatmap,
    mean,
    one,
    quantile,
    quantiles,
)
from deploy.monitoring.build.gateway import CHOICES
from deploy.monitoring.build.gateway_health import JOB, MODEL, RATE
from deploy.monitoring.build.runbook import runbook

AT_A_GLANCE = Row(
    "At a glance",
    (
        figure(
            "Batches",
            "Engine calls a second that the gateway formed.",
            "ops",
            one(f"sum(rate(penstock_batches_total{{{MODEL}}}{RATE}))", "batches"),
        ),
        figure(
            "Mean batch",
            "Rows of an engine call that the gateway formed, on average of the chosen models.",
            "short",
            one(
                f"sum(rate(penstock_batch_size_sum{{{MODEL}}}{RATE})) "
                f"/ sum(rate(penstock_batch_size_count{{{MODEL}}}{RATE}))",
                "rows",
            ),
            decimals=1,
        ),
        figure(
            "Waiting now",
            "Requests that wait for a batch.",
            "short",
            one(f"sum(penstock_batch_queue_requests{{{MODEL}}})", "waiting"),
        ),
        figure(
            "Longest predicted answer",
            "Until a request of one row that came now would be answered: the worst model of the fullest gateway.",
            "s",
            one(f"max(penstock_batch_wait_seconds{{{MODEL}}})", "predicted"),
        ),
        figure(
            "Given up by the queue",
            "Requests a second that the queue refused or dropped, of all reasons.",
            "reqps",
            one(f"sum(rate(penstock_batch_refused_total{{{MODEL}}}{RATE})) or vector(0)", "given up"),
            steps=((None, GREEN), (0.01, ORANGE)),
        ),
        figure(
            "Calls at the engine now",
            "Batches that the engine has. A model has as many slots as instances, and one more.",
            "short",
            one(f"sum(penstock_batch_calls{{{MODEL}}})", "calls"),
        ),
    ),
)


BATCHES = Row(
    "Batches of the gateway",
    (
        Panel(
            "Rows of a batch",
            "How many engine calls had how many rows. Batches grow by themselves under load: large ones at night "
            "are a delay somewhere, small ones under load an engine that is too quick to need them, or deadlines "
            "too tight.",
            "short",
            heatmap("penstock_batch_size_bucket", MODEL),
            Look.HEATMAP,
            width=12,
        ),
        Panel(
            "Mean batch by model",
            "Rows of an engine call, over five minutes.",
            "short",
            one(f"max by (model) (penstock:batch_size:mean_5m{{{MODEL}}})", "{{model}}"),
            width=6,
            decimals=1,
        ),
        Panel(
            "Quantiles of the batch",
            "Rows of an engine call, of the chosen models together. From buckets of powers of two.",
            "short",
            quantiles("penstock_batch_size_bucket", MODEL),
            width=6,
        ),
        Panel(
            "Why batches closed",
            "Batches a second. slot_free: the engine was free and nothing more waited; full; deadline: more rows "
            "would have made one late; delay: max_queue_delay_us had passed; incompatible: the next could not "
            "share it.",
            "ops",
            one(f"sum by (reason) (rate(penstock_batches_total{{{MODEL}}}{RATE}))", "{{reason}}"),
            Look.STACKED,
            width=12,
        ),
        Panel(
            "Calls at the engine",
            "Batches that the engine has now, by model.",
            "short",
            one(f"sum by (model) (penstock_batch_calls{{{MODEL}}})", "{{model}}"),
            Look.STACKED,
            width=12,
        ),
    ),
)


QUEUES = Row(
    "Queues",
    (
        Panel(
            "Requests that wait, by model",
            "For a batch, now.",
            "short",
            one(f"sum by (model) (penstock_batch_queue_requests{{{MODEL}}})", "{{model}}"),
            Look.STACKED,
        ),
        Panel(
            "Bytes that wait, by model",
            "Of the tensors that wait for a batch; max_queue_bytes is the limit of a model.",
            "bytes",
            one(f"sum by (model) (penstock_batch_queue_bytes{{{MODEL}}})", "{{model}}"),
            Look.STACKED,
        ),
        Panel(
            "Given up by the queue, by reason",
            "A second. queue_full, queue_bytes, share (of one caller); cannot_meet: its deadline, refused at once with "
            "the "
            "predicted wait; deadline: it passed in the queue.",
            "reqps",
            one(f"sum by (model, reason) (penstock:batch_refused:rate5m{{{MODEL}}})", "{{model}}: {{reason}}"),
            Look.STACKED,
        ),
        Panel(
            "Wait in the queue, quantiles",
            "Seconds that a request waited in the gateway, for a decoder or an engine, of the chosen models together.",
            "s",
            quantiles("penstock_queue_seconds_bucket", MODEL),
        ),
        Panel(
            "Wait in the queue, p99 by model",
            "The longest hundredth of the waits.",
            "s",
            one(quantile(0.99, "penstock_queue_seconds_bucket", MODEL, "model"), "{{model}}"),
        ),
        Panel(
            "Predicted answer, by model",
            "Until a request of one row that came now would be answered, as the queue itself predicts. Above "
            "slo_p99_ms it refuses.",
            "s",
            one(f"max by (model) (penstock_batch_wait_seconds{{{MODEL}}})", "{{model}}"),
        ),
    ),
)


BUCKET = "penstock_infer_seconds_bucket"
ENGINE = Row(
    "Calls to the engine, as the gateway sees them",
    (
        Panel(
            "Duration, quantiles",
            "Of a call to the engine, of the chosen models together.",
            "s",
            quantiles(BUCKET, MODEL),
        ),
        Panel(
            "Duration, p90 by model",
            "Over five minutes.",
            "s",
            one(f"max by (model) (penstock:infer_seconds:p90_5m{{{MODEL}}})", "{{model}}"),
        ),
        Panel("Duration of calls", "How many calls took how long.", "s", heatmap(BUCKET, MODEL), Look.HEATMAP),
    ),
)


def _triton_mean(name: str) -> str:
    """Seconds of a request that succeeded, of a sum of microseconds."""
    top = f"sum by (model) (rate(nv_inference_{name}{{{MODEL}}}{RATE}))"
    return f"{top} / sum by (model) (rate(nv_inference_request_success{{{MODEL}}}{RATE})) / 1e6"


PARTS = ("queue", "compute_input", "compute_infer", "compute_output")
TRITON = Row(
    "Triton's own figures",
    (
        Panel(
            "Mean batch: the gateway's beside Triton's",
            "Rows of an execution as Triton counts them, beside the rows of the calls that the gateway formed. "
            "Equal where the gateway forms the batches; Triton's alone where Triton does (batch_owner).",
            "short",
            (
                Query(
                    f"sum by (model) (rate(nv_inference_count{{{MODEL}}}{RATE})) "
                    f"/ sum by (model) (rate(nv_inference_exec_count{{{MODEL}}}{RATE}))",
                    "{{model}} Triton",
                ),
                Query(mean("penstock_batch_size", MODEL, "model"), "{{model}} gateway"),
            ),
            decimals=1,
        ),
        Panel(
            "Queue: the gateway's beside Triton's",
            "Mean wait of a request in the gateway and in Triton. Both at once are two batchers in series: two delays.",
            "s",
            (
                Query(_triton_mean("queue_duration_us"), "{{model}} Triton"),
                Query(mean("penstock_queue_seconds", MODEL, "model"), "{{model}} gateway"),
            ),
        ),
        Panel(
            "What the way to Triton costs",
            "Mean call to the engine as the gateway sees it, less the mean request as Triton sees it: the socket, "
            "copies, and the event loops of both.",
            "s",
            one(
                f"({mean('penstock_infer_seconds', MODEL, 'model')}) - on (model) "
                f"({_triton_mean('request_duration_us')})",
                "{{model}}",
            ),
            minimum=None,
        ),
        Panel(
            "Where Triton's time goes",
            "Of the mean request of the chosen models together: its queue, inputs, the model, outputs.",
            "s",
            tuple(
                Query(
                    f"sum(rate(nv_inference_{part}_duration_us{{{MODEL}}}{RATE})) "
                    f"/ sum(rate(nv_inference_request_success{{{MODEL}}}{RATE})) / 1e6",
                    part.removeprefix("compute_"),
                )
                for part in PARTS
            ),
            Look.STACKED,
        ),
        Panel(
            "Requests at Triton",
            "A second, by model: those that succeeded, and those that failed, by reason.",
            "reqps",
            (
                Query(f"sum by (model) (rate(nv_inference_request_success{{{MODEL}}}{RATE}))", "{{model}}"),
                Query(
                    f"sum by (model, reason) (rate(nv_inference_request_failure{{{MODEL}}}{RATE})) > 0",
                    "{{model}} failed: {{reason}}",
                ),
            ),
        ),
        Panel(
            "Waiting at Triton, pinned memory",
            "Requests that wait in Triton for an execution; of its pool of pinned memory, the share in use. "
            "Without pinned memory copies to the GPU are slow.",
            "short",
            (
                Query(f"sum by (model) (nv_inference_pending_request_count{{{MODEL}}})", "{{model}}"),
                Query(
                    f"max(nv_pinned_memory_pool_used_bytes{{{JOB}}} / nv_pinned_memory_pool_total_bytes{{{JOB}}})",
                    "pinned pool",
                ),
            ),
            right=(("pinned pool", "percentunit"),),
        ),
    ),
)


BATCHING = Board(
    "penstock-batching",
    "Penstock: batching",
    "How large batches are, why they closed, what waits and how long, what the engine takes, and what Triton itself "
    "says.",
    (AT_A_GLANCE, BATCHES, QUEUES, ENGINE, TRITON, runbook("batching")),
    CHOICES,
)
