"""NVIDIA's two MPS programs as the tests have them: the stand-in for the control program, and an empty server."""

import sys
from pathlib import Path

FAKE = Path(__file__).resolve().parents[1] / "deploy" / "fake_mps_control.py"


def programs(folder: Path) -> Path:
    """A folder for PATH that holds both; the control program's path is `nvidia-cuda-mps-control` in it."""
    folder.mkdir(parents=True, exist_ok=True)
    control = folder / "nvidia-cuda-mps-control"
    control.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I {FAKE} "$@"\n')
    (folder / "nvidia-cuda-mps-server").write_text("#!/bin/sh\n")
    for program in folder.iterdir():
        program.chmod(0o755)
    return folder
