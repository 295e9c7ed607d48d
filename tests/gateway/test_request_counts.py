"""Counts of inferences by model, and figures over the last minute."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.gateway.metrics import Metrics
from penstock.gateway.request_counts import RequestCounts, RequestHistory, quantile, samples_in, sum_samples
from penstock.metric_table import SECONDS
from tests.support.stack import CHECKOUT

BUCKETS = len(SECONDS) + 1


def counted(*at: tuple[int, int]) -> RequestCounts:
    """Durations by (bucket, count)."""
    durations = [0] * BUCKETS
    for bucket, count in at:
        durations[bucket] = count
    return RequestCounts({"200": sum(durations)}, durations)


def test_counts_of_a_process_are_by_model_over_all_protocols() -> None:
    """Each duration is in its own bucket, the longest in the last."""
    metrics = Metrics()
    for protocol, code, seconds in (("http", "200", 0.0004), ("http", "503", 0.0004), ("grpc", "OK", 99.0)):
        metrics.request_done(model="m", protocol=protocol, code=code, seconds=seconds)
    metrics.request_done(model="n", protocol="http", code="200", seconds=0.02)
    counts = metrics.request_counts()
    assert counts["m"] == RequestCounts({"200": 1, "503": 1, "OK": 1}, [2, *[0] * (BUCKETS - 2), 1])
    assert counts["n"].durations[5] == 1  # 0.01 to 0.025 s


def test_counts_of_several_processes_are_their_sums(tmp_path: Path) -> None:
    """Read from the files that the processes share, also of processes that ended."""
    script = (
        "import sys; from pathlib import Path; from penstock.gateway.metrics import Metrics, MetricFiles;"
        "m = Metrics(MetricFiles(Path(sys.argv[1]), sys.argv[2]));"
        "m.request_done(model='m', protocol='http', code='200', seconds=0.0004); m.batch('m', 3);"
        "m.request_done(model='m', protocol='grpc', code='OK', seconds=99)"
    )
    for name in ("core", "front-1"):
        command = [sys.executable, "-c", script, str(tmp_path), name]
        subprocess.run(command, timeout=60, cwd=CHECKOUT, check=True)
    assert sum_samples(samples_in(tmp_path)) == {"m": RequestCounts({"200": 2, "OK": 2}, [2, *[0] * (BUCKETS - 2), 2])}


def test_figures_are_over_the_last_minute_only() -> None:
    """Older requests do not count; a request in the last minute does."""
    history, old = RequestHistory(), {"m": counted((0, 500))}
    for now in range(0, 200, 10):
        history.add(now, old)
    new = {"m": counted((0, 500), (3, 60))}
    figures = history.figures("m", 200.0, new)
    assert (figures.over_s, figures.rate_per_s) == (60.0, 1.0)
    assert figures.p50_s == pytest.approx(0.00375)  # the middle of the bucket from 2.5 to 5 ms
    assert history.figures("m", 200.0, new, over_s=10).rate_per_s == 6.0
    assert history.figures("other", 200.0, new).rate_per_s == 0.0


def test_figures_before_the_first_sample_are_empty() -> None:
    """A rate over no time is not a rate."""
    history = RequestHistory()
    assert history.figures("m", 1.0, {"m": counted((0, 5))}).p50_s is None
    history.add(1.0, {})
    assert history.figures("m", 1.0, {"m": counted((0, 5))}).rate_per_s == 0.0
    assert history.figures("m", 3.0, {"m": counted((0, 5))}).rate_per_s == 2.5


def test_counts_that_begin_again_give_no_negative_rate() -> None:
    """As after a restart of a worker whose files were removed."""
    history = RequestHistory()
    history.add(0.0, {"m": counted((0, 500))})
    assert history.figures("m", 10.0, {"m": counted((0, 5))}).rate_per_s == 0.0


@pytest.mark.parametrize(
    ("durations", "share", "seconds"),
    [
        ({0: 10}, 0.5, 0.00025),
        ({0: 99, 13: 1}, 0.99, 0.0005),
        ({0: 98, 13: 2}, 0.99, 7.5),
        ({BUCKETS - 1: 3}, 0.5, 10.0),
        ({}, 0.5, math.nan),
    ],
)
def test_quantile_is_interpolated_in_its_bucket(durations: dict[int, int], share: float, seconds: float) -> None:
    """As Prometheus' histogram_quantile; durations without an upper bound count as the last bound."""
    found = quantile(counted(*durations.items()).durations, share)
    assert (math.nan if found is None else found) == pytest.approx(seconds, nan_ok=True)
