"""The gateway's dashboard, second half: how full it is, and whether it is well."""

from deploy.monitoring.build.board import GREEN, RED, Look, Panel, Query, Row, one

JOB = 'namespace=~"$namespace", job=~"$job"'
MODEL = f'{JOB}, model=~"$model"'
RATE = "[$__rate_interval]"
UP_OR_DOWN = (("0", "down", RED), ("1", "up", GREEN))


FULLNESS = Row(
    "Limits and queues",
    (
        Panel(
            "Requests in flight, against the limit",
            "Accepted and not answered yet, of all gateways, and the sum of their max_inflight_requests. "
            "Autoscaling looks at this: see the chart's autoscaling.targets.",
            "short",
            (
                Query(f"sum(penstock:inflight_requests:sum{{{JOB}}})", "in flight"),
                Query(f"sum(penstock_max_inflight_requests{{{JOB}}})", "limit"),
            ),
        ),
        Panel(
            "Bytes in flight, against the limit",
            "Of requests in flight and of answers that are not read yet; of bodies still on their way; and the "
            "sum of max_inflight_bytes.",
            "bytes",
            (
                Query(f"sum(penstock_inflight_bytes{{{JOB}}})", "in flight"),
                Query(f"sum(penstock_receiving_bytes{{{JOB}}})", "on their way"),
                Query(f"sum(penstock_max_inflight_bytes{{{JOB}}})", "limit"),
            ),
        ),
        Panel(
            "Requests in flight by key",
            "By API key; of all tokens as `tokens`, of all callers without a key as `none`. One that fills the "
            "gateway wants a rate in the access file.",
            "short",
            one(f"sum by (key) (penstock_key_inflight_requests{{{JOB}}})", "{{key}}"),
            Look.STACKED,
        ),
        Panel(
            "Queues",
            "Jobs that wait, by queue: decode are pictures that wait for a decoder. Models' queues are on the "
            "batching dashboard.",
            "short",
            one(f"sum by (queue) (penstock_queue_depth{{{JOB}}})", "{{queue}}"),
        ),
        Panel(
            "Wait in queues, p90 and mean by gateway",
            "Seconds that a request waited for a decoder or an engine, over five minutes. The mean is what "
            "autoscaling holds against its target.",
            "s",
            (
                Query(f"penstock:queue_seconds:p90_5m{{{JOB}}}", "{{instance}} p90"),
                Query(f"penstock:queue_seconds:mean_5m{{{JOB}}}", "{{instance}} mean"),
            ),
        ),
        Panel(
            "Connections, programs, event loop",
            "Connections to the REST and gRPC ports; programs on the same host that use the batcher, such as video; "
            "worker processes. Largest delay of the event loop in milliseconds: a large one means too little CPU.",
            "short",
            (
                Query(f"sum(penstock_http_connections{{{JOB}}})", "REST connections"),
                Query(f"sum(penstock_grpc_connections{{{JOB}}})", "gRPC connections"),
                Query(f"sum(penstock_guests{{{JOB}}})", "client processes"),  # plain-english: ok
                Query(f"sum(penstock_fronts{{{JOB}}})", "fronts"),
                Query(f"max(penstock_loop_lag_seconds{{{JOB}}}) * 1000", "event loop late, ms"),
            ),
        ),
    ),
)


