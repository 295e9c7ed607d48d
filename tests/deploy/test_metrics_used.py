"""Nothing is exported, recorded or listed in vain: each metric is shown or watched, or it is said why not."""

import csv
import json
import re
from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.metric_tables import MONITORING, exported_metrics, external_rows, known_metrics, rules
from tests.deploy.promql import metrics_of

# Of a metric that neither a dashboard nor a rule uses: why it is there.
NOT_USED = {
    "process_virtual_memory_bytes": "comes with the library's other figures; resident memory is what counts",
    "penstock_gpu_info": "gives a query the UUID of a card, by which other exporters name it",
}
TRITONS_PAGE = MONITORING.parents[1] / "tests" / "deploy" / "triton_metrics.txt"


def expressions() -> Iterator[str]:
    """Of every rule, and of every panel."""
    yield from (rule["expr"] for rule in rules())
    for path in (MONITORING / "dashboards").glob("*.json"):
        document = json.loads(path.read_text())
        yield from (marks["expr"] for marks in document["annotations"]["list"])
        for panel in document["panels"]:
            for one in (panel, *panel.get("panels", ())):
                yield from (target["expr"] for target in one.get("targets", ()))


def test_metrics_are_each_used_or_it_is_said_why_not() -> None:
    """Of ours, of other programs' that are listed, and of those that the rules record."""
    known = known_metrics()
    used = {known[name].family for expression in expressions() for name in metrics_of(expression) if name in known}
    families = {one.family for one in known.values()}
    assert families - used == set(NOT_USED)


def test_tritons_metrics_are_those_of_the_real_triton() -> None:
    """Name, kind and labels of each nv_… are those on the page that the bundled Triton showed."""
    families = {family.name: family for family in text_string_to_metric_families(TRITONS_PAGE.read_text())}
    for row in external_rows():
        if row["exporter"] == "triton":
            family = families[row["name"]]
            assert family.type == row["kind"], row["name"]
            assert {label for sample in family.samples for label in sample.labels} == set(row["labels"]), row["name"]


def test_dcgm_exporter_exports_what_is_used() -> None:
    """Its file of counters has exactly the metrics that are listed, with their kinds, in three fields a line."""
    lines = [line for line in (MONITORING / "dcgm-counters.csv").read_text().splitlines() if line and line[0] != "#"]
    exported = {}
    for name, kind, what in csv.reader(lines):
        assert what.strip()
        exported[name.strip()] = kind.strip()
    assert exported == {row["name"]: row["kind"] for row in external_rows() if row["exporter"] == "dcgm"}
    assert "DCGM_FI_PROF_SM_ACTIVE" in exported


def test_external_metrics_are_listed_once_and_by_an_exporter_that_is_described() -> None:
    """No name twice, none of ours, and none that differs from its neighbours in a label by a slip of the pen."""
    names = [row["name"] for row in external_rows()]
    assert len(names) == len(set(names))
    assert not [name for name in names if name.startswith("penstock")]
    text = (MONITORING / "external_metrics.toml").read_text()
    assert {row["exporter"] for row in external_rows()} == set(re.findall(r"^\[exporters\.([\w-]+)\]", text, re.M))
    assert len({one.name for one in exported_metrics()}) == len(exported_metrics())
