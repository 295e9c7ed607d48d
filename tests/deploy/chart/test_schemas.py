"""Every object is one that the API server takes, from Kubernetes 1.29 to the newest whose schema is known."""

import re
from collections.abc import Iterator

import pytest
import yaml

from tests.deploy.chart.objects import pods_of
from tests.deploy.chart.rendering import CHART, Document, render
from tests.deploy.chart.schemas_of import VERSIONS, faults
from tests.deploy.chart.value_sets import NAMES, SETS, merged, rendered

pytestmark = pytest.mark.xdist_group("chart")

LABEL = re.compile(r"|[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
DNS_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9](?:[-a-z0-9]{0,13}[a-z0-9])?")
MOST_OF_A_STATEFUL_SET = 52  # its pods carry a label of its name and 11 characters
LONGEST_RELEASE = "a-release-whose-name-is-as-long-as-helm-allows-it-xyz"


@pytest.mark.parametrize("name", NAMES)
def test_objects_keep_the_strict_schema_of_every_version(name: str) -> None:
    """No unknown field, no wrong type, nothing required is missing, from Kubernetes 1.29 to the newest."""
    found = {
        (version, each["kind"], each["metadata"]["name"]): faults(each, version)
        for version in VERSIONS
        for each in rendered(name).objects
    }
    assert {who: what for who, what in found.items() if what} == {}


def test_versions_are_all_that_the_schemas_know_from_the_charts_oldest_on() -> None:
    """The oldest is the one that Chart.yaml promises."""
    promised = yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"]
    assert promised == ">=1.29.0-0"
    assert VERSIONS[0].startswith("1.29.")
    assert len(VERSIONS) >= 9


def labels_in(value: object) -> Iterator[tuple[str, str]]:
    """Every label that is set or selected by, anywhere in an object."""
    if isinstance(value, list):
        for each in value:
            yield from labels_in(each)
    if isinstance(value, dict):
        for key, each in value.items():
            if key in ("labels", "matchLabels", "selector", "nodeSelector") and isinstance(each, dict):
                yield from ((name, text) for name, text in each.items() if isinstance(text, str))
            yield from labels_in(each)


def bad_names(document: Document) -> Iterator[str]:
    """Names and labels that no schema forbids and the API server refuses."""
    name: str = document["metadata"]["name"]
    most = MOST_OF_A_STATEFUL_SET if document["kind"] == "StatefulSet" else 63
    is_of_the_cluster = document["kind"] == "PersistentVolume"  # a domain of 253 characters
    if not is_of_the_cluster and (not DNS_LABEL.fullmatch(name) or len(name) > most):
        yield f"{document['kind']} {name} ({len(name)} characters, at most {most})"
    is_of_alerts = document["kind"] == "PrometheusRule"  # whose own labels are Prometheus', not Kubernetes'
    labels = labels_in(document["metadata"] if is_of_alerts else document)
    yield from (f"{name}: {key}={text}" for key, text in labels if not LABEL.fullmatch(text))


@pytest.mark.parametrize("name", NAMES)
def test_names_are_ones_that_the_api_server_takes(name: str) -> None:
    """DNS labels of 63 characters at most, for the longest release name; no two alike, none of another release."""
    plugin = {"gpu": {"sharing": {"devicePlugin": {"createConfig": False}}}}  # the plugin's config is one release's
    done = render(merged(SETS[name], plugin), release=LONGEST_RELEASE)
    assert [bad for each in done.objects for bad in bad_names(each)] == []
    keys = [(each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]) for each in done.objects]
    assert sorted(set(keys)) == sorted(keys)
    for pods in pods_of(done):
        names = [each["name"] for each in pods.containers]
        assert len(set(names)) == len(names)
        assert all(PORT_NAME.fullmatch(port) for port in pods.ports), pods.ports
    others = {(each["kind"], each["metadata"]["name"]) for each in rendered(name).objects}
    assert others & {(kind, title) for kind, _, title in keys} == set()
