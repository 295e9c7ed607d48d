"""Two runs side by side, and the folders that they are read from."""

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from penstock_load.measure import bootstrap
from penstock_load.measure.bootstrap import Blocks, blocks_of, draw_weights, resampled_percentiles
from penstock_load.measure.compare import ComparedFigure, RunComparison, compare
from penstock_load.measure.ledger import Ledger, percentiles_of
from penstock_load.measure.run_folder import (
    RECORDS_FILE,
    RecordsFile,
    RunFolder,
    RunFolderError,
    read_records,
    read_run_folder,
    write_run,
)
from penstock_load.results import Record, Run, ServerQuantile, Status
from tests.loadtest.runs import make_run, make_run_records

SEED_OF_A, SEED_OF_B = 6, 7  # each row errs once in 20 pairs; in this one none does


def folder_of(
    tmp_path: Path, name: str, records: list[Record], *, seconds: float = 20.0, **changes: object
) -> RunFolder:
    """A run of those records, written and read again."""
    path = tmp_path / name
    write_run(path, msgspec.structs.replace(make_run(records, seconds=seconds), **changes))
    with RecordsFile(path / RECORDS_FILE) as file:
        file.append(records[:100])
        file.append(records[100:])
    return read_run_folder(path)


def row(comparison: RunComparison, measure: str) -> ComparedFigure:
    """The comparison's row of that measure."""
    return next(it for it in comparison.rows if it.measure == measure)


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for these intervals."""
    monkeypatch.setattr(bootstrap, "RESAMPLES", 300)


@pytest.fixture(scope="module")
def run_a(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The run that others are compared with."""
    return folder_of(tmp_path_factory.mktemp("a"), "a", make_run_records(seconds=20.0, seed=SEED_OF_A))


def test_runs_of_the_same_server_show_no_difference(run_a: RunFolder, tmp_path: Path) -> None:
    """Two samples of one distribution: every interval covers 1, and the sentence says so."""
    a = run_a
    b = folder_of(tmp_path, "b", make_run_records(seconds=20.0, seed=SEED_OF_B), seed=0)
    found = compare(a, b)
    for measure in ("ok_per_s", "capacity_per_s", "p50_ms", "p95_ms", "p99_ms", "cpu_ms_per_ok"):
        one = row(found, measure)
        assert one.low is not None
        assert one.high is not None
        assert one.low < 1 < one.high
        assert one.is_trusted
        assert "no significant difference: -" in one.sentence
    assert row(found, "error_share").sentence == "error share: 0 in both"
    assert found.warnings == ()


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    """Of 40 pairs of runs without a difference, few p99s differ: 2 expected, 6 allowed."""
    random = np.random.default_rng(5)

    def resampled(seed: int) -> np.ndarray:
        latency_ms = 10 * np.exp(random.normal(0, 0.3, 600))
        ones = np.ones(60)
        blocks = Blocks(np.zeros(60, np.intp), ones, ones, ones, latency_ms, random.integers(0, 60, 600), None)
        return resampled_percentiles(draw_weights(blocks, seed), blocks, [990])[990]

    ratios = [resampled(1) / resampled(2) for _ in range(40)]
    misses = sum(not np.quantile(ratio, 0.025) <= 1 <= np.quantile(ratio, 0.975) for ratio in ratios)
    assert misses <= 6


def test_server_that_is_a_fifth_faster_is_found(run_a: RunFolder, tmp_path: Path) -> None:
    """A true 20 % lies in the interval of every percentile, and 1 does not."""
    a = run_a
    b = folder_of(tmp_path, "b", make_run_records(seconds=20.0, median_ms=8.0, seed=SEED_OF_B), seed=0)
    found = compare(a, b)
    for measure in ("p50_ms", "p95_ms", "p99_ms"):
        one = row(found, measure)
        assert one.low is not None
        assert one.high is not None
        assert one.low <= 0.8 <= one.high < 1
        assert one.sentence.endswith("%) lower")
    assert "no significant difference" in row(found, "ok_per_s").sentence


