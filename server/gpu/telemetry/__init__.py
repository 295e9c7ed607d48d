"""How busy the cards are: SM activity beside `util`, each figure with its source; and which card is lost.

A process of its own asks NVML, since a call into a sick driver may never return, and writes JSON lines
(`python -m server.gpu.telemetry`). `sample` and `Sampler` read them for a bench, `TelemetryReader` for the gateway.
"""

from server.gpu.telemetry.line import Activity, CardLoad, Line, ProcessLoad, Source, Xid
from server.gpu.telemetry.sampler import NoTelemetry, Sampler, sample

__all__ = ["Activity", "CardLoad", "Line", "NoTelemetry", "ProcessLoad", "Sampler", "Source", "Xid", "sample"]