RESTARTS = ("engine", "gateway", "front", "decoder")
HEALTH = Row(
    "Health",
    (
        Panel(
            "Scraped, ready, engine, MPS",
            "Whether Prometheus gets the page; whether the gateway says ready; whether the engine answers and its "
            "canary inference succeeds; whether the MPS daemon listens (only where CUDA_MPS_PIPE_DIRECTORY is "
            "set).",
            "none",
            (
                Query(f"min by (instance) (up{{{JOB}}})", "{{instance}} scraped"),
                Query(f"min by (instance) (penstock_ready{{{JOB}}})", "{{instance}} ready"),
                Query(f"min by (instance) (penstock_engine_up{{{JOB}}})", "{{instance}} engine"),
                Query(f"min by (instance) (penstock_mps_up{{{JOB}}})", "{{instance}} MPS"),
            ),
            Look.STATES,
            steps=((None, RED), (1, GREEN)),
            words=UP_OR_DOWN,
        ),
        Panel(
            "Models",
            "The minimum over all gateways: 1 if a model serves, 0 if it failed to load, is refused, hangs or fails.",
            "none",
            one(f"min by (model) (penstock_model_ready{{{MODEL}}})", "{{model}}"),
            Look.STATES,
            steps=((None, RED), (1, GREEN)),
            words=(("0", "failed", RED), ("1", "serves", GREEN)),
        ),
        Panel(
            "Replicas of the engine",
            "Of several engine addresses: 0 is left out, since it fails more than the others.",
            "none",
            one(f"min by (replica) (penstock_replica_up{{{JOB}}})", "{{replica}}"),
            Look.STATES,
            steps=((None, RED), (1, GREEN)),
            words=(("0", "left out", RED), ("1", "in use", GREEN)),
        ),
        Panel(
            "Restarts",
            "Of the engine, the gateway, its fronts and its decoders, in each interval. Any is worth a look; a "
            "decoder's is a picture that killed it.",
            "short",
            tuple(
                Query(
                    f"sum by (instance) (increase(penstock_{what}_restarts_total{{{JOB}}}{RATE}))",
                    f"{{{{instance}}}} {what}",
                )
                for what in RESTARTS
            ),
            Look.STEPS,
            steps=((None, GREEN), (1, RED)),
        ),
        Panel(
            "Unavailable models",
            "By cause: hang (no answer within the execution time-out), canary or traffic (all inferences fail), trial "
            "(failed at load), starting (no first answer yet). Also how often a model was found to hang in each "
            "interval.",
            "short",
            (
                Query(f"sum by (model, cause) (penstock_model_unavailable{{{MODEL}}})", "{{model}}: {{cause}}"),
                Query(f"sum by (model) (increase(penstock_model_hangs_total{{{MODEL}}}{RATE}))", "{{model}} hung"),
            ),
            Look.STEPS,
        ),
        Panel(
            "Engine without answers",
            "Times that calls and a probe went unanswered (the circuit opened), replicas left out, calls sent a "
            "second time, in each interval.",
            "short",
            (
                Query(f"sum(increase(penstock_engine_stalls_total{{{JOB}}}{RATE}))", "stalls"),
                Query(
                    f"sum by (replica) (increase(penstock_replica_ejections_total{{{JOB}}}{RATE}))",
                    "{{replica}} left out",
                ),
                Query(f"sum(increase(penstock_engine_retries_total{{{JOB}}}{RATE}))", "second tries"),
            ),
            Look.STEPS,
        ),
        Panel(
            "Versions",
            "How many gateways run which version: two at once are a rollout.",
            "short",
            one(f"count by (version) (penstock_build_info{{{JOB}}})", "{{version}}"),
            Look.STACKED,
        ),
    ),
)


SHARED_MEMORY_AND_KEYS = Row(
    "Shared memory, keys, traces",
    (
        Panel(
            "Memory shared with the engine",
            "Of the slab, in use now; of the regions that clients registered.",
            "bytes",
            (
                Query(f"sum by (instance) (penstock_slab_leased_bytes{{{JOB}}})", "{{instance}} slab"),
                Query(f"sum by (instance) (penstock_shared_memory_bytes{{{JOB}}})", "{{instance}} clients'"),
            ),
        ),
        Panel(
            "Clients' regions",
            "Registered now, and gone in each interval without being unregistered: unused for their lease, or "
            "their client's connection gone.",
            "short",
            (
                Query(f"sum(penstock_shared_memory_regions{{{JOB}}})", "regions"),
                Query(f"sum by (reason) (increase(penstock_shared_memory_expired_total{{{JOB}}}{RATE}))", "{{reason}}"),
            ),
        ),
        Panel(
            "Keys, certificates and traces",
            "API keys in use. In each interval: changed access files and TLS files that could not be used, and spans "
            "that the collector did not get. Days until the first certificate expires.",
            "short",
            (
                Query(f"max(penstock_access_keys{{{JOB}}})", "keys"),
                Query(f"sum(increase(penstock_access_failed_reads_total{{{JOB}}}{RATE}))", "access file not reloaded"),
                Query(f"sum(increase(penstock_tls_failed_reads_total{{{JOB}}}{RATE}))", "TLS files not reloaded"),
                Query(
                    f"(min(penstock_tls_certificate_expires_timestamp_seconds{{{JOB}}}) - time()) / 86400",
                    "days until the certificate expires",
                ),
                Query(f"sum(increase(penstock_spans_dropped_total{{{JOB}}}{RATE}))", "spans dropped"),
            ),
        ),
    ),
    is_collapsed=True,
)
