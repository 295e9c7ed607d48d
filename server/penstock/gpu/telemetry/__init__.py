"""GPU load and health: SM activity, utilization, their sources, and lost GPUs.

A child process (`python -m penstock.gpu.telemetry`) reads NVML, because a call into a broken driver may hang, and
writes JSON lines. `sample` and `Sampler` read them for benchmarks, `TelemetryReader` for the gateway.
"""
