"""NVIDIA GPUs of this machine: NVML, MPS, telemetry, video engines, profilers."""
