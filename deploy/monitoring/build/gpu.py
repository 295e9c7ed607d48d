"""The GPU, as dcgm-exporter sees it: how much of it works, not only whether it does."""

from deploy.monitoring.build.board import GREEN, ORANGE, RED, Board, Choice, Look, Panel, Query, Row, figure, one
from deploy.monitoring.build.gpu_of_gateways import MPS, SEEN
from deploy.monitoring.build.runbook import runbook

CARD = 'Hostname=~"$host", gpu=~"$gpu"'
NAME = "{{Hostname}} {{gpu}}"
WHY = """\
**`util` says whether the GPU works, not how much of it.** It is the share of time in which *at least one* kernel ran:
one small kernel on one of a hundred multiprocessors, back to back, is 100 %. A card at `util` 100 % may have nine
tenths of itself idle.

**SM activity** is the share of multiprocessors that have work, over time: what more batches, more instances or MPS can
still win.

* `util` high, SM activity low: small kernels one after the other. Larger batches, more instances, MPS.
* both high: the card is the limit. More cards, a smaller model, INT8.
* both low: it waits for something else: decoding, the gateway's CPU, the network.

Nothing of Penstock scales on `util`. SM activity needs Volta or newer: a P4 has none. With time-slicing or MPS both are
of the whole card.
"""


def _percent(name: str) -> str:
    return f"{name}{{{CARD}}} / 100"


AT_A_GLANCE = Row(
    "At a glance",
    (
        figure(
            "SM activity",
            "Mean of the chosen cards: the share of multiprocessors that have work.",
            "percentunit",
            one(f"avg(penstock:gpu_sm_active:ratio{{{CARD}}})", "SM active"),
        ),
        figure(
            "util",
            "Mean of the chosen cards: the share of time in which anything at all ran.",
            "percentunit",
            one(f"avg(penstock:gpu_util:ratio{{{CARD}}})", "util"),
        ),
        figure(
            "Tensor activity",
            "Mean of the chosen cards: the share of cycles in which the tensor pipe works. FP16 and INT8 models "
            "use it.",
            "percentunit",
            one(f"avg(DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{CARD}}})", "tensor"),
        ),
        figure(
            "Memory in use",
            "The fullest of the chosen cards.",
            "percentunit",
            one(f"max(penstock:gpu_memory_used:ratio{{{CARD}}})", "memory"),
            steps=((None, GREEN), (0.9, ORANGE), (0.97, RED)),
        ),
        figure(
            "Power", "Of the chosen cards together.", "watt", one(f"sum(DCGM_FI_DEV_POWER_USAGE{{{CARD}}})", "power")
        ),
        figure(
            "Last Xid",
            "The greatest number of a last Xid among the chosen cards; 0: none. The runbook says which ones want "
            "a new card.",
            "none",
            one(f"max(DCGM_FI_DEV_XID_ERRORS{{{CARD}}})", "Xid"),
            steps=((None, GREEN), (1, RED)),
        ),
    ),
)


ACTIVITY = Row(
    "How much of the card works",
    (
        Panel(
            "SM activity beside util",
            "Both as shares of 1. The distance between them is what `util` hides.",
            "percentunit",
            (
                Query(f"DCGM_FI_PROF_SM_ACTIVE{{{CARD}}}", f"{NAME} SM active"),
                Query(_percent("DCGM_FI_DEV_GPU_UTIL"), f"{NAME} util"),
            ),
            width=14,
            height=10,
            maximum=1,
        ),
        Panel(
            "Why util misleads",
            "What the two figures beside it mean, and what to do.",
            "none",
            look=Look.TEXT,
            width=10,
            height=10,
            text=WHY,
        ),
        Panel(
            "Tensor pipe and warps",
            "Share of cycles in which the tensor pipe works; resident warps by those that would fit.",
            "percentunit",
            (
                Query(f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{CARD}}}", f"{NAME} tensor"),
                Query(f"DCGM_FI_PROF_SM_OCCUPANCY{{{CARD}}}", f"{NAME} occupancy"),
            ),
            maximum=1,
        ),
        Panel(
            "Memory bandwidth",
            "Share of cycles in which the device's memory sends or receives. About 0.8 is all there is.",
            "percentunit",
            one(f"DCGM_FI_PROF_DRAM_ACTIVE{{{CARD}}}", NAME),
            maximum=1,
            steps=((None, GREEN), (0.8, ORANGE)),
        ),
        Panel(
            "NVDEC and NVENC",
            "Share of time in which the video decoders and encoders are busy.",
            "percentunit",
            (
                Query(_percent("DCGM_FI_DEV_DEC_UTIL"), f"{NAME} NVDEC"),
                Query(_percent("DCGM_FI_DEV_ENC_UTIL"), f"{NAME} NVENC"),
            ),
            maximum=1,
        ),
    ),
)


