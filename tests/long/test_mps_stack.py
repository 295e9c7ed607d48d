"""`penstock up --mps on` whole, with the real Triton on a CPU: the control program and NVML are stand-ins."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from loadtest.bench.gpu.programs import PenstockUp
from penstock.gpu.mps.control import PIPE_DIRECTORY
from tests.gpu.mps_programs import programs
from tests.support.stack import CHECKOUT
from tests.support.waiting import wait_for

pytestmark = pytest.mark.long
UP_S = 60.0
FAKE_NVML = Path(__file__).parents[1] / "gpu" / "fake_nvml"


@pytest.fixture
def card(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An H200 and NVIDIA's programs, for every process that is started; the folder of their run directories."""
    folder = tmp_path_factory.mktemp("card")
    (folder / "nvml.json").write_text(json.dumps({"cards": [{"uuid": "GPU-0", "total": 141 << 30}]}))
    monkeypatch.setenv("PATH", f"{programs(folder / 'bin')}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_NVML", str(folder / "nvml.json"))
    monkeypatch.setenv("PYTHONPATH", str(FAKE_NVML))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.delenv(PIPE_DIRECTORY, raising=False)
    return folder


def metric(home: Path, name: str) -> float:
    """Of the gateway's page; -1 where it is not there."""
    page = re.findall(r"metrics (http\S+)", (home / "up.log").read_text())[-1]
    with urllib.request.urlopen(page, timeout=10) as answer:
        found = re.search(rf"^penstock_{name} (\S+)$", answer.read().decode(), re.MULTILINE)
    return float(found[1]) if found else -1.0


def test_stack_under_mps_comes_back_from_the_daemons_death_and_leaves_nothing(
    card: Path, tmp_path: Path, triton_environment: Path
) -> None:
    """Not ready meanwhile, ready again, counted and timed; at the end no daemon and no folder of its own is left."""
    flags = ("--mps", "on", "--mps-active-thread-percentage", "50", "--workers", "1")
    shutil.copytree(CHECKOUT / "model_repository" / "identity_fp32", tmp_path / "models" / "one")
    (tmp_path / "models" / "one" / "golden.json").unlink(missing_ok=True)
    config = tmp_path / "models" / "one" / "config.pbtxt"
    config.write_text(config.read_text().replace('"identity_fp32"', '"one"'))
    with PenstockUp(tmp_path, ["one"], *flags, environment=triton_environment) as up:
        up.wait(time.monotonic() + UP_S)
        (pipes,) = {path.parent for path in card.glob("penstock-*/run-*/control")}
        assert "set_default_active_thread_percentage 50" in (pipes / "logs" / "said").read_text()
        stubs = [one for one in up.processes() if "triton_python_backend_stub".startswith(one.name())]
        assert {one.environ()[PIPE_DIRECTORY] for one in stubs} == {str(pipes)}
        assert metric(tmp_path, "mps_up") == 1
        status = subprocess.run(
            [sys.executable, "-m", "penstock.cli.main", "mps", "status", "--json"],
            cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert [one["directory"] for one in json.loads(status.stdout)["daemons"]] == [str(pipes)]
        old = int((pipes / "nvidia-cuda-mps-control.pid").read_text())
        os.kill(old, signal.SIGKILL)
        wait_for(lambda: metric(tmp_path, "ready") == 0)
        wait_for(lambda: metric(tmp_path, "mps_recovery_seconds") > 0)
        assert metric(tmp_path, "ready") == 1
        assert metric(tmp_path, "mps_restarts_total") == 1
        new = int((pipes / "nvidia-cuda-mps-control.pid").read_text())
        assert new != old
    assert list(card.glob("penstock-*/run-*")) == []
    with pytest.raises(ProcessLookupError):
        os.kill(new, 0)
