"""deploy/mps's two scripts against a stand-in for the driver's control program: start, health, limits, end, death."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
DAEMON, HEALTHY = (CHECKOUT / "deploy" / "mps" / name for name in ("daemon.sh", "healthy.sh"))
FAKE = Path(__file__).with_name("fake_mps_control.py")
READY = "mps: ready at"


@dataclass
class Place:
    """A directory for the daemon's pipes, and a PATH with the stand-in."""

    pipes: Path
    environ: dict[str, str]

    @property
    def said_to_daemon(self) -> list[str]:
        return (self.pipes / "logs" / "said").read_text().splitlines()

    def run(self, script: Path, **environ: str) -> subprocess.CompletedProcess[str]:
        """The script to its end."""
        return subprocess.run(
            [script], env={**self.environ, **environ}, capture_output=True, text=True, timeout=30, check=False
        )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """One with the driver's two programs."""
    programs = tmp_path / "bin"
    programs.mkdir()
    control = programs / "nvidia-cuda-mps-control"
    control.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I {FAKE} "$@"\n')
    (programs / "nvidia-cuda-mps-server").write_text("#!/bin/sh\n")
    (programs / "nvidia-smi").write_text("#!/bin/sh\nprintf 'GPU 0: a\\nGPU 1: b\\n'\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    pipes = tmp_path / "pipes"
    return Place(pipes, {"PATH": f"{programs}:/usr/bin:/bin", "CUDA_MPS_PIPE_DIRECTORY": str(pipes)})


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(place: Place) -> Iterator[Start]:
    """Starts daemon.sh and waits for its `ready` between the daemon's own lines; ends what is left of it."""
    running: list[subprocess.Popen[str]] = []

    def begin(**environ: str) -> subprocess.Popen[str]:
        daemon = subprocess.Popen(
            [DAEMON], env={**place.environ, **environ}, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        running.append(daemon)
        assert daemon.stdout is not None
        lines = []
        while not (lines and lines[-1].startswith(READY)):
            lines.append(daemon.stdout.readline())
            assert lines[-1], lines
        return daemon

    yield begin
    for daemon in running:
        end_group(daemon)


def end_group(daemon: subprocess.Popen[str]) -> None:
    """Kills the script and the stand-in."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(daemon.pid, signal.SIGKILL)
    daemon.communicate(timeout=10)


def pid_of_control(place: Place) -> int:
    """The stand-in's, as it wrote it down."""
    return int((place.pipes / "nvidia-cuda-mps-control.pid").read_text())


def test_daemon_started_is_healthy_and_sigterm_ends_it_with_nothing_left(place: Place, start: Start) -> None:
    """It says when it is ready, is healthy then, and SIGTERM ends it with code 0, its files removed."""
    daemon = start()
    assert place.run(HEALTHY).returncode == 0
    control = pid_of_control(place)
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(10) == 0
    assert "quit -t 10" in place.said_to_daemon
    assert [entry.name for entry in place.pipes.iterdir()] == ["logs"]
    with pytest.raises(ProcessLookupError):
        os.kill(control, 0)
    unhealthy = place.run(HEALTHY)
    assert (unhealthy.returncode, unhealthy.stderr.count("\n")) == (1, 1)


def test_daemon_that_dies_is_unhealthy_and_ends_the_script(place: Place, start: Start) -> None:
    """Killed, it is unhealthy though its socket is still there, and the script fails so that it is started again."""
    daemon = start()
    os.kill(daemon.pid, signal.SIGSTOP)  # so that it does not tidy up yet
    os.kill(pid_of_control(place), signal.SIGKILL)
    answer = place.run(HEALTHY)
    assert (place.pipes / "control").exists()
    assert (answer.returncode, "does not answer" in answer.stderr) == (1, True)
    os.kill(daemon.pid, signal.SIGCONT)
    said, _ = daemon.communicate(timeout=10)
    assert (daemon.returncode, "ended by itself with code 137" in said) == (1, True)


def test_second_start_over_the_files_of_a_killed_one_works(place: Place, start: Start) -> None:
    """Script and daemon killed together leave everything behind; the next start clears it away."""
    end_group(start())
    assert (place.pipes / "control").exists()
    start()
    assert place.run(HEALTHY).returncode == 0


def test_second_daemon_in_the_same_directory_is_refused(place: Place, start: Start) -> None:
    """One that runs keeps its files; the other one says why it does not start."""
    start()
    second = place.run(DAEMON)
    assert (second.returncode, "runs at" in second.stderr) == (1, True)
    assert place.run(HEALTHY).returncode == 0


def test_limits_are_passed_to_the_daemon(place: Place, start: Start) -> None:
    """Percentage and memory become commands, the memory for each card, and do not stay in the daemon's environment."""
    start(CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="25", CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="4G")
    commands = [line for line in place.said_to_daemon if "set_default" in line]
    limit = "set_default_device_pinned_mem_limit"
    assert commands == ["set_default_active_thread_percentage 25", f"{limit} 0 4G", f"{limit} 1 4G"]
    assert place.said_to_daemon[0] == "environment {}"


def test_limits_by_card_are_passed_unchanged(place: Place, start: Start) -> None:
    """NVIDIA's own form names the cards; a percentage of 0 is none."""
    start(CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="0", CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=1G,1=512M")
    commands = [line for line in place.said_to_daemon if "set_default" in line]
    assert [line.split()[1:] for line in commands] == [["0", "1G"], ["1", "512M"]]


REFUSED = [
    ({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "120"}, "is '120'; it takes a whole number from 1 to 100"),
    ({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "half"}, "is 'half'"),
    ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "four"}, "has 'four'; use 4G"),
    ({"MPS_QUIT_SECONDS": "soon"}, "MPS_QUIT_SECONDS is 'soon'"),
    ({"CUDA_MPS_PIPE_DIRECTORY": "/proc/none"}, "may not write to /proc/none"),
    ({"CUDA_MPS_LOG_DIRECTORY": "/proc/none"}, "CUDA_MPS_LOG_DIRECTORY"),
    ({"PATH": "/usr/bin:/bin"}, "nvidia-cuda-mps-control is not on PATH; it comes with NVIDIA's driver"),
    ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "7=1G"}, "refused 'set_default_device_pinned_mem_limit 7 1G': no such"),
    ({"FAKE_MPS_SICK": "dead"}, "ended by itself with code 3; its lines above"),
]


