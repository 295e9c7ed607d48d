"""The table of results has one line for each headline of the newest committed results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtest.bench.results_table import HEADLINES, NOTHING, main, results_table
from penstock_load.committed import ResultsError, read_committed, target_rows
from penstock_load.measure.measures import measure
from penstock_load.measure.run_folder import write_run
from penstock_load.results import Run, State
from penstock_load.scenario import read_scenario, scenario_names
from penstock_load.targets import read_targets, scenario_targets, slo_targets
from penstock_load.verdict import Circumstances, judge
from tests.loadtest.runs import MACHINE, make_run, make_run_records

TARGETS = read_targets()
PAGE = "# Ours\n\n<!-- results -->\nold\n<!-- /results -->\n\nMore.\n"


def judged_run(scenario: str, **options: Any) -> Run:
    """A made-up run of two cores with what it measured and how it was judged."""
    run = make_run(scenario=scenario, **options)
    run = msgspec.structs.replace(run, server_hardware="", measurements=measure(run.phases))
    here = Circumstances(machine=MACHINE, models=run.models, slo_p99_ms=run.slo_p99_ms, complaints=run.complaints)
    documented = scenario_targets(TARGETS, scenario)
    rows = (*documented, *slo_targets(read_scenario(scenario), documented=documented))
    return msgspec.structs.replace(run, verdicts=judge(rows, run.measurements, here))


@pytest.fixture
def keep(tmp_path: Path) -> Callable[[str, object], Path]:
    """Puts a result into the folder of results, which it returns."""

    def write(name: str, content: object) -> Path:
        path = tmp_path / "results" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Run):
            write_run(path.parent, content)
        else:
            path.write_bytes(content if isinstance(content, bytes) else msgspec.json.encode(content))
        return tmp_path / "results"

    return write


def spread(median: float) -> dict[str, float]:
    """As a bench writes it."""
    return {"median": median, "low": median * 0.9, "high": median * 1.1}


def bench(name: str, **result: object) -> dict[str, object]:
    """As bench.report.write_json writes it."""
    conditions = {"cpu": "AMD EPYC, 2 cores, load 0.4", "versions": "", "command": f"python -m loadtest.bench.{name}"}
    return {"conditions": conditions, "results": [{"model": "street", **result}]}


def test_run_is_a_line_a_headline(keep: Callable[[str, object], Path]) -> None:
    """Scenario, what, median with rounds, target, verdict and hardware of the two things that image-steady shows."""
    run = judged_run("image-steady")
    lines = results_table(read_committed(TARGETS, keep("image-steady-here/run.json", run))).splitlines()
    spreads = {one.measure: one.spread for one in run.measurements}
    assert lines[0] == "| scenario | what | measured | target | verdict | on |"
    assert lines[2].startswith("| image-steady | street: capacity | ")
    assert f"| {spreads['capacity_per_s'].median:,.0f}/s (" in lines[2]
    assert lines[2].endswith("|  |  | Imagined 3000 @ 2.0 GHz, 2 cores |")
    assert f"| {spreads['p99_ms'].median:.1f} ms (" in lines[3]
    assert lines[3].endswith("| at most 250 ms | pass | Imagined 3000 @ 2.0 GHz, 2 cores |")
    assert lines[4] == ""


def test_every_headline_is_measured_by_what_it_is_of() -> None:
    """The headlines name shipped scenarios and benches that targets speak of."""
    benches = {name for target in TARGETS for name in target.scenarios if name.startswith("bench ")}
    assert set(scenario_names()) <= HEADLINES.keys() <= set(scenario_names()) | benches


def test_failed_run_says_fail(keep: Callable[[str, object], Path]) -> None:
    """What a run failed stands in the table as failed."""
    run = judged_run("overload")
    table = results_table(read_committed(TARGETS, keep("overload-here/run.json", run)))
    assert "| at least 0.9 | fail |" in table


def test_untrusted_run_does_not_pass_in_the_table(keep: Callable[[str, object], Path]) -> None:
    """A run whose generator was the bottleneck is shown as not measured."""
    run = judged_run("image-burst", complaints=("the generator was too slow",))
    table = results_table(read_committed(TARGETS, keep("image-burst-here/run.json", run)))
    assert "| not measured |" in table
    assert "| pass |" not in table


def test_newest_run_of_a_machine_stands_and_other_machines_beside_it(keep: Callable[[str, object], Path]) -> None:
    """Of two runs on one machine the later counts; a run on other hardware is a line of its own."""
    run = judged_run("image-burst")
    later = msgspec.structs.replace(judged_run("image-burst", seed=3), began_at="2026-01-01T00:00:00Z")
    elsewhere = msgspec.structs.replace(run, server_hardware="1 × NVIDIA H200, 16 cores")
    keep("image-burst-a/run.json", later)
    keep("image-burst-b/run.json", run)
    committed = read_committed(TARGETS, keep("image-burst-h200/run.json", elsewhere))
    lines = [line for line in results_table(committed).splitlines() if line.startswith("| image-burst")]
    assert [line.rpartition("| ")[2] for line in lines] == [
        "Imagined 3000 @ 2.0 GHz, 2 cores |",
        "1 × NVIDIA H200, 16 cores |",
    ]
    newest = next(one.spread.median for one in later.measurements if one.measure == "p99_ms")
    assert f"| {newest:.1f} ms (" in lines[0]


def test_benches_are_judged_by_the_targets(keep: Callable[[str, object], Path]) -> None:
    """The endpoint's share of its limit, and the rate by the best peer's, with the peer that comes nearest to ours."""
    peers = [
        {"name": "penstock-triton", "rate_ratio": spread(1), "light_p99_ratio": spread(1), "server_ms": spread(9)},
        {"name": "penstock-embedded", "rate_ratio": spread(0.8), "light_p99_ratio": spread(1), "server_ms": spread(9)},
        {"name": "ray", "rate_ratio": spread(3), "light_p99_ratio": spread(0.2), "server_ms": spread(20)},
        {"name": "fastapi", "rate_ratio": spread(1.4), "light_p99_ratio": spread(1.2), "server_ms": spread(12)},
    ]
    keep("peers-here/peers.json", bench("peers.__main__ run", rows=peers, rounds=5))
    keep("bench-here/relay.json", bench("relay", ratio=spread(0.3)))
    committed = read_committed(TARGETS, keep("bench-here/endpoint.json", bench("image_endpoint", ratio=spread(0.6))))
    lines = results_table(committed).splitlines()
    assert lines[2].startswith(
        "| image_endpoint | street: rate by the harmonic limit of decode, resize, engine and outputs | 0.6 ("
    )
    assert lines[2].endswith("| at least 0.85 | fail | AMD EPYC, 2 cores |")
    assert "| 1.4 (1.26 to 1.54) | at least 1.3 | pass |" in lines[3]
    states = {row.target.id: row.state for row in target_rows(TARGETS, committed)}
    assert (states["peers-p99"], states["peers-cpu"], states["jpeg-limit"]) == (State.FAIL,) * 3


def test_sentences_stand_beside_the_figures_of_a_card_that_they_were_not_measured_on(
    keep: Callable[[str, object], Path],
) -> None:
    """The best way to batch against TensorRT's figure, fours against the framework's: compared, never judged."""
    rates = {(1, 1): 14, (1, 4): 50, (64, 1): 110, (2, 64): 140}
    rows = [{"callers": n, "sentences": m, "sentences_per_s": spread(rate)} for (n, m), rate in rates.items()]
    body = bench("gpu.sentences --json it") | {"results": [{"model": "opennmt-random"} | row for row in rows]}
    committed = read_committed(TARGETS, keep("sentences-here/sentences.json", body))
    targets = {row.target.id: row for row in target_rows(TARGETS, committed)}
    for name, words in (("opennmt-v100", "0.259 of its 541"), ("opennmt-v100-before", "1.91 of its 26.2")):
        assert targets[name].state is State.NOT_COMPARABLE
        assert words in targets[name].why
    keep("sentences-here/sentences.json", body | {"results": body["results"][:1]})  # type: ignore[operator]
    with pytest.raises(ResultsError, match=r"sentences\.json: no result of bench gpu\.sentences"):
        read_committed(TARGETS, committed[0].path.parent.parent)


def test_targets_show_their_newest_committed_verdict(keep: Callable[[str, object], Path]) -> None:
    """Every target has a row: what judged it last and on what, else what would measure it."""
    keep("tensor-small-a/run.json", judged_run("tensor-small", records=make_run_records(has_beside=True)))
    later = msgspec.structs.replace(judged_run("tensor-small"), began_at="2026-01-01T00:00:00Z")
    committed = read_committed(TARGETS, keep("tensor-small-b/run.json", later))
    rows = {row.target.id: row for row in target_rows(TARGETS, committed)}
    assert rows.keys() == {target.id for target in TARGETS}
    assert rows["gateway-added-p50"].state is State.PASS  # by the older run: the newer had nothing beside it
    assert rows["gateway-added-p50"].on == "Imagined 3000 @ 2.0 GHz, 2 cores"
    assert rows["gateway-triton-tiny"].state is State.NOT_COMPARABLE
    assert rows["video-limit"].why == "run python -m loadtest.bench.video"
    assert rows["video-streams-core"].why == "run penstock load run video-streams"
    assert rows["h200-jpeg"].why == "run python -m loadtest.bench.gpu"


def test_table_is_written_and_checked(
    keep: Callable[[str, object], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--check fails on an old table, --write puts the new one between the marks and touches nothing else."""
    results = ["--results", str(keep("image-burst-here/run.json", judged_run("image-burst")))]
    page = tmp_path / "README.md"
    page.write_text(PAGE)
    assert main([*results, "--check", str(page)]) == 1
    assert f"--write {page}" in capsys.readouterr().err
    assert page.read_text() == PAGE
    assert main([*results, "--write", str(page)]) == 0
    assert main([*results, "--check", str(page)]) == 0
    assert main(results) == 0
    printed = capsys.readouterr().out
    assert page.read_text() == PAGE.replace("old\n", printed)