def test_figures_are_those_of_all_judged_records(tmp_path: Path) -> None:
    """Exact percentiles by nearest rank, not a histogram's; and the same runs give the same comparison."""
    records = make_run_records(seconds=20.0, refused=0.02, seed=SEED_OF_A)
    a = folder_of(tmp_path, "a", records)
    found = compare(a, a)
    judged = [record for record in records if record.phase == "steady"]
    waited = np.array([(it.done_s - it.intended_s) * 1e3 for it in judged if it.status is Status.OK])
    assert row(found, "p99_ms").a == pytest.approx(percentiles_of(waited).p99)
    assert row(found, "error_share").a == pytest.approx(1 - waited.size / len(judged))
    assert row(found, "ok_per_s").a == pytest.approx(waited.size / 60.0)
    assert row(found, "p99_ms").ratio == 1.0
    assert compare(a, a) == found


def test_resampled_percentiles_are_those_of_the_drawn_seconds() -> None:
    """The matrix gives what sorting each draw would."""
    random = np.random.default_rng(0)
    latency_ms, block_of = random.exponential(10.0, 500), random.integers(0, 20, 500)
    ones = np.ones(20)
    blocks = Blocks(np.zeros(20, dtype=np.intp), ones, ones, ones, latency_ms, block_of, None)
    weights = draw_weights(blocks, seed=1)
    found = resampled_percentiles(weights, blocks, [500, 990])
    for draw in (0, 1, 299):
        drawn = np.repeat(latency_ms, weights[draw].astype(int)[block_of])
        naive = percentiles_of(drawn)
        assert (found[500][draw], found[990][draw]) == (naive.p50, naive.p99)


def test_seconds_are_drawn_within_their_own_round() -> None:
    """Each draw holds as many seconds of a round as the round had."""
    run = make_run(make_run_records(rounds=2, seconds=5.0), seconds=5.0)
    judged = [(phase, Ledger()) for phase in run.phases if phase.is_judged]
    blocks = blocks_of(judged)
    weights = draw_weights(blocks, seed=1)
    assert weights.shape == (300, 10)
    for stratum in (0, 1):
        assert set(weights[:, blocks.stratum == stratum].sum(axis=1)) == {5.0}


def test_short_runs_are_not_to_be_trusted(tmp_path: Path) -> None:
    """Fewer than ten seconds: each row and a warning say so."""
    records = make_run_records(rounds=1, seconds=5.0)
    a = folder_of(tmp_path, "a", records, seconds=5.0)
    found = compare(a, a)
    assert all(not it.is_trusted and "not to be trusted" in it.sentence for it in found.rows)
    assert found.warnings == ("intervals come from as few as 5 seconds and are not to be trusted; run for longer",)


def test_what_makes_a_comparison_unfair_is_said(run_a: RunFolder, tmp_path: Path) -> None:
    """Scenario, rate, machine, hardware, models, seed, SLO and complaints: a sentence each."""
    a = run_a
    machine = msgspec.structs.replace(a.run.machine, cores=16)
    b = folder_of(
        tmp_path,
        "b",
        make_run_records(seconds=20.0, per_s=200.0),
        scenario="overload",
        machine=machine,
        server_hardware="NVIDIA H200",
        models=("people",),
        seed=7,
        slo_p99_ms=50.0,
        complaints=("The generator was the bottleneck.",),
    )
    found = compare(a, b).warnings
    warnings = "\n".join(found)
    assert len(found) == 8
    assert "the scenario differs: image-steady in A, overload in B" in warnings
    assert "the models differ: street in A, people in B" in warnings
    assert "the SLO differs: 100 ms in A, 50 ms in B" in warnings
    assert "the payloads' seed differs: 0 in A, 7 in B" in warnings
    assert "the server's hardware differs: cpu in A, NVIDIA H200 in B" in warnings
    assert "2 cores in A, Imagined 3000 @ 2.0 GHz, 16 cores in B" in warnings
    assert "the phase steady was offered " in warnings
    assert "B cannot be relied on: The generator was the bottleneck." in warnings


