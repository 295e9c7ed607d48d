"""GPU load and health: SM activity besides `util`, the source of each figure, and which GPU is lost.

A child process (`python -m penstock.gpu.telemetry`) reads NVML, since a call into a broken driver may never return, and
writes JSON lines. `sample` and `Sampler` read them for a bench, `TelemetryReader` for the gateway.
"""

from penstock.gpu.telemetry.messages import Activity, ActivitySource, CardLoad, ProcessLoad, TelemetryMessage, Xid
from penstock.gpu.telemetry.sampler import Sampler, TelemetryUnavailable, sample

__all__ = [
    "Activity",
    "ActivitySource",
    "CardLoad",
    "ProcessLoad",
    "Sampler",
    "TelemetryMessage",
    "TelemetryUnavailable",
    "Xid",
    "sample",
]
