"""What the libraries under us would tell their makers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("module", ["penstock.models.onnx_reference", "deploy.models.graph"])
def test_onnxruntime_under_our_code_keeps_no_reports(module: str, tmp_path: Path) -> None:
    """Importing our code, then ONNX Runtime, leaves neither a queue of reports nor a device's number behind."""
    environment = {name: value for name, value in os.environ.items() if name not in ("ORT_DISABLE_TELEMETRY", "CI")}
    environment |= {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    program = f"import {module}, onnxruntime; onnxruntime.get_available_providers()"
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []
