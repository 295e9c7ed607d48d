"""A real Prometheus of a test's own, with the rules that users get, every second."""

import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

from server.backends.triton_ports import pick_free_ports
from tests.conftest import CHECKOUT
from tests.integration.living import wait_for
from tests.integration.web import call

RULES = CHECKOUT / "deploy" / "monitoring" / "rules"
UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def prometheus_program() -> str:
    """The program; the test skips where there is none."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no prometheus here: Debian's package prometheus has it")
    return program


def rule_groups(file: Path) -> list[dict[str, Any]]:
    """Of one of the files that users get."""
    groups: list[dict[str, Any]] = yaml.safe_load(file.read_text())["groups"]
    return groups


def write_hasty_rules(folder: Path, hurry: float) -> None:
    """The rules with every `for` divided by `hurry`; windows and all else as they are."""
    for file in RULES.glob("*.yaml"):
        groups = rule_groups(file)
        for rule in (rule for group in groups for rule in group["rules"] if "for" in rule):
            rule["for"] = f"{round(_milliseconds(rule['for']) / hurry)}ms"
        (folder / file.name).write_text(yaml.safe_dump({"groups": groups}))


def _milliseconds(duration: str) -> float:
    unit = duration.lstrip("0123456789")
    return 1000 * float(duration.removesuffix(unit)) * UNITS_S[unit]


@dataclass(frozen=True)
class Sample:
    """One series of an answer."""

    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Prometheus:
    """It runs. targets: the folder in which each job has its file of targets."""

    url: str
    targets: Path

    def scrape(self, job: str, address: str, **labels: str) -> None:
        """Take a target in, under one of the jobs that it was started with. labels: of all its series."""
        file = self.targets / f"{job}.json"
        written = file.with_suffix(".new")
        written.write_text(json.dumps([{"targets": [address], "labels": labels}]))
        written.rename(file)
        wait_for(lambda: self.number(f'up{{job="{job}"}}') == 1, 20, f"{job} is scraped")

    def ask(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer of its API."""
        answer = call("GET", f"{self.url}/api/v1/{path}?{urlencode(parameters)}").json
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str, **parameters: str) -> list[Sample]:
        """What is there now."""
        result = self.ask("query", query=expression, **parameters)["result"]
        return [Sample(row["metric"], float(row["value"][1])) for row in result]

    def number(self, expression: str, **parameters: str) -> float | None:
        """The one finite number that there is; None where there is none, or none yet."""
        found = [sample.value for sample in self.query(expression, **parameters) if math.isfinite(sample.value)]
        return found[0] if len(found) == 1 else None

    def window(self, selector: str, seconds: int, at: float) -> list[float]:
        """The samples of the one series in that window, as they were scraped."""
        (series,) = self.ask("query", query=f"{selector}[{seconds}s]", time=str(at))["result"]
        return [float(value) for _, value in series["values"]]

    def firing(self, alert: str, job: str) -> list[dict[str, Any]]:
        """The alert's instances that fire for a job."""
        alerts: list[dict[str, Any]] = self.ask("alerts")["alerts"]
        named = [one for one in alerts if (one["labels"]["alertname"], one["labels"].get("job")) == (alert, job)]
        return [one for one in named if one["state"] == "firing"]


@contextmanager
def prometheus(folder: Path, jobs: tuple[str, ...], *, hurry: float) -> Iterator[Prometheus]:
    """Scrapes and evaluates every second, until the end of the with; no job has a target yet."""
    program = prometheus_program()
    (port,) = pick_free_ports("127.0.0.1", 1)
    rules, targets = folder / "rules", folder / "targets"
    rules.mkdir()
    targets.mkdir()
    write_hasty_rules(rules, hurry)
    scraped = [{"job_name": job, "file_sd_configs": [{"files": [str(targets / f"{job}.json")]}]} for job in jobs]
    times = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config = {"global": times, "rule_files": [str(rules / "*.yaml")], "scrape_configs": scraped}
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    flags = [
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([program, *flags, "--log.level=warn"], stdout=log, stderr=log)
    running = Prometheus(f"http://127.0.0.1:{port}", targets)
    try:
        wait_for(lambda: process.poll() is not None or _is_ready(running), 30, "Prometheus is ready")
        assert process.poll() is None, (folder / "prometheus.log").read_text()
        yield running
    finally:
        process.terminate()
        process.wait(20)


def _is_ready(running: Prometheus) -> bool:
    try:
        return call("GET", f"{running.url}/-/ready").status == 200
    except OSError:
        return False
