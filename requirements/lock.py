"""Resolve every lock anew: requirements files with hashes and no registry address."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
UV = Path(sys.executable).parent / "uv"
FLAGS = "--universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --no-header -q"
OVERRIDES = ("--override", "requirements/overrides.in")
LOCKS: dict[str, list[str]] = {
    "bootstrap.txt": ["requirements/bootstrap.in"],
    "base.txt": ["pyproject.toml", "--extra", "otel"],
    "dev.txt": ["pyproject.toml", "--extra", "dev", "-c", "requirements/base.txt", *OVERRIDES],
    "load.txt": [
        "pyproject.toml",
        *("--extra", "load", "--extra", "otel", "--extra", "video", "--extra", "kafka"),
        *("-c", "requirements/dev.txt"),
        *OVERRIDES,
    ],
    "video.txt": [
        "pyproject.toml",
        *("--extra", "otel", "--extra", "video", "--extra", "kafka"),
        *("-c", "requirements/load.txt"),
        *OVERRIDES,
    ],
    "video-gpu.txt": ["requirements/video-gpu.in", "-c", "requirements/load.txt"],
    "engine-gpu.txt": ["requirements/engine-gpu.in", "-c", "requirements/load.txt"],
    "tensorrt.txt": ["requirements/tensorrt.in", "-c", "requirements/load.txt"],
    "locust.txt": ["requirements/locust.in", "-c", "requirements/load.txt"],
    "triton.txt": ["requirements/triton.in"],
    "triton-gpu.txt": ["requirements/triton-gpu.in", "-c", "requirements/triton.txt"],
    "triton-tensorrt.txt": ["requirements/triton-tensorrt.in", "-c", "requirements/tensorrt.txt"],
    "triton-models.txt": ["requirements/triton-models.in", "-c", "requirements/triton.txt"],
    "triton-server.txt": ["requirements/triton-server.in", "--no-deps"],
    "clients.txt": ["requirements/clients.in"],
    "perf-analyzer.txt": ["requirements/perf-analyzer.in", "--no-deps"],
    **{f"peers/{name}.txt": [f"requirements/peers/{name}.in"] for name in ("bentoml", "litserve", "mlserver", "ray")},
}


def main() -> None:
    for lock, sources in LOCKS.items():
        command = [str(UV), "pip", "compile", *FLAGS.split(), *sources, "-o", f"requirements/{lock}", *sys.argv[1:]]
        subprocess.run(command, cwd=HERE.parent, check=True)


if __name__ == "__main__":
    main()
