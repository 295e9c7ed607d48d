"""A made-up run of the GPU bench: figures of about the right size, three rounds, the same each time."""

import random
from pathlib import Path

from loadtest.bench.gpu.chart import THREADS
from loadtest.bench.gpu.figures import PointLedger

MACHINE = "1 × NVIDIA H200, Imagined 3000, 16 cores"
CONDITIONS = {
    "cpu": "Imagined 3000, 16 cores, load 1.0",
    "machine": MACHINE,
    "at": "2026-11-22 21:00 UTC",
    "versions": "Python 3.12.3",
    "gpu versions": "driver 580.159.04 (CUDA 13.0), torch 2.11.0, Triton 2.51",
    "command": "python -m loadtest.bench.gpu --json gpu.json",
    "slo_p99_ms": "15",
}
RATES = {"none": (1050.0, 1.0), "mps": (4600.0, 5.0), "batching": (5200.0, 4.0), "mps+batching": (8400.0, 7.0)}
CLIENTS = (1, 2, 4, 8, 16, 32, 47)


def made_up(
    path: Path, *, parts: tuple[str, ...] = ("chart", "engine", "jpeg", "faults"), rounds: int = 3
) -> PointLedger:
    """A ledger that was saved."""
    ledger = PointLedger(path, dict(CONDITIONS), "resnet50-torch-random")
    draw = random.Random(1)
    for number in range(1, rounds + 1):
        if "chart" in parts:
            _chart(ledger, number, draw)
        if "engine" in parts:
            _engine(ledger, number, draw)
        if "jpeg" in parts:
            _jpeg(ledger, number, draw)
    if "faults" in parts:
        ledger.faults.append(
            {
                "fault": "one client killed", "victim": "fault-0", "answered": 4000, "failed": {"fault-0": 12},
                "silent_s": {"fault-0": 4.2, "fault-1": 0.03}, "silent_from_s": {"fault-0": 0.0, "fault-1": 0.5},
                "recovery_s": 4.21, "said": {"503: down": 12},
                "note": "kill -9 of 17",
            }
        )  # fmt: skip
    ledger.facts = {THREADS: 15, "chart mps MPS clients": 48}
    ledger.failures = ["raw and served: the card was gone"]
    ledger.save()
    return ledger


def _chart(ledger: PointLedger, number: int, draw: random.Random) -> None:
    for mode, (most, half) in RATES.items():
        for clients in CLIENTS:
            rate = most * clients / (clients + half) * draw.uniform(0.97, 1.03)
            figures = {"rate": rate, "p50_ms": clients / rate * 1000, "p99_ms": clients / rate * 1400}
            figures |= {"machine_cores": rate / 700, "sm_activity": rate / 9000, "sm_occupancy": rate / 40000}
            figures |= {"tensor_activity": rate / 30000, "memory_bandwidth_activity": rate / 20000, "util": 0.97}
            ledger.add("chart", number, {"mode": mode, "clients": clients}, figures)
    for mode, rate in (("none", 1040.0), ("mps-whole", 2500.0)):
        figures = {"rate": rate * draw.uniform(0.98, 1.02), "sm_activity": rate / 9000}
        ledger.add("whole", number, {"mode": mode, "clients": 8}, figures)


def _engine(ledger: PointLedger, number: int, draw: random.Random) -> None:
    for part, share in (("raw", 1.0), ("served", 0.96)):
        for processes, batch, rate in ((1, 1, 1100), (8, 64, 16200), (8, 128, 16400)):
            for memory in ("cuda", "system"):
                key = {"processes": processes, "batch": batch, "memory": memory}
                found = rate * share * (0.9 if memory == "system" else 1.0) * draw.uniform(0.99, 1.01)
                ledger.add(part, number, key, {"rate": found, "machine_cores": 6.0, "sm_activity": 0.93})


def _jpeg(ledger: PointLedger, number: int, draw: random.Random) -> None:
    for way, most in (("engine", 9800.0), ("gateway", 6100.0)):
        for share, p99 in ((0.97, 40.0), (0.93, 19.0), (0.88, 13.0)):
            tried = {"asked_per_s": most * share, "ok_per_s": most * share, "p50_ms": 6.0}
            tried |= {"p99_ms": p99 * draw.uniform(0.95, 1.05), "in_time": 0.995}
            ledger.add("jpeg rate", number, {"decoded_by": way, "share": f"{share:.2f}"}, tried)
        held = {"capacity_per_s": most, "held_per_s": most * 0.88 * draw.uniform(0.99, 1.01), "p50_ms": 6.0}
        held |= {"p99_ms": 13.0, "gateway_cores": 6.0, "model_cores": 3.0, "generator_cores": 2.0}
        ledger.add("jpeg", number, {"decoded_by": way}, held)
