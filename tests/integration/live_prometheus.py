"""A Prometheus with the rules that users get, in a hurry, and what it is asked: numbers, windows, what fires."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

from tests.integration.prometheus_server import RULES, Prometheus, prometheus
from tests.support.http import call

UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}


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


class LivePrometheus(Prometheus):
    """Beyond queries: its API, one number of a query, the samples of a window, alerts."""

    def ask(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer of its API."""
        answer = call("GET", f"{self.url}/api/v1/{path}?{urlencode(parameters)}").json
        assert answer["status"] == "success", answer
        return answer["data"]

    def finite(self, expression: str, **parameters: str) -> list[float]:
        """The numbers that there are now, or at the parameter `time`; no NaN."""
        found = [float(row["value"][1]) for row in self.ask("query", query=expression, **parameters)["result"]]
        return [value for value in found if math.isfinite(value)]

    def number(self, expression: str, **parameters: str) -> float | None:
        """The single finite value, or None."""
        found = self.finite(expression, **parameters)
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
def live_prometheus(folder: Path, *scrapes: Mapping[str, Any], hurry: float) -> Iterator[LivePrometheus]:
    """Until the end of the with. It looks for targets every 5 s only: name those that are still to come, too."""
    rules = folder / "rules"
    rules.mkdir()
    write_hasty_rules(rules, hurry)
    with prometheus(folder / "server", *scrapes, rules=rules) as server:
        yield LivePrometheus(server.url)
