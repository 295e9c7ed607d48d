"""Penstock: inference serving with Triton or an embedded engine behind a batching gateway."""

import os

VERSION = "0.1.0"  # as pyproject.toml has it

# ONNX Runtime's wheels report each process and session to their maker, and write ~/.cache/Microsoft for it. It reads
# this when it is imported, and Triton and our other children inherit it; who wants the reports sets it to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