def test_errors_in_one_run_only_have_no_ratio(run_a: RunFolder, tmp_path: Path) -> None:
    """A share against none is described in words."""
    a = run_a
    b = folder_of(tmp_path, "b", make_run_records(seconds=20.0, refused=0.05, seed=SEED_OF_B))
    one = row(compare(a, b), "error_share")
    assert (one.ratio, one.low, one.high) == (None, None, None)
    assert one.sentence.startswith("B's error share is 0.0")
    assert one.sentence.endswith("where A's is 0")


def test_committed_runs_without_records_are_compared_by_their_rounds(run_a: RunFolder, tmp_path: Path) -> None:
    """Medians and spreads, and a warning that there is no interval."""
    a = run_a
    kept = tmp_path / "committed.json"
    os.replace(
        write_run(
            tmp_path / "b", make_run(make_run_records(seconds=20.0, median_ms=8.0, seed=SEED_OF_B), seconds=20.0)
        ),
        kept,
    )
    found = compare(a, read_run_folder(kept))
    one = row(found, "p50_ms")
    assert one.ratio == pytest.approx(0.8, rel=0.05)
    assert one.low is None
    assert "lower; the rounds do not overlap: A " in one.sentence
    assert found.warnings == (
        "no confidence intervals: committed has no records.jsonl, so medians of the rounds are compared",
    )


def test_run_folder_gives_back_what_was_written(tmp_path: Path) -> None:
    """Records line by line, and the run with all its figures, an infinite bound among them."""
    records = make_run_records(rounds=1, seconds=3.0, has_beside=True, refused=0.1)
    run = with_infinite_bound(make_run(records, seconds=3.0, has_reloads=True))
    write_run(tmp_path / "run", run)
    with RecordsFile(tmp_path / "run" / RECORDS_FILE) as file:
        file.append(records)
    found = read_run_folder(tmp_path / "run")
    assert (found.name, found.run, list(found.records())) == ("run", run, records)
    assert [path.name for path in sorted((tmp_path / "run").iterdir())] == ["records.jsonl", "run.json"]


def with_infinite_bound(run: Run) -> Run:
    """The same run, whose first witness saw latencies above the last bucket."""
    first, *others = run.phases
    assert first.witness is not None
    witness = msgspec.structs.replace(first.witness, quantiles=(ServerQuantile(0.99, 10_000.0, float("inf")),))
    return msgspec.structs.replace(run, phases=(msgspec.structs.replace(first, witness=witness), *others))


def test_what_is_no_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """Missing, not a run, of a newer format: each says which file and what to do."""
    with pytest.raises(RunFolderError, match=r"nowhere cannot be read \(No such file or directory\); name the folder"):
        read_run_folder(tmp_path / "nowhere")
    (tmp_path / "run.json").write_text('{"format": 1, "scenario": "x"}')
    with pytest.raises(RunFolderError, match=r"run.json is not a run, or is damaged .*run the scenario again"):
        read_run_folder(tmp_path)
    (tmp_path / "run.json").write_text('{"format": 2, "rows": []}')
    with pytest.raises(RunFolderError, match=r"format 2, and this version reads up to 1; read it with a newer"):
        read_run_folder(tmp_path)
    (tmp_path / "run.json").write_text("[1, 2")
    with pytest.raises(RunFolderError, match=r"is not a run, or is damaged"):
        read_run_folder(tmp_path)


def test_damaged_line_of_records_is_named(tmp_path: Path) -> None:
    """What stands before it is read; the error says which line it is."""
    path = tmp_path / RECORDS_FILE
    records = make_run_records(rounds=1, seconds=1.0)
    with RecordsFile(path) as file:
        file.append(records[:2])
    path.write_bytes(path.read_bytes() + b'{"round": 1, "pha')
    reading = read_records(path)
    assert [next(reading), next(reading)] == records[:2]
    with pytest.raises(RunFolderError, match=r"records.jsonl, line 3 is damaged"):
        next(reading)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_full_disk_is_reported_to_the_caller() -> None:
    """Records that cannot be kept are an error at once, not a short file."""
    with pytest.raises(OSError, match="No space left"), RecordsFile(Path("/dev/full")) as file:
        file.append(make_run_records(rounds=1, seconds=1.0))
