"""Every metric that a rule or a dashboard may use, from the tables that declare them."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from penstock.gateway.metrics import PROCESS_METRICS
from penstock.metric_table import METRICS as GATEWAY_TABLE
from penstock_video.metrics import TABLE as VIDEO_TABLE
from tests.deploy.promql import labels_of, parsed

MONITORING = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
# What Prometheus puts on every series, and what its Kubernetes discovery and the operator add.
TARGET_LABELS = frozenset({"job", "instance", "namespace", "pod", "container", "service", "endpoint", "node"})
EXPORTED_LABELS = frozenset({"exported_namespace", "exported_pod", "exported_container"})


@dataclass(frozen=True, slots=True)
class Known:
    """One series' name: its kind (counter, gauge, bucket, recorded), every label that it may have, and who exports it.

    family: the name of its row, where a histogram has three.
    """

    name: str
    family: str
    kind: str
    labels: frozenset[str]
    exporter: str


def _declared(prefix: str, exporter: str, table: Any) -> list[Known]:
    """The series of our own tables: both have rows of name, kind and labels."""
    found = []
    for row in table:
        family, labels = f"{prefix}{row.name}", frozenset(row.labels) | TARGET_LABELS
        kind = row.kind.value.partition(",")[0]
        if kind in ("histogram", "summary"):
            found += [Known(f"{family}_{part}", family, "counter", labels, exporter) for part in ("sum", "count")]
        if kind == "histogram":
            found.append(Known(f"{family}_bucket", family, "bucket", labels | {"le"}, exporter))
        if kind in ("counter", "gauge"):
            found.append(Known(family, family, kind, labels, exporter))
    return found


def external_rows() -> list[dict[str, Any]]:
    """The rows of external_metrics.toml."""
    rows: list[dict[str, Any]] = tomllib.loads((MONITORING / "external_metrics.toml").read_text())["metric"]
    return rows


def _external() -> list[Known]:
    found = []
    for row in external_rows():
        labels = frozenset(row["labels"]) | TARGET_LABELS
        if row["exporter"] == "dcgm":
            labels |= EXPORTED_LABELS
        found.append(Known(row["name"], row["name"], row["kind"], labels, row["exporter"]))
    return found


def rules() -> list[dict[str, Any]]:
    """Every rule of deploy/monitoring/rules, in the files' order."""
    found = []
    for path in sorted((MONITORING / "rules").glob("*.yaml")):
        for group in (yaml.safe_load(path.read_text()) or {}).get("groups", []):
            found += group["rules"]
    return found


@cache
def known_metrics() -> dict[str, Known]:
    """Every series that may be named, by its name; recording rules with the labels that their expressions leave."""
    named = {one.name: one for one in exported_metrics()}
    for rule in rules():
        if "record" in rule:
            labels = labels_of(parsed(rule["expr"]), named) | rule.get("labels", {}).keys()
            known = Known(rule["record"], rule["record"], "recorded", frozenset(labels), "rules")
            before = named.get(known.name)  # a rule that is recorded twice has one's labels or the other's
            named[known.name] = known if before is None else _either(before, known)
    return named


def _either(one: Known, other: Known) -> Known:
    return Known(one.name, one.family, one.kind, one.labels | other.labels, one.exporter)


def exported_metrics() -> list[Known]:
    """Every series that a program exports: ours and other people's."""
    ours = _declared("penstock_", "gateway", GATEWAY_TABLE) + _declared("penstock_video_", "video", VIDEO_TABLE)
    return ours + [_of_process(name) for name in sorted(PROCESS_METRICS)] + _external()


def _of_process(name: str) -> Known:
    kind = "counter" if name.endswith("_total") else "gauge"
    return Known(name, name, kind, TARGET_LABELS, "the gateway and the video program")
