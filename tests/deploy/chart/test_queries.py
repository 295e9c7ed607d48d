"""What others are to ask Prometheus can be asked, and the files of deploy/monitoring arrive whole."""

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
import yaml

from tests.deploy.chart.objects import pods_of, selects
from tests.deploy.chart.rendering import CHART, render
from tests.deploy.chart.value_sets import NAMES, SETS, merged, rendered

pytestmark = pytest.mark.xdist_group("chart")

MONITORING = CHART.parents[1] / "monitoring"
ADAPTER = MONITORING / "prometheus-adapter.yaml"
WITH_RULES = [name for name in NAMES if SETS[name].get("monitoring", {}).get("rules", {}).get("enabled")]
WITH_MONITORS = [name for name in NAMES if SETS[name].get("monitoring", {}).get("serviceMonitor", {}).get("enabled")]
WITH_DASHBOARDS = [name for name in NAMES if SETS[name].get("monitoring", {}).get("dashboards", {}).get("enabled")]


def rule_groups() -> list[dict[str, Any]]:
    """The groups of all files of rules, in their order."""
    files = sorted((MONITORING / "rules").glob("*.yaml"))
    return [group for path in files for group in yaml.safe_load(path.read_text())["groups"]]


def keda_queries() -> Iterator[str]:
    """What KEDA asks."""
    for name in ("keda", "everything"):
        (scaled,) = rendered(name).of_kind("ScaledObject")
        yield from (each["metadata"]["query"] for each in scaled["spec"]["triggers"])


def adapter_rules() -> list[dict[str, Any]]:
    """prometheus-adapter's rules: of the values of its chart, or of its own file."""
    loaded = yaml.safe_load(ADAPTER.read_text())
    rules = loaded["rules"]
    found: list[dict[str, Any]] = rules if isinstance(rules, list) else rules["custom"]
    return found


def as_asked(query: str, series: str) -> str:
    """The adapter's template as it asks: about some pods of a namespace."""
    words = {"Series": series, "LabelMatchers": 'namespace="ml",pod=~"a|b"', "GroupBy": "pod", "LabelValuesByName": ""}
    return re.sub(r"<<\s*\.(\w+)\s*>>", lambda match: words[match[1]], query)


def test_kedas_queries_parse_and_ask_about_this_release() -> None:
    """One number each: a sum over this release's gateways, of metrics of ours."""
    queries = list(keda_queries())
    assert len(queries) >= 4
    for query in queries:
        assert isinstance(promql_parser.parse(query), promql_parser.AggregateExpr), query
        assert 'namespace="ml"' in query
        assert "penstock_inflight_requests" in query or "penstock_queue_seconds" in query


def test_adapters_queries_parse_and_name_what_the_hpa_asks_for() -> None:
    """The HPA's metrics are those that prometheus-adapter's file makes."""
    made = set()
    for rule in adapter_rules():
        series = re.match(r"\w+", rule["seriesQuery"])
        assert series
        promql_parser.parse(rule["seriesQuery"])
        promql_parser.parse(as_asked(rule["metricsQuery"], series[0]))
        made.add(rule.get("name", {}).get("as") or series[0])
    (hpa,) = rendered("hpa").of_kind("HorizontalPodAutoscaler")
    asked = {each["pods"]["metric"]["name"] for each in hpa["spec"]["metrics"] if each["type"] == "Pods"}
    assert asked == {"penstock_inflight_requests", "penstock_queue_seconds"}
    assert asked <= made


@pytest.mark.parametrize("name", WITH_RULES)
def test_rules_are_those_of_the_files_untouched_and_parse(name: str) -> None:
    """deploy/monitoring's rules reach the operator as they are, `{{ $labels }}` and all."""
    rendered_groups = [group for each in rendered(name).of_kind("PrometheusRule") for group in each["spec"]["groups"]]
    assert sorted(rendered_groups, key=str) == sorted(rule_groups(), key=str)
    assert rendered_groups
    for group in rendered_groups:
        for rule in group["rules"]:
            promql_parser.parse(str(rule["expr"]))


@pytest.mark.parametrize("name", WITH_DASHBOARDS)
def test_dashboards_are_those_of_the_files(name: str) -> None:
    """Each dashboard in a ConfigMap with the label that Grafana's sidecar looks for."""
    files = {path.name: json.loads(path.read_text()) for path in (MONITORING / "dashboards").glob("*.json")}
    maps = [
        each
        for each in rendered(name).of_kind("ConfigMap")
        if "grafana_dashboard" in each["metadata"].get("labels", {})
    ]
    found = {file: json.loads(text) for each in maps for file, text in each["data"].items()}
    assert files
    assert found == files
    assert all(len(json.dumps(each["data"])) < 1_000_000 for each in maps), "a ConfigMap takes 1 MiB"


@pytest.mark.parametrize("name", WITH_MONITORS)
def test_service_monitors_find_every_pod_that_has_metrics_once(name: str) -> None:
    """Each monitor selects Services that have the port it names; no pod is scraped twice, none is left out."""
    scraped: list[str] = []
    services = rendered(name).of_kind("Service")
    for monitor in rendered(name).of_kind("ServiceMonitor", "PodMonitor"):
        found = [each for each in services if selects(monitor["spec"]["selector"], each["metadata"]["labels"])]
        assert found
        for endpoint in monitor["spec"]["endpoints"]:
            assert endpoint.get("path", "/metrics") == "/metrics"
            for service in found:
                if endpoint["port"] not in {port["name"] for port in service["spec"]["ports"]}:
                    continue
                selector = {"matchLabels": service["spec"]["selector"]}
                scraped += [each.component for each in pods_of(rendered(name)) if selects(selector, each.labels)]
    has_metrics = {"gateway"} | ({"video"} if SETS[name].get("video", {}).get("enabled") else set())
    assert sorted(scraped) == sorted(has_metrics)


def test_monitor_sends_the_key_that_the_gateways_require() -> None:
    """It is a Bearer token from the named Secret; without a Secret, no token is sent."""

    def authorization(over: dict[str, Any]) -> object:
        monitors = render(merged(SETS["monitoring"], over)).of_kind("ServiceMonitor")
        return next(
            monitor["spec"]["endpoints"][0].get("authorization")
            for monitor in monitors
            if monitor["spec"]["endpoints"][0]["port"] == "metrics"
        )

    over = {
        "gateway": {"settings": {"metrics_key_required": True}},
        "monitoring": {"serviceMonitor": {"apiKeySecret": "scrape"}},
    }
    assert authorization(over) == {"type": "Bearer", "credentials": {"name": "scrape", "key": "api-key"}}
    assert authorization({}) is None
