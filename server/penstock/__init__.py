"""Penstock: inference serving with Triton or an embedded engine behind a batching gateway."""

import os

VERSION = "0.1.0"  # as in pyproject.toml

# ONNX Runtime's wheels report each process and session to their maker, and write ~/.cache/Microsoft. It reads this
# variable at import, and Triton and our other children inherit it. Set it to 0 to send the reports.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
