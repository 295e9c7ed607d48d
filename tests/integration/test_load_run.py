"""`penstock load` against the real stack: the verdict, the report, the other witness, and how runs end."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import Result
from typer.testing import CliRunner

from penstock.cli.gateway_client import GatewayClient
from penstock_load.cli import commands
from penstock_load.clients.payloads import make_pictures
from penstock_load.measure.run_folder import read_run_folder
from penstock_load.results import Run, Side, State, Status
from tests.support.stack import CHECKOUT, RunningStack

pytestmark = pytest.mark.xdist_group("stack")

QUICK = """
name = "quick"
about = "a second or two of each kind of phase"
slo_p99_ms = 5000
[[request]]
kind = "{kind}"
model = "{model}"
sizes = [16]
[[phase]]
name = "capacity"
seconds = 0.5
callers = 2
is_capacity = true
[[phase]]
name = "ladder"
seconds = 1
arrivals = {{ shape = "step", unit = "of_capacity", rates = [0.2, 0.4] }}
[[phase]]
name = "steady"
seconds = 2
arrivals = {{ shape = "poisson", rate = 20 }}
is_judged = true
"""


def scenario(folder: Path, *, kind: str = "image", model: str = "street") -> str:
    """A scenario of four seconds, as a file."""
    path = folder / f"{kind}.toml"
    path.write_text(QUICK.format(kind=kind, model=model))
    return str(path)


def load(*words: str, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    """`penstock load …` as a person calls it, from the checkout."""
    command = [sys.executable, "-m", "penstock.cli.main", "load", *words]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=timeout_s, check=False)


def load_here(*words: str) -> Result:
    """The same in this process, for what takes no load generator."""
    return CliRunner().invoke(commands.app, list(words))


def where(stack: RunningStack) -> list[str]:
    """The stack's addresses as flags."""
    return ["--target", stack.http_url, "--grpc", stack.grpc_address, "--metrics", stack.metrics_url]


def run_of(folder: Path) -> Run:
    """What run.json holds."""
    return read_run_folder(folder).run


def verdicts(run: Run) -> dict[str, State]:
    """By target."""
    return {verdict.target_id: verdict.state for verdict in run.verdicts}