BODY = Row(
    "Memory, power, errors",
    (
        Panel(
            "Memory",
            "In use and free. What does not fit is refused by the engine, and the gateway then halves batches.",
            "mbytes",
            (
                Query(f"DCGM_FI_DEV_FB_USED{{{CARD}}}", f"{NAME} used"),
                Query(f"DCGM_FI_DEV_FB_FREE{{{CARD}}}", f"{NAME} free"),
            ),
        ),
        Panel(
            "Power and temperature",
            "A card that is hot or at its power limit clocks down: see the next panel.",
            "watt",
            (
                Query(f"DCGM_FI_DEV_POWER_USAGE{{{CARD}}}", f"{NAME} power"),
                Query(f"DCGM_FI_DEV_GPU_TEMP{{{CARD}}}", f"{NAME} temperature"),
            ),
            right=((".*temperature", "celsius"),),
        ),
        Panel(
            "SM clock", "Down under load: power or heat.", "hertz", one(f"DCGM_FI_DEV_SM_CLOCK{{{CARD}}} * 1e6", NAME)
        ),
        Panel(
            "PCIe",
            "Bytes a second that the card sends and receives. Pictures of uint8 instead of FP32 are a quarter of it.",
            "Bps",
            (
                Query(f"DCGM_FI_PROF_PCIE_TX_BYTES{{{CARD}}}", f"{NAME} sends"),
                Query(f"DCGM_FI_PROF_PCIE_RX_BYTES{{{CARD}}}", f"{NAME} receives"),
            ),
        ),
        Panel(
            "Last Xid",
            "Its number stays after the error; what counts is when it changes.",
            "none",
            one(f"DCGM_FI_DEV_XID_ERRORS{{{CARD}}}", NAME),
            Look.STEPS,
            steps=((None, GREEN), (1, RED)),
        ),
    ),
)


def _by_pod(name: str) -> tuple[Query, ...]:
    held = f'max by (exported_namespace, exported_pod, gpu) ({name}{{{CARD}, exported_pod!=""}})'
    own = f'max by (namespace, pod, gpu) ({name}{{{CARD}, exported_pod="", pod!="", pod!~".*dcgm-exporter.*"}})'
    return Query(held, "{{exported_namespace}}/{{exported_pod}} {{gpu}}"), Query(own, "{{namespace}}/{{pod}} {{gpu}}")


WHOLE = (
    "By the pod that holds the card (label exported_pod, or pod where the scrape says honorLabels). A card that "
    "pods share is shown whole for each of them, and for all of them only where dcgm-exporter runs with "
    "KUBERNETES_VIRTUAL_GPUS=true."
)
PODS = Row(
    "By pod (Kubernetes)",
    (
        Panel("SM activity by pod", WHOLE, "percentunit", _by_pod("DCGM_FI_PROF_SM_ACTIVE"), width=12, maximum=1),
        Panel("Memory by pod", WHOLE, "mbytes", _by_pod("DCGM_FI_DEV_FB_USED"), width=12),
    ),
    is_collapsed=True,
)


GPU = Board(
    "penstock-gpu",
    "Penstock: GPU",
    "How much of each card works, beside whether it does; its memory, power and errors: by dcgm-exporter, and as "
    "gateways see their own cards by NVML; MPS; each model's part.",
    (AT_A_GLANCE, ACTIVITY, SEEN, MPS, BODY, PODS, runbook("gpu")),
    (
        Choice("host", "Host", "label_values(DCGM_FI_DEV_GPU_UTIL, Hostname)"),
        Choice("gpu", "GPU", 'label_values(DCGM_FI_DEV_GPU_UTIL{Hostname=~"$host"}, gpu)'),
    ),
)
