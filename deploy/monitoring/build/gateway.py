"""The gateway: what comes in, what goes wrong, how long it takes, how full it is, whether it is well."""

from deploy.monitoring.build.board import (
    GREEN,
    ORANGE,
    RED,
    YELLOW,
    Board,
    Choice,
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
from deploy.monitoring.build.gateway_health import FULLNESS, HEALTH, JOB, MODEL, RATE, SHARED_MEMORY_AND_KEYS
from deploy.monitoring.build.on_kubernetes import on_kubernetes
from deploy.monitoring.build.processes import processes
from deploy.monitoring.build.runbook import runbook

# A request is bad where the service is to blame: 429 and 4xx are the caller's.
BAD = 'code=~"5..|UNAVAILABLE|INTERNAL|DEADLINE_EXCEEDED|UNKNOWN|DATA_LOSS"'
OBJECTIVE = 0.01  # one in a hundred may fail
CHOICES = (
    Choice("namespace", "Namespace", "label_values(penstock_ready, namespace)"),
    Choice("job", "Job", 'label_values(penstock_ready{namespace=~"$namespace"}, job)', is_always_there=True),
    Choice("model", "Model", f"label_values(penstock_model_ready{{{JOB}}}, model)"),
)


def _rate(name: str, by: str, matchers: str = JOB) -> str:
    return f"sum by ({by}) (rate({name}{{{matchers}}}{RATE}))"


AT_A_GLANCE = Row(
    "At a glance",
    (
        figure(
            "Ready gateways",
            "Gateways that say that they are ready; compare with how many there should be.",
            "short",
            one(f"sum(penstock_ready{{{JOB}}})", "ready"),
            steps=((None, RED), (1, GREEN)),
        ),
        figure(
            "Requests",
            "Inference requests answered a second, whatever the answer.",
            "reqps",
            one(f"sum(rate(penstock_requests_total{{{MODEL}}}{RATE}))", "requests"),
        ),
        figure(
            "Failed requests",
            "Share of requests that failed by our fault over five minutes: 5xx, and gRPC's UNAVAILABLE, INTERNAL, "
            "DEADLINE_EXCEEDED, UNKNOWN, DATA_LOSS. The objective is at most 1 %.",
            "percentunit",
            one(f"max(penstock:errors:ratio_rate5m{{{JOB}}})", "failed"),
            steps=((None, GREEN), (OBJECTIVE, ORANGE), (14.4 * OBJECTIVE, RED)),
            decimals=2,
        ),
        figure(
            "p99 latency",
            "From the head of a request to its answer, of the chosen models together.",
            "s",
            one(quantile(0.99, "penstock_request_seconds_bucket", MODEL), "p99"),
        ),
        figure(
            "In flight, of the limit",
            "The fullest gateway: requests in flight by max_inflight_requests. At 1 it refuses.",
            "percentunit",
            one(f"max(penstock:inflight_requests:ratio{{{JOB}}})", "in flight"),
            steps=((None, GREEN), (0.8, ORANGE), (0.95, RED)),
        ),
        figure(
            "Error budget left",
            "Of 30 days and 1 %: 1 is untouched, 0 is spent, below 0 the objective is missed. Counts as many days "
            "as Prometheus keeps.",
            "percentunit",
            one(
                f"1 - (sum(increase(penstock_requests_total{{{JOB}, {BAD}}}[30d])) or vector(0)) "
                f"/ sum(increase(penstock_requests_total{{{JOB}}}[30d])) / {OBJECTIVE}",
                "left",
            ),
            steps=((None, RED), (0, ORANGE), (0.25, GREEN)),
            minimum=None,
        ),
    ),
)


TRAFFIC = Row(
    "Traffic and errors",
    (
        Panel(
            "Requests by code",
            "Answers a second by their final status: HTTP's numbers, gRPC's words. 429 is a caller's own quota, "
            "503 and UNAVAILABLE are refusals or an engine that is down, 504 and DEADLINE_EXCEEDED missed "
            "deadlines.",
            "reqps",
            one(_rate("penstock_requests_total", "code", MODEL), "{{code}}"),
            Look.STACKED,
        ),
        Panel(
            "Requests by model",
            "Answers a second by model; `unknown` stands for names of models that are not served.",
            "reqps",
            one(_rate("penstock_requests_total", "model", MODEL), "{{model}}"),
            Look.STACKED,
        ),
        Panel(
            "Requests by protocol",
            "Answers a second by protocol: http, grpc, or guest (a program on the same host).",  # plain-english: ok
            "reqps",
            one(_rate("penstock_requests_total", "protocol", MODEL), "{{protocol}}"),
            Look.STACKED,
        ),
        Panel(
            "Refused or failed by the gateway itself",
            "By reason: full, queue_full, draining (limits), cannot_meet, deadline, quota (a caller's own), "
            "engine_down, invalid and so on. What the engine refuses and is handed on is not among them.",
            "reqps",
            one(_rate("penstock_rejected_total", "reason"), "{{reason}}"),
            Look.STACKED,
        ),
        Panel(
            "Accepted work, and what came of it",
            "Inferences that got a place in flight; answered; failed by the gateway, by reason; cancelled since "
            "the caller left, by where they were then.",
            "reqps",
            (
                Query(f"sum(rate(penstock_inferences_accepted_total{{{JOB}}}{RATE}))", "accepted"),
                Query(f"sum(rate(penstock_inferences_answered_total{{{JOB}}}{RATE}))", "answered"),
                Query(_rate("penstock_inferences_failed_total", "reason"), "failed: {{reason}}"),
                Query(_rate("penstock_inferences_cancelled_total", "stage"), "cancelled in {{stage}}"),
            ),
        ),
        Panel(
            "Callers that left, pictures not taken",
            "Requests whose client went away, by transport; images that could not be decoded or were refused, by "
            "codec and reason.",
            "reqps",
            (
                Query(_rate("penstock_cancelled_total", "protocol"), "left: {{protocol}}"),
                Query(_rate("penstock_decode_errors_total", "codec, reason"), "{{codec}}: {{reason}}"),
            ),
        ),
    ),
)


def _burn(window: str) -> Query:
    return Query(f"max by (job) (penstock:errors:ratio_rate{window}{{{JOB}}}) / {OBJECTIVE}", f"{{{{job}}}} {window}")


FAST = (
    "1 spends the budget of 30 days in 30 days. The page at 14.4 needs the 5 m and the 1 h window above it, "
    "the one at 6 the 30 m and the 6 h window."
)
SLOW = "The ticket at 3 needs the 2 h and the 1 d window above it, the one at 1 the 6 h and the 3 d window."
SLO = Row(
    "Objective: 99 % of requests over 30 days",
    (
        Panel(
            "Burn rate, fast windows",
            FAST,
            "short",
            tuple(_burn(window) for window in ("5m", "30m", "1h", "6h")),
            width=12,
            steps=((None, GREEN), (6, ORANGE), (14.4, RED)),
        ),
        Panel(
            "Burn rate, slow windows",
            SLOW,
            "short",
            tuple(_burn(window) for window in ("2h", "6h", "1d", "3d")),
            width=12,
            steps=((None, GREEN), (1, YELLOW), (3, ORANGE)),
        ),
    ),
)


STAGES = ("decode", "preprocess", "queue", "infer", "postprocess")


BUCKET = "penstock_request_seconds_bucket"
LATENCY = Row(
    "Latency",
    (
        Panel(
            "Request quantiles",
            "From the head of a request to its answer, of the chosen models together. Quantiles come from "
            "buckets, so they are no finer than these.",
            "s",
            quantiles(BUCKET, MODEL),
        ),
        Panel(
            "p50 and p99 by model",
            "Over five minutes, as the rules record them.",
            "s",
            (
                Query(f"max by (model) (penstock:request_seconds:p99_5m{{{MODEL}}})", "{{model}} p99"),
                Query(f"max by (model) (penstock:request_seconds:p50_5m{{{MODEL}}})", "{{model}} p50"),
            ),
        ),
        Panel(
            "Where the mean request's time goes",
            "Means of the stages of image requests, and of calls to the engine, one on the other. Tensor requests "
            "have the stage infer only.",
            "s",
            tuple(Query(mean(f"penstock_{stage}_seconds", MODEL, "job"), stage) for stage in STAGES),
            Look.STACKED,
        ),
        Panel(
            "Request latency",
            "How many requests took how long. Two bands are two kinds of requests, or some that had to wait.",
            "s",
            heatmap(BUCKET, MODEL),
            Look.HEATMAP,
            width=24,
        ),
    ),
)


GATEWAY = Board(
    "penstock-gateway",
    "Penstock: gateway",
    "What comes in, what goes wrong, how long it takes, how full it is, whether it is well.",
    (
        AT_A_GLANCE,
        TRAFFIC,
        SLO,
        LATENCY,
        FULLNESS,
        HEALTH,
        processes(JOB),
        SHARED_MEMORY_AND_KEYS,
        on_kubernetes("gateway", "triton"),
        runbook("slo", "gateway", "platform"),
    ),
    CHOICES,
)