def test_page_without_marks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A page with no place for the table is left alone, with a sentence that says what is missing."""
    page = tmp_path / "README.md"
    page.write_text("# Ours\n<!-- results -->\n")
    assert main(["--write", str(page)]) == 1
    assert "<!-- /results --> in it" in capsys.readouterr().err
    assert page.read_text() == "# Ours\n<!-- results -->\n"


def test_empty_folder_says_that_nothing_is_measured(tmp_path: Path) -> None:
    """Without results there is a sentence, and no empty table."""
    assert results_table(read_committed(TARGETS, tmp_path)) == f"{NOTHING}\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("image-steady-here/run.json", b'{"scenario": "image-steady"}'),
        ("image-steady-here/run.json", b"no JSON"),
        ("peers-here/peers.json", bench("peers", rows=[])),
        ("bench-here/endpoint.json", bench("image_endpoint", ratio=1.0)),
    ],
    ids=["a run of another version", "no JSON", "peers without rows", "a figure without spread"],
)
def test_result_that_cannot_be_read_is_named(
    name: str, content: object, keep: Callable[[str, object], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A broken result is one sentence with its file, and exit code 1: it is not left out in silence."""
    folder = keep(name, content)
    with pytest.raises(ResultsError, match=name):
        read_committed(TARGETS, folder)
    assert main(["--results", str(folder)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_table_of_the_results_is_made_from_the_committed_results() -> None:
    """The table has no figure that was typed by hand."""
    page = Path(__file__).resolve().parents[2] / "loadtest" / "results" / "README.md"
    assert main(["--check", str(page)]) == 0
