"""A real Prometheus (Debian's) beside a test: it scrapes its targets every second, and answers queries."""

import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.engines.triton.endpoints import pick_free_ports
from tests.support.waiting import wait_for

RULES = Path(__file__).resolve().parents[2] / "deploy" / "monitoring" / "rules"
READY_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Prometheus:
    """Where it listens."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query; AssertionError with Prometheus' own words where it refuses."""
        body = urllib.parse.urlencode({"query": expression}).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query", body, timeout=10) as answer:
                document = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from None
        result = document["data"]["result"]
        return result if document["data"]["resultType"] == "vector" else [{"metric": {}, "value": result}]

    def wait_for(self, expression: str, timeout_s: float = 20.0) -> list[dict[str, Any]]:
        """Its first answer that is not empty."""
        found: list[dict[str, Any]] = []

        def has_answer() -> bool:
            found[:] = self.query(expression)
            return bool(found)

        wait_for(has_answer, timeout_s, f"an answer to {expression!r}")
        return found


def scrape(job: str, target: str, path: str = "/metrics", **labels: str) -> dict[str, Any]:
    """Of one target, host:port. labels: what its discovery would add."""
    return {"job_name": job, "metrics_path": path, "static_configs": [{"targets": [target], "labels": labels}]}


@contextlib.contextmanager
def prometheus(folder: Path, *scrapes: Mapping[str, Any], rules: Path | None = RULES) -> Iterator[Prometheus]:
    """One with our rules. scrapes: what of, as in its configuration. rules: their folder; None for none."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no prometheus here: Debian's package prometheus has it")
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "500ms"},
        "rule_files": [str(rules / "*.yaml")] if rules is not None else [],
        "scrape_configs": list(scrapes),
    }
    folder.mkdir(exist_ok=True)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (port,) = pick_free_ports("127.0.0.1", 1)
    listen = f"--web.listen-address=127.0.0.1:{port}"
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", listen]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _wait_until_ready(f"http://127.0.0.1:{port}", process, folder / "log")
            yield Prometheus(f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            process.wait(20)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=2):
            return
        time.sleep(0.05)
    raise AssertionError(f"prometheus was not ready: {log.read_text()[-2000:]}")
