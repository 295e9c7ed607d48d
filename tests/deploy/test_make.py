"""What `make` would build on machines of other kinds."""

import os
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


def would_run(tmp_path: Path, target: str, *, machine: str, libc: str) -> str:
    """The commands that `make` prints where `uname` and `getconf` answer like this."""
    for name, answer in (("uname", machine), ("getconf", libc)):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{answer}'\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = ["make", "--no-print-directory", "--dry-run", "--always-make", target, "PYTHON=python3"]
    done = subprocess.run(
        command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


@pytest.mark.parametrize(
    ("target", "machine", "libc"),
    [
        *(("up", "Darwin arm64", ""), ("test", "Linux aarch64", "glibc 2.39"), ("test-long", "Linux x86_64", "")),
        *(("up", "Linux x86_64", "glibc 2.31"), ("up", "Linux x86_64", "glibc 2.4")),
    ],
)
def test_make_where_tritons_wheel_cannot_run_goes_without_it_and_says_so(
    tmp_path: Path, target: str, machine: str, libc: str
) -> None:
    """No other system, processor or C library has it downloaded in vain; one line says what serves there."""
    commands = would_run(tmp_path, target, machine=machine, libc=libc)
    assert ".venv-triton" not in commands
    assert commands.count("the embedded engine serves") == 1


@pytest.mark.parametrize("libc", ["glibc 2.35", "glibc 3.0"])
def test_make_where_tritons_wheel_runs_builds_its_environment(tmp_path: Path, libc: str) -> None:
    """Linux on x86-64 from glibc 2.35 on, where 2.4 is old and 2.41 is new."""
    commands = would_run(tmp_path, "up", machine="Linux x86_64", libc=libc)
    assert "penstock setup triton --folder .venv-triton" in commands
    assert "the embedded engine serves" not in commands


def test_make_tensorrt_fills_both_environments(tmp_path: Path) -> None:
    """The builder and the plug-in beside the embedded engine, the plug-in beside Triton's models."""
    commands = would_run(tmp_path, "tensorrt", machine="Linux x86_64", libc="glibc 2.35")
    assert "--require-hashes -r requirements/tensorrt.txt" in commands
    assert "penstock setup triton --folder .venv-triton --tensorrt" in commands


def test_make_test_gpu_looks_for_a_gpu_before_it_installs(tmp_path: Path) -> None:
    """A machine without one downloads nothing."""
    commands = would_run(tmp_path, "test-gpu", machine="Linux x86_64", libc="glibc 2.35")
    assert commands.startswith("nvidia-smi -L")
