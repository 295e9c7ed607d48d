"""Metrics of several processes, each of them a process here, too: the library keeps one kind of value a process."""

import subprocess
import sys
from pathlib import Path

from tests.support.stack import CHECKOUT

COUNTS = """
import os, sys
from pathlib import Path
from penstock.gateway.metrics import Metrics, MetricFiles
metrics = Metrics(MetricFiles(Path(sys.argv[1]), sys.argv[2]))
"""
TELLS = "metrics.read('engine_up', lambda: 1); print(metrics.text().decode())"


def process(folder: Path, name: str, does: str) -> list[str]:
    """What a process of that name prints that does this; it ends as if it were killed, without a last word."""
    script = COUNTS + does + "\nsys.stdout.flush(); os._exit(0)"
    arguments = [sys.executable, "-c", script, str(folder), name]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, cwd=CHECKOUT, check=True)
    return done.stdout.splitlines()


def test_text_is_of_all_processes_and_of_those_that_were_killed(tmp_path: Path) -> None:
    """Counters and histograms are sums, over processes that run and those that are gone; readings are its own.

    Accepted stays the sum of answered, failed and cancelled, also over kills, and whatever was not written down.
    """
    done = "metrics.request_done(model='m', protocol='http', code='200', seconds=0.01);"
    accepts = "[metrics.inference_accepted() for _ in range(3)]; metrics.inference_answered(); metrics.flush()"
    ends = "metrics.inference_accepted(); metrics.inference_failed('full')"  # and is killed before it is written down
    for name, does in (("front-1", accepts), ("front-2", ""), ("front-1", ends)):
        process(tmp_path / "files", name, done + does)
    lines = process(tmp_path / "files", "front-1", TELLS)
    assert 'penstock_requests_total{code="200",model="m",protocol="http"} 3.0' in lines
    assert 'penstock_request_seconds_count{model="m",protocol="http"} 3.0' in lines
    assert "penstock_engine_up 1.0" in lines
    assert sum(line.startswith("process_open_fds ") for line in lines) == 1  # of the process that tells
    assert len(list((tmp_path / "files").glob("counter_*.db"))) == 2  # however often a worker is replaced
    assert "penstock_inferences_accepted_total 4.0" in lines
    assert "penstock_inferences_answered_total 1.0" in lines
    assert 'penstock_inferences_failed_total{reason="killed"} 2.0' in lines
    assert 'penstock_inferences_failed_total{reason="full"} 1.0' in lines