@pytest.mark.parametrize(("environ", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_what_cannot_be_run_is_refused_in_one_line(place: Place, environ: Mapping[str, str], why: str) -> None:
    """Each says with which value, and what to do, and leaves no daemon behind."""
    refused = place.run(DAEMON, **environ)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1), refused
    assert READY not in refused.stdout
    assert why in refused.stderr
    assert place.run(HEALTHY).returncode == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may be another user")
def test_directory_of_another_user_is_refused_with_both_users(place: Place, tmp_path: Path) -> None:
    """Without the right to write there, the message names the owner."""
    place.pipes.mkdir()
    place.pipes.chmod(0o755)
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    words = ["setpriv", "--reuid", "10001", "--regid", "10001", "--clear-groups", "sh", DAEMON]
    refused = subprocess.run(words, env=place.environ, capture_output=True, text=True, timeout=20, check=False)
    assert refused.stderr.startswith(f"mps: user 10001 may not write to {place.pipes} (its owner: 0)"), refused


def test_deaf_daemon_gets_the_signal_again_and_is_killed_by_its_container(place: Place, start: Start) -> None:
    """SIGTERM while it is deaf: it is asked, then signalled; a container's engine does the rest."""
    daemon = start(FAKE_MPS_SICK="deaf", MPS_QUIT_SECONDS="0")
    daemon.send_signal(signal.SIGTERM)
    until = time.monotonic() + 10
    while "quit -t 0" not in place.said_to_daemon and time.monotonic() < until:
        time.sleep(0.05)
    assert "quit -t 0" in place.said_to_daemon
    os.kill(pid_of_control(place), signal.SIGKILL)
    assert daemon.wait(10) == 0


@pytest.mark.parametrize("script", ["deploy/mps/daemon.sh", "deploy/mps/healthy.sh", "deploy/docker/serve_triton.sh"])
def test_scripts_are_executable_and_posix(script: str) -> None:
    """They are for `sh`, whichever a base image has, and may be executed."""
    assert os.access(CHECKOUT / script, os.X_OK)
    assert (CHECKOUT / script).read_text().startswith("#!/bin/sh\n")
    subprocess.run(["sh", "-n", CHECKOUT / script], check=True)
