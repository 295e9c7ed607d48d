"""NVIDIA's perf_analyzer beside the bench's own callers: the same model, as many callers, system shared memory.

It asks one model at a time and takes seconds a point, so the chart is not made with it; what it says of one point tells
whether the bench's callers are believed. PENSTOCK_PERF_ANALYZER names it, else it is that of `.venv-clients`.
"""

import os
import re
import subprocess
from pathlib import Path

from loadtest.bench.gpu.raw import CHECKOUT
from server.backends.triton_runtime import TritonRuntime

TIMEOUT_S, WINDOW_MS, WINDOWS = 30.0, 1000, 3
STABLE_PERCENT = 50  # it is asked for a figure, not for a proof
# It is linked against these; Triton's wheel has them under names with a hash.
_LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}


def find_perf_analyzer() -> Path | None:
    """The program; None where it is not here."""
    told = os.environ.get("PENSTOCK_PERF_ANALYZER")
    program = Path(told) if told else CHECKOUT / ".venv-clients" / "bin" / "perf_analyzer"
    return program if os.access(program, os.X_OK) else None


def perf_analyzer_rate(runtime: TritonRuntime, folder: Path, port: int, model: str, callers: int) -> str:
    """What it says, "5,460 inferences/s", or why it says nothing. folder: for links to the libraries that it wants."""
    program = find_perf_analyzer()
    if program is None:
        return "perf_analyzer is not here"
    command = [
        *(str(program), "-m", model, "-u", f"127.0.0.1:{port}", "-i", "http", "--concurrency-range", str(callers)),
        *("--shared-memory", "system", "--output-shared-memory-size", "8192", "-s", str(STABLE_PERCENT)),
        *("--measurement-interval", str(WINDOW_MS), "--max-trials", str(WINDOWS)),
    ]
    environ = {"PATH": os.environ.get("PATH", ""), "LD_LIBRARY_PATH": str(_libraries(runtime, folder))}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environ)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"perf_analyzer did not end well: {error}"
    return rate_in_words(done.stdout) or f"perf_analyzer said nothing of a rate: {done.stderr.strip()[-200:]}"


def rate_in_words(output: str) -> str:
    """The throughput that its report ends with; empty where there is none."""
    found = re.findall(r"Throughput: ([\d.]+) infer/sec", output)
    return f"{float(found[-1]):,.0f} inferences/s" if found else ""


def _libraries(runtime: TritonRuntime, folder: Path) -> Path:
    links = folder / "perf-analyzer-libraries"
    links.mkdir(parents=True, exist_ok=True)
    if runtime.wheel is not None:
        for name, pattern in _LIBRARIES.items():
            for found in runtime.wheel.libraries.glob(pattern):
                (links / name).unlink(missing_ok=True)
                (links / name).symlink_to(found)
    return links
