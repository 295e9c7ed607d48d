"""The GPU, as the gateways see their own cards by NVML; whose time it is; and MPS."""

from deploy.monitoring.build.board import GREEN, ORANGE, RED, Look, Panel, Query, Row, one

CARD = "{{instance}} {{gpu}}"

SEEN = Row(
    "As gateways see their cards (NVML), and whose time it is",
    (
        Panel(
            "SM activity beside util, by NVML",
            "The same two figures without dcgm-exporter: SM activity by NVML's GPM (Hopper and later; its source is "
            "in the name) or by an exporter that the gateway reads, and the share of time in which any kernel ran.",
            "percentunit",
            (
                Query("penstock_gpu_sm_activity", f"{CARD} SM active ({{{{source}}}})"),
                Query("penstock_gpu_kernel_running_share", f"{CARD} util"),
            ),
            width=12,
            maximum=1,
        ),
        Panel(
            "Inference time by model",
            "Each model's part of all inference time of the engines, by Triton's own counters: of the GPU's time, "
            "where all models run there.",
            "percentunit",
            one("penstock:model_compute:share5m", "{{model}}"),
            Look.STACKED,
            width=12,
            maximum=1,
        ),
        Panel(
            "Tensor pipe, memory, warps",
            "Share of the tensor pipes that work, of the memory's bandwidth that is used, of the warps that fit.",
            "percentunit",
            (
                Query("penstock_gpu_tensor_activity", f"{CARD} tensor"),
                Query("penstock_gpu_memory_bandwidth_activity", f"{CARD} memory bandwidth"),
                Query("penstock_gpu_sm_occupancy", f"{CARD} occupancy"),
            ),
            maximum=1,
        ),
        Panel(
            "NVDEC and NVJPG",
            "Use of the card's video and JPEG decoders, the mean of each kind.",
            "percentunit",
            (
                Query("penstock_gpu_nvdec_activity", f"{CARD} NVDEC"),
                Query("penstock_gpu_nvjpg_activity", f"{CARD} NVJPG"),
            ),
            maximum=1,
        ),
        Panel(
            "Cards that answer",
            "Whether NVML can ask the card; a gateway with models on a GPU is not ready while it has lost one.",
            "none",
            one("penstock_gpu_up", CARD),
            Look.STATES,
            steps=((None, RED), (1, GREEN)),
            words=(("0", "lost", RED), ("1", "up", GREEN)),
        ),
        Panel(
            "Memory by process",
            "Of each card, by Triton's model instance or by program; clients of MPS among them.",
            "bytes",
            one("penstock_gpu_process_memory_bytes", f"{CARD} {{{{process}}}}"),
            Look.STACKED,
        ),
        Panel(
            "Time by process",
            "Share of time in which a kernel of the process ran, as far as NVML tells. Under MPS processes run at the "
            "same time, so that the sum may exceed 1.",
            "percentunit",
            one("penstock_gpu_process_time_share", f"{CARD} {{{{process}}}}"),
        ),
        Panel(
            "Xid errors",
            "Errors that the driver reported of the gateway's cards since it started, by number.",
            "none",
            one("penstock_gpu_xid_errors_total", f"{CARD} Xid {{{{xid}}}}"),
            Look.STEPS,
            steps=((None, GREEN), (1, RED)),
        ),
    ),
)

MPS = Row(
    "MPS",
    (
        Panel(
            "MPS daemon",
            "Whether it listens, as the gateways see it that share a card through it (CUDA_MPS_PIPE_DIRECTORY is set).",
            "none",
            one("min by (instance) (penstock_mps_up)"),
            Look.STATES,
            steps=((None, RED), (1, GREEN)),
            words=(("0", "down", RED), ("1", "up", GREEN)),
        ),
        Panel(
            "Clients",
            "Processes of the engine that compute under MPS, and beside it, where `penstock up --mps` runs it: those "
            "beside it take turns with all others.",
            "none",
            (
                Query("penstock_mps_clients", "{{instance}} clients"),
                Query("penstock_mps_unattached_processes", "{{instance}} beside MPS"),
            ),
            Look.STEPS,
        ),
        Panel(
            "Restarts of all clients",
            "One client's fatal fault, the end of the MPS server or of its daemon ends all clients; and how long it "
            "took the last time until requests were served again.",
            "none",
            (
                Query("increase(penstock_mps_restarts_total[$__rate_interval])", "{{instance}} restarts"),
                Query("penstock_mps_recovery_seconds", "{{instance}} last recovery"),
            ),
            Look.STEPS,
            steps=((None, GREEN), (1, ORANGE)),
            right=((".*recovery", "s"),),
        ),
    ),
)
