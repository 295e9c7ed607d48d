"""The bench of the Python client: its figures, and that its calls get results."""

import json
from pathlib import Path

import pytest

from loadtest.bench.gateway import client_overhead
from loadtest.bench.gateway.client_overhead import OURS, measure, rows_of


def test_overhead_is_the_difference_of_a_rounds_medians() -> None:
    """Round by round, over each client that was measured."""
    rows = rows_of({"urllib3": [100.0, 110.0, 105.0], OURS: [120.0, 121.0, 145.0]})
    assert [row["us"].median for row in rows] == [105.0, 121.0]
    assert rows[0]["over_us"] == {}
    over = rows[1]["over_us"]["urllib3"]
    assert (over.median, over.low, over.high) == (20.0, 11.0, 40.0)


def test_each_round_has_a_stretch_of_each_client_after_a_warm_up() -> None:
    """The first round is not counted."""
    called: list[str] = []
    medians = measure({name: lambda name=name: called.append(name) for name in "ab"}, rounds=3, count=5)
    assert {name: len(figures) for name, figures in medians.items()} == {"a": 3, "b": 3}
    assert (called.count("a"), called.count("b")) == (20, 20)


def test_bench_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A short run against its own server: every client reads ten objects, and all have a row."""
    monkeypatch.setattr("sys.argv", ["bench", "--rounds", "1", "--calls", "3", "--json", str(tmp_path / "a.json")])
    assert client_overhead.main() == 0
    rows = json.loads((tmp_path / "a.json").read_text())["results"]
    assert {"http.client", "urllib3", OURS} <= {row["client"] for row in rows}