@pytest.fixture(scope="module")
def quick_run(stack: RunningStack, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run against the real stack, and what it printed."""
    folder = tmp_path_factory.mktemp("run")
    name = scenario(folder)
    done = load("run", name, *where(stack), "--min-rate", "5", "--out", str(folder / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "out", done.stdout + done.stderr


def test_run_with_a_target_below_what_was_reached_passes(quick_run: tuple[Path, str]) -> None:
    """Exit code 0, a verdict a row, and the words for a person."""
    folder, said = quick_run
    run = run_of(folder)
    assert verdicts(run) == {"slo": State.PASS, "slo-errors": State.PASS, "min-rate": State.PASS}
    assert run.complaints == ()
    assert "PASS" in said
    assert str(folder / "report.html") in said


@pytest.mark.long
def test_run_with_a_target_above_what_was_reached_fails(stack: RunningStack, tmp_path: Path) -> None:
    """Exit code 1, and JSON that says which row failed and by how much."""
    done = load(
        "run", scenario(tmp_path), *where(stack), "--min-rate", "1000", "--out", str(tmp_path / "out"), "--json"
    )
    assert done.returncode == 1, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    states = {row["target_id"]: row["state"] for row in said["verdicts"]}
    assert states == {"slo": "pass", "slo-errors": "pass", "min-rate": "fail"}
    (row,) = [row for row in said["verdicts"] if row["target_id"] == "min-rate"]
    assert row["value"] == pytest.approx(20, rel=0.6)  # 40 Poisson arrivals in two seconds
    assert row["ratio"] == pytest.approx(row["value"] / 1000)
    assert said["exit_code"] == 1


def test_run_leaves_flat_records_that_add_up_to_its_figures(quick_run: tuple[Path, str]) -> None:
    """Every request is a line, and counts and latencies of run.json are those of the lines."""
    folder, _ = quick_run
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    assert all(not isinstance(value, dict | list) for line in lines for value in line.values())
    for phase in run_of(folder).phases:
        mine = [line for line in lines if line["phase"] == phase.phase]
        assert len(mine) == phase.all.intended
        assert sum(line["status"] == Status.OK for line in mine) == phase.all.ok
        worst_ms = max((line["done_s"] - line["intended_s"]) * 1e3 for line in mine)
        assert phase.all.latency.highest == pytest.approx(worst_ms)


def test_run_counts_the_same_answers_as_the_server(quick_run: tuple[Path, str]) -> None:
    """The server's own counters are the other witness; stages, batch sizes, CPU and memory come with them."""
    for phase in run_of(quick_run[0]).phases:
        assert phase.witness is not None
        assert phase.witness.answered == phase.all.ok
        assert dict(phase.witness.batch_sizes)
        assert phase.all.stages is not None
        assert 0 < phase.all.stages.infer_ms < phase.all.stages.total_ms
        assert phase.cpu_ms_per_ok is not None
        assert phase.cpu_ms_per_ok > 0


def test_report_is_one_file_that_shows_the_run(quick_run: tuple[Path, str]) -> None:
    """Plots are inside it, nothing is fetched, and the markdown says the same verdict."""
    folder, _ = quick_run
    html, markdown = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    assert "data:image/" in html or "<svg" in html
    for text in (html, markdown):
        assert "PASS" in text
        assert "street" in text
        assert "quick" in text


def test_report_is_made_again_from_the_run_alone(quick_run: tuple[Path, str], tmp_path: Path) -> None:
    """run.json holds all that a report needs."""
    (tmp_path / "run.json").write_bytes((quick_run[0] / "run.json").read_bytes())
    done = load_here("report", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "report.md").read_text() == (quick_run[0] / "report.md").read_text()


@pytest.mark.long
def test_run_beside_the_engine_measures_the_gateways_price(stack: RunningStack, tmp_path: Path) -> None:
    """Both sides in every phase of every round, and the ratio of their capacities."""
    folder = tmp_path / "out"
    beside = ["--beside", stack.engine_http_url, "--rounds", "2", "--out", str(folder)]
    done = load("run", scenario(tmp_path, kind="rest", model="identity_fp32"), *where(stack), *beside)
    assert done.returncode == 0, done.stdout + done.stderr
    run = run_of(folder)
    asked = [(phase.round, phase.phase, phase.side) for phase in run.phases]
    assert len(set(asked)) == len(asked) == 2 * 3 * 2
    assert [side for round, phase, side in asked if phase == "steady"] == [
        Side.TARGET, Side.BESIDE, Side.BESIDE, Side.TARGET
    ]  # fmt: skip
    measured = {measurement.measure: measurement for measurement in run.measurements}
    assert 0 < measured["rate_ratio"].spread.median < 2
    assert measured["rate_ratio"].rounds == 2
    assert "added_p50_ms" in measured


@pytest.mark.parametrize("stop", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_run_that_is_stopped_reports_what_it_had(stack: RunningStack, tmp_path: Path, stop: signal.Signals) -> None:
    """By Ctrl-C or SIGTERM: the finished phases are kept, nothing passes, and no process of it goes on."""
    folder = tmp_path / "out"
    words = ["run", scenario(tmp_path), *where(stack), "--duration", "60", "--out", str(folder)]
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.main", "load", *words],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 60
    while time.monotonic() < until and '"steady"' not in _text(folder / "records.jsonl"):
        time.sleep(0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(stop)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 1, stdout + stderr
    assert f"stopped before its end by {'Ctrl-C' if stop is signal.SIGINT else 'SIGTERM'}" in stdout
    assert "Traceback" not in stderr
    assert {phase.phase for phase in run_of(folder).phases} == {"capacity", "ladder"}
    assert (folder / "report.html").stat().st_size > 1000
    _, left = psutil.wait_procs(family, timeout=5)
    assert left == []


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_comparing_a_run_with_itself_tells_no_difference(quick_run: tuple[Path, str]) -> None:
    """Every ratio is 1, and too short a run is said to be too short."""
    done = load_here("compare", str(quick_run[0]), str(quick_run[0]), "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert {row["measure"] for row in rows} >= {"p50_ms", "p99_ms"}
    for row in rows:
        assert row["ratio"] in (None, pytest.approx(1))
        assert not row["is_trusted"]


@pytest.mark.long
def test_knee_of_the_real_stack_is_found_and_reported(stack: RunningStack, tmp_path: Path) -> None:
    """The highest rate under a bound, confirmed by a longer trial; the trials are the report's phases."""
    folder = tmp_path / "out"
    short = ["--seconds", "1", "--start", "5", "--highest", "10", "--slo-p99-ms", "5000", "--min-rate", "5"]
    done = load("knee", scenario(tmp_path), *where(stack)[:4], *short, "--out", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "/s kept the SLO" in done.stdout
    run = run_of(folder)
    assert verdicts(run) == {"min-rate": State.PASS}
    assert sum(phase.phase.startswith("trial") for phase in run.phases) >= 3
    assert (folder / "report.html").stat().st_size > 1000


@pytest.mark.long
def test_reloads_are_timed_and_the_model_serves_again(stack: RunningStack, tmp_path: Path) -> None:
    """The shipped cold-start scenario, against a stack that can load and unload."""
    folder = tmp_path / "out"
    done = load("run", "cold-start", *where(stack), "--out", str(folder))
    run = run_of(folder)
    assert len(run.reloads) == 5, done.stdout + done.stderr
    assert all(reload.load_ms > 0 and reload.first_answer_ms > 0 for reload in run.reloads)
    assert {"load_ms", "first_answer_ms"} <= {measurement.measure for measurement in run.measurements}
    (picture,) = make_pictures(1, seed=1)
    assert GatewayClient(stack.http_url).infer_image("street", picture.content, picture.media_type).results


@pytest.mark.long
def test_streams_are_loaded_and_judged(stack: RunningStack, tmp_path: Path) -> None:
    """Tensors over gRPC streams of the gateway's own; the server counted what was sent."""
    name = scenario(tmp_path, kind="grpc-stream", model="identity_fp32")
    done = load("run", name, *where(stack), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    run = run_of(tmp_path / "out")
    assert verdicts(run) == {"slo": State.PASS, "slo-errors": State.PASS}
    assert run.complaints == ()


def test_scenario_that_the_stack_cannot_do_says_so(stack: RunningStack, tmp_path: Path) -> None:
    """One sentence, exit code 1, and no folder is left behind."""
    name = scenario(tmp_path, kind="image", model="identity_fp32")
    done = load_here("run", name, *where(stack), "--out", str(tmp_path / "out"))
    assert done.exit_code == 1
    assert "send tensors to /infer instead" in done.stderr
    assert done.stderr.startswith("penstock: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
