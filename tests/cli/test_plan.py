"""`penstock plan`: the table, the object, and what is refused."""

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import typer
from rich.console import Console

from penstock.cli.gateway_client import GatewayClient
from penstock.cli.plan import engine_of_model, print_results
from penstock.planning.comparison import ContenderResult, LoadResult, Race, RaceCase, Rate, RateBounds
from penstock.planning.policies import Contender, PolicyProblem
from penstock.planning.profile import V100
from penstock.planning.simulation import EngineModel
from penstock.protocol.batch_reports import FitReport, ModelBatchReport, OptionsReport
from penstock.protocol.inference import BatchOwner

KNOBS = "delay 1.75 ms, timeout 4.2 ms, max batch 512"
CHECKOUT = Path(__file__).resolve().parent.parent.parent


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as a person runs it."""
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "plan", *arguments],
        cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def race() -> Race:
    """One from a real run."""
    at_rate = LoadResult(2300.0, 2290.0, 0.99, 0.0, 0.01, 0.0, 7.0, 4.5, 6.8)
    over = LoadResult(4341.0, 3300.0, 0.76, 0.01, 0.23, 0.0, 13.0, 5.0, 7.0)
    rows = (
        ContenderResult(Contender.TRITON, KNOBS, 280, Rate(2193.0, 62.0, (2193.0,)), at_rate, ((1.5, over),)),
        ContenderResult(Contender.OURS, "defaults", 1, Rate(2310.0, 40.0, (2310.0,)), at_rate, ((1.5, over),)),
    )
    case = RaceCase(PolicyProblem(EngineModel(V100), 0.007), "poisson")
    return Race(case, RateBounds(2894.4, 3053.4, 4860.6, Rate(2576.0, 72.0, (2576.0,))), rows)


@pytest.mark.parametrize("width", [80, 120])
def test_show_fits_the_width_and_puts_the_fastest_first(width: int) -> None:
    """Rates with their confidence, shares of what is possible, what overload costs, the knobs that were best."""
    stream = io.StringIO()
    print_results([race()], Console(file=stream, width=width, highlight=False))
    text = stream.getvalue()
    assert max(len(line) for line in text.splitlines()) <= width
    assert text.index("penstock ") < text.index("triton ")
    joined = " ".join(text.split())
    assert "penstock 2310 ± 40 7.0 4.5 6.8 90% 3300 23/1/0" in joined
    assert "knowing all arrivals 2576 ± 72, 2 t(b) ≤ SLO (Nexus) 2894" in joined
    assert f"triton: {KNOBS} (best of 280)" in joined


def test_plan_of_a_measured_profile_is_one_object(tmp_path: Path) -> None:
    """With --json, two processes: bounds, and a row a policy with its rate and what became of it under overload."""
    profile = tmp_path / "mine.toml"
    profile.write_text("points = [[1, 4.0], [16, 8.0]]\n", encoding="utf-8")
    done = plan(
        *("--profile", str(profile), "--slo-ms", "20", "--policy", "penstock", "--policy", "batch 1"),
        *("--count", "1000", "--seeds", "2", "--overload", "2", "--jobs", "2", "--json"),
    )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["races"]
    assert (found["profile"], found["slo_ms"], found["arrivals"]) == ("mine", 20.0, "poisson")
    assert found["bounds"]["nexus"] == pytest.approx(2000.0)
    ours, naive = found["rows"]
    assert (ours["policy"], naive["policy"]) == ("penstock", "batch 1")
    assert 3 * naive["rate"] < ours["rate"] < found["bounds"]["capacity"]
    assert ours["overload"][0]["times"] == 2.0
    assert done.stderr == ""


def test_plan_without_a_terminal_writes_its_progress_as_lines(tmp_path: Path) -> None:
    """Who waits for minutes sees on standard error how far it is; the columns of overload say what they are."""
    profile = tmp_path / "mine.toml"
    profile.write_text("points = [[1, 4.0], [16, 8.0]]\n", encoding="utf-8")
    quick = ("--slo-ms", "20", "--policy", "penstock", "--count", "1000", "--seeds", "2", "--overload", "2")
    done = plan("--profile", str(profile), *quick, "--jobs", "1")
    assert done.stderr.splitlines() == [f"replayed {parts} of 2 parts" for parts in range(3)]
    assert "% refused/" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--profile", "p100", "--slo-ms", "7"), "there is no profile 'p100': name one of v100, h200"),
        (("--profile", "v100", "--slo-ms", "2"), "--slo-ms 2: v100 takes 2.1275 ms for one row; give more"),
        (("--profile", "v100", "--slo-ms", "7", "--arrivals", "calm"), "--arrivals calm: name one of poisson, bursty"),
        (("--profile", "v100", "--slo-ms", "7", "--policy", "luck"), "--policy luck: name one of penstock, triton"),
        (("--profile", "v100", "--slo-ms", "7", "--share", "1.0"), "--share 1.0: give 0.5 or more, below 1"),
        (("--profile", "v100", "--slo-ms", "7", "--overload", "0"), "--overload 0: give more than 0"),
        (("--profile", "v100"), "say within how many ms: --slo-ms 50"),
        (("--slo-ms", "7"), "say which engine: --profile v100"),
        (("--slo-ms", "7", "--profile", "v100", "--model", "street"), "say which engine"),
    ],
)
def test_plan_refuses_what_it_cannot_run_in_one_sentence(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2 and what to give instead; nothing runs."""
    from penstock.cli.main import main

    monkeypatch.setattr(sys, "argv", ["penstock", "plan", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


@contextmanager
def long_plan() -> Iterator[tuple["subprocess.Popen[str]", list[psutil.Process]]]:
    """One that would run for minutes, with its two workers."""
    arguments = ("--profile", "v100", "--slo-ms", "50", "--count", "500000", "--jobs", "2", "--json")
    parent = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.main", "plan", *arguments],
        cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while len(workers := psutil.Process(parent.pid).children()) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(workers) == 2
        yield parent, workers
    finally:
        parent.kill()
        parent.communicate(timeout=30)


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_plan_that_is_stopped_leaves_no_worker(sign: signal.Signals, code: int) -> None:
    """Ctrl-C ends it with one sentence, kill -9 without; its processes go with it either way."""
    with long_plan() as (parent, workers):
        parent.send_signal(sign)
        output, said = parent.communicate(timeout=30)
        assert parent.returncode == code
        assert (output, said) == ("", "penstock: stopped: nothing was kept\n" if sign is signal.SIGINT else "")
        assert psutil.wait_procs(workers, timeout=20)[1] == []


def page(fit: FitReport | None, slo_p99_ms: float | None = 20.0) -> ModelBatchReport:
    """What a gateway tells of a model."""
    options = OptionsReport(32, 2, slo_p99_ms, 0.0, 512, 1 << 20)
    return ModelBatchReport("street", BatchOwner.GATEWAY, options, None, fit, [], {}, {}, "")


def test_the_engine_of_a_running_model_is_what_its_gateway_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fit, its largest batch, its instances unless others are said, and its SLO where none is said."""
    monkeypatch.setattr(GatewayClient, "explain_model", lambda self, name: page(FitReport(4.0, 0.5, 0.1, 90)))
    gateway = GatewayClient("http://gateway", "")
    found = engine_of_model("street", gateway, instances=None, way_ms=1.0)
    assert found.engine.profile.seconds(32) == pytest.approx(0.020)
    assert (found.engine.profile.max_batch_size, found.engine.instances, found.slos_ms) == (32, 2, (20.0,))
    assert (found.engine.before_s, found.engine.after_s) == (0.001, 0.001)
    assert engine_of_model("street", gateway, instances=3, way_ms=0.0).engine.instances == 3


def test_a_model_that_was_not_measured_yet_cannot_be_planned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence that says what to do."""
    monkeypatch.setattr(GatewayClient, "explain_model", lambda self, name: page(None))
    with pytest.raises(typer.Exit):
        engine_of_model("street", GatewayClient("http://gateway", ""), instances=None, way_ms=0.0)
    assert "http://gateway does not know yet how long street takes: send it requests" in capsys.readouterr().err
